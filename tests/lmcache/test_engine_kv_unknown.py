"""When nobody can say whether LMCache still has the KV of a chunk, nothing is deleted, nothing is served,
and what comes back is right as soon as somebody can say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface

from tests.support.engines import CHUNK, Engine, rows_of, tokens_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

TOKENS, ROWS = tokens_of(4), rows_of(4 * CHUNK)


@pytest.fixture
def on_disk_alone(start, tmp_path) -> Engine:
    """KV of four chunks, in LMCache's disk tier and not in its RAM; hidden states served before."""
    engine = start(local_disk=str(tmp_path / "kv"), max_local_disk_size=1)
    engine.store_both(TOKENS, ROWS)
    return _leave_ram(engine, "LocalDiskBackend")


@pytest.fixture(params=[{}, {"audit_backend_enabled": True}], ids=["plain", "audited"])
def in_remote_alone(request, start, tmp_path) -> Engine:
    """KV of four chunks, in a remote (LMCache's own, on a directory) and not in RAM."""
    engine = start(remote_url=f"fs://localhost:1{tmp_path}/remote", remote_serde="naive", extra=request.param)
    engine.store_both(TOKENS, ROWS)
    return _leave_ram(engine, "RemoteBackend")


def _leave_ram(engine: Engine, behind: str) -> Engine:
    keys = engine.keys(TOKENS)
    backend = engine.backend(behind)
    wait_until(lambda: all(backend.contains(key) and not backend.exists_in_put_tasks(key) for key in keys))
    for key in keys:
        engine.backend("LocalCPUBackend").remove(key)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    return engine


def takes_back_into_ram(engine: Engine, keys) -> None:
    for key in keys:
        engine.manager.get(key).ref_count_down()


def goes_over_all_chunks(engine: Engine) -> None:
    """The look for orphans, which a store has every so often, visits every chunk twice."""
    for _ in range(2):
        engine.store.debug.run_chores()


def nothing_is_deleted(engine: Engine, served: int = 0) -> None:
    for _ in range(3):
        assert engine.served(TOKENS) == served
    assert engine.store.flush(10) == 0
    assert engine.store.stats()["kv_gone_deleted"] == 0
    goes_over_all_chunks(engine)
    assert engine.store.stats()["kv_gone_deleted"] == 0
    assert engine.store.num_cached_chunks() == 4
    assert len(engine.files) == 4
    assert engine.store.stats()["misses_kv_unknown"] > 0


def all_is_back(engine: Engine) -> None:
    assert engine.engine.lookup(TOKENS) == 4 * CHUNK
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def test_while_frozen(on_disk_alone):
    engine = on_disk_alone
    engine.engine.freeze(True)
    nothing_is_deleted(engine)
    engine.engine.freeze(False)
    all_is_back(engine)


def test_while_frozen_what_lies_in_ram_is_served(on_disk_alone):
    engine = on_disk_alone
    takes_back_into_ram(engine, engine.keys(TOKENS)[:2])
    engine.engine.freeze(True)
    nothing_is_deleted(engine, served=2 * CHUNK)
    engine.engine.freeze(False)
    all_is_back(engine)


@pytest.mark.parametrize("bypassed", ["LocalDiskBackend", "LocalCPUBackend"])
def test_while_a_backend_is_bypassed(on_disk_alone, bypassed):
    engine = on_disk_alone
    engine.manager.set_backend_bypass(bypassed, True)
    if bypassed == "LocalDiskBackend":
        nothing_is_deleted(engine)
    else:  # the one that has the KV is asked
        assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
        disk = engine.backend("LocalDiskBackend")
        for key in engine.keys(TOKENS)[2:]:
            disk.remove(key)
        nothing_is_deleted(engine, served=2 * CHUNK)
        engine.store_kv(TOKENS)
        wait_until(lambda: all(disk.contains(key) for key in engine.keys(TOKENS)))
    engine.manager.set_backend_bypass(bypassed, False)
    all_is_back(engine)


