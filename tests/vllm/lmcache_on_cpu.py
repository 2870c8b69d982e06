"""LMCache's connector for vLLM, changed only so far that it runs on a CPU.

LMCache has no connector for CPU memory (``No supported cpu connector found``), so it gets one that really copies
KV. It expects nothing but KV among vLLM's caches, so the hidden states' is not shown to it. And vLLM's
wrapper passes no shutdown on; here the engine is closed. (All of LMCache's shutdown ends in an assertion of ZeroMQ when
everything runs in one process, and without it LMCache's threads never end: vllm_run.py exits hard.)
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class LMCacheOnCpu(LMCacheConnectorV1):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not at the top: vLLM on a CPU looks into every module that is there when it starts, and trips over LMCache's.
        import lmcache.v1.gpu_connector

        from tests.vllm.lmcache_paged_cpu import create

        lmcache.v1.gpu_connector.CreateGPUConnector = create
        super().__init__(*args, **kwargs)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches({name: c for name, c in kv_caches.items() if not name.startswith("cache_only")})

    def shutdown(self) -> None:
        engine = self._lmcache_engine.lmcache_engine
        if engine is not None:  # beside the scheduler there is none
            engine.close()
