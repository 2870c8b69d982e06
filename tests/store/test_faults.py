"""Disks and files that fail, for real where that is possible: nothing wrong is served, serving never stops."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.tiered import TieredStore
from tests.support.disks import INJECTED, FaultyDisk, tmpfs
from tests.support.figures import tell
from tests.support.forked import with_tiers
from tests.support.prompts import (
    CHUNK,
    LAYER_BYTES,
    Prompt,
    check_balance,
    chunk_files,
    on_disk,
    opened,
    prompt,
    rows,
    tokens,
)
from tests.support.waiting import Stalls, wait_until

MB = 1_000_000
FOREVER = 3600.0


# -- disks -------------------------------------------------------------------------------------------------


def test_a_disk_that_fails_writes_takes_the_tier_offline_and_comes_back_by_itself(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, files=disk, write_back_sec=0) as store:
        disk.errors["pwritev"] = errno.EIO
        p, x = prompt(4), rows(4 * CHUNK)
        assert store.store(p.refs, p.bytes, {0: x}) == 4
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float()), "RAM goes on"
        more = prompt(8)
        started = time.monotonic()
        assert store.store(more.refs, more.bytes, {0: rows(8 * CHUNK)}) == 8, "the oldest dirty chunks make room"
        assert time.monotonic() - started < 0.4, "without waiting for a disk that is not there"
        assert store.stats()["drops_offline"] == 4
        assert store.stats()["errors_write"] >= 1
        assert len([record for record in caplog.records if "is offline" in record.getMessage()]) == 1
        disk.errors.clear()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        wait_until(lambda: store.stats()["dirty_chunks"] == 0)
        assert len(chunk_files(tmp_path)) == 8
        assert not list(tmp_path.glob("*/??/.*")), "no temporary is left"
        check_balance(store)


def test_a_disk_that_fails_reads_is_a_miss_and_the_chunks_are_served_when_it_is_back(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with opened(tmp_path, files=disk) as store:
        p, x = on_disk(store, 4)
        disk.errors["preadv"] = errno.EIO
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["cold_state"] == "offline"
        assert store.covered(p.names, [0]) == 0
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["misses_offline"] == 2
        assert store.stats()["errors_read"] >= 1
        assert store.stats()["quarantined_chunks"] == 0
        disk.errors.clear()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        check_balance(store)


def test_a_full_disk_evicts_then_pauses_and_never_fails_a_store(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, files=disk, write_back_sec=0) as store:
        on_disk(store, 4)
        disk.errors["pwritev"] = errno.ENOSPC
        q, y = prompt(2), rows(2 * CHUNK, seed=3)
        assert store.store(q.refs, q.bytes, {0: y}) == 2
        wait_until(lambda: store.stats()["cold_state"] == "paused")
        assert store.stats()["drops_cold_limit"] >= 1, "it made room before it gave up"
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        assert not list(tmp_path.glob("*/??/.*"))
        assert len([record for record in caplog.records if "takes no writes for now" in record.getMessage()]) == 1
        disk.errors.clear()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        wait_until(lambda: store.stats()["dirty_chunks"] == 0)
        assert store.stats()["errors_disk_full"] >= 1
        check_balance(store)


def test_one_failed_write_is_tried_again_after_room_was_made(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, write_back_sec=FOREVER) as store:
        on_disk(store, 4)
        q = prompt(1)
        store.store(q.refs, q.bytes, {0: rows(CHUNK)})
        disk.fail_once["pwritev"] = errno.ENOSPC
        assert store.flush(10) == 0
        assert store.stats()["cold_state"] == "online"
        assert store.stats()["errors_disk_full"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_tmpfs_that_runs_full(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=256k"):
        INJECTED["full tmpfs"] += 1
        with opened(tmp_path, chunks=4, max_cold_size=256 / 1024**2) as store:
            for seed in range(40):
                p, x = prompt(2), rows(2 * CHUNK, seed=seed)
                assert store.store(p.refs, p.bytes, {0: x}) == 2
                assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
            store.flush(2)
            assert 0 < store.stats()["cold_bytes"] <= 256 * 1024
            check_balance(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_min_free_disk_stays_free_on_a_real_disk_whoever_fills_it(tmp_path: Path) -> None:
    def free() -> int:
        disk = os.statvfs(tmp_path)
        return disk.f_bavail * disk.f_frsize

    def churn(store: TieredStore) -> None:
        for seed in range(20):
            p, x = prompt(2), rows(2 * CHUNK, seed=seed)
            assert store.store(p.refs, p.bytes, {0: x}) == 2
            store.flush(1)
            assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
            if store.stats()["cold_state"] == "online":
                assert free() >= floor - in_flight

    floor, in_flight = 512 << 10, 4 * 2 * LAYER_BYTES  # a write asks before it starts, each of four threads for itself
    with tmpfs(tmp_path, "size=1m"):
        INJECTED["free space below min_free_disk"] += 1
        with opened(tmp_path, chunks=4, max_cold_size=1 / 1024, min_free_disk=floor / 1024**3) as store:
            churn(store)
            held = store.stats()["cold_bytes"]
            assert held > 300 << 10, "all the rest is used"
            (tmp_path / "somebody's").write_bytes(b"x" * (200 << 10))
            churn(store)
            assert 0 < store.stats()["cold_bytes"] < held - (150 << 10), "as much as was missing has made room"
            (tmp_path / "somebody's").write_bytes(b"x" * (700 << 10))
            churn(store)
            assert store.stats()["cold_state"] == "paused"
            (tmp_path / "somebody's").unlink()
            store.debug.resume_now()  # the pause is over
            wait_until(lambda: store.stats()["cold_state"] == "online")
            assert store.flush(10) == 0
            assert store.stats()["cold_chunks"] > 0
            check_balance(store)


def test_a_file_size_limit_of_the_process_leaves_chunks_in_ram_and_the_others_on_disk(tmp_path: Path) -> None:
    INJECTED["RLIMIT_FSIZE"] += 1
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
import torch
from tests.support.prompts import *
with opened({str(tmp_path)!r}, write_back_sec=0) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    p, x = prompt(4), rows(4 * CHUNK)
    assert store.store(p.refs, p.bytes, {{0: x}}) == 4
    assert store.flush(5) == 0, "what the disk does not take, whatever room is made, is not waited for"
    assert store.stats()["dirty_chunks"] == 4
    assert store.stats()["cold_state"] == "online"
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
print("served")
"""
    done = with_tiers().run(code, timeout=60)
    assert done.stdout.strip() == "served", done.stderr
    assert not list(tmp_path.glob("*/??/.*"))


