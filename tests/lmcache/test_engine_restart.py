"""After a restart: the files are there, the KV is not, and only the same model gets its rows back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from lmcache_hs_backend.tiers.flows.recover import Recover
from tests.support.engines import (
    CHUNK,
    CHUNK_BYTES,
    FILE_BYTES,
    GIB,
    ChunkedTokenDatabase,
    Engine,
    make_metadata,
    rows_of,
    tokens_of,
)
from tests.support.waiting import hold_up, wait_until

pytestmark = pytest.mark.engine

TOKENS, ROWS = tokens_of(4), rows_of(4 * CHUNK)


def restarted(start, **changes: Any) -> Engine:
    engine = start(**changes)
    engine.settled()
    return engine


@pytest.fixture
def left_behind(start) -> None:
    """Four chunks of an engine that has ended."""
    engine = start()
    engine.store_both(TOKENS, ROWS)
    engine.close()
    assert len(engine.files) == 4


def test_recovered_chunks_are_hidden_until_their_kv_is_back(left_behind, start):
    engine = restarted(start)
    assert engine.store.num_cached_chunks() == 4
    assert engine.retrieve(TOKENS) is None
    stats = engine.store.stats()
    assert stats["unconfirmed_chunks"] == 4
    assert stats["misses_kv_absent"] == 1
    assert stats["cold_bytes"] == 4 * FILE_BYTES
    engine.store_kv(TOKENS[: 2 * CHUNK])
    assert torch.equal(engine.retrieve(TOKENS), ROWS[: 2 * CHUNK].float())
    assert engine.store.num_cached_chunks() == 4
    engine.store_kv(TOKENS)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    assert engine.store.stats()["unconfirmed_chunks"] == 0
    assert engine.store.stats()["kv_gone_deleted"] == 0


def test_a_recovered_chunk_that_was_served_is_deleted_when_its_kv_goes_again(left_behind, start):
    engine = restarted(start)
    engine.store_kv(TOKENS)
    assert engine.served(TOKENS) == 4 * CHUNK
    engine.evict_kv(engine.keys(TOKENS)[2])
    assert engine.served(TOKENS) == 2 * CHUNK
    wait_until(lambda: len(engine.files) == 3)


@pytest.mark.parametrize("found_during", ["the copy", "nothing in particular"])
def test_a_prompt_that_is_stored_again_while_recovery_is_under_way_counts(
    left_behind, start, monkeypatch, found_during
):
    during = contextlib.nullcontext
    if found_during == "the copy":
        during = _recovery_finds_the_files_after_a_copy(monkeypatch)
    engine = start()
    with during(engine.store):
        engine.store_both(TOKENS, ROWS)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    engine.settled()
    assert engine.store.flush(10) == 0
    assert engine.store.num_cached_chunks() == len(engine.files) == 4
    assert engine.store.stats()["cold_bytes"] == 4 * FILE_BYTES
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def _recovery_finds_the_files_after_a_copy(monkeypatch):
    copied = hold_up(monkeypatch, Recover, "_scan_top")

    def during(store):
        def hook():
            copied.set()
            wait_until(lambda: store.num_cached_chunks() == 4)

        return store.debug.between_copy_and_publication(hook)

    return during


def test_coverage_counts_recovered_chunks(left_behind, start):
    engine = restarted(start)
    chunks = [(number * CHUNK, (number + 1) * CHUNK, key) for number, key in enumerate(engine.keys(TOKENS))]
    assert engine.store.coverage(chunks) == 4 * CHUNK
    assert engine.store.coverage(chunks, (0, 1)) == 0


def test_storing_recovered_chunks_again_counts_once_and_copies_nothing(left_behind, start):
    engine = restarted(start, settings={"store_count": "new"})
    engine.store_kv(TOKENS)
    assert engine.store.store_hidden_states(TOKENS, ROWS) == 4
    assert engine.store.stats()["hot_bytes"] == 0
    assert engine.store.stats()["dirty_chunks"] == 0
    assert engine.store.store_hidden_states(TOKENS, ROWS) == 0
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def test_four_layers_stored_again_one_by_one_count_each(start):
    """vLLM-Omni stores layer by layer, and takes less than it expects for a failure."""
    layers = {idx: rows_of(4 * CHUNK, seed=idx + 9) for idx in (-1, 0, 12, 24)}
    engine = start(settings={"store_count": "new"})
    engine.store_kv(TOKENS)
    assert [engine.store.store_hidden_states(TOKENS, rows, layer_idx=idx) for idx, rows in layers.items()] == [4] * 4
    engine.close()
    engine = restarted(start, settings={"store_count": "new"})
    engine.store_kv(TOKENS)
    for idx, rows in layers.items():
        for first in range(0, 4 * CHUNK, CHUNK):
            tokens = TOKENS[: first + CHUNK]
            flushed = rows[first : first + CHUNK]
            assert engine.store.store_hidden_states(tokens, flushed, layer_idx=idx, token_offset=first) == 1
    assert engine.store.stats()["hot_bytes"] == 0
    assert [engine.store.store_hidden_states(TOKENS, rows, layer_idx=idx) for idx, rows in layers.items()] == [0] * 4
    for idx, rows in layers.items():
        assert torch.equal(engine.retrieve(TOKENS, layer_idx=idx), rows.float())


def test_a_layer_that_is_new_after_a_restart_joins_the_recovered_ones(left_behind, start):
    engine = restarted(start)
    engine.store_kv(TOKENS)
    assert engine.store.store_hidden_states(TOKENS, 2 * ROWS, layer_idx=5) == 4
    assert engine.store.flush(10) == 0
    engine.close()
    engine = restarted(start)
    engine.store_kv(TOKENS)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    assert torch.equal(engine.retrieve(TOKENS, layer_idx=5), 2 * ROWS.float())


def test_what_is_recovered_counts_against_the_limit_and_leaves_oldest_first(start):
    limit = {"max_cold_size": 6 * FILE_BYTES / GIB}
    engine = start(settings=limit)
    old, young = tokens_of(3, seed=1), tokens_of(3, seed=2)
    for tokens in (old, young):
        engine.store_both(tokens, rows_of(3 * CHUNK))
        assert engine.store.flush(10) == 0
    engine.close()
    engine = restarted(start, settings=limit)
    assert engine.store.stats()["cold_bytes"] == 6 * FILE_BYTES
    new = tokens_of(3, seed=3)
    engine.store_both(new, rows_of(3 * CHUNK))
    assert engine.store.flush(10) == 0
    assert engine.store.stats()["cold_bytes"] <= 6 * FILE_BYTES
    assert not any(engine.store.has_chunk(key) for key in engine.keys(old))
    assert all(engine.store.has_chunk(key) for key in engine.keys(young) + engine.keys(new))


def test_more_than_a_smaller_limit_allows_leaves_after_a_restart(left_behind, start):
    engine = restarted(start, settings={"max_cold_size": 2 * FILE_BYTES / GIB})
    wait_until(lambda: engine.store.stats()["cold_bytes"] <= 2 * FILE_BYTES)
    keys = engine.keys(TOKENS)
    assert [engine.store.has_chunk(key) for key in keys] == [True, True, False, False]  # the prefix is youngest
    assert len(engine.files) == 2


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"metadata": {"model_name": "org/test-model-2"}},
    "model with a similar name": {"metadata": {"model_name": "other/test-model"}},
    "kv dtype": {"metadata": {"kv_dtype": torch.float16}},
    "chunk size": {"config": {"chunk_size": CHUNK // 2}},
    "rank": {"metadata": {"worker_id": 1, "world_size": 2}},
    "world size": {"metadata": {"world_size": 2}},
    "hash algorithm": {"config": {"pre_caching_hash_algorithm": "sha256_cbor"}},
    "revision": {"config": {"settings": {"model_revision": "v2"}}},
}


@pytest.mark.parametrize("what", OTHERS)
def test_rows_are_never_served_to_another(left_behind, start, what):
    changes = OTHERS[what].get("config", {})
    metadata = make_metadata(chunk=changes.get("chunk_size", CHUNK), **OTHERS[what].get("metadata", {}))
    stranger = restarted(start, metadata=metadata, **changes)
    sees_nothing(stranger)
    stranger.close()
    is_served_again(start)


def test_rows_are_never_served_under_another_none_hash(left_behind, start, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ChunkedTokenDatabase, "_get_init_hash", lambda database: 12345)
        stranger = restarted(start)
        sees_nothing(stranger)
        stranger.close()
    is_served_again(start)


def test_a_local_model_is_another_one_once_its_weights_change(start, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    metadata = {"model_name": str(model)}
    engine = start(metadata=make_metadata(**metadata))
    engine.store_both(TOKENS, ROWS)
    engine.close()
    engine = restarted(start, metadata=make_metadata(**metadata))
    assert engine.store.num_cached_chunks() == 4
    engine.close()
    (model / "model.safetensors").write_bytes(b"other weights")
    sees_nothing(restarted(start, metadata=make_metadata(**metadata)))


def sees_nothing(stranger: Engine) -> None:
    stranger.store_kv(TOKENS)
    assert stranger.engine.lookup(TOKENS) == 4 * CHUNK
    assert stranger.store.num_cached_chunks() == 0
    assert stranger.retrieve(TOKENS) is None


def is_served_again(start) -> None:
    engine = restarted(start)
    engine.store_kv(TOKENS)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


# -- two engines on one cold path ------------------------------------------------------------------------

NEIGHBOURS = {
    "two models": ({"model_name": "org/a"}, {"model_name": "org/b"}),
    "two ranks": ({"world_size": 2, "worker_id": 0}, {"world_size": 2, "worker_id": 1}),
}


@pytest.mark.parametrize("who", NEIGHBOURS)
def test_two_live_engines_never_evict_each_other(start, who):
    limit = {"max_cold_size": 5 * FILE_BYTES / GIB}
    one, two = (
        start(metadata=make_metadata(**identity), settings=limit, hot_bytes=4 * CHUNK_BYTES)
        for identity in NEIGHBOURS[who]
    )
    for engine in (one, two):
        engine.settled()
    kept = tokens_of(5, seed=1)
    one.store_both(kept, rows_of(5 * CHUNK))
    assert one.store.flush(10) == 0
    for seed in (2, 3, 4):
        two.store_both(tokens_of(5, seed=seed), rows_of(5 * CHUNK, seed=seed))
        assert two.store.flush(10) == 0
    assert two.store.stats()["drops_cold_limit"] == 10
    assert len(two.files) == 5
    assert len(one.files) == 5
    assert one.store.stats()["cold_bytes"] == two.store.stats()["cold_bytes"] == 5 * FILE_BYTES
    assert torch.equal(one.retrieve(kept), rows_of(5 * CHUNK).float())
    assert one.store.stats()["hits_cold"] > 0


def test_a_dead_namespace_goes_first(left_behind, start):
    engine = restarted(
        start, metadata=make_metadata(model_name="org/new"), settings={"max_cold_size": 5 * FILE_BYTES / GIB}
    )
    assert engine.store.stats()["cold_bytes"] == 4 * FILE_BYTES
    tokens = tokens_of(5, seed=8)
    engine.store_both(tokens, rows_of(5 * CHUNK))
    assert engine.store.flush(10) == 0
    assert engine.store.stats()["drops_cold_limit"] == 0
    assert engine.store.stats()["cold_bytes"] == 5 * FILE_BYTES
    assert len(engine.files) == 5


def test_a_second_process_on_one_namespace_gets_a_directory_of_its_own(start):
    first = start()
    second = start()
    assert second.store.tiers.directory == f"{first.store.tiers.directory}/p1"
    for seed, engine in enumerate((first, second)):
        engine.store_both(TOKENS, rows_of(4 * CHUNK, seed=seed))
    second.close()
    second = restarted(start)
    assert second.store.tiers.directory.endswith("/p1")
    second.store_kv(TOKENS)
    assert torch.equal(second.retrieve(TOKENS), rows_of(4 * CHUNK, seed=1).float())
    assert torch.equal(first.retrieve(TOKENS), rows_of(4 * CHUNK, seed=0).float())
