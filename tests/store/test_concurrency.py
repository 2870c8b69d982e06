"""Operations that meet each other at the worst moment, made to do so: each of these was a fault once."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.chunk import LayerSpec, Presence, token_bytes
from lmcache_hs_backend.format.chunk_file import FileLayer, read_header, write
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.flows.read import PendingReads, ReadJob, Reads
from lmcache_hs_backend.tiers.memory import buffers
from lmcache_hs_backend.tiers.memory.copies import CopyRows
from tests.support.disks import FaultyDisk
from tests.support.forked import with_tiers
from tests.support.prompts import (
    CHUNK,
    HIDDEN,
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
from tests.support.waiting import wait_until

FOREVER = 3600.0


# -- writes and leases -------------------------------------------------------------------------------------


def test_a_chunk_that_is_being_read_is_written_once(tmp_path: Path) -> None:
    with opened(tmp_path, write_back_sec=0) as store:
        p = prompt(1)
        store.store(p.refs, p.bytes, {0: rows(CHUNK)})
        with store.debug.pinned(p.names[0]):
            assert store.flush(10) == 0
            assert store.stats()["written_chunks"] == 1
            assert store.stats()["queue_writes"] == 0


def test_a_write_that_finds_no_room_is_not_tried_again_at_once(tmp_path: Path, disk: FaultyDisk) -> None:
    limit = 3 * (LAYER_BYTES + 4096)
    sizes = {"max_cold_size": limit / 1024**3, "min_free_disk": 1e-6}
    with opened(tmp_path, files=disk, write_back_sec=0, **sizes) as store:
        p, _ = on_disk(store, 2)
        with store.debug.pinned(*p.names):  # no file may leave
            before = disk.calls["statvfs"]  # a write begins by looking how much room the disk has
            q = prompt(2)
            store.store(q.refs, q.bytes, {0: rows(2 * CHUNK)})
            store.flush(1.0)
            assert 0 < disk.calls["statvfs"] - before < 30
        wait_until(lambda: store.stats()["queue_writes"] == 0)


def test_a_chunk_whose_write_crashes_is_not_tried_for_ever_and_holds_up_nobody(tmp_path: Path) -> None:
    with opened(tmp_path, write_back_sec=0) as store:
        p = Prompt(prompt(1).ids, key_of=lambda number, value: "x" * (1 << 20))  # no header takes such a key
        store.store(p.refs, p.bytes, {0: rows(CHUNK)})
        wait_until(lambda: store.stats()["errors_internal"] == 1)
        started = time.monotonic()
        assert store.flush(10) == 0
        assert store.stats()["dirty_chunks"] == 1
        assert time.monotonic() - started < 2
        q, x = prompt(2), rows(2 * CHUNK)
        store.store(q.refs, q.bytes, {0: x})
        wait_until(lambda: store.covered(q.names, [0]) == 2 and store.stats()["queue_writes"] == 0)
        store.debug.evict_clean()
        assert torch.equal(store.retrieve(q.refs, [0])[0], x.float())
        assert store.stats()["errors_internal"] == 1
        assert store.stats()["drops_unwritable"] == 1


def test_a_stream_of_reads_does_not_end_all_writing(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, io_threads=1, promote=False, write_back_sec=0) as store:
        p, x = on_disk(store, 6)
        disk.bytes_per_sec = 200 * LAYER_BYTES
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            q = prompt(2)
            store.store(q.refs, q.bytes, {0: rows(2 * CHUNK)})
            wait_until(lambda: store.stats()["dirty_chunks"] == 0)
            assert store.stats()["queue_reads"] >= 0
        finally:
            stop.set()
            for reader in readers:
                reader.join()


def test_a_caller_does_not_wait_behind_somebodys_prefetch(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, chunks=64, io_threads=1, read_timeout_sec=5) as store:
        p, _ = on_disk(store, 40)
        q, y = on_disk(store, 1)
        disk.bytes_per_sec = 20 * LAYER_BYTES  # the prefetch takes two seconds
        store.prefetch(p.refs)
        started = time.monotonic()
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        assert time.monotonic() - started < 1
        disk.bytes_per_sec = 0.0
        wait_until(lambda: store.has(p.names[-1], 0)[0])


def test_a_retrieve_larger_than_the_pool_keeps_no_more_scratch_memory_than_threads(tmp_path: Path) -> None:
    with opened(tmp_path, chunks=40, promote=False, io_threads=2) as store:
        p, x = on_disk(store, 40)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["hits_cold"] == 40
        result = 40 * 2 * LAYER_BYTES  # float32, and idle again by now
        kept = store.debug.memory().idle_buffers
        assert kept <= result + 8 * LAYER_BYTES, "what is read goes on into the result at once"


@pytest.mark.parametrize("busy", [1, 2])
def test_a_write_that_is_due_does_not_wait_for_the_thread_that_has_planned_it(tmp_path: Path, busy: int) -> None:
    go = threading.Event()

    class SlowReads(FaultyDisk):
        def preadv(self, fd: int, views: Any, offset: int) -> int:
            go.wait(20)
            return super().preadv(fd, views, offset)

    with opened(tmp_path, files=SlowReads(), io_threads=4, read_timeout_sec=30, write_back_sec=0.5) as store:
        p, x = on_disk(store, 4)
        q = prompt(1)
        store.store(q.refs, q.bytes, {0: rows(CHUNK)})  # one idle thread looks at it, and finds it too early
        store.prefetch(p.refs[:busy])
        try:
            wait_until(lambda: store.stats()["written_chunks"] == 5)
        finally:
            go.set()
        wait_until(lambda: store.has(p.names[0], 0)[0])
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


# -- cold hits, in two halves --------------------------------------------------------------------------------


@pytest.mark.parametrize("promote", [True, False])
@pytest.mark.parametrize("by_caller", [True, False])
def test_a_chunk_that_arrives_damaged_once_is_read_again_and_served(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch, promote: bool, by_caller: bool
) -> None:
    with opened(tmp_path, files=disk, promote=promote) as store:
        p, x = on_disk(store, 4)
        disk.flips = 1
        if not by_caller:
            monkeypatch.setattr(PendingReads, "has", lambda self, _: bool(self.result))
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert (disk.calls["preadv"], disk.flips) == (5, 0)
        stats = store.stats()
        assert (stats["hits_cold"], stats["misses_bad_file"], stats["quarantined_chunks"]) == (4, 0, 0)
        check_balance(store)


def test_a_chunk_that_arrives_damaged_twice_is_set_aside(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk) as store:
        p, _ = on_disk(store, 1)
        disk.flips = 2
        assert store.retrieve(p.refs, [0]) == {}
        stats = store.stats()
        assert (stats["misses_bad_file"], stats["quarantined_chunks"], stats["hot_bytes"]) == (1, 1, 0)
        check_balance(store)


def test_a_prefetch_reads_again_what_arrives_damaged_once(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk) as store:
        p, x = on_disk(store, 1)
        disk.flips = 1
        store.prefetch(p.refs)
        wait_until(lambda: store.has(p.names[0], 0) == (True, True))
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["quarantined_chunks"] == 0
        wait_until(lambda: not store.debug.busy())
        check_balance(store)


def test_two_calls_for_the_same_chunks_read_each_file_once(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, read_timeout_sec=30) as store:
        p, x = on_disk(store, 6)
        opened_before = disk.calls["open"]
        disk.hang()
        found: list[torch.Tensor] = []
        callers = [threading.Thread(target=lambda: found.append(store.retrieve(p.refs, [0])[0])) for _ in range(3)]
        for caller in callers:
            caller.start()
        wait_until(lambda: store.debug.chunks()[p.names[5]].pins == 6)  # each call's, and its read's
        disk.resume()
        for caller in callers:
            caller.join()
        assert len(found) == 3
        assert all(torch.equal(rows, x.float()) for rows in found)
        assert disk.calls["open"] - opened_before == 6
        check_balance(store)


def test_a_call_that_gives_up_leaves_no_slot_behind(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, read_timeout_sec=0.2) as store:
        p, x = on_disk(store, 8)
        disk.hang()
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["misses_timeout"] == 1
        assert store.stats()["hot_bytes"] <= store.config.io_threads * LAYER_BYTES, "those of reads under way"
        disk.resume()
        wait_until(lambda: not store.debug.busy() and store.stats()["cold_state"] == "online")
        check_balance(store)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


def test_an_error_in_the_callers_half_ends_all_its_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 6)
        with monkeypatch.context() as patch:
            too_narrow = {0: torch.zeros(6 * CHUNK, HIDDEN - 1)}
            patch.setattr(store._retrieve, "_outputs", lambda *_: too_narrow)
            with pytest.raises(RuntimeError):
                store.retrieve(p.refs, [0])
        wait_until(lambda: not store.debug.busy())
        check_balance(store)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


def test_a_copy_that_fails_on_an_io_thread_is_a_miss_at_once_and_no_wrong_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, read_timeout_sec=20) as store:
        p, x = on_disk(store, 6)
        copy, fetch = Reads._copy, Reads._fetch

        def fetch_late(self: Reads, read: ReadJob) -> str | None:
            miss = fetch(self, read)
            wait_until(lambda: read.pending is not None and bool(read.pending.result))
            return miss

        def fail(self: Reads, read: ReadJob, pending: PendingReads, how: CopyRows) -> None:
            if read.position == 3:
                raise RuntimeError("on purpose")
            copy(self, read, pending, how)

        monkeypatch.setattr(Reads, "_copy", fail)
        monkeypatch.setattr(Reads, "_fetch", fetch_late)
        monkeypatch.setattr(Reads, "_is_for_caller", lambda self, read: False)  # the I/O threads do it all
        started = time.monotonic()
        assert torch.equal(store.retrieve(p.refs, [0])[0], x[: 3 * CHUNK].float())
        assert time.monotonic() - started < 10
        wait_until(lambda: store.stats()["errors_internal"] == 1)
        wait_until(lambda: not store.debug.busy())
        check_balance(store)


@pytest.mark.parametrize("promote", [True, False])
def test_the_memory_of_a_cold_result_comes_back_without_a_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promote: bool
) -> None:
    monkeypatch.setattr(buffers, "SMALL_RESULT", 0)  # the rows here are small; large results are meant
    with opened(tmp_path, promote=promote) as store:
        p, _ = on_disk(store, 6)
        gc.collect()
        gc.disable()
        try:
            store.retrieve(p.refs, [0])
            wait_until(lambda: store.debug.memory().idle_buffers >= 6 * 2 * LAYER_BYTES)  # float32
            idle = store.debug.memory().idle_buffers
            store.debug.evict_clean()
            store.retrieve(p.refs, [0])
            wait_until(lambda: store.debug.memory().idle_buffers >= 6 * 2 * LAYER_BYTES)
            if promote:
                assert store.debug.memory().idle_buffers == idle, "it was used again"
        finally:
            gc.enable()


def test_a_caller_that_is_interrupted_with_a_read_in_hand_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 6)
        finish = Reads.finish

        def interrupted(self: Reads, *how: Any) -> bool:
            monkeypatch.setattr(Reads, "finish", finish)
            raise KeyboardInterrupt

        monkeypatch.setattr(Reads, "finish", interrupted)
        monkeypatch.setattr(Reads, "_is_for_caller", lambda self, read: read.miss is None)
        with pytest.raises(KeyboardInterrupt):
            store.retrieve(p.refs, [0])
        wait_until(lambda: not store.debug.busy())
        check_balance(store)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


# -- dropped and stored again --------------------------------------------------------------------------------


def test_a_read_of_a_dropped_chunk_does_not_touch_its_successors_file(tmp_path: Path) -> None:
    walking, go = threading.Event(), threading.Event()

    def ask(keys: list[object], memory_only: bool) -> list[Presence]:
        if threading.current_thread().name == "late":
            walking.set()
            assert go.wait(20)
        return [Presence.PRESENT] * len(keys)

    with opened(tmp_path, ask=ask, write_back_sec=FOREVER, read_timeout_sec=20) as store:
        p, _ = on_disk(store, 1)
        found: list[object] = []
        late = threading.Thread(target=lambda: found.append(store.retrieve(p.refs, [0])), name="late")
        late.start()
        assert walking.wait(10)  # it has looked the chunk up, and will read it
        store.drop(p.names)
        y = {0: rows(CHUNK, seed=5), 3: rows(CHUNK, seed=6)}
        assert store.store(p.refs, p.bytes, y) == 1
        assert store.flush(10) == 0
        go.set()
        late.join()
        assert found == [{}]
        assert store.stats()["misses_absent"] == 1
        store.debug.evict_clean()
        assert store.stats()["quarantined_chunks"] == 0
        out = store.retrieve(p.refs, [0, 3])
        assert all(torch.equal(out[idx], y[idx].float()) for idx in y)
        store.flush(5)
        check_balance(store)


def test_a_chunk_dropped_while_it_is_written_and_stored_again_has_the_new_file(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with opened(tmp_path, files=disk, write_back_sec=0, read_timeout_sec=30) as store:
        p = prompt(1)
        disk.hang()
        store.store(p.refs, p.bytes, {0: rows(CHUNK, seed=1)})
        wait_until(lambda: disk.hanging == 1)
        assert store.drop(p.names, durable=False) == 1  # else it waits until the disk counts as one that hangs
        store.store(p.refs, p.bytes, {0: rows(CHUNK, seed=2)})
        disk.resume()
        assert store.flush(10) == 0
        store.debug.evict_clean()
        assert torch.equal(store.retrieve(p.refs, [0])[0], rows(CHUNK, seed=2).float())
        assert len(chunk_files(tmp_path)) == 1
        check_balance(store)


@pytest.mark.parametrize("again", [False, True], ids=["and stored", "stored, and dropped again"])
def test_a_file_that_could_not_be_deleted_belongs_to_the_chunk_that_is_dropped(
    tmp_path: Path, disk: FaultyDisk, again: bool
) -> None:
    with opened(tmp_path, files=disk, write_back_sec=FOREVER) as store:
        p, x = on_disk(store, 1)
        disk.errors["unlink"] = errno.EBUSY
        store.drop(p.names)
        wait_until(lambda: store.stats()["errors_unlink"] == 1)
        assert store.store(p.refs, p.bytes, {0: x}) == 1
        disk.errors.clear()
        if again:
            store.drop(p.names)
            wait_until(lambda: not chunk_files(tmp_path))
        else:
            assert store.flush(10) == 0
            assert len(chunk_files(tmp_path)) == 1
        wait_until(lambda: not store.debug.busy())
        check_balance(store)


def test_an_answer_that_kv_is_gone_is_void_when_it_was_seen_since(tmp_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def ask(keys: list[object], memory_only: bool) -> list[Presence]:
        if memory_only or not slow:
            return [Presence.PRESENT] * len(keys)
        asked.set()
        answer.wait(10)
        return [Presence.GONE] * len(keys)

    slow = False
    with opened(tmp_path, ask=ask, write_back_sec=FOREVER) as store:
        p, x = prompt(2), rows(2 * CHUNK)
        store.store(p.refs, p.bytes, {0: x})
        slow = True
        reader = threading.Thread(target=store.retrieve, args=(p.refs, [0]))
        reader.start()
        assert asked.wait(10)
        store.store(p.refs, p.bytes, {0: x})  # the KV is back, and the store has seen it
        answer.set()
        reader.join()
        assert len(store) == 2
        slow = False
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


# -- start and end -------------------------------------------------------------------------------------------


def test_clear_before_the_scan_is_done_clears_what_it_finds(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p, _ = on_disk(store, 4)
    store = TieredStore(settings(tmp_path), 8 * LAYER_BYTES, IDENT)
    try:
        store.clear()
        assert store.wait_recovered(20)
        assert store.retrieve(p.refs, [0]) == {}
        wait_until(lambda: not chunk_files(tmp_path))
        wait_until(lambda: store.stats()["cold_bytes"] == 0)
    finally:
        store.close()


def test_headers_that_a_failing_disk_hid_are_read_when_it_is_back(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 4)
    disk.errors["preadv"] = errno.EIO
    store = TieredStore(settings(tmp_path), 8 * LAYER_BYTES, IDENT, files=disk)
    try:
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        disk.errors.clear()
        wait_until(lambda: store.covered(p.names, [0]) == 4)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["quarantined_chunks"] == 0
    finally:
        store.close()


def test_a_directory_is_not_given_away_while_an_operation_in_it_is_outstanding(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with opened(tmp_path, files=disk, write_back_sec=0, close_timeout_sec=0.5) as store:
        disk.hang()
        p = prompt(1)
        store.store(p.refs, p.bytes, {0: rows(CHUNK)})
        wait_until(lambda: disk.hanging == 1)
        store.close()
        with opened(tmp_path) as other:
            assert other.directory == f"{store.directory}/p1"
        disk.resume()


def test_no_time_to_close_still_gives_the_directory_back(tmp_path: Path) -> None:
    with opened(tmp_path, close_timeout_sec=0) as store:
        on_disk(store, 1)
    with opened(tmp_path) as again:
        assert again.directory == store.directory
        assert len(again) == 1


def test_a_forked_child_exits_by_itself(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.support.prompts import *
store = TieredStore(settings(Path({str(tmp_path)!r})), 8 * LAYER_BYTES, IDENT)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
store.close()
print("both ended")
"""
    done = with_tiers().run(code, timeout=60)
    assert done.stdout.strip() == "both ended", done.stderr


