"""How the plugin comes and goes: found by its engine, built again at LMCache's will, closed in any order."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from time import monotonic

import pytest
import torch

from lmcache_hs_backend import HSTieredBackend, TieredHiddenStateStore
from tests.support.engines import (
    CHUNK,
    ECCacheEngine,
    Engine,
    GatedFiles,
    HiddenStateStore,
    LMCacheEngineBuilder,
    chunk_files,
    logged,
    make_config,
    make_metadata,
    our_threads,
    rows_of,
    tokens_of,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

PACKAGE = "lmcache_hs_backend"
TOKENS, ROWS = tokens_of(3), rows_of(3 * CHUNK)


def holds_its_rows(engine: Engine) -> bool:
    rows = engine.retrieve(TOKENS)
    return rows is not None and torch.equal(rows, ROWS.float())


# -- at start ------------------------------------------------------------------------------------------


def test_the_store_takes_the_place_of_lmcaches_own_and_says_so(start, cold_path):
    with logged(f"{PACKAGE}.integrations.lmcache.backend") as messages:
        engine = start()
    assert isinstance(engine.store, TieredHiddenStateStore)
    loaded = [message for message in messages if message.startswith("hs_tiered loaded")]
    assert len(loaded) == 1
    assert str(cold_path) in loaded[0]
    assert "pinned: no" in loaded[0] or torch.cuda.is_available()


def test_the_store_that_is_replaced_gives_its_pool_back(start, monkeypatch):
    closed = []
    real = HiddenStateStore.close
    monkeypatch.setattr(HiddenStateStore, "close", lambda store: (closed.append(store), real(store)))
    start()
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("changes", "metadata", "why"),
    [
        ({"enable_hidden_state_cache": False}, {}, "enable_hidden_state_cache is false"),
        ({"enable_scheduler_bypass_lookup": True}, {"role": "scheduler"}, "scheduler"),
    ],
    ids=["switched off", "scheduler"],
)
def test_where_it_cannot_serve_it_is_inert(start, cold_path, changes, metadata, why):
    with logged(f"{PACKAGE}.integrations.lmcache.backend") as messages:
        engine = start(metadata=make_metadata(**metadata), **changes)
    assert [message for message in messages if "inert" in message and why in message]
    assert type(engine.store) is (HiddenStateStore if metadata else type(None))
    assert not our_threads()
    assert not cold_path.exists()
    assert engine.plugin.contains(engine.keys(TOKENS)[0]) is False
    assert engine.manager.clear() == 0
    if metadata:
        assert engine.engine.lookup(TOKENS) == 0
    else:
        kv = engine.store_kv(TOKENS)
        into = torch.zeros_like(kv)
        assert engine.engine.retrieve(torch.tensor(TOKENS), kv=into).all()
        assert torch.equal(into, kv)


def test_with_blending_it_is_inert(cold_path):
    # LMCache's own database for blending wants a tokenizer from the network, so there is no engine here.
    config = make_config(cold_path, enable_blending=True)
    with logged(f"{PACKAGE}.integrations.lmcache.backend") as messages:
        plugin = HSTieredBackend(config=config, metadata=make_metadata())
    assert [message for message in messages if "inert" in message and "enable_blending" in message]
    assert plugin.hot is plugin.cold is None
    plugin.close()
    assert not our_threads()


def test_a_storage_manager_without_an_engine_gets_an_inert_plugin(cold_path):
    config = make_config(cold_path)
    with logged(f"{PACKAGE}.integrations.lmcache.backend") as messages:
        encoder_cache = ECCacheEngine(config, make_metadata(), torch.bfloat16)
    try:
        assert [message for message in messages if "inert" in message and "no engine" in message]
        assert not our_threads()
        assert not cold_path.exists()
        encoded = rows_of(8)
        assert encoder_cache.put("picture", encoded)
        assert encoder_cache.contains("picture")
        assert not encoder_cache.contains("another picture")
    finally:
        encoder_cache.close()


# -- built again ---------------------------------------------------------------------------------------


@pytest.fixture(params=[{}, {"audit_backend_enabled": True}], ids=["plain", "audited"])
def engine(request, start, tmp_path) -> Engine:
    engine = start(extra=request.param, local_disk=str(tmp_path / "kv"), max_local_disk_size=1)
    engine.store_both(TOKENS, ROWS)
    disk = engine.backend("LocalDiskBackend")
    wait_until(lambda: all(disk.contains(key) for key in engine.keys(TOKENS)))
    return engine


def test_a_plugin_that_is_recreated_goes_on_with_the_running_store(engine):
    store, plugin = engine.store, engine.plugin
    for _ in range(3):
        assert "hs_tiered" in engine.manager.recreate_backend("hs_tiered")
        assert engine.store is store
        assert engine.plugin is not plugin
        assert holds_its_rows(engine)
    assert len(our_threads()) == 5  # four for I/O and one for everything else, still
    key = engine.keys(TOKENS)[2]
    assert engine.tiers_of(key)[0]
    engine.manager.remove(key)
    assert engine.served(TOKENS) == 2 * CHUNK


def test_recreating_the_kv_on_disk_loses_no_rows_whose_kv_is_in_ram(engine):
    store = engine.store
    assert "LocalDiskBackend" in engine.manager.recreate_backend("LocalDiskBackend")
    assert engine.store is store
    assert holds_its_rows(engine)


def test_recreating_the_kv_in_ram_loses_no_rows_whose_kv_is_on_disk(engine):
    store = engine.store
    assert "LocalCPUBackend" in engine.manager.recreate_backend("LocalCPUBackend")
    assert engine.store is store
    assert holds_its_rows(engine)


def test_backends_that_are_closed_and_created_again_go_on_with_the_running_store(engine):
    store = engine.store
    assert engine.manager.close_backend("hs_tiered")
    assert "hs_tiered" not in engine.manager.list_backends()
    assert holds_its_rows(engine)  # without a façade the store serves on
    assert engine.manager.create_backends() == {
        "hs_tiered": type(engine.manager.storage_backends["hs_tiered"]).__name__
    }
    assert engine.store is store
    assert holds_its_rows(engine)
    assert store.stats()["stored_chunks"] == 3


def test_backends_that_are_created_once_more_beside_the_running_ones_change_nothing(engine):
    store, old = engine.store, engine.plugin
    engine.manager.create_backends()
    assert engine.store is store
    assert engine.plugin is not old
    assert holds_its_rows(engine)
    old.close()  # the façade that was dropped without a word, whenever its finalizer comes
    assert holds_its_rows(engine)
    assert engine.plugin.hot is not None


def test_kv_in_a_remote_that_is_closed_and_created_again_keeps_its_rows(start, tmp_path):
    engine = start(remote_url=f"fs://localhost:1{tmp_path}/remote", remote_serde="naive")
    engine.store_both(TOKENS, ROWS)
    remote = engine.backend("RemoteBackend")
    wait_until(lambda: all(remote.contains(key) for key in engine.keys(TOKENS)))
    for key in engine.keys(TOKENS):
        engine.backend("LocalCPUBackend").remove(key)
    assert holds_its_rows(engine)
    assert engine.manager.close_backend("RemoteBackend")
    assert engine.retrieve(TOKENS) is None  # where its KV is cannot be asked at present
    assert "RemoteBackend" in engine.manager.create_backends()
    assert engine.engine.lookup(TOKENS) == 3 * CHUNK
    assert holds_its_rows(engine)


@pytest.mark.parametrize("name", ["hs_tiered", "LocalDiskBackend"])
def test_backends_may_be_recreated_while_others_store_and_retrieve(engine, name):
    stop = threading.Event()
    wrong: list[object] = []

    def work() -> None:
        seed = 0
        while not stop.is_set():
            seed += 1
            engine.store.store_hidden_states(tokens_of(2, seed=seed % 7 + 1), rows_of(2 * CHUNK))
            rows = engine.retrieve(TOKENS)
            if rows is not None and not torch.equal(rows, ROWS[: len(rows)].float()):
                wrong.append(rows)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in range(10):
        engine.manager.recreate_backend(name)
    stop.set()
    for worker in workers:
        worker.join(20)
    assert not wrong
    assert holds_its_rows(engine)
    stats = engine.store.stats()
    assert stats["errors_internal"] == stats["kv_gone_deleted"] == 0


def test_an_encoder_cache_that_shares_the_engines_metadata_does_no_harm(start):
    engine = start()
    engine.store_both(TOKENS, ROWS)
    store = engine.store
    encoder_cache = ECCacheEngine(engine.config, engine.metadata, torch.bfloat16)
    assert encoder_cache.put("picture", rows_of(8))
    assert not encoder_cache.contains("another picture")
    assert engine.store is store
    assert holds_its_rows(engine)
    encoder_cache.close()
    assert holds_its_rows(engine)
    engine.manager.remove(engine.keys(TOKENS)[1])
    assert engine.served(TOKENS) == CHUNK


# -- at the end ----------------------------------------------------------------------------------------

CLOSERS = {
    "store": lambda engine: engine.store.close(),
    "facade": lambda engine: engine.plugin.close(),
    "storage manager": lambda engine: engine.manager.close(),
    "engine": lambda engine: engine.engine.close(),
}


@pytest.mark.parametrize("order", list(itertools.permutations(CLOSERS)), ids="-".join)
def test_closing_in_any_order_and_twice_is_fine(start, order):
    engine = start(max_local_cpu_size=0.001)
    engine.store_both(TOKENS, ROWS)
    with logged(PACKAGE, logging.WARNING) as ours, logged("lmcache", logging.ERROR) as theirs:
        for name in order:
            CLOSERS[name](engine)
            CLOSERS[name](engine)
        engine.close()
    assert ours == theirs == []
    assert engine.store.closed
    assert not our_threads()
    assert len(engine.files) == 3


def test_nothing_is_touched_after_close(start):
    engine = start()
    engine.store_both(TOKENS, ROWS)
    rows, store, keys, facade = engine.retrieve(TOKENS), engine.store, engine.keys(TOKENS), engine.plugin
    engine.close()
    assert store.store_hidden_states(TOKENS, ROWS) == 0
    assert store.store_layers(TOKENS, {5: ROWS}) == 0
    assert store.retrieve_hidden_states(TOKENS) is None
    assert store.retrieve_layers(TOKENS, [0]) == {}
    assert store.prefetch(TOKENS) is None
    assert store.coverage([(0, CHUNK, keys[0])]) == 0
    assert store.num_cached_chunks() == 0
    assert not store.has_chunk(keys[0])
    assert not store.drop_key(keys[0])
    assert store.flush(1) == 0
    assert store.clear() == 0
    assert not facade.contains(keys[0])
    assert facade.remove(keys[0]) is False
    assert facade.clear() == 0
    assert store.stats()["drops_close"] == 0
    assert torch.equal(rows, ROWS.float())  # what was given out stays whole
    assert len(chunk_files(store.tiers.directory)) == 3


def test_dirty_chunks_are_written_at_close(start):
    engine = start(settings={"write_back_sec": 3600, "clean_fraction": 0})
    engine.store_both(TOKENS, ROWS)
    assert not engine.files
    engine.close()
    assert len(engine.files) == 3


def test_an_engine_that_vanishes_without_a_word_takes_its_store_along(start, cold_path):
    config = make_config(cold_path)
    lost = Engine(config)
    lost.store_both(TOKENS, ROWS)
    tiers = lost.store.tiers
    manager = lost.manager
    for registry in ("_instances", "_cfgs", "_metadatas"):
        getattr(LMCacheEngineBuilder, registry).pop(lost.id)
    LMCacheEngineBuilder._stat_loggers.pop(lost.id).shutdown()
    loop, thread = manager.loop, manager.thread
    del lost, manager
    gc.collect()
    try:
        wait_until(lambda: tiers.closed and len(chunk_files(cold_path)) == 3)
        wait_until(lambda: not our_threads())
    finally:
        tiers.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@pytest.mark.parametrize("call", ["pwritev", "open", "rename"])
def test_a_disk_that_hangs_does_not_keep_destroy_from_returning(start, call):
    engine = start(settings={"close_timeout_sec": 1, "io_threads": 2})
    engine.store_both(TOKENS, ROWS)
    disk = GatedFiles(call)
    engine.use_files(disk)
    with logged(PACKAGE, logging.WARNING) as messages:
        began = monotonic()
        engine.close()
        took = monotonic() - began
    assert took < 3
    assert engine.store.stats()["drops_close"] == 3
    assert [message for message in messages if "does not return" in message]
    disk.open_gate()
