"""What was deleted stays deleted: a kill at any moment, a restart, a disk that fails, a store that is under way."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.tiered import TieredStore
from tests.store.test_directories import program
from tests.support.disks import FaultyDisk
from tests.support.forked import with_tiers
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
    tokens,
)
from tests.support.waiting import wait_until

CHILD = """
import os, sys
from pathlib import Path
from lmcache_hs_backend.tiered import TieredStore
from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES, Prompt, rows, settings, tokens
store = TieredStore(settings(Path(sys.argv[1])), 64 * LAYER_BYTES, IDENT)
prompts = [Prompt(tokens(8, seed)) for seed in range(40)]
for p in prompts:
    assert store.store(p.refs, p.bytes, {0: rows(8 * CHUNK, seed=1)}) == 8
    assert store.flush(30) == 0  # a slow disk shall not make a later prompt find no room
{delete}
print("deleted", flush=True)
os.kill(os.getpid(), 9)
"""


def run_child(tmp_path: Path, delete: str) -> str:
    code = CHILD.replace("{delete}", delete)
    done = with_tiers().run(code, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def test_what_was_cleared_is_not_found_again_after_a_kill_right_after(tmp_path: Path) -> None:
    assert "deleted" in run_child(tmp_path, "assert store.clear() == 320")
    with opened(tmp_path, chunks=64) as store:
        assert store.wait_recovered(20)
        assert len(store) == 0
        p, x = Prompt(tokens(8, 39)), rows(8 * CHUNK, seed=2)
        assert store.retrieve(p.refs, [0]) == {}
        assert store.store(p.refs, p.bytes, {0: x}) == 8, "new rows are stored"
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        wait_until(lambda: not any(tmp_path.glob("*/trash/*")))
        wait_until(lambda: store.flush(10) == 0)
        check_balance(store)


def test_what_was_dropped_is_not_found_again_after_a_kill_right_after(tmp_path: Path) -> None:
    assert "deleted" in run_child(tmp_path, "assert store.drop(prompts[3].names) == 8")
    with opened(tmp_path, chunks=64) as store:
        assert store.wait_recovered(20)
        assert len(store) == 312
        assert store.retrieve(Prompt(tokens(8, 3)).refs, [0]) == {}


class KilledAt(FaultyDisk):
    """A disk on which the process dies at the n-th rename of a clear; in the test it just stops there."""

    renames_left = -1

    def rename(self, source: str, target: str) -> None:
        if "/trash/" in str(target):
            if self.renames_left == 0:
                raise OSError(errno.EIO, "killed here")
            self.renames_left -= 1
        super().rename(source, target)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_clear_that_could_not_be_finished_says_so_writes_nothing_and_is_finished_later(
    tmp_path: Path, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = KilledAt()
    with opened(tmp_path, files=disk, chunks=64, write_back_sec=0) as store:
        p, _ = on_disk(store, 16)
        disk.renames_left = after
        assert store.clear() == 16
        assert "cannot be moved away yet" in caplog.text
        assert store.stats()["errors_clear"] == 1
        assert store.retrieve(p.refs, [0]) == {}
        new = rows(16 * CHUNK, seed=9)
        assert store.store(p.refs, p.bytes, {0: new}) == 16
        assert store.flush(0.3) == 16, "nothing is written among what was cleared"
        disk.renames_left = -1
        wait_until(lambda: store.flush(1) == 0)
        store.debug.evict_clean()
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], new)
        wait_until(lambda: not store.debug.busy())
        check_balance(store)
    with opened(tmp_path, chunks=64) as store:
        assert store.wait_recovered(20)
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], new)


def test_rows_whose_store_is_under_way_are_cleared_too(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p, x = prompt(4), rows(4 * CHUNK)
        with store.debug.between_copy_and_publication(lambda: store.clear() and None):
            assert store.store(p.refs, p.bytes, {0: x}) == 0
        assert len(store) == 0
        assert store.retrieve(p.refs, [0]) == {}
        assert store.store(p.refs, p.bytes, {0: x}) == 4
        check_balance(store)


def test_a_write_that_is_under_way_when_all_is_cleared_leaves_no_file(tmp_path: Path) -> None:
    class Gate(FaultyDisk):
        entered, go = threading.Event(), threading.Event()

        def pwritev(self, *args: object) -> int:
            self.entered.set()
            self.go.wait(20)
            return super().pwritev(*args)

    disk = Gate()
    disk.go.set()
    with opened(tmp_path, files=disk, write_back_sec=0) as store:
        disk.go.clear()
        disk.entered.clear()
        p, x = prompt(4), rows(4 * CHUNK)
        assert store.store(p.refs, p.bytes, {0: x}) == 4
        assert disk.entered.wait(10)
        threading.Timer(0.1, disk.go.set).start()
        assert store.clear() == 4
        wait_until(lambda: not store.debug.busy())
        assert not chunk_files(tmp_path)
        assert store.store(p.refs, p.bytes, {0: x}) == 4
        wait_until(lambda: store.flush(5) == 0)
        assert len(chunk_files(tmp_path)) == 4
        check_balance(store)


def test_a_write_whose_directory_a_clear_takes_away_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    class ClearedMeanwhile(FaultyDisk):
        store: TieredStore | None = None

        def mkdir(self, path: str, mode: int = 0o777) -> None:
            os.mkdir(path, mode)
            store, self.store = self.store, None
            if store is not None:
                store.clear()

    disk = ClearedMeanwhile()
    with opened(tmp_path, files=disk) as store:
        disk.store = store
        p, x = prompt(1), rows(CHUNK)
        assert store.store(p.refs, p.bytes, {0: x}) == 1
        assert store.flush(10) == 0
        wait_until(lambda: not store.debug.busy())
        assert disk.store is None, "or this is no test of anything"
        assert store.stats()["cold_state"] == "online"
        assert store.stats()["errors_write"] == 0
        assert store.retrieve(p.refs, [0]) == {}, "it was cleared"
        assert store.store(p.refs, p.bytes, {0: x}) == 1
        assert store.flush(10) == 0
        assert store.demote(p.names) == 1
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)


@pytest.mark.timing
def test_clearing_300_000_chunks_takes_the_caller_less_than_50_ms(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.debug.add_cold_chunks(300_000)
        started = time.perf_counter()
        assert store.clear() == 300_000
        took = time.perf_counter() - started
        assert took < 0.05, f"{1000 * took:.0f} ms"
        assert len(store) == 0


def test_deletions_do_not_starve_writes(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, chunks=64, write_back_sec=0) as store:
        old = [on_disk(store, 32, seed)[0] for seed in range(1, 9)]
        disk.unlink_sec = 0.02
        for p in old:
            store.drop(p.names, durable=False)
        new = prompt(8)
        store.store(new.refs, new.bytes, {0: rows(8 * CHUNK)})
        wait_until(lambda: all(os.path.exists(store.debug.path(name)) for name in new.names), 5)
        assert store.debug.busy(), "the deletions are not over yet"
        disk.unlink_sec = 0.0


@pytest.mark.timing
def test_deletions_that_are_left_do_not_keep_the_directory_from_the_next_store(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    store = TieredStore(settings(tmp_path, close_timeout_sec=1), 512 * LAYER_BYTES, IDENT, files=disk)
    p, _ = on_disk(store, 400)
    disk.unlink_sec = 0.1
    store.drop(p.names, durable=False)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 3
    with opened(tmp_path, on_locked="error") as again:
        assert again.wait_recovered(20)


# -- what other processes of the same namespace have left ----------------------------------------------------------


def test_a_clear_reaches_what_a_process_has_left_that_has_ended(tmp_path: Path) -> None:
    p, old, new = prompt(4), rows(4 * CHUNK, seed=1), rows(4 * CHUNK, seed=2)
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            assert second.store(p.refs, p.bytes, {0: old}) == 4
        first.clear()  # before it has looked at what the second one has left
        assert first.covered(p.names, [0]) == 0
    with opened(tmp_path) as store:
        assert store.retrieve(p.refs, [0]) == {}, "a start that knows of no clear adopts nothing from before it"
        assert store.store(p.refs, p.bytes, {0: new}) == 4
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], new)
        check_balance(store)


def test_a_clear_in_a_subdirectory_reaches_the_namespace_of_a_process_that_has_ended(tmp_path: Path) -> None:
    p, old = prompt(4), rows(4 * CHUNK, seed=1)
    first = TieredStore(settings(tmp_path), 8 * LAYER_BYTES, IDENT)
    with opened(tmp_path) as second:
        assert first.store(p.refs, p.bytes, {0: old}) == 4
        first.close()
        second.debug.run_chores()
        assert second.debug.disk().dead > 0
        second.clear()
        wait_until(lambda: second.debug.run_chores() or not second.debug.disk().dead)
        wait_until(lambda: not list(tmp_path.glob("**/*.safetensors")))
        check_balance(second)
    with opened(tmp_path) as store:
        assert store.retrieve(p.refs, [0]) == {}


def test_what_a_process_leaves_that_ran_during_a_clear_is_not_adopted_by_the_next_start_either(tmp_path: Path) -> None:
    p, old = prompt(4), rows(4 * CHUNK, seed=1)
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            assert second.store(p.refs, p.bytes, {0: old}) == 4
            first.clear()
            assert second.covered(p.names, [0]) == 4, "a process that runs is cleared by itself"
        first.debug.run_chores()
    with opened(tmp_path) as store:
        assert store.retrieve(p.refs, [0]) == {}


def test_a_clear_while_chunks_are_adopted_leaves_none_of_them(tmp_path: Path) -> None:
    class Gate(FaultyDisk):
        entered, go = threading.Event(), threading.Event()

        def rename(self, source: str, target: str) -> None:
            if "/p1/" in str(source) and "/trash/" not in str(target):
                self.entered.set()
                self.go.wait(20)
            super().rename(source, target)

    p, disk = prompt(8), Gate()
    with opened(tmp_path, files=disk) as first:
        with opened(tmp_path) as second:
            assert second.store(p.refs, p.bytes, {0: rows(8 * CHUNK)}) == 8
        looking = threading.Thread(target=first.debug.run_chores)
        looking.start()
        assert disk.entered.wait(10)
        clearing = threading.Thread(target=first.clear)
        clearing.start()
        wait_until(first.debug.clearing)
        disk.go.set()
        clearing.join(20)
        left = Path(first.directory).glob("**/*.safetensors")
        assert all("/trash/" in str(path) for path in left), "nothing is left where a start would find it"
        looking.join(20)
        assert len(first) == 0
        assert first.stats()["errors_clear"] == 0
        wait_until(lambda: not first.debug.busy())
        check_balance(first)
    with opened(tmp_path) as store:
        assert store.retrieve(p.refs, [0]) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that may not look")
def test_a_clear_that_cannot_list_its_directory_says_so_and_is_finished_later() -> None:
    program("""
