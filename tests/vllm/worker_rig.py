"""The worker's half of the connector over a cache of random rows, driven as vLLM drives it, without vLLM."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat
from lmcache_hs_backend.integrations.vllm.protocol import Finish, ReadyChunk, Step
from lmcache_hs_backend.integrations.vllm.scheduler_side.sequence import ChunkedSequence
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings
from lmcache_hs_backend.integrations.vllm.worker_side.device import HiddenStatesCache
from lmcache_hs_backend.integrations.vllm.worker_side.sink import CapturedModel, CaptureSink
from lmcache_hs_backend.integrations.vllm.worker_side.worker import Worker
from lmcache_hs_backend.tiered import TieredStore
from tests.support.waiting import wait_until

KEY_FORMAT = KeyFormat("model", "bfloat16")
CHUNK, BLOCK, LAYERS, HIDDEN = 16, 8, (2, 5), 32


class Rig:
    """A worker over a cache of random rows, as vLLM would drive it."""

    def __init__(self, directory: Path, *, files: FileLayer | None = None, **changes: Any) -> None:
        """``files``: the disk, when it is one with faults; the tiers are then not the sink's own."""
        self.directory = directory
        self.cache = torch.randn(32, len(LAYERS), BLOCK, HIDDEN).to(torch.bfloat16)
        settings = ConnectorSettings.from_connector(
            {"cold_path": str(directory), "hot_size": 0.01, "max_cold_size": 0.1, "chunk_size": CHUNK, **changes}
        )
        ident = NamespaceId(model="model", kv_dtype="bfloat16", chunk_size=CHUNK)
        self.store = None if files is None else TieredStore(settings, settings.hot_bytes, ident, files=files)
        model = CapturedModel(ident, KEY_FORMAT, LAYERS, '{"source": "test"}', {})
        self.sink = CaptureSink(settings, model, self.store)
        self.worker = Worker(HiddenStatesCache(self.cache), self.sink, None, wait_sec=settings.store_wait_ms / 1000)

    def ready(self, ids: list[int], blocks: list[int]) -> tuple[list[ReadyChunk], ChunkedSequence]:
        sequence = ChunkedSequence(KEY_FORMAT, CHUNK)
        chunks = sequence.close(ids, len(ids))
        per_chunk = CHUNK // BLOCK
        return [
            ReadyChunk("r", ref, data, blocks[n * per_chunk : (n + 1) * per_chunk])
            for n, (ref, data) in enumerate(chunks)
        ], sequence

    def serve(self, ids: list[int], blocks: list[int], *, wrote: bool = True, foreign: tuple[int, ...] = ()) -> None:
        """One step in which a whole request is computed, and its end."""
        self.start(ids, blocks, wrote=wrote, foreign=foreign)
        wait_until(lambda: self.sink.idle)

    def start(self, ids: list[int], blocks: list[int], *, wrote: bool = True, foreign: tuple[int, ...] = ()) -> None:
        """The same, without waiting until its rows are on disk."""
        ready, sequence = self.ready(ids, blocks)
        step = Step(tokens=len(ids), ready=ready, written=[(b, True) for b in blocks], foreign=list(foreign))
        if wrote:
            self.worker.wrote_hidden_states()
        self.worker.after_step(step)
        record = {"request_id": "r", "prompt_tokens": len(ids), "expected_tokens": len(ids)}
        assert not self.worker.finish(Finish("r", ready[-1:], sequence.refs, record, None))

    def right(self, ids: list[int], blocks: list[int], layer: int) -> torch.Tensor:
        return torch.cat([self.cache[b, LAYERS.index(layer)] for b in blocks])[: len(ids)]

    def close(self) -> None:
        self.worker.close()
        if self.store is not None:
            self.store.close()


class Copying:
    """Stands in for the event of a copy from a GPU, which this machine does not have: it ends when ``done`` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(30)
