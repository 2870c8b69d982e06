"""Coupled deletion: when LMCache has lost the KV of a chunk, the chunk leaves RAM and disk.

Also when something is under way with that chunk at that very moment; a disk that waits holds it there.
"""

from __future__ import annotations

import threading

import pytest
import torch

from lmcache_hs_backend.integrations.lmcache.store import key_name
from tests.support.engines import CHUNK, CHUNK_BYTES, GIB, Engine, GatedFiles, rows_of, tokens_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

TOKENS, ROWS = tokens_of(4), rows_of(4 * CHUNK)
PATIENT = {"write_back_sec": 3600, "clean_fraction": 0}  # nothing is written before somebody asks for it


def is_nowhere(engine: Engine, *keys) -> bool:
    """No trace of the chunks is left: index, RAM and disk."""
    on_disk = {path.stem for path in engine.files}
    return not any(engine.store.has_chunk(key) or file_name(key) in on_disk for key in keys)


def file_name(key) -> str:
    return key_name(key).hex()


def balances(engine: Engine) -> bool:
    """What is counted is what is there: bytes in RAM by chunk, bytes on disk by file."""
    stats = engine.store.stats()
    files = engine.files
    try:
        on_disk = sum(path.stat().st_size for path in files)
    except FileNotFoundError:  # one has just been deleted: then not yet
        return False
    return (
        stats["hot_bytes"] == stats["hot_chunks"] * CHUNK_BYTES
        and stats["cold_bytes"] == on_disk
        and stats["cold_chunks"] == len(files)
    )


@pytest.mark.parametrize("where", ["hot", "written", "cold"])
def test_a_chunk_whose_kv_is_evicted_ends_the_prefix_and_is_gone_from_both_tiers(start, where):
    engine = start(hot_bytes=8 * CHUNK_BYTES, settings=PATIENT | {"store_count": "new"})
    engine.store_both(TOKENS, ROWS)
    if where == "written":
        assert engine.store.flush(10) == 0
    elif where == "cold":
        engine.make_cold(TOKENS)
    keys = engine.keys(TOKENS)
    engine.evict_kv(keys[1])
    assert torch.equal(engine.retrieve(TOKENS), ROWS[:CHUNK].float())
    assert not engine.store.has_chunk(keys[1])
    wait_until(lambda: is_nowhere(engine, keys[1]))
    assert engine.store.stats()["kv_gone_deleted"] == 1
    wait_until(lambda: balances(engine))
    engine.store_kv(TOKENS)
    assert engine.served(TOKENS) == CHUNK  # the KV is back, the rows are not
    assert engine.store.store_hidden_states(TOKENS, ROWS) == 1
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def test_all_chunks_behind_the_first_whose_kv_is_gone_leave_with_it(start):
    engine = start()
    engine.store_both(TOKENS, ROWS)
    keys = engine.keys(TOKENS)
    for key in keys[1:]:
        engine.evict_kv(key)
    assert engine.served(TOKENS) == CHUNK
    assert engine.store.num_cached_chunks() == 1
    wait_until(lambda: is_nowhere(engine, *keys[1:]))


def test_all_layers_of_a_chunk_leave_together(start):
    engine = start()
    engine.store_kv(TOKENS)
    assert engine.store.store_layers(TOKENS, dict.fromkeys((-1, 0, 7), ROWS)) == 4
    assert engine.store.flush(10) == 0
    keys = engine.keys(TOKENS)
    engine.evict_kv(keys[3])
    assert engine.served(TOKENS, layer_idx=7) == 3 * CHUNK
    assert not any(engine.store.has_chunk(keys[3], layer_idx=idx) for idx in (-1, 0, 7))
    wait_until(lambda: is_nowhere(engine, keys[3]))


