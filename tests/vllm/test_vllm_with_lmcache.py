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

from lmcache_hs_backend.integrations.vllm.capture import Capture, Model
from lmcache_hs_backend.integrations.vllm.device import HiddenStatesCache
from lmcache_hs_backend.integrations.vllm.lmcache_engine import EngineChunks, find_store
from lmcache_hs_backend.integrations.vllm.messages import Finish, Step, Take
from lmcache_hs_backend.integrations.vllm.sequence import ChunkedSequence, Keying
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings
from lmcache_hs_backend.integrations.vllm.worker import Worker
from lmcache_hs_backend.tiers.namespace import NamespaceId

pytest.importorskip("lmcache", reason="needs LMCache beside this package")
pytestmark = pytest.mark.engine
LAYERS, HIDDEN = (2, 5), 32


def test_rows_go_to_the_engines_store_and_leave_with_their_kv(start: Callable[..., Any]) -> None:
    engine = start()
    chunk = engine.engine.config.chunk_size
    connector = SimpleNamespace(_lmcache_engine=SimpleNamespace(lmcache_engine=engine.engine))
    found = find_store([SimpleNamespace(), connector])
    assert found is not None
    assert (found.store, found.chunk_size) == (engine.engine.hidden_state_store, chunk)

    cache = torch.randn(8, len(LAYERS), chunk, HIDDEN).to(torch.bfloat16)
    settings = ConnectorSettings.from_connector({"chunk_size": chunk})
    model = Model(NamespaceId(model="m"), Keying("m", "bfloat16"), LAYERS, "{}", {})
    worker = Worker(HiddenStatesCache(cache), Capture(settings, model, found.tiers), None, EngineChunks(found))
    ids = list(range(1000, 1000 + 3 * chunk + 7))
    engine.store_kv(ids)
    chunks, blocks = ChunkedSequence(model.keying, chunk), [6, 2, 5, 1]
    full = [Take("r", ref, data, [blocks[n]]) for n, (ref, data) in enumerate(chunks.advance(ids, 3 * chunk))]
    tail = [Take("r", ref, data, [blocks[3]]) for ref, data in chunks.close(ids, len(ids))]
    worker.wrote_hidden_states()
    worker.after_step(Step(tokens=3 * chunk, takes=full[:2]))
    worker.after_step(Step(tokens=0, takes=full[2:]))
    worker.finish(Finish("r", tail, chunks.refs, {"request_id": "r"}, None))
    worker.close()

    store = engine.engine.hidden_state_store
    for number, layer in enumerate(LAYERS):
        rows = store.retrieve_hidden_states(ids, layer_idx=layer)
        assert torch.equal(rows, torch.cat([cache[b, number] for b in blocks[:3]]).float())
    assert store.num_cached_chunks() == 3  # LMCache makes no chunk of the tail

    engine.engine.clear()
    assert store.retrieve_hidden_states(ids, layer_idx=LAYERS[0]) is None
    assert store.num_cached_chunks() == 0
