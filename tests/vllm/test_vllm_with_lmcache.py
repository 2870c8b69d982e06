"""With an LMCache engine in the process: its store is used, under its names, and rows go when their KV goes.

LMCache's own vLLM connector does not run on a CPU, so here a real LMCacheEngine stands behind an object with
that connector's attributes, and the worker's half is driven as vLLM drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat
from lmcache_hs_backend.integrations.vllm.protocol import Finish, KeyInputs, ReadyChunk, Step
from lmcache_hs_backend.integrations.vllm.scheduler_side.sequence import ChunkedSequence
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings
from lmcache_hs_backend.integrations.vllm.worker_side.device import HiddenStatesCache
from lmcache_hs_backend.integrations.vllm.worker_side.lmcache_engine import EngineChunks, find_store
from lmcache_hs_backend.integrations.vllm.worker_side.sink import CapturedModel, CaptureSink
from lmcache_hs_backend.integrations.vllm.worker_side.worker import Worker

pytest.importorskip("lmcache", reason="needs LMCache beside this package")
pytestmark = pytest.mark.engine
LAYERS, HIDDEN = (2, 5), 32


class Rig:
    """A worker's half beside an engine, as vLLM would drive it, over a cache of random rows."""

    def __init__(self, engine: Any) -> None:
        connector = SimpleNamespace(_lmcache_engine=SimpleNamespace(lmcache_engine=engine.engine))
        found = find_store([SimpleNamespace(), connector])
        assert found is not None
        self.engine, self.found, self.chunk = engine, found, found.chunk_size
        self.cache = torch.randn(8, len(LAYERS), self.chunk, HIDDEN).to(torch.bfloat16)
        settings = ConnectorSettings.from_connector({"chunk_size": self.chunk})
        self.model = CapturedModel(NamespaceId(model="m"), KeyFormat("m", "bfloat16"), LAYERS, "{}", {})
        capture = CaptureSink(settings, self.model, found.tiers, found.allowed)
        self.worker = Worker(HiddenStatesCache(self.cache), capture, None, EngineChunks(found))

    def serve(self, ids: list[int], blocks: list[int], key_inputs: KeyInputs | None = None) -> None:
        """A request that is computed in two steps, and its end."""
        chunks = ChunkedSequence(self.model.key_format, self.chunk)
        ready = [
            ReadyChunk("r", ref, data, [blocks[ref.start // self.chunk]]) for ref, data in chunks.close(ids, len(ids))
        ]
        self.worker.wrote_hidden_states()
        self.worker.after_step(Step(tokens=1, ready=ready[:2], named={} if key_inputs is None else {"r": key_inputs}))
        self.worker.after_step(Step(tokens=0, ready=ready[2:-1]))
        self.worker.finish(Finish("r", ready[-1:], chunks.refs, {"request_id": "r"}, None))

    def right(self, blocks: list[int], layer: int) -> torch.Tensor:
        return torch.cat([self.cache[b, LAYERS.index(layer)] for b in blocks]).float()


def test_rows_go_to_the_engines_store_and_leave_with_their_kv(start: Callable[..., Any]) -> None:
    rig = Rig(start())
    engine, store = rig.engine, rig.engine.store
    assert (rig.found.store, rig.chunk) == (store, engine.config.chunk_size)
    ids, blocks = list(range(1000, 1000 + 3 * rig.chunk + 7)), [6, 2, 5, 1]
    engine.store_kv(ids)
    rig.serve(ids, blocks)
    rig.worker.close()
    for layer in LAYERS:
        rows = store.retrieve_hidden_states(ids, layer_idx=layer)
        assert torch.equal(rows, rig.right(blocks[:3], layer))
    assert store.num_cached_chunks() == 3  # LMCache makes no chunk of the tail

    engine.engine.clear()
    assert store.retrieve_hidden_states(ids, layer_idx=LAYERS[0]) is None
    assert store.num_cached_chunks() == 0


def test_only_the_layers_that_lmcache_allows_are_taken(start: Callable[..., Any]) -> None:
    rig = Rig(start(hidden_state_layers=[LAYERS[1], 77]))
    ids, blocks = list(range(2000, 2000 + 2 * rig.chunk + 7)), [6, 2, 5]
    rig.engine.store_kv(ids)
    rig.serve(ids, blocks)
    store = rig.engine.store
    assert store.retrieve_hidden_states(ids, layer_idx=LAYERS[0]) is None
    assert torch.equal(store.retrieve_hidden_states(ids, layer_idx=LAYERS[1]), rig.right(blocks[:2], LAYERS[1]))
    rig.worker.close()


def test_a_requests_tags_are_part_of_its_chunks_names(start: Callable[..., Any]) -> None:
    rig = Rig(start())
    tags = {"lmcache.tag.user": "a"}
    ids, blocks = list(range(3000, 3000 + 2 * rig.chunk + 7)), [6, 2, 5]
    rig.engine.store_kv(ids)
    rig.engine.store_kv(ids, request_configs=tags)
    rig.serve(ids, blocks, KeyInputs(tags, None))
    store = rig.engine.store
    assert store.retrieve_hidden_states(ids, layer_idx=LAYERS[0]) is None
    rows = store.retrieve_hidden_states(ids, layer_idx=LAYERS[0], request_configs=tags)
    assert torch.equal(rows, rig.right(blocks[:2], LAYERS[0]))
    rig.serve(ids, [0, 1, 3])  # without tags it is another request, and its rows are stored too
    assert torch.equal(store.retrieve_hidden_states(ids, layer_idx=LAYERS[0]), rig.right([0, 1], LAYERS[0]))
    rig.worker.close()


def test_chunks_from_an_image_on_are_left_out_because_lmcache_names_them_after_it(start: Callable[..., Any]) -> None:
    rig = Rig(start())
    ids, blocks = list(range(4000, 4000 + 3 * rig.chunk + 7)), [6, 2, 5, 1]
    rig.engine.store_kv(ids)
    rig.serve(ids, blocks, KeyInputs(None, rig.chunk + 3))
    store = rig.engine.store
    rows = store.retrieve_hidden_states(ids, layer_idx=LAYERS[0])
    assert torch.equal(rows, rig.right(blocks[:1], LAYERS[0]))
    rig.worker.close()
