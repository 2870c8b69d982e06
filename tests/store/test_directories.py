"""Links, left-overs and limits that would lead the cold tier to files that are not its own, or away from its own.

Each of these was a fault once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.format import chunk_file, layout
from lmcache_hs_backend.tiered import TieredStore
from tests.store.test_environment import PLAIN, run_python
from tests.support.disks import INJECTED, FaultyDisk, tmpfs
from tests.support.forked import with_tiers
from tests.support.prompts import (
    CHUNK,
    IDENT,
    LAYER_BYTES,
    check_balance,
    chunk_files,
    on_disk,
    opened,
    prompt,
    rows,
    settings,
)
from tests.support.waiting import wait_until

OTHER = IDENT.__class__(**{**IDENT.__dict__, "model": "org/other"})
SIX_CHUNKS = 6 * (LAYER_BYTES + 8192) / 1024**3


def program(code: str) -> None:
    """Run code in a process of its own, with what it needs of the tests' helpers at hand; it must end well."""
    head = f"""
import sys
sys.path[:0] = {sys.path!r}
import torch
from tests.support.disks import FaultyDisk
from tests.support.processes import become_nobody
from tests.support.prompts import *
from tests.support.waiting import wait_until
"""
    done = with_tiers().run(head + code, env=PLAIN)
    assert done.returncode == 0, done.stdout + done.stderr


def fill(store: TieredStore) -> None:
    """More than the limit allows: whatever counts as ours leaves first."""
    for seed in range(3):
        on_disk(store, 4, seed)


# -- links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["quarantine", "archive"])
@pytest.mark.parametrize("whose", ["our own", "a dead namespace's"])
def test_what_a_link_in_the_place_of_a_directory_leads_to_is_neither_counted_nor_deleted(
    tmp_path: Path, folder: str, whose: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "ab").mkdir(parents=True)
    theirs = [outside / f"precious-{n}" for n in range(5)] + [outside / "ab" / f"{'ab' * 16}.safetensors"]
    for path in theirs:
        path.write_bytes(b"x" * 5000)
    with opened(tmp_path / "cold", ident=IDENT if whose == "our own" else OTHER) as store:
        link = Path(store.directory) / folder
    link.symlink_to(outside)
    INJECTED["symlinked directory"] += 1
    with opened(tmp_path / "cold", max_cold_size=SIX_CHUNKS, chunks=4) as store:
        assert store.stats()["cold_bytes"] == 0
        fill(store)
        assert store.stats()["cold_bytes"] <= SIX_CHUNKS * 1024**3
    assert all(path.exists() for path in theirs)


def test_a_link_from_a_dead_namespace_to_a_live_one_costs_the_live_one_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, ident=OTHER) as store:
        dead = Path(store.directory)
    third = IDENT.__class__(**{**IDENT.__dict__, "model": "org/third"})
    with opened(tmp_path, ident=third) as live:
        p, x = on_disk(live, 4)
        (dead / "archive").symlink_to(live.directory)
        with opened(tmp_path, max_cold_size=SIX_CHUNKS, chunks=4) as store:
            fill(store)
        assert torch.equal(live.retrieve(p.refs, [0])[0], x.float())


def test_directories_that_become_links_after_they_were_used_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with opened(tmp_path / "cold", on_kv_gone="archive") as store:
        p, x = on_disk(store, 3)
        root = Path(store.directory)
        for folder in list(root.glob("??")):
            folder.rename(outside / folder.name)
            folder.symlink_to(outside / folder.name)
            INJECTED["symlinked directory"] += 1
        before = {path: path.stat() for path in outside.rglob("*.safetensors")}
        assert store.retrieve(p.refs, [0]) == {}
        assert store.store(p.refs, p.bytes, {0: x, 3: x}) == 3
        assert store.flush(10) == 0
        assert len(chunk_files(tmp_path / "cold")) == 3
        for folder in list(root.glob("??")):
            if folder.is_dir() and not folder.is_symlink():
                folder.rename(outside / f"{folder.name}-again")
                folder.symlink_to(outside / f"{folder.name}-again")
        before |= {path: path.stat() for path in outside.rglob("*.safetensors")}
        store.drop(p.names[:1])
        store.kv_gone(p.names[1:])
        store.flush(5)
        wait_until(lambda: not store.debug.busy())
    assert {path: path.stat() for path in outside.rglob("*.safetensors")} == before


