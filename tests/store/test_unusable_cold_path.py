"""A cold path that cannot be used at start: the hot tier works, and the cold tier comes when the path can be used."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.layout import LOCK, RECORD
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock
from lmcache_hs_backend.tiers.flows import opening
from tests.store.test_directories import program
from tests.support.disks import INJECTED
from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES, check_balance, on_disk, opened, prompt, rows, settings
from tests.support.waiting import wait_until

#: Makes the directory (which exists) unusable, and returns what makes it usable again.
Break = Callable[[Path, pytest.MonkeyPatch], Callable[[], None]]


def a_file_in_its_place(path: Path, _: pytest.MonkeyPatch) -> Callable[[], None]:
    aside = path.with_name("aside")
    path.rename(aside)
    path.write_text("theirs")

    def mend() -> None:
        assert path.read_text() == "theirs"
        path.unlink()
        aside.rename(path)

    return mend


def a_link_that_leads_nowhere(path: Path, _: pytest.MonkeyPatch) -> Callable[[], None]:
    aside = path.with_name("aside")  # what a bare mount point looks like to whoever made a link into the mount
    path.rename(aside)
    path.symlink_to(path.with_name("mount") / "cold")

    def mend() -> None:
        path.with_name("mount").mkdir()
        aside.rename(path.with_name("mount") / "cold")

    return mend


def its_lock_is_a_directory(path: Path, _: pytest.MonkeyPatch) -> Callable[[], None]:
    (lock,) = path.glob(f"*/{LOCK}")
    lock.unlink()
    lock.mkdir()
    return lock.rmdir


def its_record_is_a_directory(path: Path, _: pytest.MonkeyPatch) -> Callable[[], None]:
    (record,) = path.glob(f"*/{RECORD}")
    record.unlink()
    record.mkdir()
    return record.rmdir


def its_namespace_is_a_link(path: Path, _: pytest.MonkeyPatch) -> Callable[[], None]:
    (namespace,) = path.iterdir()
    elsewhere = path.with_name("elsewhere")
    namespace.rename(elsewhere)
    namespace.symlink_to(elsewhere)

    def mend() -> None:
        namespace.unlink()
        elsewhere.rename(namespace)

    return mend


def flock_is_refused(_: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    flock = fcntl.flock

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    return lambda: monkeypatch.setattr(fcntl, "flock", flock)


def nobody_may_write(path: Path, _: pytest.MonkeyPatch) -> Callable[[], None]:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (namespace,) = path.iterdir()
    (namespace / LOCK).unlink()
    namespace.chmod(0o500)
    return lambda: namespace.chmod(0o700)


def a_read_only_filesystem(path: Path, _: pytest.MonkeyPatch) -> Callable[[], None]:
    for command in (["mount", "--bind"], ["mount", "-o", "remount,bind,ro"]):
        done = subprocess.run([*command, str(path), str(path)], capture_output=True, check=False)
        if done.returncode:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
    return lambda: (subprocess.run(["umount", "-l", str(path)], check=True), None)[1]


def a_disk_that_hangs(_: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    answer = threading.Event()
    take = NamespaceLock.take

    def hang(directory: str) -> NamespaceLock | None:
        assert answer.wait(60)
        return take(directory)

    def mend() -> None:
        monkeypatch.setattr(opening, "_TIMEOUT_SEC", usual)  # a healthy disk may take that long on a busy machine
        answer.set()

    usual = opening._TIMEOUT_SEC
    monkeypatch.setattr(NamespaceLock, "take", hang)
    monkeypatch.setattr(opening, "_TIMEOUT_SEC", 0.3)
    return mend


BREAKS: list[tuple[Break, str]] = [
    (a_file_in_its_place, "must be a directory that user"),
    (a_link_that_leads_nowhere, "must be a directory that user"),
    (its_lock_is_a_directory, LOCK),
    (its_record_is_a_directory, RECORD),
    (its_namespace_is_a_link, "is a symbolic link"),
    (flock_is_refused, "local_lock=flock"),
    (nobody_may_write, "must be a directory that user"),
    (a_read_only_filesystem, "must be a directory that user"),
    (a_disk_that_hangs, "has not answered in 0.3 s"),
]


@contextmanager
def broken(path: Path, how: Break, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The cold path is not usable, before what is yielded is called and at the end at the latest."""
    todo = [how(path, monkeypatch)]
    INJECTED["unusable cold path"] += 1

    def mend() -> None:
        while todo:
            todo.pop()()

    try:
        yield mend
    finally:
        mend()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PROBE_SEC", (0.05, 0.2))