def test_a_vanished_directory_takes_the_tier_offline_until_it_is_back(tmp_path: Path) -> None:
    INJECTED["vanished directory"] += 1
    with opened(tmp_path, write_back_sec=0) as store:
        p, x = on_disk(store, 4)
        aside = tmp_path / "aside"
        os.rename(store.directory, aside)
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["cold_state"] == "offline"
        assert len(store) == 4, "the chunks are not taken for deleted"
        os.rename(aside, store.directory)
        wait_until(lambda: store.stats()["cold_state"] == "online")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


@pytest.mark.parametrize(("most", "use_odirect"), [(1000, "off"), (4096, "auto")])
def test_short_reads_and_writes_move_everything_in_the_end(
    tmp_path: Path, disk: FaultyDisk, most: int, use_odirect: str
) -> None:
    disk.short = most
    with opened(tmp_path, files=disk, use_odirect=use_odirect) as store:
        p, x = on_disk(store, 3)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["quarantined_chunks"] == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_failed_write_of_one_more_layer_leaves_the_file_as_it_was(
    tmp_path: Path, disk: FaultyDisk, code: int
) -> None:
    with opened(tmp_path, files=disk, write_back_sec=FOREVER) as store:
        p, x = on_disk(store, 1)
        path = Path(store.debug.path(p.names[0]))
        before = path.read_bytes()
        y = rows(CHUNK, seed=1)
        assert store.store(p.refs, p.bytes, {3: y}) == 1
        disk.errors["pwritev"] = code
        store.flush(1)
        assert path.read_bytes() == before
        assert not list(tmp_path.glob("*/??/.*"))
        assert torch.equal(store.retrieve(p.refs, [3])[3], y.float()), "it is in RAM"
        disk.errors.clear()
        store.debug.resume_now()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        assert store.flush(10) == 0
        out = store.retrieve(p.refs, [0, 3])
        assert torch.equal(out[0], x.float())
        assert torch.equal(out[3], y.float())
        check_balance(store)


def test_a_file_that_cannot_be_deleted_is_deleted_when_the_disk_is_back(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk) as store:
        p, _ = on_disk(store, 3)
        disk.errors["unlink"] = errno.EROFS
        assert store.drop(p.names) == 3
        wait_until(lambda: store.stats()["errors_unlink"] == 3)
        assert store.stats()["cold_bytes"] > 0, "bytes count until the file is gone"
        disk.errors.clear()
        wait_until(lambda: not chunk_files(tmp_path))
        wait_until(lambda: store.stats()["cold_bytes"] == 0)