import logging, os, tempfile
folder = become_nobody()
with opened(folder) as store:
    p, x = on_disk(store, 4)
    os.chmod(store.directory, 0o300)
    store.clear()
    assert store.stats()["errors_clear"] == 1
    assert store.retrieve(p.refs, [0]) == {}
    os.chmod(store.directory, 0o700)
    wait_until(lambda: not store.debug.clearing())
with opened(folder) as store:
    assert store.retrieve(p.refs, [0]) == {}
""")


def test_what_was_dropped_while_the_cold_path_could_not_be_used_is_deleted_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, away = tmp_path / "cold", tmp_path / "away"
    with opened(path) as store:
        p, _ = on_disk(store, 4)
        q, y = on_disk(store, 2)
    path.rename(away)
    path.touch()  # not mounted yet
    store = TieredStore(settings(path), 8 * LAYER_BYTES, IDENT)
    try:
        new = rows(CHUNK, seed=7)
        assert store.store(p.refs[:1], p.bytes, {0: new}) == 1
        assert store.drop(p.names) == 1
        assert "cannot be deleted yet" in caplog.text
        assert store.store(p.refs[:1], p.bytes, {0: new}) == 1
        path.unlink()
        away.rename(path)
        wait_until(lambda: store.wait_recovered(0.1), 30)
        assert store.covered(p.names, [0]) == 1
        assert store.covered(q.names, [0]) == 2
        wait_until(lambda: store.debug.run_chores() or store.flush(5) == 0)
        wait_until(lambda: store.debug.run_chores() or not store.debug.busy())
        assert len(chunk_files(path)) == 3
        check_balance(store)
    finally:
        store.close()
    with opened(path) as store:
        assert store.covered(p.names, [0]) == 1
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], new), "what was stored after it stays"
        assert torch.equal(store.retrieve(q.refs, [0], None)[0], y)


def test_a_drop_whose_file_cannot_be_deleted_says_so_and_is_finished_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, files=disk) as store:
        p, _ = on_disk(store, 2)
        disk.errors["unlink"] = errno.EPERM
        assert store.drop(p.names) == 2
        assert "2 chunk(s) were dropped, but their files" in caplog.text
        assert store.retrieve(p.refs, [0]) == {}
        disk.errors.clear()
        wait_until(lambda: store.debug.run_chores() or not chunk_files(tmp_path))
        check_balance(store)


def test_what_was_dropped_is_not_adopted_from_a_process_that_has_ended(tmp_path: Path) -> None:
    p, x = prompt(4), rows(4 * CHUNK)
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            assert second.store(p.refs, p.bytes, {0: x}) == 4
        assert first.drop(p.names[2:]) == 0
        assert len(chunk_files(Path(first.directory))) == 2
        first.debug.run_chores()
        wait_until(lambda: first.covered(p.names, [0]) == 2)  # the others are adopted
        assert len(first) == 2
        check_balance(first)
    with opened(tmp_path) as store:
        assert store.covered(p.names, [0]) == 2