def test_while_the_engine_says_that_it_is_unhealthy(on_disk_alone, monkeypatch):
    engine = on_disk_alone
    engine.engine.mark_init_failed("for the test")
    disk = engine.backend("LocalDiskBackend")
    lost = {key: disk.dict.pop(key) for key in engine.keys(TOKENS)[1:]}
    nothing_is_deleted(engine, served=CHUNK)
    engine.engine._init_failed = False
    disk.dict.update(lost)
    all_is_back(engine)


def test_while_the_remote_has_no_connection(in_remote_alone):
    engine = in_remote_alone
    remote = engine.backend("RemoteBackend")
    connection, remote.connection = remote.connection, None
    nothing_is_deleted(engine)
    remote.connection = connection
    all_is_back(engine)


@pytest.mark.parametrize("error", [ConnectionError("reset by peer"), TimeoutError()], ids=["reset", "timeout"])
def test_while_every_request_to_the_remote_fails(in_remote_alone, error):
    """Redis is down, say: the connection object is there, and RemoteBackend turns each error into False."""
    engine = in_remote_alone
    connection = engine.backend("RemoteBackend").connection

    async def fails(key):
        raise error

    connection.exists = fails
    nothing_is_deleted(engine)
    del connection.exists
    all_is_back(engine)


def test_while_asking_raises(on_disk_alone):
    engine = on_disk_alone
    disk = engine.backend("LocalDiskBackend")

    def fails(key, pin=False):
        raise RuntimeError("dictionary changed size during iteration")

    disk.contains = fails
    nothing_is_deleted(engine)
    assert engine.store.stats()["errors_presence"] > 0
    del disk.contains
    all_is_back(engine)


@pytest.fixture
def slow_disk(start, tmp_path) -> Iterator[tuple[Engine, Callable[[], None]]]:
    """An engine with KV on disk alone whose disk writes wait, and the call that lets them go on."""
    gate = threading.Event()
    engine = start(local_disk=str(tmp_path / "kv"), max_local_disk_size=1, local_cpu=False)
    disk = engine.backend("LocalDiskBackend")
    real = disk.write_file
    disk.write_file = lambda buffer, path: (gate.wait(60), real(buffer, path))
    yield engine, gate.set
    gate.set()


def test_while_the_kv_is_on_its_way_to_disk(slow_disk):
    engine, go_on = slow_disk
    engine.store_kv(TOKENS)
    disk = engine.backend("LocalDiskBackend")
    assert all(disk.exists_in_put_tasks(key) and not disk.contains(key) for key in engine.keys(TOKENS))
    assert engine.store.store_hidden_states(TOKENS, ROWS) == 4
    nothing_is_deleted(engine)
    go_on()
    wait_until(lambda: all(disk.contains(key) for key in engine.keys(TOKENS)))
    all_is_back(engine)


def test_while_kv_that_was_there_before_is_on_its_way_again(on_disk_alone):
    engine = on_disk_alone
    disk, keys = engine.backend("LocalDiskBackend"), engine.keys(TOKENS)
    for key in keys[1:]:
        disk.disk_worker.insert_put_task(key)
    lost = {key: disk.dict.pop(key) for key in keys[1:]}
    nothing_is_deleted(engine, served=CHUNK)
    disk.dict.update(lost)
    for key in keys[1:]:
        disk.disk_worker.remove_put_task(key)
    all_is_back(engine)


@pytest.mark.parametrize("kind", ["P2PBackend", "PDBackend", "PDBackendAsync"])
def test_beside_a_backend_that_cannot_know(start, kind):
    engine = start()
    backend = type(kind, (_CannotKnow,), {})(engine.backend("LocalCPUBackend"))
    engine.manager.storage_backends[kind] = backend
    engine.store_both(TOKENS, ROWS)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    for key in engine.keys(TOKENS)[2:]:
        engine.backend("LocalCPUBackend").remove(key)
    nothing_is_deleted(engine, served=2 * CHUNK)
    engine.store_kv(TOKENS)
    all_is_back(engine)


