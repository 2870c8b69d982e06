"""Calls of so many chunks that they give the store's lock up in between, and what small calls beside them wait for.

Without strict mode: it would check thousands of chunks whenever the lock is given up.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.tiers.flows.core import PIECE
from tests.support.disks import FaultyDisk
from tests.support.prompts import CHUNK, Prompt, check_balance, opened, prompt, rows, tokens

pytestmark = pytest.mark.timing

LONG = 8 * PIECE + 100


class SlowReads(FaultyDisk):
    """Reads take a millisecond, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def preadv(self, *args: Any) -> int:
        self.reads += 1
        time.sleep(0.001)
        return super().preadv(*args)


def test_rows_of_a_long_prompt_come_back_from_either_tier_and_its_prefix_is_youngest(tmp_path: Path) -> None:
    p, x = prompt(LONG), rows(LONG * CHUNK)
    with opened(tmp_path, chunks=LONG + 10) as store:
        assert store.store(p.refs, p.bytes, {0: x}) == LONG

        def uses() -> list[int]:
            chunks = store.debug.chunks()
            return [chunks[name].used_ns for name in p.names]

        assert uses() == sorted(uses(), reverse=True)
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        assert uses() == sorted(uses(), reverse=True)
        assert store.flush(60) == 0
        assert store.demote(p.names) == LONG
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        assert uses() == sorted(uses(), reverse=True)
        assert store.stats()["promoted"] == LONG
        check_balance(store)
        assert store.drop(p.names) == LONG
        assert len(store) == 0
        check_balance(store)


def test_a_long_prompt_that_ends_early_is_served_up_to_there_and_unpinned(tmp_path: Path) -> None:
    ids = tokens(LONG)
    p, shorter = Prompt(ids), Prompt(ids[: (PIECE + 50) * CHUNK])
    x = rows(len(shorter))
    with opened(tmp_path, chunks=LONG) as store:
        assert store.store(shorter.refs, shorter.bytes, {0: x}) == PIECE + 50
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
        assert store.stats()["misses_absent"] == 1
        assert not any(chunk.pins for chunk in store.debug.chunks().values())


@pytest.mark.parametrize("clean_fraction", [0.0, 0.25])
def test_of_a_prompt_larger_than_the_hot_tier_the_prefix_stays_there(tmp_path: Path, clean_fraction: float) -> None:
    p, x = prompt(LONG), rows(LONG * CHUNK)
    room = PIECE + 200
    changes = {"store_wait_ms": 60_000, "clean_fraction": clean_fraction, "write_back_sec": 3600}
    with opened(tmp_path, chunks=room, **changes) as store:
        first = prompt(100)  # from now on it is known how fast the disk writes, so a store may wait for it
        store.store(first.refs, first.bytes, {0: rows(len(first))})
        assert store.flush(60) == 0
        kept = store.store(p.refs, p.bytes, {0: x})
        assert kept >= room
        # What the cleaner writes ahead may be of this prompt, if the machine is slow or busy: that much may have left.
        ahead = int(clean_fraction * room)
        chunks = store.debug.chunks()
        assert all(chunks[name].hot for name in p.names[: room - 50 - ahead]), "the rest passes through the last slots"
        assert store.flush(60) == 0
        assert torch.equal(store.retrieve(p.refs, [0], None)[0], x[: kept * CHUNK])
        check_balance(store)


def test_a_small_cold_call_does_not_wait_for_the_reads_of_a_long_one(tmp_path: Path) -> None:
    disk = SlowReads()
    with opened(tmp_path, chunks=LONG + 10, files=disk, read_timeout_sec=60) as store:
        long, small = prompt(LONG), prompt(1)
        for p in (long, small):
            assert store.store(p.refs, p.bytes, {0: rows(len(p))}) == len(p.refs)
        assert store.flush(60) == 0
        store.debug.evict_clean()
        thread = threading.Thread(target=store.retrieve, args=(long.refs, [0], None))
        thread.start()
        while not disk.reads:
            time.sleep(0.001)
        assert store.retrieve(small.refs, [0], None), "it is served"
        read = disk.reads
        assert thread.is_alive(), "long before the other one is"
        thread.join()
        assert read < LONG // 2


def test_a_small_hot_call_is_quick_beside_a_long_one(tmp_path: Path) -> None:
    """At p99 20 ms on a quiet machine (docs/performance.md); here the median, so that a busy one passes."""
    with opened(tmp_path, chunks=4096 + 10, clean_fraction=0, write_back_sec=3600) as store:
        long, small = prompt(4096), prompt(1)
        for p in (long, small):
            assert store.store(p.refs, p.bytes, {0: rows(len(p))}) == len(p.refs)
        over, waits = threading.Event(), []

        def again_and_again() -> None:
            while not over.is_set():
                assert store.retrieve(long.refs, [0], None)

        thread = threading.Thread(target=again_and_again)
        thread.start()
        try:
            for _ in range(50):
                started = time.monotonic()
                assert store.retrieve(small.refs, [0], None)
                waits.append(time.monotonic() - started)
                time.sleep(0.002)
        finally:
            over.set()
            thread.join()
        assert sorted(waits)[25] < 0.1
        store.clear()


def test_nobody_waits_for_the_lock_until_a_long_store_is_over(tmp_path: Path) -> None:
    """Who waits for the lock has not been in the store yet, so a long call makes way for all that might be there."""
    with opened(tmp_path, chunks=4096 + 10, clean_fraction=0, write_back_sec=3600) as store:
        long, x = prompt(4096), {0: rows(4096 * CHUNK)}
        over, waits, stores = threading.Event(), [], []

        def look_again_and_again() -> None:
            while not over.is_set():
                started = time.monotonic()
                store.has(long.names[0], 0)
                waits.append(time.monotonic() - started)
                time.sleep(0.001)

        thread = threading.Thread(target=look_again_and_again)
        thread.start()
        try:
            for _ in range(8):
                started = time.monotonic()
                assert store.store(long.refs, long.bytes, x) == 4096
                stores.append(time.monotonic() - started)
                store.clear()
        finally:
            over.set()
            thread.join()
        assert max(waits) < sorted(stores)[4], "it was more than one store, before"
