"""The hot tier's memory is provided ahead of its first use, so that no store waits for the kernel."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.chunk import cut
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.memory.arena import map_memory
from tests.support.prompts import IDENT, rows, settings
from tests.support.waiting import wait_until

TOKENS, HIDDEN = 4096, 2048
PROMPT_BYTES = 2 * TOKENS * HIDDEN
PATIENT = {"write_back_sec": 3600, "clean_fraction": 0}  # no disk beside what is timed


def seconds(store: TieredStore, seed: int, x: torch.Tensor) -> float:
    """Of one store of a prompt like no other."""
    prompt = cut([seed, *range(1, TOKENS)], model="m", kv_dtype="bfloat16", chunk_size=256)
    started = time.perf_counter()
    assert store.store(prompt.refs, prompt.ids, {0: x}) == len(prompt.refs)
    return time.perf_counter() - started


@pytest.mark.timing
@pytest.mark.parametrize("huge", [True, False], ids=["huge pages", "small pages"])
def test_a_store_into_memory_that_was_never_used_takes_at_most_twice_as_long(tmp_path: Path, huge: bool) -> None:
    x = rows(TOKENS, hidden=HIDDEN)
    fresh, warm = [], []
    for number in range(8):  # the best of them: a machine that does something else meanwhile is not what is asked about
        config = settings(tmp_path / str(number), **PATIENT)
        map_hot = functools.partial(map_memory, huge=huge)
        store = TieredStore(config, 8 * PROMPT_BYTES, IDENT, map_hot=map_hot)
        try:
            fresh += [seconds(store, seed, x) for seed in range(2)]
            wait_until(lambda store=store: store.debug.memory().touched == store.debug.memory().mapped)
            store.clear()
            warm += [seconds(store, seed, x) for seed in range(10, 14)]
            store.clear()
        finally:
            store.close()
    assert min(fresh) <= 2 * min(warm)


def test_all_of_the_memory_is_touched_in_time_and_rows_that_came_first_stay_as_they_are(tmp_path: Path) -> None:
    x = rows(TOKENS, hidden=HIDDEN)
    prompt = cut(list(range(TOKENS)), model="m", kv_dtype="bfloat16", chunk_size=256)
    store = TieredStore(settings(tmp_path, **PATIENT), 12 * PROMPT_BYTES, IDENT)
    try:
        assert store.store(prompt.refs, prompt.ids, {layer: x + layer for layer in range(8)}) == len(prompt.refs)
        wait_until(lambda: store.debug.memory().touched == store.debug.memory().mapped)
        for layer, kept in store.retrieve(prompt.refs, list(range(8)), None).items():
            assert torch.equal(kept, x + layer)
    finally:
        store.clear()
        store.close()


def test_memory_is_left_alone_where_that_is_wanted(tmp_path: Path) -> None:
    store = TieredStore(settings(tmp_path, touch_memory=False, **PATIENT), PROMPT_BYTES, IDENT)
    try:
        assert store.debug.memory().touched == 0
    finally:
        store.close()
