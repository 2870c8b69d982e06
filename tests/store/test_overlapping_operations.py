"""Two things that meet at one moment: eviction and a store, a start and a caller, a close and a slow disk.

Each of these once lost rows, served rows of another model, or left a store paused, waiting or spinning.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.config import GIB
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.flows import neighbours, recover
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from tests.support.disks import FaultyDisk, tmpfs
from tests.support.prompts import (
    CHUNK,
    IDENT,
    LAYER_BYTES,
    Prompt,
    check_balance,
    chunk_files,
    on_disk,
    opened,
    prompt,
    rows,
    settings,
)
from tests.support.prompts import tokens as token_ids
from tests.support.waiting import wait_until

FILE = LAYER_BYTES + 4096  # bytes of a chunk file of one layer


class Gate(FaultyDisk):
    """A disk on which deleting a chunk file waits for ``open_gate`` where ``held`` says so of its path."""

    held: Callable[[str], bool] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self._gate = threading.Event()

    def unlink(self, path: str) -> None:
        if self.held is not None and path.endswith(".safetensors") and self.held(path):
            self.entered.set()
            self._gate.wait()
        super().unlink(path)

    def open_gate(self) -> None:
        self.held = None
        self._gate.set()


class SlowToRead(FaultyDisk):
    """A disk that may hang, but only for reads."""

    def pwritev(self, fd: int, views: Any, offset: int) -> int:
        return os.pwritev(fd, views, offset)


def unread(store: TieredStore) -> int:
    """How many files have been found by name, and no more."""
    return sum(chunk.file == "unread" for chunk in store.debug.chunks().values())


def started(path: Path, disk: FaultyDisk, **changes: Any) -> TieredStore:
    """A store whose files have been found by name, and no more."""
    ask = {"ask": changes.pop("ask")} if "ask" in changes else {}
    store = TieredStore(settings(path, write_back_sec=3600, **changes), 64 * LAYER_BYTES, IDENT, files=disk, **ask)
    files = len(chunk_files(path))  # in several directories, each with a task of its own
    wait_until(lambda: len(store.debug.chunks()) == files and unread(store) > 0)
    return store


def stored(path: Path, p: Prompt, layers: dict[int, torch.Tensor]) -> None:
    with opened(path) as store:
        store.store(p.refs, p.bytes, layers)
        assert store.flush(10) == 0


# -- room -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io_threads", [1, 4, 8])
def test_at_min_free_disk_threads_that_write_side_by_side_do_not_pause_each_other(
    tmp_path: Path, io_threads: int
) -> None:
    with tmpfs(tmp_path, "size=16m"):
        disk = os.statvfs(tmp_path)
        floor = disk.f_bavail * disk.f_frsize - 60 * FILE
        limits = {"min_free_disk": floor / GIB, "max_cold_size": 16 / 1024}
        with opened(tmp_path, chunks=64, write_back_sec=0, io_threads=io_threads, **limits) as store:
            x = rows(8 * CHUNK)
            for _ in range(60):
                p = prompt(8)
                assert store.store(p.refs, p.bytes, {0: x}) == 8
                wait_until(lambda: store.stats()["queue_writes"] <= 8 or store.stats()["cold_state"] != "online")
                assert store.stats()["cold_state"] == "online"
            store.flush(10)
            assert store.stats()["queue_writes"] == 0
            assert store.stats()["written_chunks"] > 400
            assert store.stats()["drops_offline"] == 0
            check_balance(store)


def test_a_chunk_that_is_stored_again_while_its_file_is_evicted_is_written_and_may_leave(tmp_path: Path) -> None:
    disk = Gate()
    limit = (2 * FILE + 8192) / GIB
    with opened(tmp_path, files=disk, max_cold_size=limit, write_back_sec=3600, clean_fraction=0) as store:
        p, x = on_disk(store, 2)
        disk.held = lambda path: True
        q = prompt(1)
        store.store(q.refs, q.bytes, {0: rows(CHUNK)})
        flushing = threading.Thread(target=store.flush, args=(10,))
        flushing.start()
        assert disk.entered.wait(10)
        (evicted,) = [name for name in p.names if store.has(name, 0) == (False, False)]
        assert store.store(p.refs, p.bytes, {0: x}) == 1
        disk.open_gate()
        flushing.join()
        store.flush(10)
        assert store.stats()["queue_writes"] == 0
        again = store.debug.chunk(evicted)
        assert again is not None
        assert again.evictable
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        check_balance(store)


def test_a_chunk_that_is_archived_again_while_the_archive_makes_room_is_there_afterwards(tmp_path: Path) -> None:
    disk = Gate()
    limit = (3 * FILE + 8192) / GIB
    with opened(
        tmp_path, files=disk, max_cold_size=limit, write_back_sec=3600, clean_fraction=0, on_kv_gone="archive"
    ) as store:
        p, x = on_disk(store, 1)
        store.kv_gone(p.names)
        wait_until(lambda: store.stats()["archived_chunks"] == 1)
        q, _ = on_disk(store, 2)
        disk.held = lambda path: "/archive/" in path
        r = prompt(1)
        store.store(r.refs, r.bytes, {0: rows(CHUNK)})
        flushing = threading.Thread(target=store.flush, args=(10,))
        flushing.start()
        assert disk.entered.wait(10)
        store.drop(q.names)  # room for what follows
        wait_until(lambda: not any(os.path.exists(store.debug.path(name)) for name in q.names))
        store.store(p.refs, p.bytes, {0: x})
        store.kv_gone(p.names)
        disk.open_gate()
        flushing.join()
        wait_until(lambda: store.stats()["archived_chunks"] == 1 and p.names[0] not in store.debug.busy())
        assert [path.stem for path in tmp_path.glob("*/archive/??/*")] == [p.names[0].hex()]
        assert store.debug.disk().archive == FILE


# -- a start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["slow", "failing"])
def test_rows_stored_before_the_header_is_read_know_whose_kv_they_belong_to(tmp_path: Path, trouble: str) -> None:
    p, x = prompt(1), rows(CHUNK)
    stored(tmp_path, p, {0: x})
    disk = SlowToRead()
    if trouble == "slow":
        disk.hang()
    else:
        disk.errors["preadv"] = errno.EIO
    asked: list[object] = []

    def ask(keys: Sequence[object], memory_only: bool) -> list[Presence]:
        asked.extend(keys)
        return [Presence.PRESENT if key == p.refs[0].kv_key else Presence.GONE for key in keys]

    store = started(tmp_path, disk, ask=ask)
    try:
        assert store.store(p.refs, p.bytes, {1: x}) == 1
        disk.errors.clear()
        disk.resume()
        asked.clear()
        wait_until(lambda: p.refs[0].kv_key in asked, 20)  # the search for orphans has come by
        assert None not in asked
        wait_until(lambda: 1 in store.retrieve(p.refs, [1], None))
        assert store.stats()["kv_gone_deleted"] == 0
    finally:
        store.close()


def test_rows_of_another_width_stored_before_the_header_is_read_are_not_taken_for_the_files(tmp_path: Path) -> None:
    p = prompt(1)
    stored(tmp_path, p, {0: rows(CHUNK, hidden=128)})
    disk = SlowToRead()
    disk.hang()
    store = started(tmp_path, disk)
    try:
        x = rows(CHUNK, hidden=256)
        assert store.store(p.refs, p.bytes, {0: x}) == 1
        disk.resume()
        assert store.wait_recovered(10)
        assert store.flush(10) == 0
        assert store.demote(p.names) == 1
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
    finally:
        store.close()


def test_a_collision_that_shows_when_the_header_is_read_is_one_and_counts_nothing_as_stored(tmp_path: Path) -> None:
    first = Prompt(token_ids(1, 1), key_of=lambda number, value: "same")
    second = Prompt(token_ids(1, 2), key_of=lambda number, value: "same")
    stored(tmp_path, first, {0: rows(CHUNK)})
    disk = SlowToRead()
    disk.hang()
    store = started(tmp_path, disk)
    try:

        def meanwhile() -> None:
            disk.resume()
            wait_until(lambda: store.debug.chunks()[first.names[0]].file == "known")

        with store.debug.between_copy_and_publication(meanwhile):
            assert store.store(second.refs, second.bytes, {0: rows(CHUNK, seed=3)}) == 0
        assert store.stats()["drops_collision"] == 1
        assert store.store(first.refs, first.bytes, {0: rows(CHUNK)}) == 1, "the first time in this process"
        check_balance(store)
    finally:
        store.close()


def test_a_file_that_could_not_be_deleted_is_never_taken_for_a_new_chunks(tmp_path: Path) -> None:
    p, other = prompt(1), prompt(1)
    old, new = rows(CHUNK, seed=1), rows(CHUNK, seed=2)
    stored(tmp_path, p, {0: old, 1: old})
    stored(tmp_path, other, {0: old})
    unread = other.names[0].hex()

    class SlowForOne(FaultyDisk):
        go = threading.Event()

        def open(self, path: str, flags: int, mode: int = 0o777) -> int:
            if unread in path:
                self.go.wait()
            return super().open(path, flags, mode)

    disk = SlowForOne()
    disk.errors["unlink"] = errno.EPERM
    store = started(tmp_path, disk, read_timeout_sec=60)
    try:
        assert store.drop(p.names) == 1
        wait_until(lambda: store.stats()["errors_unlink"] == 1)
        assert store.store(p.refs, p.bytes, {0: new}) == 1
        assert store.retrieve(p.refs, [1]) == {}, "that was dropped"
        disk.go.set()
        assert store.wait_recovered(10)
        assert store.flush(10) == 0
        assert store.demote(p.names) == 1
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], new)
        check_balance(store)
    finally:
        disk.go.set()
        disk.errors.clear()
        store.close()


def test_nothing_of_our_own_is_evicted_before_it_is_known_how_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    scan_folder = recover.scan_folder
    with opened(tmp_path, chunks=64) as store:
        p = prompt(40)
        store.store(p.refs, p.bytes, {0: rows(40 * CHUNK)})
        assert store.flush(10) == 0
    monkeypatch.setattr(recover, "scan_folder", lambda folder: (go.wait(), scan_folder(folder))[1])

    class AtTheFloor(FaultyDisk):
        def statvfs(self, path: str) -> Any:
            real = os.statvfs(path)
            bavail = (1 << 30) // 4096 + (40 - len(chunk_files(tmp_path))) * FILE // 4096
            return os.statvfs_result((4096, 4096, *real[2:4], bavail, *real[5:]))

    gone: set[object] = set()
    store = TieredStore(
        settings(tmp_path, min_free_disk=1, on_kv_gone="archive"), 64 * LAYER_BYTES, IDENT, files=AtTheFloor(),
        ask=lambda keys, _: [Presence.GONE if key in gone else Presence.PRESENT for key in keys],
    )  # fmt: skip
    try:
        wait_until(lambda: unread(store) == 40)  # by their names, not their sizes
        q = prompt(1)
        assert store.store(q.refs, q.bytes, {0: rows(CHUNK)}) == 1
        gone.add(q.refs[0].kv_key)
        store.kv_gone(q.names)
        wait_until(lambda: store.stats()["drops_archive"] == 1)
        assert len(chunk_files(tmp_path)) == 40
    finally:
        go.set()
        assert store.wait_recovered(10)
        store.close()


def test_a_disk_that_hangs_at_the_start_holds_up_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    scan_flat = recover.scan_flat
    monkeypatch.setattr(recover, "scan_flat", lambda folder: (go.wait(), scan_flat(folder))[1])
    store = TieredStore(settings(tmp_path, store_wait_ms=60_000, read_timeout_sec=0.5), 8 * LAYER_BYTES, IDENT)
    try:
        for _ in range(4):
            p, x = prompt(6), rows(6 * CHUNK)
            begun = time.monotonic()
            assert store.store(p.refs, p.bytes, {0: x}) == 6
            assert time.monotonic() - begun < 10, "what hangs for read_timeout_sec is waited for no more"
            assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        assert store.stats()["drops_offline"] == 16, "the oldest have left"
    finally:
        go.set()
        store.close()


def test_a_cold_path_that_cannot_be_listed_costs_only_the_count_of_other_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p, x = prompt(2), rows(2 * CHUNK)
    stored(tmp_path, p, {0: x})

    def refused(path: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(neighbours, "namespaces", refused)
    with opened(tmp_path) as store:  # waits until it has recovered
        assert store.covered(p.names, [0]) == 2
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
    assert "other namespaces are not counted" in caplog.text


@pytest.fixture
def by_and_by(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The start finds names when the first of these is set, and sizes when the second is."""
    names, sizes = threading.Event(), threading.Event()
    chunk_names, scan_folder = recover.chunk_names, recover.scan_folder
    monkeypatch.setattr(recover, "chunk_names", lambda folder: (names.wait(), chunk_names(folder))[1])
    monkeypatch.setattr(recover, "scan_folder", lambda folder: (sizes.wait(), scan_folder(folder))[1])
    return names, sizes


