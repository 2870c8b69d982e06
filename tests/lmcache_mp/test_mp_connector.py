"""The vLLM connector's half beside the model, with rows that go to the store of a real ``lmcache server``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache")

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.integrations.vllm.protocol import Finish, KeyInputs, ReadyChunk, Step
from lmcache_hs_backend.integrations.vllm.scheduler_side.sequence import ChunkedSequence
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings
from lmcache_hs_backend.integrations.vllm.worker_side.device import HiddenStatesCache
from lmcache_hs_backend.integrations.vllm.worker_side.server_sink import ServerChunks, ServerSink, open_server
from lmcache_hs_backend.integrations.vllm.worker_side.sink import CapturedModel
from lmcache_hs_backend.integrations.vllm.worker_side.worker import Worker
from tests.support.mp_server import CHUNK, MODEL, MpServer
from tests.support.waiting import wait_until
from tests.vllm.worker_rig import KEY_FORMAT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, LAYERS, HIDDEN = 64, (2, 5), 32
PER_CHUNK = CHUNK // BLOCK


class Engine:
    """A worker over a cache of random rows that stores into the server."""

    def __init__(self, server: MpServer) -> None:
        self.cache = torch.randn(64, len(LAYERS), BLOCK, HIDDEN).to(torch.bfloat16)
        self.sink = ServerSink(server.client(read_timeout_sec=60), LAYERS, 1 << 30)
        self.worker = Worker(HiddenStatesCache(self.cache), self.sink, None, ServerChunks(CHUNK))

    def serve(self, ids: list[int], blocks: list[int], inputs: KeyInputs | None = None) -> None:
        """A request that is computed in two steps, and its end."""
        sequence = ChunkedSequence(KEY_FORMAT, CHUNK)
        ready = [
            ReadyChunk("r", ref, data, blocks[n * PER_CHUNK : (n + 1) * PER_CHUNK])
            for n, (ref, data) in enumerate(sequence.close(ids, len(ids)))
        ]
        written = [(block, True) for block in blocks]
        named = {} if inputs is None else {"r": inputs}
        self.worker.wrote_hidden_states()
        self.worker.after_step(Step(tokens=len(ids), ready=ready[:1], written=written, named=named))
        self.worker.wrote_hidden_states()
        self.worker.after_step(Step(tokens=len(ids), ready=ready[1:-1], written=written))
        self.worker.finish(Finish("r", ready[-1:], sequence.refs, None, None))
        wait_until(lambda: self.sink.idle, 60)

    def rows(self, blocks: list[int], layer: int) -> torch.Tensor:
        return torch.cat([self.cache[block, LAYERS.index(layer)] for block in blocks])


def prompt(seed: int, tokens: int) -> list[int]:
    ids: list[int] = torch.randint(0, 9000, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def test_rows_of_an_engine_are_in_the_servers_store(shared_server: MpServer) -> None:
    engine, client = Engine(shared_server), shared_server.client(read_timeout_sec=60)
    ids, blocks = prompt(1, 3 * CHUNK + 20), list(range(3, 3 + 3 * PER_CHUNK + 1))
    engine.serve(ids, blocks)
    found = client.retrieve_layers(ids, LAYERS, None)
    for layer in LAYERS:  # whole chunks only, as the server's KV
        assert torch.equal(found[layer], engine.rows(blocks, layer)[: 3 * CHUNK])
    assert engine.sink.figures == {"taken": 3, "lost": 0}
    assert shared_server.put_kv(ids) == 3
    shared_server.delete_kv(ids, [1])  # they have the names of their KV
    wait_until(lambda: client.coverage(ids, LAYERS) == CHUNK, 60)
    engine.worker.close()
    client.close()


def test_salts_and_images(shared_server: MpServer) -> None:
    engine, client = Engine(shared_server), shared_server.client(read_timeout_sec=60)
    ids, blocks = prompt(2, 2 * CHUNK + 1), list(range(2 * PER_CHUNK + 1))
    engine.serve(ids, blocks, KeyInputs(None, CHUNK + 3, "alice"))
    assert client.coverage(ids, LAYERS) == 0
    assert client.coverage(ids, LAYERS, cache_salt="alice") == CHUNK
    engine.worker.close()
    client.close()


def test_a_server_that_is_not_there_costs_rows_and_nothing_else(tmp_path: Path) -> None:
    engine = Engine(MpServer(tmp_path / "cold", tmp_path / "log"))
    engine.serve(prompt(3, 2 * CHUNK + 1), list(range(2 * PER_CHUNK + 1)))
    assert engine.sink.figures == {"taken": 2, "lost": 2}
    engine.worker.close()


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"mp_server_url": "http://host"}, "mp_server_url"),
        ({"mp_server_url": "tcp://127.0.0.1:5555", "emit": "both"}, "emit"),
    ],
)
def test_settings_that_do_not_go_together_are_named(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        ConnectorSettings.from_connector(settings)


def test_a_chunk_size_that_is_not_the_servers_is_refused(shared_server: MpServer) -> None:
    settings = ConnectorSettings.from_connector({"mp_server_url": shared_server.url, "chunk_size": 2 * CHUNK})
    ident = NamespaceId(model=MODEL, kv_dtype="bfloat16", chunk_size=2 * CHUNK)
    with pytest.raises(ConfigError, match=f"chunk_size.*must be {CHUNK}"):
        open_server(settings, CapturedModel(ident, KEY_FORMAT, LAYERS, "{}", {}))
