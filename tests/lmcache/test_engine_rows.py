"""Hidden states through a real engine: what vLLM-Omni does with them, what upstream loses, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engines import CHUNK, CHUNK_BYTES, HIDDEN, Engine, rows_of, tokens_of

pytestmark = pytest.mark.engine


def chunks_of(engine: Engine, tokens: list[int]) -> list[tuple[int, int, Any]]:
    return list(engine.engine.token_database.process_tokens(tokens=tokens))


# -- the consumer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hot_chunks", [4, 64])
def test_a_prompt_that_is_flushed_at_chunk_borders_is_restored_whole(start, hot_chunks):
    """vLLM-Omni: layer -1 for the main rows, others beside it; it demands that stored equals expected."""
    engine = start(hot_bytes=hot_chunks * CHUNK_BYTES)
    layers = {-1: rows_of(8 * CHUNK, seed=1), 0: rows_of(8 * CHUNK, seed=2), 24: rows_of(8 * CHUNK, seed=3)}
    tokens = tokens_of(8)
    saved = 0
    for step in (100, 64, 30, 200, 118):  # prefill in uneven steps
        computed = saved + step if step != 118 else 8 * CHUNK
        border = computed // CHUNK * CHUNK
        if border <= saved:
            continue
        engine.store_kv(tokens[:border])
        for layer_idx, rows in layers.items():
            stored = engine.store.store_hidden_states(
                torch.tensor(tokens[:border]), rows[saved:border], layer_idx=layer_idx, token_offset=saved
            )
            assert stored == (border - saved) // CHUNK
        saved = border
    assert saved == 8 * CHUNK
    computed = engine.engine.lookup(tokens)
    assert computed == 8 * CHUNK
    assert engine.store.coverage(chunks_of(engine, tokens), tuple(layers)) >= computed
    for layer_idx, rows in layers.items():
        assert torch.equal(engine.retrieve(tokens, layer_idx=layer_idx), rows.float())


def test_coverage_ends_where_a_layer_does(start):
    engine = start()
    tokens = tokens_of(4)
    engine.store_kv(tokens)
    engine.store.store_hidden_states(tokens, rows_of(4 * CHUNK), layer_idx=-1)
    engine.store.store_hidden_states(tokens[: 2 * CHUNK], rows_of(2 * CHUNK), layer_idx=0)
    chunks = chunks_of(engine, tokens)
    coverage = engine.store.coverage
    assert [coverage(chunks, layers) for layers in ((-1,), (0,), (-1, 0), (5,))] == [256, 128, 128, 0]
    assert coverage(chunks) == 2 * CHUNK
    assert coverage(iter(chunks), [-1]) == 4 * CHUNK
    assert coverage([]) == 0
    engine.store.drop_key(chunks[1][2])
    assert coverage(chunks, (-1,)) == CHUNK


def test_coverage_takes_hashes_as_the_lookup_server_has_them(start):
    engine = start()
    tokens = tokens_of(3)
    engine.store_both(tokens, rows_of(3 * CHUNK))
    hashed = list(engine.engine.token_database.process_tokens(tokens=tokens, make_key=False))
    assert all(isinstance(chunk_hash, int) for _, _, chunk_hash in hashed)
    assert engine.store.coverage(hashed) == 3 * CHUNK


def test_coverage_is_honest_about_the_cold_tier_and_reads_nothing(start):
    engine = start(hot_bytes=4 * CHUNK_BYTES)
    tokens = tokens_of(3)
    engine.store_both(tokens, rows_of(3 * CHUNK))
    engine.make_cold(tokens)
    reads = engine.store.stats()["disk_read_seconds_count"]
    assert engine.store.coverage(chunks_of(engine, tokens)) == 3 * CHUNK
    assert engine.store.stats()["disk_read_seconds_count"] == reads
    engine.store.debug.go_offline("for the test")
    assert engine.store.coverage(chunks_of(engine, tokens)) == 0


def test_coverage_does_not_ask_for_kv(start):
    engine = start()
    tokens = tokens_of(2)
    engine.store.store_hidden_states(tokens, rows_of(2 * CHUNK))  # its KV is still on the way
    assert engine.retrieve(tokens) is None
    assert engine.store.coverage(chunks_of(engine, tokens)) == 2 * CHUNK


# -- layers and dtypes ------------------------------------------------------------------------------------


def test_a_prefix_ends_where_the_dtype_changes_only_for_native_rows(start):
    engine = start()
    tokens = tokens_of(2)
    engine.store_kv(tokens)
    rows = rows_of(2 * CHUNK)
    engine.store.store_hidden_states(tokens[:CHUNK], rows[:CHUNK])
    engine.store.store_hidden_states(tokens, rows[CHUNK:].float(), token_offset=CHUNK)
    assert torch.equal(engine.retrieve(tokens), rows.float())
    assert torch.equal(engine.store.retrieve_layers(tokens, [0], dtype=None)[0], rows[:CHUNK])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_survive_disk_bit_by_bit_in_their_own_dtype(start, dtype):
    engine = start(hot_bytes=8 * CHUNK_BYTES, save_unfull_chunk=True)
    tokens = tokens_of(2.5)
    rows = rows_of(len(tokens), dtype=dtype)
    engine.store_kv(tokens)
    assert engine.store.store_hidden_states(tokens, rows, layer_idx=-7) == 3
    assert engine.store.flush(10) == 0
    assert engine.store.stats()["hot_bytes"] <= rows.nbytes + 4096
    engine.close()
    engine = start(hot_bytes=8 * CHUNK_BYTES, save_unfull_chunk=True)
    engine.settled()
    engine.store_kv(tokens)
    native = engine.store.retrieve_layers(tokens, [-7], dtype=None)[-7]
    assert native.dtype == dtype
    assert torch.equal(native, rows)
    assert torch.equal(engine.retrieve(tokens, layer_idx=-7), rows.float())


@pytest.mark.parametrize("where", ["hot", "cold"])
def test_a_layer_that_is_asked_for_twice_is_read_once(start, where):
    engine = start(hot_bytes=8 * CHUNK_BYTES)
    tokens, rows = tokens_of(2), rows_of(2 * CHUNK)
    engine.store_both(tokens, rows)
    if where == "cold":
        engine.make_cold(tokens)
    back = engine.store.retrieve_layers(tokens, [0, 0])
    assert list(back) == [0]
    assert torch.equal(back[0], rows.float())
    stats = engine.store.stats()
    assert stats["hot_bytes"] == stats["hot_chunks"] * CHUNK_BYTES
    engine.store.clear()
    assert engine.store.stats()["hot_bytes"] == 0


# -- bad input -------------------------------------------------------------------------------------------

TOKENS = tokens_of(2)
GOOD = rows_of(2 * CHUNK)


@pytest.fixture
def engine(start) -> Engine:
    engine = start()
    engine.store_kv(TOKENS)
    return engine


def holds_nothing(engine: Engine) -> None:
    stats = engine.store.stats()
    assert engine.store.num_cached_chunks() == 0
    assert stats["hot_bytes"] == stats["stored_chunks"] == stats["errors_internal"] == 0
    assert engine.store.store_hidden_states(TOKENS, GOOD) == 2
    assert torch.equal(engine.retrieve(TOKENS), GOOD.float())


@pytest.mark.parametrize("offset", [-1, 2 * CHUNK + 1, 1])
def test_a_wrong_offset_is_refused(engine, offset):
    with pytest.raises(ValueError, match="token_offset"):
        engine.store.store_hidden_states(TOKENS, GOOD, token_offset=offset)
    holds_nothing(engine)


WRONG_TOKENS = {
    "floats": torch.rand(2 * CHUNK),
    "two dimensions": torch.tensor([TOKENS, TOKENS]),
    "text": ["a"] * (2 * CHUNK),
    "none": [None] * (2 * CHUNK),
    "fractions": [0.5] * (2 * CHUNK),
    "beyond 64 bits": [2**63] * (2 * CHUNK),
}


@pytest.mark.parametrize("wrong", WRONG_TOKENS)
def test_wrong_token_ids_are_refused(engine, wrong):
    tokens = WRONG_TOKENS[wrong]
    rows = GOOD[: len(tokens)]
    with pytest.raises(ValueError, match="token_ids"):
        engine.store.store_hidden_states(tokens, rows)
    with pytest.raises(ValueError, match="token_ids"):
        engine.store.retrieve_hidden_states(tokens)
    with pytest.raises(ValueError, match="token_ids"):
        engine.store.prefetch(tokens)
    holds_nothing(engine)


@pytest.mark.parametrize("layer_idx", [True, 1.0, "0", None, 2**63, -(2**63) - 1])
def test_a_layer_index_that_is_no_int_of_64_bits_is_refused(engine, layer_idx):
    with pytest.raises(ValueError, match="layer_idx"):
        engine.store.store_hidden_states(TOKENS, GOOD, layer_idx=layer_idx)
    with pytest.raises(ValueError, match="layer_idx"):
        engine.retrieve(TOKENS, layer_idx=layer_idx)
    holds_nothing(engine)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool])
def test_rows_cannot_be_asked_for_in_a_dtype_that_is_no_float(engine, dtype):
    with pytest.raises(ValueError, match="dtype"):
        engine.store.retrieve_layers(TOKENS, [0], dtype=dtype)


def test_tokens_may_be_a_list_a_tuple_or_a_tensor_of_any_int(start):
    engine = start(settings={"store_count": "new"})
    engine.store_kv(TOKENS)
    assert engine.store.store_hidden_states(tuple(TOKENS), GOOD) == 2
    for ids in (TOKENS, torch.tensor(TOKENS), torch.tensor(TOKENS, dtype=torch.int32)):
        assert engine.store.store_hidden_states(ids, GOOD) == 0
        assert torch.equal(engine.retrieve(ids), GOOD.float())


def test_a_list_that_has_changed_since_the_last_call_is_another_prompt(engine):
    store, others = engine.store, rows_of(2 * CHUNK, seed=2)
    given = list(TOKENS)
    changed = [TOKENS[0] + 1, *TOKENS[1:]]
    for ids in (given, changed):
        engine.store_kv(ids)
    assert store.store_hidden_states(given, GOOD) == 2
    given[0] += 1
    assert store.retrieve_hidden_states(given) is None
    assert store.store_hidden_states(given, others) == 2
    assert torch.equal(store.retrieve_hidden_states(given), others.float())
    assert torch.equal(store.retrieve_hidden_states(TOKENS), GOOD.float())
    given.append(5)
    assert torch.equal(store.retrieve_hidden_states(given), others.float())


def test_token_ids_that_cannot_be_compared_with_the_last_ones_are_refused_as_ever(engine):
    assert engine.store.store_hidden_states(TOKENS, GOOD) == 2
    for wrong in (torch.tensor([TOKENS[0], 2]), [TOKENS[0]], str(TOKENS[0])):
        with pytest.raises(ValueError, match="token_ids"):
            engine.store.retrieve_hidden_states([wrong, *TOKENS[1:]])


def test_a_wrong_call_of_a_layer_that_is_not_allowed_is_still_left_out(start):
    engine = start(hidden_state_layers=[0])
    assert engine.store.store_hidden_states(TOKENS, GOOD > 0, layer_idx=1) == 0


def test_trouble_of_our_own_is_a_miss_that_is_counted_and_leaks_nothing(engine):
    without_memory = torch.empty(2 * CHUNK, HIDDEN, device="meta")  # passes every check, and cannot be copied
    assert engine.store.store_hidden_states(TOKENS, without_memory) == 0
    stats = engine.store.stats()
    assert (stats["errors_internal"], stats["hot_bytes"]) == (1, 0)
    assert engine.store.store_hidden_states(TOKENS, GOOD) == 2
    assert torch.equal(engine.retrieve(TOKENS), GOOD.float())