def found(store: TieredStore) -> Callable[[], bool]:
    return lambda: all(chunk.file != "absent" for chunk in store.debug.chunks().values())


@pytest.mark.parametrize("write_back_sec", [0, 3600])
def test_layers_that_only_the_file_has_survive_a_store_before_it_was_looked_into(
    tmp_path: Path, by_and_by: tuple[threading.Event, threading.Event], write_back_sec: float
) -> None:
    names, sizes = by_and_by
    p, x, y = prompt(4), rows(4 * CHUNK), rows(4 * CHUNK, seed=5)
    names.set()
    sizes.set()
    stored(tmp_path, p, {0: x, 1: y})
    names.clear()
    sizes.clear()
    store = TieredStore(settings(tmp_path, write_back_sec=write_back_sec), 64 * LAYER_BYTES, IDENT)
    try:
        assert store.store(p.refs, p.bytes, {0: x}) == 4
        names.set()
        wait_until(found(store))
        sizes.set()
        assert store.flush(10) == 0
        assert store.wait_recovered(10)
        wait_until(lambda: store.demote(p.names) >= 0 and not store.stats()["hot_chunks"])
        assert torch.equal(store.retrieve(p.refs, [1], None)[1], y)
        check_balance(store)
    finally:
        store.close()


def test_an_archive_that_is_written_before_the_file_was_looked_into_has_all_layers_and_its_true_size(
    tmp_path: Path, by_and_by: tuple[threading.Event, threading.Event]
) -> None:
    names, sizes = by_and_by
    p, other, x = prompt(2), prompt(3), rows(2 * CHUNK)
    names.set()
    sizes.set()
    stored(tmp_path, p, {0: x, 1: x})
    stored(tmp_path, other, {0: rows(3 * CHUNK)})
    names.clear()
    sizes.clear()
    store = TieredStore(settings(tmp_path, on_kv_gone="archive"), 64 * LAYER_BYTES, IDENT)
    try:
        assert store.store(p.refs, p.bytes, {0: x}) == 2
        names.set()
        wait_until(lambda: len(store) == 5 and found(store)())
        store.kv_gone(p.names)  # rows in RAM and a file
        store.kv_gone(other.names)  # a file alone
        wait_until(lambda: store.stats()["archived_chunks"] == 5)
        sizes.set()
        assert store.wait_recovered(10)
        archived = {path.stem: path for path in tmp_path.glob("*/archive/??/*")}
        for name in p.names:
            assert {"layer.0", "layer.1"} < set(load_file(archived[name.hex()]))
        assert store.debug.disk().archive == sum(path.stat().st_size for path in archived.values())
    finally:
        store.close()


