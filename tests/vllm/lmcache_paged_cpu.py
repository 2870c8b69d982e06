"""KV between LMCache's memory and vLLM's paged caches on a CPU, which LMCache itself has nothing for."""

from __future__ import annotations

from typing import Any

import torch

try:
    from lmcache.inprocess.v1.gpu_connector.mock_gpu_connector import MockGPUConnector  # 0.5.7
except ImportError:
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector


class PagedCpu(MockGPUConnector):
    """Between objects ``[2, layers, tokens, width]`` and caches ``[blocks, heads, block size, key and value]``."""

    def __init__(self, kv_shape: tuple[int, ...]) -> None:
        super().__init__(kv_shape)
        self.layers, _, _, self.heads, self.head = kv_shape

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self.layers, num_tokens, self.heads * self.head])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            slots = kwargs["slot_mapping"][start:end]
            for layer, cache in enumerate(kwargs["kvcaches"]):
                size = cache.shape[2]
                rows = cache[slots // size, :, slots % size].view(end - start, self.heads, 2, self.head)
                obj.tensor[:, layer] = rows.permute(2, 0, 1, 3).reshape(2, end - start, -1)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            slots = kwargs["slot_mapping"][start:end]
            for layer, cache in enumerate(kwargs["kvcaches"]):
                size = cache.shape[2]
                rows = obj.tensor[:, layer].view(2, end - start, self.heads, self.head)
                cache[slots // size, :, slots % size] = rows.permute(1, 2, 0, 3).reshape(end - start, self.heads, -1)


def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> PagedCpu:
    """In place of LMCache's CreateGPUConnector."""
    return PagedCpu(metadata.kv_shape)
