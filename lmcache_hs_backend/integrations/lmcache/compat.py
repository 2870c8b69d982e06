"""The only place that names LMCache's modules for code that runs in an engine, because they move.

0.5.6 keeps the in-process engine in ``lmcache.v1``; 0.5.7 moves it to ``lmcache.inprocess.v1`` without
leaving anything behind, and calls it deprecated. Everything else that is used here has stayed.
"""

from __future__ import annotations

from typing import Any

from lmcache.logging import init_logger
from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, TORCH_DTYPE_TO_STR_DTYPE, CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface, StoragePluginInterface

try:
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
except ImportError:
    from lmcache.inprocess.v1.cache_engine import LMCacheEngineBuilder

__all__ = [
    "STR_DTYPE_TO_TORCH_DTYPE",
    "TORCH_DTYPE_TO_STR_DTYPE",
    "CacheEngineKey",
    "LMCacheEngineConfig",
    "LMCacheMetadata",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "StorageBackendInterface",
    "StoragePluginInterface",
    "TensorMemoryObj",
    "find_engine",
    "init_logger",
    "labels",
    "real_backend",
]


def find_engine(metadata: LMCacheMetadata) -> Any | None:
    """The engine that is building a backend: the one with this very metadata object.

    Neither the config (two engines may share one) nor an instance id (each server has its own) tells. Where two
    engines share the metadata too, it is the one that has no storage manager yet.
    """
    engines = [engine for engine in list(LMCacheEngineBuilder._instances.values()) if engine.metadata is metadata]
    return next((engine for engine in engines if engine.storage_manager is None), engines[0] if engines else None)


def real_backend(backend: Any) -> Any:
    """The storage backend behind LMCache's audit wrapper, if there is one."""
    return getattr(backend, "real_backend", backend)


def labels(metadata: LMCacheMetadata) -> dict[str, object]:
    """The Prometheus labels that LMCache gives its own metrics."""
    return {
        "model_name": metadata.model_name,
        "worker_id": metadata.worker_id,
        "role": metadata.role or "",
        "served_model_name": getattr(metadata, "served_model_name", None) or "",
    }
