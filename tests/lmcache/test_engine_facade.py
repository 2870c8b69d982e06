"""The façade among LMCache's storage backends: towards KV it is not there."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

from tests.support.engines import CHUNK, Engine, rows_of, tokens_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

AUDITED = {"audit_backend_enabled": True}


@pytest.fixture(params=[{}, AUDITED], ids=["plain", "audited"])
def engine(request, start) -> Engine:
    """An engine that holds the hidden states of four chunks and no KV at all."""
    engine = start(extra=request.param)
    engine.tokens = tokens_of(4)
    assert engine.store.store_hidden_states(engine.tokens, rows_of(4 * CHUNK)) == 4
    assert engine.store.num_cached_chunks() == 4
    return engine


class LookupAnswers:
    """Stands where LMCache's lookup server does: it takes the answer for the scheduler."""

    def __init__(self) -> None:
        self.answers: dict[str, int] = {}

    def send_response_to_scheduler(self, lookup_id: str, retrieved_length: int) -> None:
        self.answers[lookup_id] = retrieved_length


def on_the_loop(engine: Engine, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, engine.manager.loop).result(10)


def test_a_lookup_never_counts_hidden_states_as_kv(engine):
    assert engine.engine.lookup(engine.tokens) == 0
    assert engine.engine.lookup(engine.tokens, lookup_id="pinned", pin=True) == 0
    assert engine.manager.batched_contains(engine.keys(engine.tokens)) == (0, {})
    assert all(engine.manager.contains(key) is None for key in engine.keys(engine.tokens))
    kv = torch.zeros_like(engine.kv(engine.tokens))
    assert engine.engine.retrieve(torch.tensor(engine.tokens), kv=kv).sum() == 0


@pytest.mark.parametrize("kv_chunks", [0, 2, 4])
def test_an_asynchronous_lookup_is_answered_at_once_with_what_is_there_of_kv(start, kv_chunks):
    engine = start(enable_async_loading=True)
    answers = engine.manager.async_lookup_server = LookupAnswers()
    tokens = tokens_of(4)
    engine.store.store_hidden_states(tokens, rows_of(4 * CHUNK))
    if kv_chunks:
        engine.store_kv(tokens[: kv_chunks * CHUNK])
    engine.engine.async_lookup_and_prefetch("request", tokens)
    wait_until(lambda: "request" in answers.answers)
    assert answers.answers == {"request": kv_chunks * CHUNK}


def test_every_question_about_kv_is_answered_with_nothing(engine):
    keys = engine.keys(engine.tokens)
    backend = engine.manager.storage_backends["hs_tiered"]
    assert backend.contains(keys[0]) is False
    assert backend.contains(keys[0], True) is False
    assert backend.batched_contains(keys) == 0
    assert on_the_loop(engine, backend.batched_async_contains("id", keys, True)) == 0
    assert backend.get_blocking(keys[0]) is None
    assert not backend.batched_get_blocking(keys)
    assert on_the_loop(engine, backend.batched_get_non_blocking("id", keys, {"cum_chunk_lengths": [0, CHUNK]})) == []
    assert backend.pin(keys[0]) is False
    assert backend.unpin(keys[0]) is False
    assert backend.exists_in_put_tasks(keys[0]) is False
    engine.manager.touch_cache()
    engine.manager.batched_unpin(keys)
    engine.manager.cancel_request("request")
    assert engine.manager.memcheck()
    assert engine.store.num_cached_chunks() == 4


def test_what_lies_behind_the_facade_is_still_found_by_a_batched_get(engine):
    kv = engine.store_kv(engine.tokens)
    assert engine.engine.lookup(engine.tokens) == 4 * CHUNK
    into = torch.zeros_like(kv)
    assert engine.engine.retrieve(torch.tensor(engine.tokens), kv=into).all()
    assert torch.equal(into, kv)


def test_storing_kv_copies_none_of_it_and_keeps_no_reference(engine):
    cpu = engine.backend("LocalCPUBackend")
    before = engine.store.stats()["hot_bytes"]
    tokens = tokens_of(3, seed=7)
    engine.store_kv(tokens)
    assert engine.store.stats()["hot_bytes"] == before
    assert [cpu.hot_cache[key].get_ref_count() for key in engine.keys(tokens)] == [1, 1, 1]
    assert engine.plugin.get_allocator_backend() is cpu


def test_a_put_of_kv_cannot_fail_whatever_it_is_given(engine):
    plugin = engine.plugin
    kept = torch.zeros(3)
    reference = weakref.ref(kept)
    plugin.batched_submit_put_task([], [])
    plugin.batched_submit_put_task(engine.keys(engine.tokens), [None] * 4, {"spec": 1}, lambda key: 1 / 0)
    plugin.batched_submit_put_task(engine.keys(engine.tokens)[:1], [kept], transfer_spec=None)
    del kept
    gc.collect()
    assert reference() is None
    assert engine.store.num_cached_chunks() == 4