# -- hanging and slow --------------------------------------------------------------------------------------


def test_a_read_that_never_returns_is_a_miss_in_time_and_the_tier_comes_back(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, read_timeout_sec=0.5) as store:
        p, x = on_disk(store, 6)
        hot, y = prompt(1), rows(CHUNK, seed=5)
        store.store(hot.refs, hot.bytes, {0: y})
        disk.hang()
        started = time.monotonic()
        assert store.retrieve(p.refs, [0]) == {}
        assert time.monotonic() - started < 1.0
        assert store.stats()["misses_timeout"] == 1
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        assert store.stats()["slots_stuck"] >= 1
        started = time.monotonic()
        assert store.retrieve(p.refs, [0]) == {}
        assert time.monotonic() - started < 0.3, "offline: nobody waits any more"
        assert torch.equal(store.retrieve(hot.refs, [0])[0], y.float())
        disk.resume()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        wait_until(lambda: store.stats()["slots_stuck"] == 0)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        store.flush(10)
        check_balance(store)


def test_a_write_that_never_returns_holds_up_no_store_for_longer_than_store_wait_ms(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with opened(tmp_path, files=disk, write_back_sec=0, read_timeout_sec=0.5, store_wait_ms=200) as store:
        disk.hang()
        p, x = prompt(8), rows(8 * CHUNK)
        assert store.store(p.refs, p.bytes, {0: x}) == 8
        wait_until(lambda: disk.hanging >= 1)
        more = prompt(4)
        started = time.monotonic()
        store.store(more.refs, more.bytes, {0: rows(4 * CHUNK)})
        assert time.monotonic() - started < 0.5
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        disk.resume()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        wait_until(lambda: store.stats()["dirty_chunks"] == 0)
        check_balance(store)


def test_close_returns_in_time_while_the_disk_hangs(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, write_back_sec=0, close_timeout_sec=1) as store:
        disk.hang()
        p = prompt(4)
        store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
        wait_until(lambda: disk.hanging >= 1)
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < 1.5
        assert store.stats()["drops_close"] == 4
        disk.resume()
        wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("hs-io")])


