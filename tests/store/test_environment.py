"""What others do around a store: processes, signals, operators, the limits of the system, a clock that is set.

What damages files and disks is in test_damaged_files.py, test_faults.py and test_real_disks.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.layout import LOCK, RECORD
from lmcache_hs_backend.tiers.memory.arena import Arena
from lmcache_hs_backend.tiers.state import orders
from tests.support.disks import INJECTED, FaultyDisk
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
)
from tests.support.waiting import wait_until

#: LMCache points Prometheus to a directory of this process's user, which its children of another user cannot write.
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PROMETHEUS_")}


def run_python(code: str, cold_path: Path, user: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program that starts with a store ``s`` on ``cold_path``, with everything of prompts.py at hand.

    It becomes ``user`` first, where it may: root can read every file.
    """
    head = f"""
import os, resource, signal, sys, threading, time
sys.path[:0] = {sys.path!r}
import torch
from tests.support.disks import FaultyDisk
from tests.support.prompts import *
if {user} and os.geteuid() == 0:
    os.setgid({user})
    os.setuid({user})
disk = FaultyDisk()
config = settings({str(cold_path)!r}, close_timeout_sec=2, read_timeout_sec=1)
s = TieredStore(config, 32 * LAYER_BYTES, IDENT, files=disk)
assert s.wait_recovered(20)
p, x = prompt(8), rows(8 * CHUNK)
assert s.store(p.refs, p.bytes, {{0: x}}) == 8

def demote():
    assert s.flush(20) == 0
    s.debug.evict_clean()
"""
    return with_tiers().run(head + code, env=PLAIN)


# -- the directory ---------------------------------------------------------------------------------------------


def _other_version(record: Path) -> None:
    record.write_text(json.dumps(json.loads(record.read_text()) | {"version": 2}))


def _link(record: Path) -> None:
    record.unlink()
    record.symlink_to("/etc/hostname")


def _fifo(record: Path) -> None:
    record.unlink()
    os.mkfifo(record)


RECORDS: dict[str, Callable[[Path], object]] = {
    "torn": lambda record: os.truncate(record, 20),
    "empty": lambda record: os.truncate(record, 0),
    "not text": lambda record: record.write_bytes(b"\xff\x00" * 100),
    "nested without end": lambda record: record.write_bytes(b"[" * 60_000),
    "longer than any": lambda record: record.write_bytes(b" " * (1 << 20)),
    "of another version": _other_version,
    "missing": lambda record: record.unlink(),
    "a link": _link,
    "a FIFO": _fifo,
}


@pytest.mark.parametrize("how", RECORDS)
def test_a_namespace_record_that_is(tmp_path: Path, how: str) -> None:
    """... is written again: the directory's own name says what it is."""
    with opened(tmp_path) as store:
        p, x = on_disk(store, 2)
        record = Path(store.directory) / RECORD
        good = record.read_text()
    RECORDS[how](record)
    INJECTED["damaged namespace.json"] += 1
    with opened(tmp_path) as store:
        assert record.parent == Path(store.directory)
        assert record.read_text() == good
        assert not record.is_symlink()
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


