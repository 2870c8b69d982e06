"""``ranks: first`` on real engines: one copy for each node, and what the other ranks answer from it."""

from __future__ import annotations

import os

import pytest
import torch

from lmcache_hs_backend.first_rank import FirstRankFiles
from tests.support.engines import CHUNK, make_metadata, our_threads, rows_of, tokens_of

pytestmark = pytest.mark.engine

TOKENS, ROWS = tokens_of(4), rows_of(4 * CHUNK)
FIRST = {"ranks": "first", "write_back_sec": 0}


def rank(worker_id: int, local_worker_id: int, world_size: int = 2):
    return make_metadata(
        world_size=world_size, local_world_size=2, worker_id=worker_id, local_worker_id=local_worker_id
    )


def test_the_first_rank_keeps_the_rows_and_the_other_one_reads_them_where_its_kv_is(start, cold_path):
    first = start(settings=FIRST, metadata=rank(0, 0))
    before = our_threads()
    other = start(settings=FIRST, metadata=rank(1, 1))
    assert our_threads() == before
    assert isinstance(other.store.tiers, FirstRankFiles)
    assert len(os.listdir(cold_path)) == 1  # one namespace, and it is the first rank's
    first.store_both(TOKENS, ROWS)
    assert first.store.flush(10) == 0
    assert other.retrieve(TOKENS) is None
    other.store_both(TOKENS[: 3 * CHUNK], ROWS[: 3 * CHUNK])  # its rows are not kept, and the caller sees all of them
    assert other.store.stats()["capacity_bytes"] == other.store.num_cached_chunks() == 0
    assert torch.equal(other.retrieve(TOKENS), ROWS[: 3 * CHUNK].float())
    assert other.store.coverage([(0, CHUNK, other.keys(TOKENS)[0])]) == CHUNK
    other.store_kv(TOKENS)
    assert torch.equal(other.retrieve(TOKENS), ROWS.float())
    other.evict_kv(other.keys(TOKENS)[1])
    assert other.served(TOKENS) == CHUNK
    assert first.served(TOKENS) == 4 * CHUNK  # whose KV is still there
    assert len(first.files) == 4
    other.plugin.clear()
    assert first.served(TOKENS) == 4 * CHUNK
    first.plugin.clear()
    assert other.retrieve(TOKENS) is None


def test_each_node_has_a_first_rank(start, tmp_path):
    ranks = [rank(number, number % 2, world_size=4) for number in range(4)]
    engines = [start(tmp_path / f"node{m.worker_id // 2}", settings=FIRST, metadata=m) for m in ranks]
    keeps = [not isinstance(engine.store.tiers, FirstRankFiles) for engine in engines]
    assert keeps == [True, False, True, False]
    for engine in engines:
        engine.store_both(TOKENS, ROWS)
        assert engine.store.flush(10) == 0
    for engine in engines:
        assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def test_a_store_that_counts_what_is_new_counts_nothing_on_the_other_rank(start):
    start(settings=FIRST, metadata=rank(0, 0))
    other = start(settings={**FIRST, "store_count": "new"}, metadata=rank(1, 1))
    assert other.store.store_hidden_states(TOKENS, ROWS) == 0
    with pytest.raises(ValueError, match="first dim"):
        other.store.store_hidden_states(TOKENS, ROWS[1:])


def test_the_other_rank_outlives_a_rebuild_of_lmcaches_backends(start):
    first, other = (start(settings=FIRST, metadata=rank(number, number)) for number in range(2))
    first.store_both(TOKENS, ROWS)
    assert first.store.flush(10) == 0
    store = other.store
    other.plugin.close()
    assert store is other.store
    other.store_kv(TOKENS)
    assert torch.equal(other.retrieve(TOKENS), ROWS.float())
