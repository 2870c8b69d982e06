"""Remote KV backends in trouble: nothing is deleted without proof, no call waits longer than its bound.

The bucket is real HTTP and LMCache's own S3Connector talks to it; the connector answers False whenever a request fails.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lmcache_hs_backend.integrations.lmcache.slow_backends import SlowBackends
from tests.support.engines import CHUNK, Engine, rows_of, tokens_of
from tests.support.s3_server import S3Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

TOKENS, ROWS = tokens_of(4), rows_of(4 * CHUNK)
BOUND_MS = 250
#: What a retrieve may take beyond the bound: the copy, the threads, a busy machine.
SLACK_SEC = 0.5


@pytest.fixture
def bucket() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def engine(bucket: S3Server, start) -> Iterator[Engine]:
    """KV of four chunks in the bucket alone, hidden states that were served, and no object sizes in the cache."""
    engine = start(
        remote_url=f"s3://127.0.0.1:{bucket.port}",
        remote_serde="naive",
        blocking_timeout_secs=2,
        extra={
            "s3_region": "us-east-1", "disable_tls": True, "s3_num_io_threads": 2, "s3_prefer_http2": False,
            "aws_access_key_id": "key", "aws_secret_access_key": "secret", "save_chunk_meta": False,
        },
        settings={"kv_presence_timeout_ms": BOUND_MS},
    )  # fmt: skip
    remote = engine.backend("RemoteBackend")
    # Its own waits, on the loop that it blocks, for that loop: LMCache 0.5.6 never ends with an S3 remote.
    remote.connection.getWrappedConnector().close = _close_nothing
    engine.store_both(TOKENS, ROWS)
    assert engine.store.flush(10) == 0
    wait_until(lambda: len(bucket.objects) == 4)
    wait_until(lambda: not any(remote.exists_in_put_tasks(key) for key in engine.keys(TOKENS)))
    for key in engine.keys(TOKENS):
        engine.backend("LocalCPUBackend").remove(key)
    forget_sizes(engine)
    wait_until(lambda: is_as_before(engine))
    forget_sizes(engine)
    yield engine
    bucket.be("ok")  # or the client's retries would outlast the engine


async def _close_nothing() -> None:
    return None


def forget_sizes(engine: Engine) -> None:
    """As after a restart: a size that the connector remembers answers for the object, whatever has become of it."""
    engine.backend("RemoteBackend").connection.getWrappedConnector().object_size_cache.clear()


def is_as_before(engine: Engine) -> bool:
    rows = engine.retrieve(TOKENS)
    return rows is not None and torch.equal(rows, ROWS.float())


def slowest_of(engine: Engine, calls: int) -> float:
    """Seconds of the slowest of some retrieves, which serve nothing."""
    slowest = 0.0
    for _ in range(calls):
        forget_sizes(engine)
        began = time.monotonic()
        assert engine.served(TOKENS) == 0
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def nothing_was_deleted(engine: Engine) -> None:
    stats = engine.store.stats()
    assert stats["kv_gone_deleted"] == 0
    assert stats["misses_kv_unknown"] > 0
    assert engine.store.num_cached_chunks() == len(engine.files) == 4


@pytest.mark.parametrize("trouble", ["down", "hang", 403, 500])
def test_a_bucket_in_trouble_deletes_nothing_and_holds_nobody_up(engine, bucket, trouble):
    bucket.be(trouble)
    assert slowest_of(engine, 5) < BOUND_MS / 1000 + SLACK_SEC
    nothing_was_deleted(engine)
    bucket.be("ok")
    wait_until(lambda: is_as_before(engine), 40)
    assert engine.store.stats()["kv_gone_deleted"] == 0


def test_a_connector_that_has_given_up_for_ever_deletes_nothing(engine, bucket):
    """After three connection errors S3Connector answers False to everything, for the rest of the process."""
    bucket.be("down")
    connector = engine.backend("RemoteBackend").connection.getWrappedConnector()
    for _ in range(3):
        connector._update_connection_failures("AWS_IO_SOCKET_CONNECTION_REFUSED")
    assert connector.connection_disabled
    assert slowest_of(engine, 3) < SLACK_SEC  # it answers at once
    nothing_was_deleted(engine)
    engine.store_kv(TOKENS)  # the prompt is computed again
    assert is_as_before(engine)


def test_a_bucket_that_never_answers_is_not_waited_for_any_more(engine, bucket):
    bucket.be("hang")
    slowest_of(engine, 2)
    began = time.monotonic()
    slowest_of(engine, 20)
    assert time.monotonic() - began < SLACK_SEC
    nothing_was_deleted(engine)


def test_what_lies_in_ram_is_served_while_the_bucket_hangs(engine, bucket):
    engine.store_kv(TOKENS[: 2 * CHUNK])
    bucket.be("hang")
    forget_sizes(engine)
    assert engine.served(TOKENS) == 2 * CHUNK
    nothing_was_deleted(engine)


# -- any remote ----------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_directory(start, tmp_path) -> Engine:
    """KV of eight chunks in LMCache's file-system remote alone."""
    engine = start(
        remote_url=f"fs://localhost:1{tmp_path}/remote", remote_serde="naive",
        settings={"kv_presence_timeout_ms": 2000},
    )  # fmt: skip
    tokens = tokens_of(8)
    engine.store_both(tokens, rows_of(8 * CHUNK))
    remote = engine.backend("RemoteBackend")
    wait_until(lambda: all(remote.contains(key) for key in engine.keys(tokens)))
    for key in engine.keys(tokens):
        engine.backend("LocalCPUBackend").remove(key)
    return engine