@pytest.mark.parametrize("trouble", ["a slow start", "a moment offline"])
def test_rows_that_leave_ram_unwritten_take_no_file_along_that_was_not_looked_into(
    tmp_path: Path, by_and_by: tuple[threading.Event, threading.Event], trouble: str
) -> None:
    names, sizes = by_and_by
    p, x = prompt(3), rows(3 * CHUNK)
    names.set()
    sizes.set()
    stored(tmp_path, p, {0: x, 1: x})
    disk = FaultyDisk()
    if trouble == "a slow start":
        names.clear()
        sizes.clear()
    else:
        disk.errors["preadv"] = errno.EIO
    limits = {"write_back_sec": 3600, "read_timeout_sec": 0.2, "store_wait_ms": 2000}
    store = TieredStore(settings(tmp_path, **limits), 4 * LAYER_BYTES, IDENT, files=disk)
    try:
        if trouble != "a slow start":
            wait_until(lambda: store.stats()["cold_state"] == "offline")
        assert store.store(p.refs, p.bytes, {0: x}) == 3
        names.set()
        wait_until(found(store))
        q = prompt(4)
        assert store.store(q.refs, q.bytes, {0: rows(4 * CHUNK)}) == 4
        assert store.stats()["drops_offline"] == 3
        sizes.set()
        disk.errors.clear()
        assert store.wait_recovered(10)
        wait_until(lambda: 1 in store.retrieve(p.refs, [1], None), 20)
        assert len([path for path in chunk_files(tmp_path) if path.stem in {name.hex() for name in p.names}]) == 3
    finally:
        store.close()