def test_a_process_whose_disk_hangs_still_exits(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from tests.support.prompts import *
from tests.support.disks import FaultyDisk
from lmcache_hs_backend.tiered import TieredStore
disk = FaultyDisk()
config = settings({str(tmp_path)!r}, write_back_sec=0, close_timeout_sec=0.5)
store = TieredStore(config, 8 * LAYER_BYTES, IDENT, files=disk)
disk.hang()
p = prompt(4)
assert store.store(p.refs, p.bytes, {{0: rows(4 * CHUNK)}}) == 4
print("leaving")
"""
    started = time.monotonic()
    done = with_tiers().run(code, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "leaving"), done.stderr
    assert time.monotonic() - started < 30


def test_backpressure_bounds_every_store_and_all_memory(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that takes a fiftieth of what stores offer: on a quiet machine, 20 MB/s of 1 GB/s and more."""
    chunk_bytes = 64 * LAYER_BYTES  # half a MiB
    wait_ms = 20.0
    with opened(tmp_path, files=disk, chunks=64 * 16, store_wait_ms=wait_ms, write_back_sec=0.1) as store:
        warm, x = prompt(12), rows(12 * CHUNK, hidden=64 * 128)
        started = time.monotonic()
        assert store.store(warm.refs, warm.bytes, {0: x}) == 12
        offered = 12 * chunk_bytes / (time.monotonic() - started)
        assert store.flush(60) == 0
        disk.bytes_per_sec = offered / 50
        resident, written = resident_bytes(), store.stats()["written_chunks"]
        caplog.clear()
        longest = given = kept = 0.0
        begun = time.monotonic()
        with Stalls() as stalls:
            while time.monotonic() < begun + 2:
                p = prompt(12)  # 6 MiB; the pool has 8
                started = time.monotonic()
                kept += store.store(p.refs, p.bytes, {0: x})
                longest = max(longest, time.monotonic() - started)
                given += len(p.refs)
                assert store.stats()["hot_bytes"] <= 16 * chunk_bytes
                disk.bytes_per_sec = given * chunk_bytes / (time.monotonic() - begun) / 50
        took = time.monotonic() - begun
        written = store.stats()["written_chunks"] - written
        assert given > 20 * written, "or this is no test of anything"
        assert longest < wait_ms / 1000 + 0.3 + stalls.longest, "the time allowed, a copy, and two busy cores"
        assert kept < given
        assert store.stats()["drops_no_room"] == given - kept
        assert store.stats()["dirty_chunks"] <= 16, "rows that wait for the disk lie in the pool and nowhere else"
        assert resident_bytes() < resident + 64 * MB
        store.metrics.report_losses()
        told = [record for record in caplog.records if "drops_no_room" in record.getMessage()]
        assert 1 <= len(told) <= 1 + took / 10, "one line in ten seconds"
        disk.bytes_per_sec = 0.0
        assert store.flush(20) == 0
        q, y = prompt(4), rows(4 * CHUNK, hidden=64 * 128, seed=1)
        assert store.store(q.refs, q.bytes, {0: y}) == 4
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        check_balance(store)
        tell(
            f"backpressure: offered {given * chunk_bytes / took / MB:.0f} MB/s to a disk that took "
            f"{written * chunk_bytes / took / MB:.0f}, longest store {longest * 1e3:.0f} ms (a thread waited up to "
            f"{stalls.longest * 1e3:.0f} for a core), kept {kept * chunk_bytes / took / MB:.0f} MB/s, "
            f"drops: no_room {given - kept:.0f}"
        )


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_reads_go_ahead_of_writes(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, chunks=64, io_threads=1, write_back_sec=FOREVER, clean_fraction=0) as store:
        p, x = on_disk(store, 1)
        q = prompt(40)
        store.store(q.refs, q.bytes, {0: rows(40 * CHUNK)})
        disk.bytes_per_sec = 40 * LAYER_BYTES  # the forty writes take a second
        flusher = threading.Thread(target=store.flush, args=(20,))
        flusher.start()
        wait_until(lambda: store.stats()["written_chunks"] > 1)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["dirty_chunks"] > 20, "the read did not wait for the writes before it"
        disk.bytes_per_sec = 0.0
        flusher.join()


# -- fsync -------------------------------------------------------------------------------------------------


class Recorder(FileLayer):
    """Real files, with a record of what was made durable and in which order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.sources: dict[str, str] = {}  # what a file was called before

    def _note(self, call: str, fd: int) -> None:
        self.calls.append((call, os.readlink(f"/proc/self/fd/{fd}")))

    def pwritev(self, fd: int, views: Any, offset: int) -> int:
        self._note("write", fd)
        return os.pwritev(fd, views, offset)

    def fdatasync(self, fd: int) -> None:
        self._note("sync", fd)
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self._note("sync", fd)
        os.fsync(fd)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.calls.append(("mkdir", path))
        os.mkdir(path, mode)

    def rename(self, source: str, target: str) -> None:
        self.calls.append(("rename", target))
        self.sources[target] = source
        os.rename(source, target)


def test_with_fsync_bytes_then_names_are_durable_before_flush_returns(tmp_path: Path) -> None:
    files = Recorder()
    with opened(tmp_path, files=files, fsync=True, io_threads=1) as store:
        p, _ = on_disk(store, 3)
        calls = list(files.calls)
        for name in p.names:
            path = store.debug.path(name)
            folder, temporary = os.path.dirname(path), files.sources[path]
            wanted = [("mkdir", folder), ("sync", store.directory), ("write", temporary), ("sync", temporary)]
            wanted += [("rename", path), ("sync", folder)]
            rest = iter(calls)
            assert all(call in rest for call in wanted), "all of them, in this order"


# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a file", "in a place that nobody may write", "larger than the disk"])
def test_a_cold_path_that_cannot_work_is_one_clear_error_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    before = {thread.name for thread in threading.enumerate()}
    path, changes = tmp_path / "file", {}
    if kind == "a file":
        path.write_text("")
    elif kind == "larger than the disk":
        path, changes = tmp_path, {"max_cold_size": 1e9}
    else:
        path = Path("/proc/nowhere")
    required = opened(path, require_cold=True, **changes)
    with pytest.raises(ConfigError, match=r"cold_path|max_cold_size") as raised, required:
        pass
    assert str(path) in str(raised.value)
    wait_until(lambda: {thread.name for thread in threading.enumerate()} <= before)
    with opened(tmp_path / "good") as store:
        p = Prompt(tokens(1))
        assert store.store(p.refs, p.bytes, {0: rows(CHUNK)}) == 1