@pytest.mark.parametrize(("how", "text"), BREAKS, ids=[how.__name__ for how, _ in BREAKS])
def test_the_hot_tier_works_and_the_cold_tier_comes_when_the_path_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Break, text: str
) -> None:
    path = tmp_path / "cold"
    with opened(path) as store:
        old, old_rows = on_disk(store, 4)
    new, new_rows = prompt(4), rows(4 * CHUNK, seed=9)
    with broken(path, how, monkeypatch) as mend:
        caplog.clear()
        store = TieredStore(settings(path), 8 * LAYER_BYTES, IDENT)
        try:
            assert store.stats()["cold_state"] == "offline"
            assert store.stats()["cold_online"] == 0
            assert not store.wait_recovered(60), "there is nothing to wait for"
            assert len(warnings(caplog)) == 1
            assert "is offline" in warnings(caplog)[0]
            assert text in warnings(caplog)[0]
            assert "cold_path is" in warnings(caplog)[0]
            assert store.store(new.refs, new.bytes, {0: new_rows}) == 4
            assert torch.equal(store.retrieve(new.refs, [0], None)[0], new_rows)
            assert store.retrieve(old.refs, [0], None) == {}
            assert store.flush(60) == 4, "there is nothing to wait for"
            mend()
            wait_until(lambda: store.stats()["cold_state"] == "online")
            wait_until(lambda: store.wait_recovered(1))
            assert store.flush(10) == 0
            for p, x in ((old, old_rows), (new, new_rows)):
                assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
            assert len(warnings(caplog)) == 1, "no more than when it began"
            check_balance(store)
        finally:
            store.close()
    with opened(path) as store:
        for p, x in ((old, old_rows), (new, new_rows)):
            assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)


@pytest.mark.parametrize(("how", "text"), BREAKS, ids=[how.__name__ for how, _ in BREAKS])
def test_where_the_cold_tier_is_required_it_is_an_error_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Break, text: str
) -> None:
    path = tmp_path / "cold"
    with opened(path):
        pass
    before = set(threading.enumerate())
    with broken(path, how, monkeypatch):
        with pytest.raises(ConfigError, match="cold_path is") as raised:
            TieredStore(settings(path, require_cold=True), 8 * LAYER_BYTES, IDENT)
        assert text in str(raised.value)
    wait_until(lambda: set(threading.enumerate()) <= before)
    with opened(path, on_locked="error"):
        pass


def test_a_store_on_its_own_requires_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("theirs")
    with pytest.raises(ConfigError, match=r"cold_path is .*file.*must be a directory"):
        TieredStore.open(file, model="m")
    with TieredStore.open(file, model="m", require_cold=False, hot_size=0.01, touch_memory=False) as store:
        x = rows(CHUNK)
        assert store.store(*store.prompt(range(CHUNK)), {0: x}) == 1
        assert torch.equal(store.retrieve(store.prompt(range(CHUNK)).refs, [0], None)[0], x)
    assert file.read_text() == "theirs"


def test_a_full_hot_tier_discards_without_waiting_while_the_path_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "cold").write_text("")
    store = TieredStore(settings(tmp_path / "cold", store_wait_ms=60_000), 8 * LAYER_BYTES, IDENT)
    try:
        for _ in range(4):
            p = prompt(6)
            assert store.store(p.refs, p.bytes, {0: rows(6 * CHUNK)}) == 6
        assert store.stats()["drops_offline"] > 0
    finally:
        store.close()