def test_a_header_that_somebody_has_read_meanwhile_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, x = prompt(2), rows(2 * CHUNK)
    stored(tmp_path, p, {0: x})
    go, read_batch = threading.Event(), recover.Recover._read_batch
    monkeypatch.setattr(recover.Recover, "_read_batch", lambda self, batch: (go.wait(), read_batch(self, batch))[1])
    store = TieredStore(settings(tmp_path, write_back_sec=3600), 8 * LAYER_BYTES, IDENT)
    try:
        size = sum(path.stat().st_size for path in chunk_files(tmp_path))
        wait_until(lambda: store.stats()["cold_bytes"] == size)  # the sizes are known, the headers are not read
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        wait_until(lambda: store.stats()["hot_chunks"] == 2)
        wait_until(lambda: store.debug.evict_files(2 * FILE))
        go.set()
        assert store.wait_recovered(10)
        assert store.stats()["drops_bad_file"] == 0
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
    finally:
        store.close()


def test_a_recovered_chunk_that_is_read_by_its_key_alone_knows_it_afterwards(tmp_path: Path) -> None:
    p, x = prompt(1), rows(CHUNK)
    stored(tmp_path, p, {0: x})
    asked: list[object] = []

    def ask(keys: Sequence[object], memory_only: bool) -> list[Presence]:
        asked.extend(keys)
        return [Presence.PRESENT if key == p.refs[0].kv_key else Presence.GONE for key in keys]

    with opened(tmp_path, ask=ask) as store:
        assert torch.equal(cast("torch.Tensor", store.read_layer(p.names[0], 0, p.refs[0].kv_key)), x)
        asked.clear()
        wait_until(lambda: bool(asked))  # the search for orphans
        assert set(asked) == {p.refs[0].kv_key}
        assert store.stats()["kv_gone_deleted"] == 0


