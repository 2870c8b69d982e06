"""Keys of hidden states, and the two tiers as LMCache storage backends that understand them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.memory_management import MemoryFormat

from lmcache_hs_backend.integrations.lmcache.kv_presence import short_keys
from lmcache_hs_backend.integrations.lmcache.tier_backends import HiddenStateKey
from tests.support.engines import CHUNK, HIDDEN, Engine, rows_of, tokens_of

pytestmark = pytest.mark.engine

AWKWARD = st.text(st.one_of(st.sampled_from("@%=/\\-.: \n\0é"), st.characters(codec="utf-8")), max_size=40)
LAYERS = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@st.composite
def kv_keys(draw) -> CacheEngineKey:
    tags = draw(st.dictionaries(AWKWARD, AWKWARD, max_size=3))
    return CacheEngineKey(
        draw(AWKWARD),
        draw(st.integers(0, 1024)),
        draw(st.integers(0, 1024)),
        draw(st.integers(-(2**63), 2**64 - 1)),
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.uint8])),
        {f"lmcache.tag.{name}": value for name, value in tags.items()} or draw(st.sampled_from([None, {}])),
    )


@given(kv_keys(), LAYERS)
@settings(deadline=None)
def test_a_key_comes_back_from_its_string(kv_key, layer_idx):
    key = HiddenStateKey(kv_key, layer_idx)
    again = HiddenStateKey.from_string(key.to_string())
    assert again == key
    assert hash(again) == hash(key)
    assert again.layer_idx == layer_idx
    assert again.kv_key == kv_key == key.kv_key
    assert again.to_string() == key.to_string()


@given(st.lists(kv_keys(), min_size=1, max_size=5))
@settings(deadline=None)
def test_what_the_tiers_keep_of_a_key_is_enough_to_ask_for_its_kv(keys):
    form = short_keys()
    # A key that differs from the first one in its hash alone is what an engine's chunks have.
    keys += [CacheEngineKey(keys[0].model_name, keys[0].world_size, keys[0].worker_id, 7, keys[0].dtype)]
    kept = [form.keep(key) for key in keys]
    assert [form.whole(one) for one in kept] == keys
    if not keys[0].tags:
        assert kept[0] == keys[0].chunk_hash, "170 bytes less for each of ten million chunks"
        assert kept[-1] == 7


@given(kv_keys(), LAYERS, LAYERS)
@settings(deadline=None)
def test_a_key_is_equal_to_its_like_alone(kv_key, layer_idx, other_idx):
    key = HiddenStateKey(kv_key, layer_idx)
    kv_layer_key = LayerCacheEngineKey(
        kv_key.model_name,
        kv_key.world_size,
        kv_key.worker_id,
        kv_key.chunk_hash,
        kv_key.dtype,
        kv_key.request_configs,
        layer_id=layer_idx,
    )
    assert key != kv_key
    assert kv_key != key
    assert key != kv_layer_key
    assert kv_layer_key != key
    assert len({key, kv_key, kv_layer_key, HiddenStateKey(kv_key, layer_idx)}) == 3
    assert (key == HiddenStateKey(kv_key, other_idx)) == (layer_idx == other_idx)


@given(kv_keys(), kv_keys(), LAYERS, LAYERS)
@settings(deadline=None)
def test_different_keys_have_different_strings(one, other, layer_idx, other_idx):
    first, second = HiddenStateKey(one, layer_idx), HiddenStateKey(other, other_idx)
    assert (first == second) == (first.to_string() == second.to_string())


@pytest.mark.parametrize("dtype", sorted(STR_DTYPE_TO_TORCH_DTYPE))
def test_every_dtype_of_lmcache_comes_back(dtype):
    key = HiddenStateKey(CacheEngineKey("m", 1, 0, 5, STR_DTYPE_TO_TORCH_DTYPE[dtype]), 0)
    assert HiddenStateKey.from_string(key.to_string()) == key


@pytest.mark.parametrize("text", ["", "hs@", "hs@0@m@1@0@5@nonsense", "m@1@0@5@bfloat16", "hs@0@m@1@0@xyz@bfloat16"])
def test_a_string_that_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="not the key of hidden states"):
        HiddenStateKey.from_string(text)


@given(st.text(max_size=60))
@settings(deadline=None)
def test_any_text_is_a_key_or_a_value_error(text):
    try:
        key = HiddenStateKey.from_string(text)
    except ValueError:
        return
    assert HiddenStateKey.from_string(key.to_string()) == key


@pytest.fixture
def engine(start) -> Engine:
    engine = start(hot_bytes=1 << 20)
    engine.tokens = tokens_of(2)
    engine.rows = rows_of(2 * CHUNK)
    engine.store_both(engine.tokens, engine.rows)
    return engine


def test_each_tier_answers_for_what_it_holds(engine):
    hot, cold, plugin = engine.plugin.hot, engine.plugin.cold, engine.plugin
    key = HiddenStateKey(engine.keys(engine.tokens)[0], 0)
    assert (hot.contains(key), cold.contains(key), plugin.contains(key)) == (True, False, True)
    assert engine.store.flush(10) == 0
    assert (hot.contains(key), cold.contains(key), plugin.contains(key)) == (True, True, True)
    engine.make_cold(engine.tokens)
    assert (hot.contains(key), cold.contains(key), plugin.contains(key)) == (False, True, True)
    absent = HiddenStateKey(key.kv_key, 1)
    assert not any(backend.contains(absent) for backend in (hot, cold, plugin))
    assert not any(backend.contains(key.kv_key) for backend in (hot, cold, plugin))


def test_a_batch_is_counted_up_to_the_first_that_is_missing(engine):
    keys = [HiddenStateKey(key, 0) for key in engine.keys(engine.tokens)]
    missing = HiddenStateKey(keys[0].kv_key, 7)
    plugin = engine.plugin
    assert plugin.batched_contains(keys) == 2
    assert plugin.batched_contains([keys[0], missing, keys[1]]) == 1
    assert asyncio.run(plugin.batched_async_contains("id", keys)) == 2
    assert asyncio.run(plugin.hot.batched_async_contains("id", keys)) == 2
    assert asyncio.run(plugin.cold.batched_async_contains("id", keys)) == 0


@pytest.mark.parametrize("tier", ["hot", "cold", "both"])
def test_what_is_got_is_a_copy_of_its_own(engine, tier):
    if tier != "hot":
        engine.make_cold(engine.tokens)
    backend = engine.plugin if tier == "both" else getattr(engine.plugin, tier)
    keys = [HiddenStateKey(key, 0) for key in engine.keys(engine.tokens)]
    found = backend.batched_get_blocking(keys)
    for number, obj in enumerate(found):
        assert obj.tensor.dtype == torch.bfloat16
        assert obj.get_memory_format() is MemoryFormat.HS_TD
        assert torch.equal(obj.tensor, engine.rows[number * CHUNK : (number + 1) * CHUNK])
        obj.tensor.zero_()
    assert torch.equal(engine.retrieve(engine.tokens), engine.rows.float())
    kept = backend.get_blocking(keys[0])
    engine.store.clear()
    engine.close()
    assert torch.equal(kept.tensor, engine.rows[:CHUNK])
    for obj in [*found, kept]:
        obj.ref_count_down()


def test_a_tier_gives_nothing_that_only_the_other_holds(engine):
    key = HiddenStateKey(engine.keys(engine.tokens)[0], 0)
    assert engine.plugin.cold.get_blocking(key) is None
    engine.make_cold(engine.tokens)
    assert engine.plugin.hot.get_blocking(key) is None
    assert engine.plugin.cold.get_blocking(key) is not None


def test_a_layer_that_is_put_joins_its_chunk_in_both_tiers(engine):
    keys = [HiddenStateKey(key, 3) for key in engine.keys(engine.tokens)]
    source = [engine.plugin.get_blocking(HiddenStateKey(key.kv_key, 0)) for key in keys]
    done = []
    engine.plugin.batched_submit_put_task(keys, source, None, done.append)
    assert done == keys
    for obj in source:
        assert obj.get_ref_count() == 1
        obj.tensor.zero_()
        obj.ref_count_down()
    assert torch.equal(engine.retrieve(engine.tokens, layer_idx=3), engine.rows.float())
    engine.make_cold(engine.tokens)
    assert torch.equal(engine.retrieve(engine.tokens, layer_idx=3), engine.rows.float())
    assert torch.equal(engine.retrieve(engine.tokens), engine.rows.float())


def test_a_layer_of_a_chunk_that_nobody_knows_is_left_out(engine):
    stranger = HiddenStateKey(engine.keys(tokens_of(1, seed=9))[0], 0)
    engine.plugin.batched_submit_put_task([stranger], [engine.plugin.get_blocking(first_key(engine))])
    assert not engine.plugin.contains(stranger)
    assert engine.store.num_cached_chunks() == 2


@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(CHUNK, HIDDEN, dtype=torch.int64),
        torch.ones(CHUNK, HIDDEN, dtype=torch.complex64),
        torch.full((CHUNK, HIDDEN), 1e300, dtype=torch.float64),
        torch.ones(CHUNK - 1, HIDDEN),
        torch.ones(CHUNK, 0),
        torch.ones(CHUNK),
    ],
    ids=["int", "complex", "too large", "too short", "no width", "one dimension"],
)
def test_rows_that_a_store_refuses_are_not_put_either(engine, rows):
    key = HiddenStateKey(engine.keys(engine.tokens)[0], 4)
    with contextlib.suppress(ValueError):  # refused aloud or left out in silence, but not taken
        engine.plugin.batched_submit_put_task([key], [Held(rows)])
    assert not engine.plugin.contains(key)
    assert engine.store.flush(10) == 0
    assert engine.store.stats()["errors_internal"] == 0
    assert torch.equal(engine.retrieve(engine.tokens), engine.rows.float())


def test_removing_a_layer_removes_its_chunk_from_both_tiers(engine):
    assert engine.store.flush(10) == 0
    first, second = (HiddenStateKey(key, 0) for key in engine.keys(engine.tokens))
    assert engine.plugin.remove(first) is True
    assert engine.plugin.remove(first) is False
    assert not engine.plugin.contains(first)
    assert engine.plugin.contains(second)
    assert engine.plugin.cold.remove(second)
    engine.wait(lambda: not engine.files)
    assert engine.store.num_cached_chunks() == 0


def test_kv_is_not_touched_when_hidden_states_are_removed(engine):
    engine.plugin.remove(first_key(engine))
    assert engine.engine.lookup(engine.tokens) == 2 * CHUNK


class Held:
    """A memory object as far as a put looks at one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def first_key(engine: Engine) -> HiddenStateKey:
    return HiddenStateKey(engine.keys(engine.tokens)[0], 0)  # type: ignore[attr-defined]
