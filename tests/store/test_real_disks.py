"""Filesystems that are frozen, read-only or full for real: an ext4 of our own, where mounting is allowed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.disks import INJECTED, tmpfs
from tests.support.prompts import CHUNK, check_balance, on_disk, opened, prompt, rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """The mount point of an ext4 of 48 MB in a file."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 48 << 20)
    try:
        run("mkfs.ext4", "-q", str(image))
        run("mount", "-o", "loop", str(image), str(mount))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no loop mount here: {error}")
    try:
        yield mount
    finally:
        subprocess.run(["fsfreeze", "-u", str(mount)], capture_output=True, check=False)
        run("umount", "-l", str(mount))


def test_a_frozen_filesystem_holds_up_nobody_and_is_used_again_when_it_thaws(ext4: Path) -> None:
    INJECTED["fsfreeze"] += 1
    limit = 16 / 1024
    with opened(ext4, max_cold_size=limit, write_back_sec=0, read_timeout_sec=0.5, store_wait_ms=200) as store:
        p, x = on_disk(store, 2, in_ram=True)
        run("fsfreeze", "-f", str(ext4))
        q, y = prompt(2), rows(2 * CHUNK, seed=1)
        started = time.monotonic()
        assert store.store(q.refs, q.bytes, {0: y}) == 2
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float()), "it is in RAM"
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        assert time.monotonic() - started < 5
        assert store.stats()["slots_stuck"] >= 1
        run("fsfreeze", "-u", str(ext4))
        wait_until(lambda: store.stats()["cold_state"] == "online", 30)
        wait_until(lambda: store.stats()["dirty_chunks"] == 0)
        wait_until(lambda: not store.debug.busy())
        check_balance(store)


def test_close_returns_while_the_filesystem_is_frozen(ext4: Path) -> None:
    INJECTED["fsfreeze"] += 1
    with opened(ext4, max_cold_size=16 / 1024, write_back_sec=0, close_timeout_sec=1) as store:
        run("fsfreeze", "-f", str(ext4))
        p = prompt(2)
        store.store(p.refs, p.bytes, {0: rows(2 * CHUNK)})
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < 2
        run("fsfreeze", "-u", str(ext4))
        wait_until(lambda: not store.debug.busy())


def test_a_filesystem_that_the_kernel_turns_read_only_costs_serving_nothing(ext4: Path) -> None:
    INJECTED["read-only filesystem"] += 1
    with opened(ext4, max_cold_size=16 / 1024, write_back_sec=0) as store:
        on_disk(store, 2, in_ram=True)
        run("mount", "-o", "remount,abort", str(ext4))  # as ext4 does by itself when it finds its disk damaged
        q, y = prompt(8), rows(8 * CHUNK, seed=1)
        assert store.store(q.refs, q.bytes, {0: y}) == 8
        wait_until(lambda: store.stats()["cold_state"] == "offline")
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        started = time.monotonic()
    assert time.monotonic() - started < 5


def test_a_full_ext4_keeps_serving_and_stays_within_what_it_has(ext4: Path) -> None:
    INJECTED["full ext4"] += 1
    with opened(ext4, chunks=4, max_cold_size=32 / 1024) as store:
        disk = os.statvfs(ext4)
        (ext4 / "ballast").write_bytes(b"\0" * (disk.f_bavail * disk.f_frsize - (1 << 20)))
        for seed in range(60):
            p, x = prompt(4), rows(4 * CHUNK, seed=seed)
            store.store(p.refs, p.bytes, {0: x})
            out = store.retrieve(p.refs, [0])
            assert not out or torch.equal(out[0], x[: len(out[0])].float())
        store.flush(5)
        assert store.stats()["errors_internal"] == 0
        (ext4 / "ballast").unlink()
        wait_until(lambda: store.stats()["cold_state"] == "online", 80)
        on_disk(store, 2, in_ram=True)
        check_balance(store)


def test_another_filesystem_over_the_cold_path_is_a_vanished_directory(tmp_path: Path) -> None:
    with opened(tmp_path, promote=False, write_back_sec=0) as store:
        p, x = on_disk(store, 3, in_ram=True)
        store.debug.evict_clean()
        INJECTED["filesystem over the cold path"] += 1
        with tmpfs(tmp_path, "size=1m"):
            assert store.retrieve(p.refs, [0]) == {}
            assert store.stats()["cold_state"] == "offline"
            q, y = prompt(2), rows(2 * CHUNK, seed=1)
            assert store.store(q.refs, q.bytes, {0: y}) == 2
            assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
            assert list(tmp_path.iterdir()) == [], "nothing is written to it"
        wait_until(lambda: store.stats()["cold_state"] == "online", 40)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.flush(10) == 0
        check_balance(store)
