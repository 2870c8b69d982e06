"""Pressure on hidden states never reaches KV: LMCache's pool, references and counters do not notice us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lmcache.observability import LMCStatsMonitor

from tests.support.engines import CHUNK, CHUNK_BYTES, GIB, Engine, rows_of, tokens_of

pytestmark = pytest.mark.engine

KV_CHUNK_BYTES = 2 * 2 * CHUNK * 32 * 2
PROMPTS = [tokens_of(4, seed=seed) for seed in range(6)]


def kv_state(engine: Engine) -> dict[str, Any]:
    """All that LMCache counts about its KV in RAM and on disk."""
    cpu = engine.backend("LocalCPUBackend")
    monitor = LMCStatsMonitor.GetOrCreate()
    allocator = cpu.memory_allocator
    return {
        "chunks": len(cpu.hot_cache),
        "references": [obj.get_ref_count() for obj in cpu.hot_cache.values()],
        "pins": [obj.is_pinned for obj in cpu.hot_cache.values()],
        "held": [engine.engine.lookup(tokens) for tokens in PROMPTS],
        "pool": allocator.pin_allocator.total_allocated_size,
        "objects": allocator.pin_allocator.num_active_allocations,
        "local_cache_usage_bytes": monitor.local_cache_usage_bytes,
        "local_storage_usage_bytes": monitor.local_storage_usage_bytes,
        "intact": allocator.memcheck(),
    }


def run(engine: Engine, disk) -> list[dict[str, Any]]:
    """KV and, where there is a store, far more hidden states than fit, with KV eviction in between."""
    states = [kv_state(engine)]
    for seed, tokens in enumerate(PROMPTS):
        kv = engine.store_kv(tokens)
        engine.wait(lambda tokens=tokens: all(disk.contains(key) for key in engine.keys(tokens)))
        states.append(kv_state(engine))
        if engine.store is not None:
            rows = rows_of(len(tokens), seed=seed)
            for layer_idx in (0, 1, 2):
                assert engine.store.store_hidden_states(tokens, rows, layer_idx=layer_idx) == 4
            assert torch.equal(engine.retrieve(tokens, layer_idx=2), rows.float())
        into = torch.zeros_like(kv)
        assert engine.engine.retrieve(torch.tensor(tokens), kv=into).all()
        assert torch.equal(into, kv)
        states.append(kv_state(engine))
    if engine.store is not None:
        assert engine.store.stats()["demoted"] > 0
        assert engine.served(PROMPTS[0], layer_idx=1) == 4 * CHUNK
        engine.store.clear()
    states.append(kv_state(engine))
    if engine.store is not None:
        engine.store.close()
    states.append(kv_state(engine))
    engine.engine.clear(PROMPTS[3])
    states.append(kv_state(engine))
    return states


def test_kv_is_the_same_with_and_without_us(start, tmp_path):
    common = {"max_local_cpu_size": 10 * KV_CHUNK_BYTES / GIB, "max_local_disk_size": 1}
    LMCStatsMonitor.DestroyInstance()
    without = start(
        storage_plugins=None, enable_hidden_state_cache=False, local_disk=str(tmp_path / "without"), **common
    )
    assert without.store is None
    expected = run(without, without.backend("LocalDiskBackend"))
    without.close()
    LMCStatsMonitor.DestroyInstance()
    engine = start(hot_bytes=8 * CHUNK_BYTES, local_disk=str(tmp_path / "with"), **common)
    actual = run(engine, engine.backend("LocalDiskBackend"))
    assert actual == expected
    assert all(state["intact"] for state in actual)
    assert expected[-1]["chunks"] <= 10  # there was pressure on KV as well


def test_a_full_hot_tier_evicts_no_kv(start):
    engine = start(hot_bytes=4 * CHUNK_BYTES, max_local_cpu_size=64 * KV_CHUNK_BYTES / GIB)
    for tokens in PROMPTS:
        engine.store_kv(tokens)
    before = kv_state(engine)
    for seed, tokens in enumerate(PROMPTS):
        assert engine.store.store_hidden_states(tokens, rows_of(len(tokens), seed=seed)) == 4
    assert kv_state(engine) == before
    assert before["held"] == [4 * CHUNK] * len(PROMPTS)
    for seed, tokens in enumerate(PROMPTS):
        assert torch.equal(engine.retrieve(tokens), rows_of(len(tokens), seed=seed).float())
    assert kv_state(engine) == before


def test_retrieving_hidden_states_leaves_no_pin_behind(start):
    engine = start()
    engine.store_both(PROMPTS[0], rows_of(4 * CHUNK))
    assert engine.engine.lookup(PROMPTS[0], lookup_id="request", pin=True) == 4 * CHUNK
    pinned = kv_state(engine)
    assert pinned["pins"] == [True] * 4
    assert engine.served(PROMPTS[0]) == 4 * CHUNK
    engine.store.coverage([(0, CHUNK, engine.keys(PROMPTS[0])[0])])
    assert kv_state(engine) == pinned
    engine.engine.lookup_unpin("request")
    assert kv_state(engine)["pins"] == [False] * 4