def test_a_slow_remote_is_asked_for_all_keys_at_once(on_a_directory):
    engine = on_a_directory
    connection = engine.backend("RemoteBackend").connection
    real = connection.exists

    async def slow(key):
        await asyncio.sleep(0.4)
        return await real(key)

    connection.exists = slow
    began = time.monotonic()
    assert engine.served(tokens_of(8)) == 8 * CHUNK
    assert 0.4 <= time.monotonic() - began < 1.2  # one after the other would be 3.2 s


def test_a_file_that_is_absent_from_its_directory_is_proof(on_a_directory, tmp_path):
    engine = on_a_directory
    engine.backend("RemoteBackend").remove(engine.keys(tokens_of(8))[3])
    assert engine.served(tokens_of(8)) == 3 * CHUNK
    assert engine.store.stats()["kv_gone_deleted"] == 1


def test_a_directory_that_is_gone_is_none(on_a_directory, tmp_path):
    """A share that is not mounted: ``os.path.exists`` is False for all of its files, and they are all still there."""
    engine = on_a_directory
    (tmp_path / "remote").rename(tmp_path / "elsewhere")
    assert engine.served(tokens_of(8)) == 0
    assert engine.store.stats()["kv_gone_deleted"] == 0
    (tmp_path / "elsewhere").rename(tmp_path / "remote")
    assert engine.served(tokens_of(8)) == 8 * CHUNK


@pytest.mark.parametrize(
    "kind", ["AzureConnector", "BigtableConnector", "SageMakerHyperPodConnector", "EICConnector", "SomebodysConnector"]
)
def test_no_from_a_connector_that_does_not_raise_is_no_proof(on_a_directory, kind):
    engine = on_a_directory
    connection = engine.backend("RemoteBackend").connection

    async def no(self, key):
        return False

    # The services themselves do not run here; their connectors' answer in trouble was read in LMCache's sources.
    pretender = type(kind, (), {"exists": no, "exists_sync": lambda self, key: False})()
    real, connection._connector = connection._connector, pretender
    assert engine.served(tokens_of(8)) == 0
    assert engine.store.stats()["kv_gone_deleted"] == 0
    assert engine.store.num_cached_chunks() == 8
    connection._connector = real
    assert engine.served(tokens_of(8)) == 8 * CHUNK


def test_a_backend_that_cannot_even_be_asked_for_a_while_is_asked_again() -> None:
    """Its loop is closed, say, while LMCache builds its backends again."""

    class Remote:
        class connection:
            answers = False

            @classmethod
            async def exists(cls, key: object) -> bool:
                while not cls.answers:
                    await asyncio.sleep(0.01)
                return True

        def __init__(self) -> None:
            self.running = asyncio.new_event_loop()
            self.thread = threading.Thread(target=self.running.run_forever, daemon=True)
            self.thread.start()
            self.asked_in_vain = 0

        @property
        def loop(self) -> asyncio.AbstractEventLoop:
            if self.running.is_closed():
                self.asked_in_vain += 1
                raise RuntimeError("Event loop is closed")
            return self.running

        def end(self) -> None:
            self.running.call_soon_threadsafe(self.running.stop)
            self.thread.join(5)
            self.running.close()

    remote, asked = Remote(), SlowBackends(0.1)
    for _ in range(2):
        assert asked.ask({"remote": remote}, ["key"]) == [None]
    remote.end()
    wait_until(lambda: remote.asked_in_vain > 0)
    again = Remote()
    again.connection.answers = True
    wait_until(lambda: asked.ask({"remote": again}, ["key"]) == [True])
    asked.close()
    again.end()
