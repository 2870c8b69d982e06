"""A start in two looks: names first, so that chunks can be served, then sizes, so that the limit holds."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.flows.recover import Recover
from tests.store.test_directories import program
from tests.support.disks import FaultyDisk
from tests.support.figures import tell
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
from tests.support.waiting import hold_up, wait_until


class Between:
    """A store that knows the names of its files and waits, before it looks at their sizes, for ``go_on``."""

    def __init__(self, store: TieredStore, gate: threading.Event) -> None:
        self.store = store
        self._gate = gate

    def go_on(self) -> None:
        self._gate.set()
        assert self.store.wait_recovered(20)


@pytest.fixture
def left(tmp_path: Path) -> list[tuple[Prompt, torch.Tensor]]:
    """Four prompts of two chunks on disk, the first one stored being the least recently used."""
    made = []
    with opened(tmp_path) as store:
        for _ in range(4):
            p, x = prompt(2), rows(64)
            assert store.store(p.refs, p.bytes, {0: x}) == 2
            made.append((p, x))
    return made


@pytest.fixture
def between(tmp_path: Path, left: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    gate = hold_up(monkeypatch, Recover, "_scan_own")
    store = TieredStore(settings(tmp_path), 8 * LAYER_BYTES, IDENT)
    try:
        wait_until(lambda: len(store) == 8)
        yield Between(store, gate)
    finally:
        gate.set()
        store.close()


def test_a_chunk_is_served_before_anybody_knows_the_size_of_its_file(between: Between, left) -> None:
    p, x = left[1]
    assert torch.equal(between.store.retrieve(p.refs, [0])[0], x.float())
    between.go_on()
    assert between.store.stats()["cold_bytes"] == sum(file.stat().st_size for file in chunk_files_of(between.store))
    check_balance(between.store)


def test_what_was_used_meanwhile_is_the_youngest_and_the_rest_keeps_its_order(between: Between, left) -> None:
    between.store.retrieve(left[0][0].refs, [0])
    between.go_on()
    order = between.store.debug.cold_order()
    expected = [name for number in (1, 2, 3, 0) for name in reversed(left[number][0].names)]
    assert order == expected


def test_what_was_dropped_meanwhile_does_not_come_back(between: Between, left) -> None:
    gone = left[2][0]
    assert between.store.drop(gone.names) == 2
    between.go_on()
    wait_until(lambda: len(chunk_files_of(between.store)) == 6)
    assert len(between.store) == 6
    assert between.store.retrieve(gone.refs, [0]) == {}
    check_balance(between.store)


def test_a_bad_file_that_is_found_meanwhile_is_counted_with_its_real_size(between: Between, left) -> None:
    bad = left[3][0]
    path = Path(between.store.debug.path(bad.names[0]))
    path.write_bytes(b"x" * 5000)
    assert between.store.retrieve(bad.refs, [0]) == {}
    between.go_on()
    assert between.store.stats()["quarantined_chunks"] == 1
    assert between.store.debug.disk().quarantine == 5000
    check_balance(between.store)


def test_nothing_is_written_before_the_sizes_are_known(between: Between, left) -> None:
    p = prompt(2)
    assert between.store.store(p.refs, p.bytes, {0: rows(64)}) == 2
    assert between.store.flush(0.1) == 2
    between.go_on()
    assert between.store.flush(10) == 0
    assert len(chunk_files_of(between.store)) == 10
    check_balance(between.store)


def test_what_was_cleared_before_it_was_found_does_not_come_back_with_what_is_stored_then(
    tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_up(monkeypatch, Recover, "_scan_top")
    p = left[0][0]
    store = TieredStore(settings(tmp_path), 8 * LAYER_BYTES, IDENT)
    try:
        store.clear()
        after = rows(64, seed=77)
        assert store.store(p.refs, p.bytes, {1: after}) == 2
        gate.set()
        assert store.wait_recovered(20)
        assert store.flush(10) == 0
        assert store.retrieve(p.refs, [0]) == {}, "rows from before the clear"
        assert torch.equal(store.retrieve(p.refs, [1])[1], after.float())
        wait_until(lambda: len(chunk_files_of(store)) == 2 and not store.debug.busy())
        check_balance(store)
    finally:
        gate.set()
        store.close()


def chunk_files_of(store: TieredStore) -> list[Path]:
    return chunk_files(Path(store.directory).parent)


def test_recovery_leaves_a_file_alone_that_is_being_written(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_up(monkeypatch, Recover, "_scan_archive")
    config = settings(tmp_path, on_kv_gone="archive", write_back_sec=3600, clean_fraction=0, read_timeout_sec=30)
    store = TieredStore(config, 8 * LAYER_BYTES, IDENT, files=disk)
    try:
        p = prompt(1)
        store.store(p.refs, p.bytes, {0: rows(CHUNK)})
        disk.hang()
        store.kv_gone(p.names)
        wait_until(lambda: disk.hanging == 1)
        archive = Path(store.directory) / "archive"
        (being_written,) = archive.rglob("*.tmp")
        left_over = being_written.parent / f".{'ab' * 16}.1.1.tmp"
        left_over.touch()
        gate.set()
        assert store.wait_recovered(20)
        assert being_written.exists()
        assert not left_over.exists()
        disk.resume()
        wait_until(lambda: store.stats()["archived_chunks"] == 1)
        assert store.stats()["drops_archive"] == 0
        assert store.stats()["cold_state"] == "online"
    finally:
        gate.set()
        disk.resume()
        store.close()


@pytest.mark.slow
@pytest.mark.timing
def test_a_start_on_many_files_stops_the_process_for_no_long_garbage_collection(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        directory = Path(store.directory)
    for number in range(100_000):
        name = f"{number % 256:02x}{number:030x}"
        folder = directory / name[:2]
        if number < 256:
            folder.mkdir(exist_ok=True)
        (folder / f"{name}.safetensors").touch()
    pauses: list[float] = []
    started = [0.0]

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started[0] = time.perf_counter()
        elif info["generation"] == 2:
            pauses.append(time.perf_counter() - started[0])

    gc.collect()
    gc.freeze()  # what the test process itself has
    gc.callbacks.append(watch)
    try:
        store = TieredStore(settings(tmp_path), 8 * LAYER_BYTES, IDENT)
        wait_until(lambda: len(store) > 99_000, 60)
        store.close()
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
    tell(f"start on 100,000 files: {len(pauses)} full collections, longest {1000 * max(pauses, default=0):.0f} ms")
    assert max(pauses, default=0) < 0.03, "three times as many are to take less than 0.05"


def test_a_start_above_the_limit_ends_although_each_deletion_takes_long_and_frees_nothing(tmp_path: Path) -> None:
    class Slow(FaultyDisk):
        def unlink(self, path: str) -> None:
            time.sleep(0.15)
            super().unlink(path)

    with opened(tmp_path, chunks=16) as store:
        on_disk(store, 8)
        quarantine = Path(store.directory) / "quarantine"
        quarantine.mkdir()
        for number in range(4):  # as a power failure leaves them
            (quarantine / f"{number:032x}.1.short.safetensors").touch()
    size = 4096 + LAYER_BYTES
    with opened(tmp_path, files=Slow(), max_cold_size=6 * size / 1024**3) as store:  # waits until it has recovered
        assert store.stats()["quarantined_chunks"] == 0
        assert store.stats()["cold_chunks"] == 6
        check_balance(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that may not look")
def test_a_neighbour_whose_trash_may_not_be_listed_does_not_end_the_start() -> None:
    program("""
import dataclasses, os, tempfile
from pathlib import Path
folder = become_nobody()
with opened(folder) as store:
    p, x = on_disk(store, 4)
with opened(folder, ident=dataclasses.replace(IDENT, model="org/other")) as other:
    on_disk(other, 1)
    trash = Path(other.directory) / "trash"
trash.mkdir()
trash.chmod(0)
with opened(folder) as store:  # waits until it has recovered
    assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
    assert store.debug.disk().dead > 0
trash.chmod(0o700)
""")