def test_kv_that_lmcaches_own_lru_evicts_takes_its_rows_along(start):
    kv_chunk = 2 * 2 * CHUNK * 32 * 2
    engine = start(max_local_cpu_size=8 * kv_chunk / GIB)
    engine.store_both(TOKENS, ROWS)
    assert engine.store.flush(10) == 0
    keys = engine.keys(TOKENS)
    assert engine.served(TOKENS) == 4 * CHUNK
    seed = 100
    cpu = engine.backend("LocalCPUBackend")
    while any(cpu.contains(key) for key in keys):
        seed += 1
        assert seed < 120
        engine.store_kv(tokens_of(4, seed=seed))
    assert engine.retrieve(TOKENS) is None
    assert engine.store.num_cached_chunks() == 0
    wait_until(lambda: is_nowhere(engine, *keys))
    wait_until(lambda: balances(engine))


def test_a_chunk_that_nobody_retrieves_any_more_is_found_and_dropped(start):
    engine = start()
    engine.store_both(TOKENS, ROWS)
    assert engine.store.flush(10) == 0
    keys = engine.keys(TOKENS)
    engine.evict_kv(keys[2])
    wait_until(lambda: is_nowhere(engine, keys[2]))
    assert engine.store.num_cached_chunks() == 3


def test_switching_lmcaches_ram_off_is_a_loss_of_kv_like_any_other(start):
    engine = start()
    engine.store_both(TOKENS, ROWS)
    assert engine.served(TOKENS) == 4 * CHUNK
    engine.engine.set_hot_cache(False)
    assert engine.retrieve(TOKENS) is None
    wait_until(lambda: engine.store.num_cached_chunks() == 0)
    engine.engine.set_hot_cache(True)
    engine.store_both(TOKENS, ROWS)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def test_a_chunk_whose_kv_is_gone_is_not_written_at_all(start):
    engine = start(settings=PATIENT)
    engine.store_both(TOKENS, ROWS)
    keys = engine.keys(TOKENS)
    for key in keys:
        engine.evict_kv(key)
    assert engine.store.flush(10) == 0
    assert not engine.files
    assert engine.store.stats()["written_chunks"] == 0
    assert engine.store.num_cached_chunks() == 0


# -- with something in flight --------------------------------------------------------------------------