# -- a disk or a process in trouble condemns no good file ----------------------------------------------------------


def test_a_disk_that_fails_today_and_tomorrow_costs_no_file(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk, promote=False) as store:
        p, x = on_disk(store, 4)
        for _ in range(3):
            disk.errors["preadv"] = errno.EIO
            assert store.retrieve(p.refs, [0]) == {}
            disk.errors.clear()
            wait_until(lambda: store.stats()["cold_state"] == "online")
            assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["quarantined_chunks"] == 0


def test_a_process_that_runs_out_of_file_descriptors_again_and_again_costs_no_file(tmp_path: Path) -> None:
    with opened(tmp_path, promote=False) as store:
        p, x = on_disk(store, 4)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for _ in range(2):
            taken = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            INJECTED["EMFILE"] += 1
            assert store.retrieve(p.refs, [0]) == {}
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            wait_until(lambda: store.stats()["cold_state"] == "online")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["quarantined_chunks"] == 0


def test_a_directory_that_is_closed_to_this_user_is_the_disks_trouble_and_not_its_files() -> None:
    code = """
demote()
os.chmod(s.directory, 0)
assert s.retrieve(p.refs, [0]) == {}
assert s.stats()["cold_state"] == "offline" and s.stats()["drops_bad_file"] == 0
os.chmod(s.directory, 0o700)
wait_until(lambda: s.stats()["cold_state"] == "online")
assert torch.equal(s.retrieve(p.refs, [0])[0], x.float())
s.close()
print("served")
"""
    INJECTED["EACCES"] += 1
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        done = run_python("from tests.support.waiting import wait_until\n" + code, Path(folder), user=54321)
    assert done.stdout.strip() == "served", done.stderr


def test_a_bad_file_that_cannot_be_set_aside_counts_until_it_is_gone(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, files=disk) as store:
        p, _ = on_disk(store, 2)
        path = Path(store.debug.path(p.names[1]))
        with path.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"12345")
        INJECTED["damaged file that cannot be moved"] += 1
        disk.errors["rename"] = disk.errors["unlink"] = errno.EROFS
        store.retrieve(p.refs, [0])
        wait_until(lambda: not store.debug.busy())
        assert store.stats()["cold_bytes"] == sum(file.stat().st_size for file in chunk_files(tmp_path))
        disk.errors.clear()
        wait_until(lambda: not path.exists(), 20)
        wait_until(lambda: store.stats()["cold_bytes"] == sum(file.stat().st_size for file in chunk_files(tmp_path)))
        check_balance(store)


# -- a full disk -----------------------------------------------------------------------------------------------


