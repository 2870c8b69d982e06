"""Disks and files that fail, for real where that is possible: nothing wrong is served, serving never stops."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from disks import INJECTED, FaultyDisk
from figures import tell
from prompts import CHUNK, LAYER_BYTES, Prompt, check_balance, chunk_files, opened, prompt, rows, tokens
from safetensors.torch import save_file
from waiting import wait_until

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.tiered import TieredStore

MB = 1_000_000
FOREVER = 3600.0


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.resume()


def on_disk(store: TieredStore, num_chunks: int, seed: int = 0) -> tuple[Prompt, torch.Tensor]:
    """A prompt whose rows are on disk and not in RAM."""
    p, x = prompt(num_chunks), rows(num_chunks * CHUNK, seed=seed)
    assert store.store(p.refs, p.bytes, {0: x}) == num_chunks
    assert store.flush(10) == 0
    with store._pair.lock:
        while store._pair.hot._evict_one():
            pass
    return p, x


# -- files -------------------------------------------------------------------------------------------------


def truncated(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def emptied(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def with_a_flipped_bit_in_the_rows(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def with_a_flipped_bit_in_the_header(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(1).randrange(200)] ^= 4
    path.write_bytes(data)


def with_a_flipped_bit_in_the_token_ids(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 - 3] ^= 4
    path.write_bytes(data)


def swapped_with_another_chunk(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def replaced_by_another_safetensors_file(path: Path, other: Path) -> None:
    save_file({"layer.0": torch.zeros(CHUNK, 128, dtype=torch.bfloat16)}, path)


def replaced_by_a_symlink(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def replaced_by_a_directory(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_a_fifo(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def deleted(path: Path, other: Path) -> None:
    path.unlink()


DAMAGES: list[Callable[[Path, Path], None]] = [
    truncated, emptied, with_a_flipped_bit_in_the_rows, with_a_flipped_bit_in_the_header,
    with_a_flipped_bit_in_the_token_ids, swapped_with_another_chunk, replaced_by_another_safetensors_file,
    replaced_by_a_symlink, replaced_by_a_directory, replaced_by_a_fifo, deleted,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("when", ["while it is open", "before it is opened again"])
def test_a_chunk_file_that_is(tmp_path: Path, damage: Callable[[Path, Path], None], when: str) -> None:
    """... is a miss, set aside and counted; the chunks before it are served, those after it live on."""
    INJECTED[damage.__name__] += 1
    with opened(tmp_path, write_back_sec=FOREVER) as store:
        p, x = on_disk(store, 4)
        paths = [Path(store._pair.cold.path(name)) for name in p.names]
        if when == "while it is open":
            damage(paths[2], paths[0])
            _check_damaged(store, p, x, damage)
    if when != "while it is open":
        damage(paths[2], paths[0])
        with opened(tmp_path, write_back_sec=FOREVER) as store:
            _check_damaged(store, p, x, damage)


def _check_damaged(store: TieredStore, p: Prompt, x: torch.Tensor, damage: Callable[..., None]) -> None:
    out = store.retrieve(p.refs, [0])[0]
    assert torch.equal(out, x[: 2 * CHUNK].float())
    assert store.stats()["quarantined_chunks"] == (damage is not deleted)
    assert not os.path.lexists(store._pair.cold.path(p.names[2]))
    assert store.covered([p.names[3]], [0]) == 1
    assert store.store(p.refs, p.bytes, {0: x}) >= 1, "it can be stored again"
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
    store.flush(10)
    check_balance(store)


def test_left_over_temporaries_are_removed_and_foreign_files_are_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 2)
        folder = Path(store._pair.cold.path(p.names[0])).parent
        root = Path(store.directory)
    ours = [folder / f".{p.names[0].hex()}.123.7.tmp", folder / ".tmpAb12Cd", root / ".namespace.json.9.9.tmp"]
    foreign = [folder / f"notes-{n}.txt" for n in range(200)] + [root / "README", folder / "model.safetensors"]
    for path in ours + foreign:
        path.write_bytes(b"x" * 100)
    with opened(tmp_path) as store:
        assert not any(path.exists() for path in ours)
        assert all(path.exists() for path in foreign)
        assert store.stats()["cold_chunks"] == 2
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


# -- disks -------------------------------------------------------------------------------------------------


def test_a_disk_that_fails_writes_takes_the_tier_offline_and_comes_back_by_itself(
    tmp_path: Path, disk: FaultyDisk
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
        assert store.stats()["quarantined_chunks"] == 0
        disk.errors.clear()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        check_balance(store)


def test_a_full_disk_evicts_then_pauses_and_never_fails_a_store(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, write_back_sec=0) as store:
        on_disk(store, 4)
        disk.errors["pwritev"] = errno.ENOSPC
        q, y = prompt(2), rows(2 * CHUNK, seed=3)
        assert store.store(q.refs, q.bytes, {0: y}) == 2
        wait_until(lambda: store.stats()["cold_state"] == "paused")
        assert store.stats()["drops_cold_limit"] >= 1, "it made room before it gave up"
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        assert not list(tmp_path.glob("*/??/.*"))
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
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    INJECTED["full tmpfs"] += 1
    try:
        with opened(tmp_path, chunks=4, max_cold_size=256 / 1024**2) as store:
            for seed in range(40):
                p, x = prompt(2), rows(2 * CHUNK, seed=seed)
                assert store.store(p.refs, p.bytes, {0: x}) == 2
                assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
            store.flush(2)
            assert 0 < store.stats()["cold_bytes"] <= 256 * 1024
            check_balance(store)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_file_size_limit_of_the_process_leaves_chunks_in_ram_and_the_others_on_disk(tmp_path: Path) -> None:
    INJECTED["RLIMIT_FSIZE"] += 1
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
import torch
from prompts import *
with opened({str(tmp_path)!r}, write_back_sec=0) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    p, x = prompt(4), rows(4 * CHUNK)
    assert store.store(p.refs, p.bytes, {{0: x}}) == 4
    assert store.flush(5) == 4, "the disk does not take them, whatever room is made"
    assert store.stats()["cold_state"] == "online"
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
print("served")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
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


def test_short_reads_and_writes_move_everything_in_the_end(tmp_path: Path, disk: FaultyDisk) -> None:
    disk.short = 1000
    with opened(tmp_path, files=disk, use_odirect="off") as store:
        p, x = on_disk(store, 3)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["quarantined_chunks"] == 0


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
from prompts import *
from disks import FaultyDisk
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "leaving"), done.stderr
    assert time.monotonic() - started < 30


def test_backpressure_bounds_every_store_and_all_memory(tmp_path: Path, disk: FaultyDisk) -> None:
    """A disk of 20 MB/s under a much higher rate of stores."""
    chunk_bytes = 64 * LAYER_BYTES  # half a MiB
    wait_ms = 60.0
    with opened(tmp_path, files=disk, chunks=64 * 16, store_wait_ms=wait_ms, write_back_sec=0.1) as store:
        p, x = prompt(2), rows(2 * CHUNK, hidden=64 * 128)
        assert store.store(p.refs, p.bytes, {0: x}) == 2
        assert store.flush(10) == 0
        disk.bytes_per_sec = 20 * MB
        longest = given = kept = 0.0
        begun = time.monotonic()
        for seed in range(40):
            q = prompt(4)
            y = rows(4 * CHUNK, hidden=64 * 128, seed=seed)
            started = time.monotonic()
            kept += store.store(q.refs, q.bytes, {0: y})
            longest = max(longest, time.monotonic() - started)
            given += 4
            assert store.stats()["hot_bytes"] <= 16 * chunk_bytes
        assert longest < wait_ms / 1000 + 0.3
        assert kept < given
        assert store.stats()["drops_no_room"] == given - kept
        with store._pair.lock:
            queued = store.stats  # the queue is bounded by the pool: there is no other place for rows
        assert queued()["dirty_chunks"] <= 16
        rate = kept * chunk_bytes / (time.monotonic() - begun)
        disk.bytes_per_sec = 0.0
        assert store.flush(20) == 0
        q, y = prompt(4), rows(4 * CHUNK, hidden=64 * 128)
        assert store.store(q.refs, q.bytes, {0: y}) == 4
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        check_balance(store)
        tell(
            f"backpressure: longest store {longest * 1e3:.0f} ms, kept {rate / MB:.0f} MB/s, dropped {given - kept:.0f}"
        )


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
    with pytest.raises(ConfigError, match=r"cold_path|max_cold_size") as raised, opened(path, **changes):
        pass
    assert str(path) in str(raised.value)
    wait_until(lambda: {thread.name for thread in threading.enumerate()} <= before)
    with opened(tmp_path / "good") as store:
        p = Prompt(tokens(1))
        assert store.store(p.refs, p.bytes, {0: rows(CHUNK)}) == 1