@pytest.mark.parametrize("name", [LOCK, RECORD])
@pytest.mark.parametrize("kind", ["a directory", "a link to another file"])
def test_something_else_in_the_place_of_our_own_files_is_one_clear_error_or_replaced(
    tmp_path: Path, name: str, kind: str
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("not ours")
    with opened(tmp_path / "cold") as store:
        path = Path(store.directory) / name
    path.unlink()
    if kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to(theirs)
    if (name, kind) == (RECORD, "a link to another file"):
        with opened(tmp_path / "cold"):
            pass
    else:
        with pytest.raises(ConfigError, match="cold_path") as raised, opened(tmp_path / "cold", require_cold=True):
            pass
        assert str(path) in str(raised.value)
    assert theirs.read_text() == "not ours"


def test_nothing_of_a_model_name_or_key_reaches_a_path_unhashed(tmp_path: Path) -> None:
    names = [
        "../../etc",
        "/",
        "..",
        "",
        ".",
        "a/../../b",
        "x" * 5000,
        "new\nline",
        "nul\0byte",
        "\udcff",
        "@",
        "~",
        "-rf",
    ]
    for name in names:
        ident = IDENT.__class__(**{**IDENT.__dict__, "model": name})
        with opened(tmp_path / "cold", ident=ident) as store:
            p = Prompt(prompt(2).ids, key_of=lambda number, value, name=name: f"{name}@{value:x}@tag%../../{name}")
            x = rows(2 * CHUNK)
            assert store.store(p.refs, p.bytes, {0: x}) == 2
            assert store.flush(10) == 0
            store.debug.evict_clean()
            assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
            assert Path(store.directory).parent == tmp_path / "cold"
    assert [path.name for path in tmp_path.iterdir()] == ["cold"]
    directories = list((tmp_path / "cold").iterdir())
    assert len(directories) == len(names)
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-")
    assert all(set(path.name) <= allowed and len(path.name) < 80 for path in directories)
    assert len(chunk_files(tmp_path / "cold")) == 2 * len(names)


def test_two_stores_of_one_process_never_share_a_directory(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        assert two.directory == f"{one.directory}/p1"
        p, x = on_disk(one, 2)
        q, y = on_disk(two, 2, seed=1)
        assert two.retrieve(p.refs, [0]) == {}
        assert torch.equal(one.retrieve(p.refs, [0])[0], x.float())
        assert torch.equal(two.retrieve(q.refs, [0])[0], y.float())
    with opened(tmp_path) as one, opened(tmp_path) as two:
        assert two.directory == f"{one.directory}/p1"
        assert (len(one), len(two)) == (4, 0), "what the second one has left is adopted by whichever starts first"


def test_a_hard_link_to_a_chunk_file_keeps_what_it_had(tmp_path: Path) -> None:
    with opened(tmp_path / "cold") as store:
        p, x = on_disk(store, 1)
        copy = tmp_path / "copy"
        copy.hardlink_to(store.debug.path(p.names[0]))
        before = copy.read_bytes()
        assert store.store(p.refs, p.bytes, {3: x}) == 1
        assert store.flush(10) == 0
        assert copy.read_bytes() == before, "the file with one more layer is another file"
        store.drop(p.names)
        wait_until(lambda: not chunk_files(tmp_path / "cold"))
        assert copy.read_bytes() == before


# -- time --------------------------------------------------------------------------------------------------


def test_a_clock_that_was_set_back_between_two_runs_only_spoils_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NextYear:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def time_ns() -> int:
            return time.time_ns() + 400 * 86400 * 10**9

    with monkeypatch.context() as patch:
        patch.setattr(orders, "time", NextYear)
        with opened(tmp_path) as store:
            p, x = on_disk(store, 3)
    INJECTED["clock step"] += 1
    with opened(tmp_path, max_cold_size=5 * (LAYER_BYTES + 4096) / 1024**3) as store:
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        for seed in range(4):
            q, y = on_disk(store, 2, seed)
            assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        check_balance(store)


@pytest.mark.parametrize("mtime_ns", [0, -(10**18), 2**62])
def test_files_of_any_age_are_found(tmp_path: Path, mtime_ns: int) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 2)
    for path in chunk_files(tmp_path):
        os.utime(path, ns=(mtime_ns, mtime_ns))
    with opened(tmp_path) as store:
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


# -- limits of the system --------------------------------------------------------------------------------------


def test_a_process_without_file_descriptors_misses_and_recovers(tmp_path: Path) -> None:
    with opened(tmp_path, promote=False) as store:
        p, x = on_disk(store, 4)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            INJECTED["EMFILE"] += 1
            assert store.retrieve(p.refs, [0]) == {}
            q = prompt(2)
            assert store.store(q.refs, q.bytes, {0: rows(2 * CHUNK)}) == 2
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: store.stats()["cold_state"] == "online")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["quarantined_chunks"] == 0
        assert store.flush(10) == 0
        check_balance(store)


def test_a_file_that_this_user_may_not_read_is_set_aside_and_the_others_are_served() -> None:
    code = """
demote()
os.chmod(s.debug.path(p.names[3]), 0)
assert torch.equal(s.retrieve(p.refs, [0])[0], x[: 3 * CHUNK].float())
assert s.stats()["cold_state"] == "online" and s.stats()["quarantined_chunks"] == 1
s.close()
print("served")
"""
    INJECTED["EACCES"] += 1
    with tempfile.TemporaryDirectory() as folder:  # which any user can reach, unlike pytest's
        os.chmod(folder, 0o777)
        done = run_python(code, Path(folder), user=54321)
    assert done.stdout.strip() == "served", done.stderr


def test_memory_that_cannot_be_pinned_is_a_warning_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(arena: Arena) -> None:
        raise RuntimeError("cudaHostRegister failed with status 2")

    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:  # as on a machine with a GPU and a small memlock limit
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(Arena, "pin", refuse)
            assert store.pin() is False
        INJECTED["pinning refused"] += 1
        assert [record.levelname for record in caplog.records if "pinned: no" in record.getMessage()] == ["WARNING"]
        assert store.stats()["pinned"] is False
        p, x = on_disk(store, 2)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT, errno.ENOTCONN], ids=errno.errorcode.get)