# -- files that do not go, and many that have to ------------------------------------------------------------


@pytest.mark.parametrize("on_kv_gone", ["delete", "archive"])
def test_two_generations_of_a_chunk_whose_file_could_not_be_deleted_leave_no_byte_counted(
    tmp_path: Path, on_kv_gone: str
) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, files=disk, on_kv_gone=on_kv_gone, write_back_sec=3600) as store:
        p, x = on_disk(store, 1)
        disk.errors["unlink"] = errno.EPERM
        store.drop(p.names)
        wait_until(lambda: store.stats()["errors_unlink"] == 1)
        store.store(p.refs, p.bytes, {0: x})
        store.kv_gone(p.names)
        wait_until(lambda: p.names[0] not in store.debug.busy())
        disk.errors.clear()
        store.debug.run_chores()
        wait_until(lambda: not chunk_files(tmp_path) and p.names[0] not in store.debug.busy())
        assert store.debug.disk().own == 0
        check_balance(store)


def test_one_file_that_cannot_be_deleted_does_not_keep_others_from_making_room(tmp_path: Path) -> None:
    class OneStays(FaultyDisk):
        stays = ""

        def unlink(self, path: str) -> None:
            if path == self.stays:
                self.calls["refused"] += 1
                raise PermissionError(errno.EPERM, "Operation not permitted", path)
            os.unlink(path)

    disk = OneStays()
    with opened(tmp_path, files=disk, chunks=64, max_cold_size=5 * FILE / GIB, write_back_sec=0) as store:
        p = prompt(4)
        store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
        assert store.flush(10) == 0
        victim = min(p.names, key=lambda name: store.debug.chunks()[name].used_ns)
        disk.stays = store.debug.path(victim)
        q = prompt(3)
        store.store(q.refs, q.bytes, {0: rows(3 * CHUNK)})
        wait_until(lambda: store.stats()["queue_writes"] == 0)
        assert disk.calls["refused"] < 10
        disk.stays = ""