def test_a_full_disk_that_failed_once_is_read_again_although_it_takes_not_a_byte(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with tmpfs(tmp_path / "disk", "size=1m"):
        INJECTED["full tmpfs"] += 1
        with opened(tmp_path / "disk", files=disk, max_cold_size=1 / 1024, promote=False) as store:
            p, x = on_disk(store, 4)
            with contextlib.suppress(OSError), (tmp_path / "disk" / "somebody's").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            disk.fail_once["preadv"] = errno.EIO
            store.retrieve(p.refs, [0])
            wait_until(lambda: store.stats()["cold_state"] == "paused")
            assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


def test_a_filesystem_without_free_inodes_pauses_writes_and_is_read_on(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=4m,nr_inodes=24"):
        INJECTED["no free inode"] += 1
        with opened(tmp_path / "disk", chunks=4, max_cold_size=1 / 1024, write_back_sec=0) as store:
            for seed in range(20):
                p, x = prompt(2), rows(2 * CHUNK, seed=seed)
                assert store.store(p.refs, p.bytes, {0: x}) == 2
                store.flush(0.2)
                assert store.stats()["cold_state"] != "offline"
                assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
            assert store.stats()["errors_write"] == 0


# -- start -------------------------------------------------------------------------------------------------------


def test_a_left_over_of_a_process_with_the_same_pid_stops_no_start(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from tests.support.prompts import IDENT
from lmcache_hs_backend.format.layout import temporary_name
print(temporary_name("x").split(".")[3])
"""
    numbers = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert numbers[0] != numbers[1], "in a container every run has the same pid, so something else must differ"
    assert layout.is_temporary(layout.temporary_name("namespace.json"))


@pytest.mark.parametrize("name", [".notes.tmp", ".swp.tmp", ".a.b.tmp", ".1.tmp"])
def test_a_hidden_file_of_somebody_elses_is_left_alone(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as store:
        p, _ = on_disk(store, 1)
        places = [Path(store.directory), Path(store.debug.path(p.names[0])).parent]
    for place in places:
        (place / name).write_text("mine")
    with opened(tmp_path):
        pass
    assert all((place / name).exists() for place in places)


def test_a_disk_that_hangs_while_headers_are_read_goes_offline(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 1)

    def hang_from_now_on(fd: int, views: object, offset: int) -> int:
        disk.hang()
        del disk.preadv
        return disk.preadv(fd, views, offset)

    disk.preadv = hang_from_now_on  # type: ignore[method-assign]
    store = TieredStore(settings(tmp_path, read_timeout_sec=0.5, store_wait_ms=200), 8 * LAYER_BYTES, IDENT, files=disk)
    try:
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        started = time.monotonic()
        assert store.retrieve(p.refs, [0]) == {}
        assert time.monotonic() - started < 0.3, "nobody waits for it any more"
        disk.resume()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        wait_until(lambda: store.covered(p.names, [0]) == 1)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
    finally:
        disk.resume()
        store.close()


def test_a_store_can_be_closed_in_a_forked_child(tmp_path: Path) -> None:
    code = """
child = os.fork()
if child == 0:
    try:
        s.close()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(s.retrieve(p.refs, [0])[0], x.float())
s.close()
print("both closed")
"""
    done = run_python(code, tmp_path)
    assert done.stdout.strip() == "both closed", done.stderr


# -- a directory that is not the one that was locked ----------------------------------------------------------


def test_of_two_stores_at_one_path_only_that_whose_lock_lies_there_goes_on(tmp_path: Path) -> None:
    place, away = tmp_path / "cold", tmp_path / "away"
    with opened(place) as first:
        p, x = on_disk(first, 3)
        os.rename(place, away)
        with opened(place) as second:
            assert first.retrieve(p.refs, [0]) == {}
            assert first.stats()["cold_state"] == "offline"
            assert first.stats()["drops_bad_file"] == 0, "its files are where they were"
            q, y = prompt(2), rows(2 * CHUNK)
            first.store(q.refs, q.bytes, {0: y})
            assert first.flush(0.5) == 2
            assert torch.equal(first.retrieve(q.refs, [0])[0], y.float()), "RAM goes on"
            on_disk(second, 2)
            assert len(chunk_files(place)) == second.stats()["cold_chunks"] == 2
        os.rename(place, tmp_path / "aside")
        os.rename(away, place)
        wait_until(lambda: first.stats()["cold_state"] == "online", 40)
        assert first.flush(10) == 0
        assert torch.equal(first.retrieve(p.refs, [0])[0], x.float())
        check_balance(first)


@pytest.mark.parametrize("there", ["nothing", "files of other sizes", "files of the same sizes"])
def test_a_directory_that_becomes_another_one_during_a_call_costs_no_chunk(tmp_path: Path, there: str) -> None:
    place, away = tmp_path / "cold", tmp_path / "away"

    class Moved(chunk_file.FileLayer):
        """The directory is replaced when a second chunk is opened for reading."""

        armed = opened = 0

        def open(self, path: str, flags: int, mode: int = 0o777) -> int:
            if self.armed and path.endswith(".safetensors"):
                self.opened += 1
                if self.opened == 2:
                    INJECTED["vanished directory"] += 1
                    os.rename(place, away)
                    for file in away.rglob("*.safetensors") if there != "nothing" else ():
                        other = place / file.relative_to(away)
                        other.parent.mkdir(parents=True, exist_ok=True)
                        other.write_bytes(bytes(file.stat().st_size + 4096 * (there == "files of other sizes")))
            return os.open(path, flags, mode)

    files = Moved()
    with opened(place, files=files, io_threads=1) as store:
        p, x = on_disk(store, 4)
        files.armed = 1
        got = store.retrieve(p.refs, [0])
        assert torch.equal(got[0], x[:CHUNK].float()), "the first was read in time"
        assert store.stats()["cold_state"] == "offline"
        assert store.stats()["drops_bad_file"] == 0, "their files are where they were"
        assert store.stats()["cold_chunks"] == 4
        files.armed = 0
        if place.exists():
            os.rename(place, tmp_path / "aside")
        os.rename(away, place)
        wait_until(lambda: store.stats()["cold_state"] == "online", 40)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        check_balance(store)


def test_without_its_lock_file_a_store_writes_no_more_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        p, _ = on_disk(store, 2)
        os.unlink(Path(store.directory) / ".lock")
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["cold_state"] == "offline"
        assert "no longer the directory that was locked" in caplog.text
        assert len(chunk_files(tmp_path)) == 2


# -- another model under the same name ------------------------------------------------------------------------


def test_rows_of_another_width_replace_those_that_the_tiers_have(tmp_path: Path) -> None:
    p, before = prompt(3), rows(3 * CHUNK)
    with opened(tmp_path) as store:
        store.store(p.refs, p.bytes, {0: before, 1: before})
    after = rows(3 * CHUNK, hidden=64)
    with opened(tmp_path) as store:
        assert store.store(p.refs, p.bytes, {0: after}) == 3
        assert torch.equal(store.retrieve(p.refs, [0])[0], after.float())
        assert store.retrieve(p.refs, [1]) == {}, "what the former model left goes with it"
        assert store.stats()["drops_reshaped"] == 3
        assert store.flush(10) == 0
        wait_until(lambda: not store.debug.busy())
        check_balance(store)
    with opened(tmp_path) as store:
        assert torch.equal(store.retrieve(p.refs, [0])[0], after.float())


def test_a_record_that_describes_another_model_is_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        record = Path(store.directory) / "namespace.json"
    right = record.read_text()
    record.write_text(right.replace("test-model", "other-model"))
    with opened(tmp_path):
        assert record.read_text() == right


# -- deleting, and coming back ----------------------------------------------------------------------------------


def test_a_deletion_that_is_tried_again_spares_the_file_that_came_back_meanwhile(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, files=disk) as store:
        p, _ = on_disk(store, 2)
        after = rows(2 * CHUNK, seed=9)
        # The deletion waits behind this, and the new chunk's write behind the deletion.
        with store.debug.holding_files(p.names):
            assert store.drop(p.names, durable=False) == 2
            assert store.store(p.refs, p.bytes, {0: after}) == 2
            disk.errors["unlink"] = errno.EBUSY
        wait_until(lambda: store.stats()["errors_unlink"] == 2)
        assert store.flush(10) == 0
        disk.errors.clear()
        store.debug.run_chores()
        wait_until(lambda: not store.debug.undeleted() and not store.debug.busy())
        assert len(chunk_files(tmp_path)) == 2
        check_balance(store)
        store.debug.evict_clean()
        assert torch.equal(store.retrieve(p.refs, [0])[0], after.float())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that may not look")
def test_a_folder_whose_files_may_not_be_looked_at_is_passed_over_and_the_rest_is_found() -> None:
    program("""
import os, tempfile
from pathlib import Path
folder = become_nobody()
with opened(folder) as store:
    for _ in range(4):
        p, x = prompt(2), rows(2 * CHUNK)
        store.store(p.refs, p.bytes, {0: x})
    first = Path(store.debug.path(p.names[0]))
os.chmod(first.parent, 0o400)
try:
    with opened(folder) as store:
        assert len(store) == 8
        files = [path for path in Path(folder).glob("*/??/*.safetensors") if path.parent != first.parent]
        assert store.stats()["cold_bytes"] >= sum(path.stat().st_size for path in files)
finally:
    os.chmod(first.parent, 0o700)
""")


# -- what the system refuses ----------------------------------------------------------------------------------


def test_a_result_for_which_there_is_no_memory_is_a_miss() -> None:
    program("""
import re, resource
from pathlib import Path
import tempfile
from lmcache_hs_backend.tiers.memory import buffers
buffers.SMALL_RESULT = 0  # as for a large result: the C library has memory of its own for these rows
with tempfile.TemporaryDirectory() as folder, opened(folder, chunks=64) as store:
    p, x = prompt(4), rows(4 * CHUNK)
    store.store(p.refs, p.bytes, {0: x})
    used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + 4096, resource.RLIM_INFINITY))
    assert store.retrieve(p.refs, [0]) == {}
    assert store.stats()["misses_memory"] == 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
    assert store.stats()["errors_internal"] == 0
    check_balance(store)
""")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may become a user without any other process")
def test_where_no_more_threads_start_the_setting_is_named() -> None:
    program("""
import os, resource, tempfile, threading
from lmcache_hs_backend.config import ConfigError
folder = become_nobody()
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    TieredStore(settings(folder), 8 * LAYER_BYTES, IDENT)
except ConfigError as error:
    assert "io_threads is 4" in str(error), error
else:
    raise SystemExit("it has started")
assert threading.active_count() == 1, threading.enumerate()
""")


def test_a_close_that_somebody_interrupts_is_finished_all_the_same(tmp_path: Path) -> None:
    program(f"""
import signal, threading
from tests.support.disks import FaultyDisk
disk = FaultyDisk()
store = TieredStore(settings({str(tmp_path)!r}, close_timeout_sec=3), 8 * LAYER_BYTES, IDENT, files=disk)
assert store.wait_recovered(10)
disk.hang()
p = prompt(4)
store.store(p.refs, p.bytes, {{0: rows(4 * CHUNK)}})
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    store.close()
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("nobody has interrupted it")
wait_until(lambda: store.stats()["drops_close"] == 4)
disk.resume()
wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("hs-io")])
""")


# -- directories named like files ----------------------------------------------------------------------------


def test_a_directory_in_the_place_of_a_file_that_could_not_be_deleted_ends_the_attempts(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, files=disk) as store:
        p, _ = on_disk(store, 1)
        (path,) = chunk_files(tmp_path)
        disk.errors["unlink"] = errno.EIO
        store.drop(p.names)
        wait_until(lambda: store.stats()["errors_unlink"] >= 1)
        path.unlink()
        path.mkdir()
        INJECTED["directory named like a chunk"] += 1
        disk.errors.clear()
        wait_until(lambda: store.stats()["cold_bytes"] == 0)
        wait_until(lambda: not store.debug.busy())
        check_balance(store)
    assert [aside.name.startswith(f"{path.name}.foreign-") for aside in path.parent.iterdir()] == [True]


def test_a_directory_that_has_the_name_of_a_chunk_to_be_written_is_moved_aside(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p = prompt(2)
        path = Path(store.debug.path(p.names[1]))
        (path / "precious").mkdir(parents=True)
        INJECTED["directory named like a chunk"] += 1
        assert store.store(p.refs, p.bytes, {0: rows(len(p))}) == 2
        assert store.flush(10) == 0
        stats = store.stats()
        assert (stats["cold_state"], stats["cold_chunks"], stats["errors_write"]) == ("online", 2, 0)
    assert path.is_file()
    assert (next(path.parent.glob("*.foreign-*")) / "precious").is_dir()