LOSSES = {
    "evicted": lambda engine, key: (engine.evict_kv(key), engine.retrieve(TOKENS)),
    "removed": lambda engine, key: engine.manager.remove(key),
    "cleared": lambda engine, key: engine.engine.clear(),
    "dropped": lambda engine, key: engine.store.drop_key(key),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("call", ["open", "pwritev", "rename"])
def test_a_chunk_that_is_being_written_leaves_no_file_behind(start, call, loss):
    engine = start(settings=PATIENT)
    engine.store_both(TOKENS[:CHUNK], ROWS[:CHUNK])
    [key] = engine.keys(TOKENS[:CHUNK])
    disk = GatedFiles(call)
    engine.use_files(disk)
    flushing = threading.Thread(target=engine.store.flush, args=(20,))
    flushing.start()
    assert disk.arrived.wait(10)
    LOSSES[loss](engine, key)
    assert engine.retrieve(TOKENS) is None
    assert engine.store.num_cached_chunks() == 0
    disk.open_gate()
    flushing.join(20)
    wait_until(lambda: is_nowhere(engine, key))
    wait_until(lambda: balances(engine) and engine.store.stats()["hot_bytes"] == 0)


def test_a_chunk_that_is_stored_again_while_its_former_write_ends_keeps_the_new_file(start):
    engine = start(settings=PATIENT)
    engine.store_both(TOKENS[:CHUNK], ROWS[:CHUNK])
    [key] = engine.keys(TOKENS[:CHUNK])
    disk = GatedFiles("rename")
    engine.use_files(disk)
    flushing = threading.Thread(target=engine.store.flush, args=(20,))
    flushing.start()
    assert disk.arrived.wait(10)
    engine.manager.remove(key)
    engine.store_both(TOKENS[:CHUNK], 2 * ROWS[:CHUNK])
    disk.open_gate()
    flushing.join(20)
    assert engine.store.flush(10) == 0
    assert len(engine.files) == 1
    engine.make_cold(TOKENS[:CHUNK])
    assert torch.equal(engine.retrieve(TOKENS[:CHUNK]), 2 * ROWS[:CHUNK].float())
    assert engine.store.stats()["misses_bad_file"] == 0
    wait_until(lambda: balances(engine))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("how", ["retrieve", "prefetch"])
def test_a_chunk_that_is_being_promoted_does_not_come_back(start, how, loss):
    engine = start(hot_bytes=8 * CHUNK_BYTES)
    engine.store_both(TOKENS[:CHUNK], ROWS[:CHUNK])
    [key] = engine.keys(TOKENS[:CHUNK])
    engine.make_cold(TOKENS[:CHUNK])
    disk = GatedFiles("preadv")
    engine.use_files(disk)
    got = []
    reading = threading.Thread(target=lambda: got.append(engine.retrieve(TOKENS[:CHUNK])))
    if how == "retrieve":
        reading.start()
    else:
        engine.store.prefetch(TOKENS[:CHUNK])
    assert disk.arrived.wait(10)
    LOSSES[loss](engine, key)
    assert not engine.store.has_chunk(key)
    disk.open_gate()
    if how == "retrieve":
        reading.join(20)
        # It had asked for the KV before that was lost, so its rows are right; or it has none.
        assert got[0] is None or torch.equal(got[0], ROWS[:CHUNK].float())
    wait_until(lambda: is_nowhere(engine, key))
    wait_until(lambda: balances(engine))
    assert engine.retrieve(TOKENS[:CHUNK]) is None


# -- archive -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["hot", "written", "cold"])
def test_with_archive_the_file_is_kept_aside_and_never_served(start, where):
    engine = start(hot_bytes=8 * CHUNK_BYTES, settings={**PATIENT, "on_kv_gone": "archive"})
    engine.store_both(TOKENS, ROWS)
    if where == "written":
        assert engine.store.flush(10) == 0
    elif where == "cold":
        engine.make_cold(TOKENS)
    keys = engine.keys(TOKENS)
    for key in keys:
        engine.evict_kv(key)
    assert engine.retrieve(TOKENS) is None
    wait_until(lambda: engine.store.stats()["archived_chunks"] == 4)
    archived = {path.stem for path in engine.files if "archive" in path.parts}
    assert archived == {file_name(key) for key in keys}
    assert not {path.stem for path in engine.files if "archive" not in path.parts} & archived
    engine.store_kv(TOKENS)
    assert engine.retrieve(TOKENS) is None
    assert not any(engine.store.has_chunk(key) for key in keys)
    assert engine.store.store_hidden_states(TOKENS, ROWS) == 4
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def test_what_is_archived_counts_against_the_limit_and_leaves_first(start):
    file_bytes = CHUNK_BYTES + 4096
    limit = 6 * file_bytes
    engine = start(settings={**PATIENT, "on_kv_gone": "archive", "max_cold_size": limit / GIB})
    engine.store_both(TOKENS, ROWS)
    assert engine.store.flush(10) == 0
    engine.manager.batched_remove(engine.keys(TOKENS))
    wait_until(lambda: engine.store.stats()["archived_chunks"] == 4)
    assert engine.store.stats()["cold_bytes"] == 4 * file_bytes
    other = tokens_of(5, seed=3)
    engine.store_both(other, rows_of(5 * CHUNK))
    assert engine.store.flush(10) == 0
    stats = engine.store.stats()
    assert stats["cold_chunks"] == 5
    assert stats["archived_chunks"] <= 1
    assert stats["cold_bytes"] <= limit
    assert stats["drops_cold_limit"] == 0


def test_clear_does_not_touch_the_archive(start):
    engine = start(settings={**PATIENT, "on_kv_gone": "archive"})
    engine.store_both(TOKENS, ROWS)
    engine.manager.remove(engine.keys(TOKENS)[3])
    wait_until(lambda: engine.store.stats()["archived_chunks"] == 1)
    engine.engine.clear()
    assert engine.store.num_cached_chunks() == 0
    wait_until(lambda: len(engine.files) == 1)
    assert engine.store.stats()["archived_chunks"] == 1