# -- what lies on disk ---------------------------------------------------------------------------------------


def test_a_file_of_fewer_tokens_is_never_served_as_more(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p, _ = on_disk(store, 1)
        path = Path(store.debug.path(p.names[0]))
        meta = read_header(FileLayer(), str(path)).meta
        made, _, _ = write(
            FileLayer(), str(path.parent), meta._replace(num_tokens=CHUNK // 2), token_bytes(p.ids[: CHUNK // 2]),
            {LayerSpec(0, "BF16", HIDDEN): memoryview(bytearray(LAYER_BYTES // 2))},
            direct=False, fsync=False, mtime_ns=1,
        )  # fmt: skip
        os.rename(made, path)
    with opened(tmp_path) as store:
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["misses_collision"] == 1


def test_one_file_that_cannot_be_read_costs_nobody_else_anything(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, promote=False) as store:
        p, _ = on_disk(store, 1)
        q, y = on_disk(store, 1)
        disk.bad_paths[store.debug.path(p.names[0])] = errno.EIO
        assert store.retrieve(p.refs, [0]) == {}
        wait_until(lambda: store.stats()["cold_state"] == "online")
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["quarantined_chunks"] == 1, "the disk works and this file fails again: it is the file"
        assert store.stats()["cold_state"] == "online"
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        disk.bad_paths[store.debug.path(q.names[0])] = errno.EACCES
        assert store.retrieve(q.refs, [0]) == {}
        assert store.stats()["cold_state"] == "online"
        assert store.stats()["quarantined_chunks"] == 2


def test_a_disk_that_stays_full_is_not_emptied_in_vain(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, chunks=30, write_back_sec=0) as store:
        on_disk(store, 20)
        disk.errors["pwritev"] = errno.ENOSPC
        q = prompt(2)
        store.store(q.refs, q.bytes, {0: rows(2 * CHUNK)})
        for tries in range(1, 4):
            wait_until(lambda tries=tries: store.stats()["errors_disk_full"] >= tries, 15)
            wait_until(lambda: store.stats()["cold_state"] == "paused", 15)
            store.debug.resume_now()  # the pause is over, and the next write fails at once
        assert len(chunk_files(tmp_path)) >= 16


def test_a_floor_that_deleting_does_not_restore_costs_no_more_than_it_could_have_given(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with opened(tmp_path, files=disk, chunks=30, min_free_disk=1e-6) as store:
        on_disk(store, 20)

        class Full:
            f_bavail, f_frsize = 0, 4096

        disk.statvfs = lambda path: Full()  # type: ignore[method-assign]
        q = prompt(1)
        store.store(q.refs, q.bytes, {0: rows(CHUNK)})
        store.flush(1)
        assert store.stats()["cold_state"] == "paused"
        assert len(chunk_files(tmp_path)) >= 17


def test_a_cold_limit_below_the_hot_tier_does_not_shrink_the_hot_tier(tmp_path: Path) -> None:
    limit = 4 * (LAYER_BYTES + 8192) / 1024**3
    with opened(tmp_path, chunks=16, max_cold_size=limit, write_back_sec=0) as store:
        p, x = prompt(12), rows(12 * CHUNK)
        assert store.store(p.refs, p.bytes, {0: x}) == 12
        started = time.monotonic()
        store.flush(10)
        assert time.monotonic() - started < 5, "what the disk does not keep holds up no flush"
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["cold_bytes"] <= limit * 1024**3


def test_a_dead_namespace_that_somebody_removes_is_forgotten(tmp_path: Path) -> None:
    import shutil

    other = IDENT.__class__(**{**IDENT.__dict__, "model": "org/other"})
    with opened(tmp_path, ident=other) as store:
        on_disk(store, 4)
        dead = store.directory
    with opened(tmp_path, max_cold_size=6 * (LAYER_BYTES + 8192) / 1024**3) as store:
        assert store.stats()["cold_bytes"] > 0
        shutil.rmtree(dead)
        store.debug.run_chores()
        assert store.stats()["cold_bytes"] == 0
        on_disk(store, 4)
        check_balance(store)


def test_odd_things_in_other_namespaces_do_not_stop_recovery(tmp_path: Path) -> None:
    other = IDENT.__class__(**{**IDENT.__dict__, "model": "org/other"})
    with opened(tmp_path, ident=other) as store:
        on_disk(store, 1)
        dead = Path(store.directory)
    (dead / "quarantine").write_text("a file, not a directory")
    (dead / "archive").symlink_to("/")
    with opened(tmp_path) as store:
        p, x = on_disk(store, 2)
    with opened(tmp_path) as store:
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


def test_links_in_the_place_of_our_directories_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with opened(tmp_path / "cold", on_kv_gone="archive") as store:
        root = Path(store.directory)
        for number in range(256):
            (root / f"{number:02x}").symlink_to(outside)
        (root / "archive").symlink_to(outside)
        (root / "quarantine").symlink_to(outside)
        p, x = on_disk(store, 3)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        store.kv_gone(p.names[:1])
        wait_until(lambda: store.stats()["archived_chunks"] == 1)
        os.truncate(store.debug.path(p.names[1]), 10)
        store.debug.evict_clean()
        store.retrieve(p.refs[1:], [0])
    assert not list(outside.iterdir())


def test_only_temporaries_of_known_shape_are_removed_at_start(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        root = Path(store.directory)
    (root / "notes.tmp").write_text("mine")
    (root / ".tmpAbC123").write_text("safetensors'")
    with opened(tmp_path):
        pass
    assert (root / "notes.tmp").exists()
    assert not (root / ".tmpAbC123").exists()


def test_archiving_takes_no_ram_from_serving_while_the_disk_hangs(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, on_kv_gone="archive", read_timeout_sec=0.3, write_back_sec=FOREVER) as store:
        p = prompt(8)
        store.store(p.refs, p.bytes, {0: rows(8 * CHUNK)})
        disk.hang()
        flusher = threading.Thread(target=store.flush, args=(1,))
        flusher.start()
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        flusher.join()
        store.kv_gone(p.names)
        q, y = prompt(4), rows(4 * CHUNK)
        assert store.store(q.refs, q.bytes, {0: y}) == 4
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        disk.resume()
        wait_until(lambda: store.stats()["cold_state"] == "online")


def test_more_layers_than_a_file_may_have_are_left_out(tmp_path: Path) -> None:
    with opened(tmp_path, layers=1100, chunks=2) as store:
        p, x = prompt(1), rows(CHUNK)
        assert store.store(p.refs, p.bytes, dict.fromkeys(range(1005), x)) == 1
        assert store.flush(20) == 0
        store.debug.evict_clean()
        assert torch.equal(store.retrieve(p.refs, [999])[999], x.float())
        assert store.retrieve(p.refs, [1000]) == {}
        assert store.stats()["quarantined_chunks"] == 0


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o000], ids=oct)
@pytest.mark.parametrize("mode", [0o700, 0o750], ids=oct)
def test_directories_have_the_mode_of_the_setting_and_files_that_of_the_umask(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        with opened(tmp_path / "a" / "b", cold_dir_mode=mode, on_kv_gone="archive") as store:
            p, _ = on_disk(store, 3)
            store.kv_gone(p.names[:1])
            os.truncate(store.debug.path(p.names[1]), 10)
            store.retrieve(p.refs[1:], [0])
            wait_until(lambda: store.stats()["archived_chunks"] == store.stats()["quarantined_chunks"] == 1)
            made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in made if path.is_dir()} == {oct(mode)}
    assert {oct(path.stat().st_mode & 0o777) for path in made if path.is_file()} == {oct(0o666 & ~umask)}
    assert {path.name for path in made} >= {"archive", "quarantine", "namespace.json", ".lock"}