def test_a_network_filesystem_that_loses_its_server_is_offline_until_it_is_back(
    tmp_path: Path, disk: FaultyDisk, code: int
) -> None:
    with opened(tmp_path, files=disk, promote=False, write_back_sec=0) as store:
        p, x = on_disk(store, 3)
        for call in ("open", "preadv", "pwritev", "rename", "unlink", "statvfs"):
            disk.errors[call] = code
        assert store.retrieve(p.refs, [0]) == {}
        assert store.stats()["cold_state"] == "offline"
        q, y = prompt(2), rows(2 * CHUNK, seed=1)
        assert store.store(q.refs, q.bytes, {0: y}) == 2
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        disk.errors.clear()
        wait_until(lambda: store.stats()["cold_state"] == "online")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.flush(10) == 0
        assert store.stats()["quarantined_chunks"] == 0
        check_balance(store)


# -- processes and signals ----------------------------------------------------------------------------------


ENDS = {
    "by itself": ("pass", 0),
    "by sys.exit": ("sys.exit(3)", 3),
    "by an exception": ("raise ValueError", 1),
    "by SIGTERM that it handles": (
        "signal.signal(signal.SIGTERM, lambda *args: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
        5,
    ),
    "by SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_while_reads_are_in_flight(tmp_path: Path, how: str) -> None:
    """... ends with its own status; what it wrote is whole, and so is what it still had to write, if it may."""
    end, status = ENDS[how]
    code = f"""
demote()
q = Prompt([1000 + n for n in range(2 * CHUNK)])
s.store(q.refs, q.bytes, {{0: honest_rows(q.ids)}})
disk.bytes_per_sec = 40 * LAYER_BYTES
readers = [threading.Thread(target=s.retrieve, args=(p.refs, [0]), daemon=True) for _ in range(3)]
for reader in readers:
    reader.start()
{end}
"""
    INJECTED[f"process ends {how}"] += 1
    started = time.monotonic()
    done = run_python(code, tmp_path)
    assert done.returncode == status, done.stderr
    assert "Fatal Python error" not in done.stderr
    assert time.monotonic() - started < 60
    with opened(tmp_path) as store:
        assert store.stats()["cold_chunks"] == (8 if how == "by SIGTERM" else 10)
        assert store.stats()["quarantined_chunks"] == 0
        q = Prompt([1000 + n for n in range(2 * CHUNK)])
        assert store.covered(q.names, [0]) == (0 if how == "by SIGTERM" else 2)


def test_a_forked_child_that_uses_the_store_waits_no_longer_than_it_may_and_harms_nobody(tmp_path: Path) -> None:
    code = """
demote()
q, y = prompt(2), rows(2 * CHUNK, seed=1)
s.store(q.refs, q.bytes, {0: y})
child = os.fork()
if child == 0:
    started = time.monotonic()
    good = s.retrieve(p.refs, [0]) == {}, torch.equal(s.retrieve(q.refs, [0])[0], y.float())
    os._exit(0 if good == (True, True) and time.monotonic() - started < 5 else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(s.retrieve(p.refs, [0])[0], x.float())
assert s.flush(10) == 0
s.close()
print("both ended")
"""
    done = run_python(code, tmp_path)
    assert done.stdout.strip() == "both ended", done.stderr


def test_children_that_are_forked_while_other_threads_use_the_store_all_end(tmp_path: Path) -> None:
    code = """
q, y = prompt(2), rows(2 * CHUNK, seed=1)
s.store(q.refs, q.bytes, {0: y})
prompts, stopping = [prompt(4) for _ in range(6)], []
z = rows(4 * CHUNK)

def work():
    while not stopping:
        for one in prompts:
            s.store(one.refs, one.bytes, {0: z})
            s.retrieve(one.refs, [0])
            s.drop(one.names, durable=False)

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(25):
    child = os.fork()
    if child == 0:
        s.covered(q.names, [0]), s.retrieve(q.refs, [0]), s.stats()
        os._exit(0)
    until = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < until, "a child hangs"
        time.sleep(0.002)
stopping.append(True)
for thread in threads:
    thread.join()
assert torch.equal(s.retrieve(q.refs, [0])[0], y.float())
assert s.check() == []
s.close()
print("all ended")
"""
    done = run_python(code, tmp_path)
    assert done.stdout.strip() == "all ended", done.stderr


# -- what the documentation says of all this -----------------------------------------------------------------


def test_every_failure_mode_names_a_test_that_exists() -> None:
    tests = Path(__file__).resolve().parents[1]
    text = (tests.parent / "docs" / "reference" / "failure-modes.md").read_text()
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    heads = ("what breaks", "---")  # of the table of each subject
    table = [cells for cells in lines if cells[0].strip() not in heads]
    assert len(table) > 20
    for what, *_, shown_by in table:
        named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+?)(?:_?…)?)?`", shown_by)
        assert named, f"no test for: {what}"
        for file, test in named:
            [path] = tests.rglob(file)
            assert f"def {test}" in path.read_text(), f"{file} has no test {test}"