def test_a_lower_limit_on_a_slow_disk_takes_no_write_for_one_that_hangs(tmp_path: Path, disk: FaultyDisk) -> None:
    p = prompt(200)
    with opened(tmp_path, chunks=200) as store:
        store.store(p.refs, p.bytes, {0: rows(200 * CHUNK)})
        assert store.flush(20) == 0

    disk.unlink_sec = 0.02
    limits = {"max_cold_size": 50 * FILE / GIB, "write_back_sec": 0, "read_timeout_sec": 1.5}
    store = TieredStore(settings(tmp_path, **limits), 64 * LAYER_BYTES, IDENT, files=disk)
    try:
        q = prompt(8)
        assert store.store(q.refs, q.bytes, {0: rows(8 * CHUNK)}) == 8
        states = set()

        def done() -> bool:
            states.add(store.stats()["cold_state"])
            return not store.stats()["queue_writes"] and store.stats()["cold_bytes"] <= 50 * FILE

        wait_until(done, 30)
        assert states == {"online"}
    finally:
        store.close()


# -- memory, and an end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()])
def test_a_moment_without_memory_for_a_merge_costs_no_rows_and_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with opened(tmp_path, layers=2, write_back_sec=0) as store:
        p, x = on_disk(store, 1)
        attempts: list[int] = []

        def refused(pool: BufferPool, nbytes: int) -> Any:
            attempts.append(nbytes)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(BufferPool, "get", refused)
            assert store.store(p.refs, p.bytes, {1: x}) == 1
            begun = time.monotonic()
            wait_until(lambda: len(attempts) >= 4)
            assert time.monotonic() - begun > 0.4, "it looks again a few times a second"
        assert store.flush(10) == 0
        assert store.demote(p.names) == 1
        assert torch.equal(store.retrieve(p.refs, [0, 1], None)[1], x)


@pytest.mark.timing
def test_a_close_ends_in_time_though_many_uses_are_not_saved_yet(tmp_path: Path) -> None:
    class SlowTimes(FaultyDisk):
        slow = 0.0

        def utime(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(self.slow)
            os.utime(*args, **kwargs)

    disk = SlowTimes()
    store = TieredStore(settings(tmp_path, close_timeout_sec=1), 600 * LAYER_BYTES, IDENT, files=disk)
    p = prompt(500)
    store.store(p.refs, p.bytes, {0: rows(500 * CHUNK)})
    assert store.flush(30) == 0
    store.retrieve(p.refs, [0])
    disk.slow = 0.05
    store.close()
    assert store.debug.memory().mapped == 0, "its memory is given back"
    with opened(tmp_path) as again:
        assert again.directory == store.directory, "and so is its directory"


def test_what_the_disk_has_no_room_for_waits_for_no_write_and_is_not_blamed_on_the_close(tmp_path: Path) -> None:
    limit = (3 * FILE + 4096) / GIB
    with opened(tmp_path, chunks=16, max_cold_size=limit, write_back_sec=0) as store:
        for _ in range(6):
            p = prompt(1)
            store.store(p.refs, p.bytes, {0: rows(CHUNK)})
            store.flush(10)
        wait_until(lambda: store.stats()["queue_writes"] == 0)
        assert store.stats()["dirty_chunks"] == 3
    assert store.stats()["drops_close"] == 0
    assert store.stats()["drops_cold_limit"] == 3


def test_a_result_that_outlives_its_pool_takes_its_memory_along() -> None:
    pool = BufferPool(1 << 30)
    result = pool.get(4 << 20).rows(1024, 1024, torch.float32)
    pool.close()
    del result
    gc.collect()
    assert not cast("Any", pool)._returned
    assert not cast("Any", pool)._on_loan