def test_removing_kv_removes_the_chunk_here_and_counts_only_kv(engine):
    engine.store_kv(engine.tokens)
    keys = engine.keys(engine.tokens)
    assert engine.manager.remove(keys[1]) == 1
    assert engine.store.has_chunk(keys[0])
    assert not engine.store.has_chunk(keys[1])
    assert engine.manager.batched_remove(keys[2:]) == 2
    assert engine.store.num_cached_chunks() == 1
    assert engine.manager.remove(keys[3]) == 0


def test_removing_kv_from_one_place_only_is_no_signal(engine):
    engine.store_kv(engine.tokens)
    keys = engine.keys(engine.tokens)
    assert engine.manager.remove(keys[0], locations=["LocalDiskBackend"]) == 0
    assert engine.store.num_cached_chunks() == 4
    assert engine.served(engine.tokens) == 4 * CHUNK


def test_clearing_the_tokens_of_a_prompt_clears_its_chunks_and_no_others(engine):
    engine.store_kv(engine.tokens)
    other = tokens_of(2, seed=5)
    engine.store_both(other, rows_of(2 * CHUNK))
    assert engine.engine.clear(tokens=engine.tokens) == 4
    assert engine.store.num_cached_chunks() == 2
    assert engine.served(other) == 2 * CHUNK
    assert engine.served(engine.tokens) == 0


def test_clearing_the_engine_empties_both_tiers(start):
    engine = start()
    tokens = tokens_of(4)
    engine.store_both(tokens, rows_of(4 * CHUNK))
    assert engine.store.flush(10) == 0
    assert len(engine.files) == 4
    assert engine.engine.clear() == 4 * CHUNK
    assert engine.store.num_cached_chunks() == 0
    assert engine.store.stats()["hot_bytes"] == 0
    wait_until(lambda: not engine.files)
    wait_until(lambda: engine.store.stats()["cold_bytes"] == 0)


def test_two_engines_that_share_one_config_object_have_a_store_each(start):
    from tests.support.engines import make_config, make_metadata

    first = start()
    second = start(config=first.config, metadata=make_metadata())
    third = start(config=make_config(first.config.extra_config["storage_plugin.hs_tiered.cold_path"]))
    stores = [engine.store for engine in (first, second, third)]
    assert len({id(store) for store in stores}) == 3
    assert len({store.tiers.directory for store in stores}) == 3
    tokens = tokens_of(2)
    for seed, engine in enumerate((first, second, third)):
        engine.store_both(tokens, rows_of(2 * CHUNK, seed=seed))
    for seed, engine in enumerate((first, second, third)):
        assert torch.equal(engine.retrieve(tokens), rows_of(2 * CHUNK, seed=seed).float())
    first.close()
    assert first.store.closed
    assert second.served(tokens) == 2 * CHUNK


def test_two_engines_that_share_config_and_metadata_have_a_store_each(start):
    first = start()
    second = start(config=first.config, metadata=first.metadata)
    assert first.store is not second.store
    assert type(first.store) is type(second.store)
    tokens = tokens_of(2)
    first.store_both(tokens, rows_of(2 * CHUNK, seed=1))
    second.store_both(tokens, rows_of(2 * CHUNK, seed=2))
    second.engine.clear()
    assert second.retrieve(tokens) is None
    assert torch.equal(first.retrieve(tokens), rows_of(2 * CHUNK, seed=1).float())


def test_two_plugin_names_for_one_engine_share_its_store(start, cold_path):
    second = {
        "storage_plugin.other.module_path": "lmcache_hs_backend",
        "storage_plugin.other.class_name": "HSTieredBackend",
    }
    engine = start(extra=second, storage_plugins=["hs_tiered", "other"])
    assert {"hs_tiered", "other"} < set(engine.manager.storage_backends)
    assert engine.store.tiers.directory.startswith(str(cold_path))
    tokens = tokens_of(2)
    engine.store_both(tokens, rows_of(2 * CHUNK))
    assert engine.served(tokens) == 2 * CHUNK
    assert engine.engine.lookup(tokens_of(2, seed=3)) == 0
    assert engine.engine.clear(tokens) == 2
    assert engine.store.num_cached_chunks() == 0


def test_another_plugin_name_works(start):
    engine = start(plugin="my_rows", settings={"io_threads": 1})
    assert list(engine.manager.storage_backends) == ["LocalCPUBackend", "my_rows"]
    assert engine.store.tiers.config.io_threads == 1
    tokens = tokens_of(2)
    engine.store_both(tokens, rows_of(2 * CHUNK))
    assert engine.served(tokens) == 2 * CHUNK