def test_what_is_cleared_before_the_path_can_be_used_is_not_served_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cold"
    with opened(path) as store:
        old, _ = on_disk(store, 4)
    new, x = prompt(4), rows(4 * CHUNK)
    with broken(path, a_file_in_its_place, monkeypatch) as mend:
        store = TieredStore(settings(path), 8 * LAYER_BYTES, IDENT)
        try:
            store.clear()
            mend()
            wait_until(lambda: store.wait_recovered(1))
            assert store.retrieve(old.refs, [0], None) == {}
            assert store.store(new.refs, new.bytes, {0: x}) == 4
            assert store.flush(10) == 0
        finally:
            store.close()
    with opened(path) as store:
        assert store.retrieve(old.refs, [0], None) == {}
        assert torch.equal(store.retrieve(new.refs, [0], None)[0], x)


def test_a_namespace_that_is_held_stays_an_error_where_that_is_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="another process holds"):
        TieredStore(settings(tmp_path, on_locked="error"), LAYER_BYTES, IDENT)


@pytest.mark.parametrize("wrong", ["a limit far above the disk", "a namespace that is held"])
def test_a_wrong_setting_that_shows_only_when_the_path_can_be_used_is_an_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    path = tmp_path / "cold"
    path.mkdir()
    changes: dict[str, object] = {"max_cold_size": 1e9} if "limit" in wrong else {"on_locked": "error"}
    with broken(path, a_file_in_its_place, monkeypatch) as mend:
        store = TieredStore(settings(path, **changes), 8 * LAYER_BYTES, IDENT)
        try:
            other = None
            if "limit" not in wrong:
                (path.with_name("aside") / IDENT.directory).mkdir(parents=True)
                other = NamespaceLock.take(str(path.with_name("aside") / IDENT.directory))
            mend()
            text = "max_cold_size is 1e+09, but must be" if "limit" in wrong else "another process holds"
            wait_until(lambda: any(text in record.getMessage() for record in caplog.records))
            assert [r.levelname for r in caplog.records if text in r.getMessage()] == ["ERROR"]
            assert store.stats()["cold_state"] == "offline"
            p = prompt(4)
            assert store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)}) == 4, "RAM goes on"
            if other is not None:
                other.close()
                wait_until(lambda: store.stats()["cold_state"] == "online")
                assert store.flush(10) == 0
        finally:
            store.close()
    assert sum(text in record.getMessage() for record in caplog.records) == 1, "once, however often it is tried"


def test_a_store_can_be_closed_while_its_path_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path):
        pass
    before = set(threading.enumerate())
    with broken(tmp_path, a_disk_that_hangs, monkeypatch):
        store = TieredStore(settings(tmp_path, close_timeout_sec=0.5), 8 * LAYER_BYTES, IDENT)
        store.close()
        assert store.closed
    wait_until(lambda: set(threading.enumerate()) <= before)
    with opened(tmp_path, on_locked="error"):  # a lock that came too late is given up
        pass


def test_a_disk_that_takes_no_byte_at_the_start_is_tried_again_without_a_trace(tmp_path: Path) -> None:
    program(f"""
import resource, time
from pathlib import Path
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # a file can be made, and nothing written into it
store = TieredStore(settings({str(tmp_path)!r}), 8 * LAYER_BYTES, IDENT)
assert store.stats()["cold_state"] == "offline"
folder = Path(store.directory)
made = folder.stat().st_mtime_ns
wait_until(lambda: folder.stat().st_mtime_ns != made)
wait_until(lambda: not list(folder.glob(".*.tmp")))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
wait_until(lambda: store.wait_recovered(0.1))
assert not list(folder.glob(".*.tmp"))
store.close()
""")