class _CannotKnow(StorageBackendInterface):
    """Peer-to-peer as LMCache has it: ``contains`` is always False, and put tasks cannot be asked for."""

    def __init__(self, allocator) -> None:
        super().__init__("cpu")
        self._allocator = allocator

    def contains(self, key, pin=False) -> bool:
        return False

    def batched_contains(self, keys, pin=False) -> int:
        return 0

    def exists_in_put_tasks(self, key) -> bool:
        raise NotImplementedError

    def batched_submit_put_task(self, keys, objs, transfer_spec=None, on_complete_callback=None) -> None:
        return None

    def get_blocking(self, key) -> None:
        return None

    def pin(self, key) -> bool:
        return False

    def unpin(self, key) -> bool:
        return False

    def remove(self, key, force=True) -> bool:
        return False

    def get_allocator_backend(self):
        return self._allocator

    def close(self) -> None:
        return None


def test_kv_that_is_spread_over_two_backends_is_all_found(on_disk_alone):
    engine = on_disk_alone
    keys = engine.keys(TOKENS)
    disk, cpu = engine.backend("LocalDiskBackend"), engine.backend("LocalCPUBackend")
    takes_back_into_ram(engine, [keys[1], keys[3]])
    assert [cpu.contains(key) for key in keys] == [False, True, False, True]
    for key in (keys[1], keys[3]):
        disk.remove(key)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    assert engine.store.stats()["kv_gone_deleted"] == 0


# -- under other keys ----------------------------------------------------------------------------------


def test_layerwise_kv_counts_as_kv(start):
    engine = start(use_layerwise=True)
    engine.store_both(TOKENS, ROWS)
    assert engine.engine.lookup(TOKENS) == 4 * CHUNK
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    goes_over_all_chunks(engine)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    for layer_key in engine.keys(TOKENS)[2].split_layers(2):
        engine.backend("LocalCPUBackend").remove(layer_key)
    assert engine.served(TOKENS) == 2 * CHUNK
    assert engine.store.num_cached_chunks() == 3


def test_tagged_kv_belongs_to_tagged_rows(start):
    engine = start()
    tag, other = {"lmcache.tag.tenant": "../../etc"}, {"lmcache.tag.tenant": "b"}
    engine.store_kv(TOKENS, request_configs=tag)
    assert engine.store.store_hidden_states(TOKENS, ROWS, request_configs=tag) == 4
    assert torch.equal(engine.retrieve(TOKENS, request_configs=tag), ROWS.float())
    assert engine.retrieve(TOKENS) is None
    assert engine.retrieve(TOKENS, request_configs=other) is None
    assert engine.store.flush(10) == 0
    goes_over_all_chunks(engine)
    assert torch.equal(engine.retrieve(TOKENS, request_configs=tag), ROWS.float())
    engine.manager.batched_remove(engine.keys(TOKENS, tag)[1:])
    assert engine.served(TOKENS, request_configs=tag) == CHUNK


def test_rows_stored_without_the_tag_of_their_kv_are_kept(start):
    """vLLM-Omni cannot pass the tag on: it has never been asked whether that KV is there, so it is not gone."""
    engine = start()
    engine.store_kv(TOKENS, request_configs={"lmcache.tag.tenant": "a"})
    assert engine.store.store_hidden_states(TOKENS, ROWS) == 4
    assert engine.retrieve(TOKENS) is None
    assert engine.store.flush(10) == 0
    goes_over_all_chunks(engine)
    assert engine.store.num_cached_chunks() == 4
    engine.store_kv(TOKENS)
    all_is_back(engine)


def test_on_the_event_loop_of_the_storage_manager_nobody_is_asked(in_remote_alone):
    """There, asking a remote would wait for itself for ever."""
    engine = in_remote_alone
    answer: list[object] = []
    done = threading.Event()

    def on_the_loop() -> None:
        answer.append(engine.retrieve(TOKENS))
        done.set()

    engine.manager.loop.call_soon_threadsafe(on_the_loop)
    assert done.wait(10)
    assert answer == [None]
    all_is_back(engine)
