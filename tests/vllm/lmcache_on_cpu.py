"""LMCache's connector for vLLM, changed only so far that it runs on a CPU.

vLLM gets the very line of the docs (``LMCacheConnectorV1Dynamic`` with LMCache's module) and imports that module
itself, so modules are changed when they are imported:

- vLLM on a CPU asks every object of every module for its ``__dict__`` when it starts. llvmlite, which LMCache imports
  through numba, answers that with a function of its library, and vLLM ends with an AttributeError.
- LMCache has no connector for CPU memory (``No supported cpu connector found``), so it gets one that really copies KV.
- It expects nothing but KV among vLLM's caches, so the hidden states' is not shown to it.
- All of its shutdown ends in an assertion of ZeroMQ when everything runs in one process, so only its engine is closed.
  Its threads never end then: vllm_run.py exits hard.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

#: What goes into ``kv_transfer_config``, as docs/how-to/vllm.md has it.
CONNECTOR = {
    "kv_connector": "LMCacheConnectorV1Dynamic",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
}


def _hide_dict(module: ModuleType) -> None:
    plain = module._lib_wrapper.__getattr__

    def getattr_(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return plain(self, name)

    module._lib_wrapper.__getattr__ = getattr_


def _copy_on_cpu(module: ModuleType) -> None:
    def create(*given: Any, **more: Any) -> Any:
        from tests.vllm.lmcache_paged_cpu import create

        return create(*given, **more)

    module.CreateGPUConnector = create  # type: ignore[attr-defined]


def _run_on_cpu(module: ModuleType) -> None:
    connector = module.LMCacheConnectorV1Dynamic
    plain = connector.register_kv_caches

    def register_kv_caches(self: Any, kv_caches: dict[str, Any]) -> None:
        plain(self, {name: cache for name, cache in kv_caches.items() if not name.startswith("cache_only")})

    def shutdown(self: Any) -> None:
        engine = self._lmcache_engine.lmcache_engine
        if engine is not None:  # beside the scheduler there is none
            engine.close()

    connector.register_kv_caches, connector.shutdown = register_kv_caches, shutdown


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "llvmlite.binding.ffi": _hide_dict,
    "lmcache.v1.gpu_connector": _copy_on_cpu,  # LMCache 0.5.6
    "lmcache.inprocess.v1.gpu_connector": _copy_on_cpu,  # 0.5.7
    CONNECTOR["kv_connector_module_path"]: _run_on_cpu,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds those modules where they are, and changes them after they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _CHANGES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if change is not None else None
        if change is not None and spec is not None and spec.loader is not None:
            run, then = spec.loader.exec_module, change

            def exec_module(module: ModuleType) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """In the process that runs vLLM, before it starts."""
    sys.meta_path.insert(0, _Finder())
