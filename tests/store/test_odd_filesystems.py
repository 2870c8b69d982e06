"""Filesystems that refuse a call: each refusal costs what the call is for, and not the tier."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.config import GIB, ConfigError, TieredConfig
from lmcache_hs_backend.tiered import TieredStore
from tests.support.disks import FaultyDisk
from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES, check_balance, on_disk, opened, prompt, rows, settings
from tests.support.waiting import wait_until


class Refusing(FaultyDisk):
    """A disk that refuses calls, each with an errno of its own."""

    def __init__(self, **refused: int) -> None:
        super().__init__()
        for call, code in refused.items():
            setattr(self, call, self._refuse(code))

    @staticmethod
    def _refuse(code: int) -> Any:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        return refuse


@pytest.mark.parametrize(
    ("call", "code", "lost"),
    [
        ("utime", errno.EPERM, "in the order in which they were written"),
        ("utime", errno.ENOSYS, "in the order in which they were written"),
        ("fdatasync", errno.EINVAL, "does not make chunk files durable"),
        ("statvfs", errno.ENOSYS, "min_free_disk is not kept"),
    ],
)
def test_a_refused_call_costs_what_it_is_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, code: int, lost: str
) -> None:
    with opened(tmp_path, files=Refusing(**{call: code}), fsync=True, min_free_disk=0.001) as store:
        for seed in range(3):
            p, x = on_disk(store, 4, seed)
            assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        assert store.stats()["cold_state"] == "online"
        check_balance(store)
    assert caplog.text.count(f"refuses {call}") == 1
    assert lost in caplog.text


def test_a_disk_that_fails_is_not_taken_for_one_that_refuses(tmp_path: Path) -> None:
    with opened(tmp_path, files=Refusing(utime=errno.EIO)) as store:
        p = prompt(2)
        store.store(p.refs, p.bytes, {0: rows(2 * CHUNK)})
        store.flush(2)
        assert store.stats()["cold_state"] == "offline"


def test_reads_with_o_direct_that_are_refused_go_through_the_page_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoDirectReads(FaultyDisk):
        def preadv(self, fd: int, *args: Any) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().preadv(fd, *args)

    with opened(tmp_path, files=NoDirectReads()) as store:
        for _ in range(2):
            p, x = on_disk(store, 4)
            assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        assert store.stats()["cold_state"] == "online"
    assert caplog.text.count("refuses odirect") <= 1


def test_a_filesystem_that_reports_no_size_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class NoSize(FaultyDisk):
        def statvfs(self, path: str) -> os.statvfs_result:
            return os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))

    with opened(tmp_path, files=NoSize()) as store:
        on_disk(store, 4)
        assert store.stats()["cold_state"] == "online"
    assert "reports a size of 0" in caplog.text


def test_directories_whose_permissions_cannot_be_set_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    with opened(tmp_path / "new") as store:
        p, x = on_disk(store, 4)
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
    assert "not cold_dir_mode" in caplog.text


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_filesystem_without_flock_is_an_error_that_names_it_and_the_mount_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="flock") as caught:
        TieredStore(settings(tmp_path, require_cold=True), LAYER_BYTES, IDENT)
    assert "local_lock=flock" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


class Small(FaultyDisk):
    """A filesystem of so many GB."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.blocks = int(size * GIB / 4096)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, self.blocks, self.blocks, self.blocks, 1000, 1000, 1000, 0, 255))


@pytest.mark.parametrize("changes", [{}, {"max_cold_size": 10.5}], ids=["default", "a little above"])
def test_a_limit_that_the_filesystem_cannot_hold_is_cut_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, float]
) -> None:
    config = TieredConfig(cold_path=str(tmp_path), min_free_disk=0, **changes)
    store = TieredStore(config, LAYER_BYTES, IDENT, files=Small(10))
    try:
        assert store.stats()["cold_limit_bytes"] == 10 * GIB
        assert "max_cold_size is" in caplog.text
    finally:
        store.close()


def test_a_limit_far_above_the_filesystem_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_cold_size is 500, but must be at most 10"):
        TieredStore(TieredConfig(cold_path=str(tmp_path), max_cold_size=500), LAYER_BYTES, IDENT, files=Small(10))


def test_after_a_disk_was_full_for_a_moment_everything_is_written_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, files=disk, chunks=16, write_back_sec=0) as store:
        first, x = prompt(4), rows(4 * CHUNK)
        store.store(first.refs, first.bytes, {0: x})
        assert store.flush(10) == 0
        disk.errors["pwritev"] = errno.ENOSPC
        p, y = prompt(8), rows(8 * CHUNK, seed=3)
        assert store.store(p.refs, p.bytes, {0: y}) == 8
        wait_until(lambda: store.stats()["cold_state"] == "paused")
        disk.errors.clear()
        store.debug.resume_now()
        wait_until(lambda: store.flush(1) == 0)
        for prompt_, expected in ((first, x), (p, y)):
            wait_until(lambda prompt_=prompt_: all(store.has(name, 0)[1] for name in prompt_.names))
            assert torch.equal(store.retrieve(prompt_.refs, [0], None)[0], expected)
        check_balance(store)


@pytest.mark.timing
def test_a_disk_that_answers_slowly_again_and_again_is_taken_offline_by_what_calls_lose(tmp_path: Path) -> None:
    class Slow(FaultyDisk):
        seconds = 0.0

        def preadv(self, *args: Any) -> int:
            time.sleep(self.seconds)
            return super().preadv(*args)

    disk = Slow()
    # One read of a file takes two or three of these; what takes longer than the limit by itself is another case.
    with opened(tmp_path, files=disk, chunks=96, read_timeout_sec=4.5) as store:
        p, x = on_disk(store, 80)
        disk.seconds = 0.6
        for _ in range(3):
            store.debug.evict_clean()
            assert store.stats()["cold_state"] == "online"
            assert len(store.retrieve(p.refs, [0], None).get(0, ())) < len(x)
        assert store.stats()["cold_state"] == "offline"
        store.debug.evict_clean()
        started = time.monotonic()
        store.retrieve(p.refs, [0])
        assert time.monotonic() - started < 0.2, "further calls do not wait for it"
        disk.seconds = 0.0
        store.debug.resume_now()
        wait_until(lambda: store.stats()["cold_state"] == "online", 40)
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
