"""The connector while its disk is full, away or slow: what the engine's thread and the sink's thread still cost."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.integrations.vllm.protocol import Finish, Step
from lmcache_hs_backend.integrations.vllm.worker_side.device import HiddenStatesCache, HostRows
from lmcache_hs_backend.integrations.vllm.worker_side.request_files import RequestFiles
from lmcache_hs_backend.integrations.vllm.worker_side.worker import Worker
from tests.support.disks import FaultyDisk
from tests.support.waiting import wait_until
from tests.vllm.worker_rig import CHUNK, HIDDEN, LAYERS, Rig

ROWS = [torch.zeros(CHUNK, HIDDEN, dtype=torch.bfloat16)] * len(LAYERS)

pytestmark = pytest.mark.timing


class Arrived:
    """The event of a copy from a GPU that has ended: such rows are stored by the sink's thread."""

    def synchronize(self) -> None:
        pass


def put(rig: Rig, ids: list[int], *, finish: bool = True) -> int:
    """A request whose rows have come from a device. Returns its chunks."""
    ready, sequence = rig.ready(ids, list(range(8)) * len(ids))
    for chunk in ready:
        rows = [layer[: chunk.ref.num_tokens] for layer in ROWS]
        rig.sink.put(chunk, HostRows(rows, Arrived()), time.monotonic() + 1)
    if finish:
        rig.sink.finish(Finish("r", ready[-1:], sequence.refs, {"request_id": "r"}, None))
    return len(ready)


def stored(rig: Rig) -> None:
    wait_until(lambda: rig.sink._thread.idle, 60)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def rig(tmp_path: Path, disk: FaultyDisk) -> Iterator[Rig]:
    made = Rig(tmp_path / "cold", files=disk, hot_size=0.25)
    yield made
    disk.errors.clear()
    made.close()


@pytest.mark.timing
def test_what_a_chunk_costs_does_not_grow_with_the_requests_that_wait_for_a_full_disk(
    rig: Rig, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    for name in ("has", "covered"):
        plain = getattr(rig.sink.store, name)
        monkeypatch.setattr(rig.sink.store, name, lambda *a, plain=plain, name=name: asked.update([name]) or plain(*a))
    disk.errors["pwritev"] = errno.ENOSPC
    per_chunk: dict[int, float] = {}
    figures = []
    next_id, waiting = 0, 0
    for requests in (0, 256):
        for _ in range(requests):
            put(rig, list(range(next_id, next_id + 32 * CHUNK)))
            next_id += 32 * CHUNK
            waiting += 1
        stored(rig)
        asked.clear()
        begun, chunks = time.monotonic(), 0
        for _ in range(50):
            chunks += put(rig, list(range(next_id, next_id + 4 * CHUNK)), finish=False)
            next_id += 4 * CHUNK
        stored(rig)
        per_chunk[requests] = sum(asked.values()) / chunks
        figures.append(f"{waiting} waiting: {chunks / (time.monotonic() - begun):.0f} chunks/s")
    print(f"sink's thread beside requests that wait for a full disk: {', '.join(figures)}; looks {per_chunk}")
    assert len(rig.sink._recorder) == 256
    assert per_chunk[256] < per_chunk[0] + 16
    disk.errors.clear()
    wait_until(lambda: rig.sink.idle, 60)
    assert rig.sink.figures["records"] == 256


@pytest.mark.timing
def test_after_an_outage_nothing_of_it_is_kept_and_chunks_cost_what_they_did(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = Rig(tmp_path / "cold", files=disk, hot_size=0.002)

    def conversations(first: int, count: int) -> float:
        """Each has a short turn, then one that fills the chunk. Returns chunks per second."""
        begun = time.monotonic()
        for start in range(first, first + count):
            put(rig, [start * 100, *range(4)])
            put(rig, [start * 100, *range(CHUNK - 1)])
        stored(rig)
        return 2 * count / (time.monotonic() - begun)

    before = conversations(0, 200)
    disk.errors["open"] = errno.EIO
    conversations(1000, 3000)
    during = conversations(5000, 200)
    kept = len(rig.sink._pending)
    disk.errors.clear()
    wait_until(lambda: rig.sink.store.stats()["cold_state"] == "online", 30)
    wait_until(lambda: rig.sink.idle, 60)
    after = conversations(6000, 200)
    wait_until(lambda: rig.sink.idle, 60)
    wait_until(lambda: not len(rig.sink._pending))
    print(f"chunks/s before, during, after an outage of 3,000 conversations: {before:.0f}, {during:.0f}, {after:.0f}")
    assert kept <= 2 * rig.sink.store.stats()["capacity_bytes"] // (len(LAYERS) * 4096)
    figures = rig.sink.figures
    assert figures["records"] + figures["records_empty"] == 2 * 3600
    assert figures["tails_dropped"] >= 400
    rig.close()


def test_records_that_wait_for_a_disk_that_never_comes_back_are_bounded_and_counted(
    rig: Rig, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_hs_backend.integrations.vllm.worker_side.recorder.MOST_WAITING", 20)
    disk.errors["open"] = errno.EIO
    for number in range(50):
        put(rig, [number, *range(CHUNK - 1)])
    stored(rig)
    assert len(rig.sink._recorder) == 20
    assert rig.sink.figures["records_lost"] == 30
    disk.errors.clear()
    wait_until(lambda: rig.sink.idle, 30)
    assert rig.sink.figures["records"] == 20


# -- one file per request --------------------------------------------------------------------------------


def test_locks_are_opened_off_the_engines_thread_and_a_disk_that_hangs_delays_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, threads, plain = threading.Event(), set(), os.open

    def slow_open(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".lock"):
            threads.add(threading.current_thread())
            assert go.wait(30)
        return plain(path, *rest, **more)

    monkeypatch.setattr(os, "open", slow_open)
    files = RequestFiles([os.path.realpath(tmp_path)], 2, lock=True)
    worker = Worker(HiddenStatesCache(torch.ones(4, 1, 8, 4)), None, files, wait_sec=0.2)
    seconds = []
    for number in range(4):
        step = Step(tokens=8, new_files={f"r{number}": str(tmp_path / f"{number}.safetensors")}, written=[(1, True)])
        begun = time.monotonic()
        worker.before_step(step)
        seconds.append(time.monotonic() - begun)
        worker.wrote_hidden_states()
        worker.after_step(step)
        seconds.append(time.monotonic() - begun)
    print(f"steps of the engine beside a disk that hangs: {[f'{second * 1000:.0f} ms' for second in seconds[1::2]]}")
    assert max(seconds[0::2]) < 0.1  # before a forward nothing is waited for
    assert 0.15 < seconds[1] < 2.0
    assert sum(seconds[3::2]) < 0.2  # the disk that hangs is waited for once
    assert threading.current_thread() not in threads
    go.set()
    files.wait_for_locks(["r0"], time.monotonic() + 10)
    assert files.close(10)
    assert {path.name for path in tmp_path.iterdir()} == {f"{number}.safetensors.lock" for number in range(4)}


def test_a_lock_is_held_when_the_step_in_which_its_request_is_new_ends(tmp_path: Path) -> None:
    files = RequestFiles([os.path.realpath(tmp_path)], 2, lock=True)
    worker = Worker(HiddenStatesCache(torch.ones(4, 1, 8, 4)), None, files, wait_sec=10)
    step = Step(tokens=8, new_files={"r": str(tmp_path / "a.safetensors")}, written=[(1, True)])
    worker.before_step(step)
    worker.wrote_hidden_states()
    worker.after_step(step)
    assert files._locks["r"].done()
    with open(tmp_path / "a.safetensors.lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert files.close(10)
