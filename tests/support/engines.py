"""Real LMCache engines on CPU for the tests, with KV that is really stored and loaded.

Works with both tested releases: 0.5.7 has moved the in-process engine.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.layout import SUFFIX
from lmcache_hs_backend.integrations.lmcache.tier_backends import HiddenStateKey
from tests.support.waiting import wait_until

try:
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.ec_engine import ECCacheEngine
    from lmcache.v1.gpu_connector.gpu_connectors import VLLMPagedMemLayerwiseGPUConnector
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.v1.hidden_state_store import HiddenStateStore
    from lmcache.v1.token_database import ChunkedTokenDatabase
except ImportError:
    from lmcache.inprocess.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.inprocess.v1.ec_engine import ECCacheEngine
    from lmcache.inprocess.v1.gpu_connector.gpu_connectors import VLLMPagedMemLayerwiseGPUConnector
    from lmcache.inprocess.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.inprocess.v1.hidden_state_store import HiddenStateStore
    from lmcache.inprocess.v1.token_database import ChunkedTokenDatabase

__all__ = [
    "ChunkedTokenDatabase",
    "ECCacheEngine",
    "Engine",
    "HiddenStateStore",
    "LMCacheEngineBuilder",
    "make_config",
    "make_metadata",
]

CHUNK = 64
KV_LAYERS, KV_HEADS, KV_HEAD = 2, 1, 32
HIDDEN = 512
#: What the rows of a chunk of ``rows_of`` take in the hot tier (bfloat16), and about what their file takes.
CHUNK_BYTES = CHUNK * HIDDEN * 2
FILE_BYTES = CHUNK_BYTES + 4096
MIB = 1 << 20
GIB = 1 << 30

_numbers = itertools.count()

# Every engine begins with gc.collect(), which would walk all of torch each time: 0.2 s.
gc.freeze()


def rows_of(num_tokens: int, hidden: int = HIDDEN, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random rows that are the same for the same seed."""
    return torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens_of(num_chunks: float, seed: int = 0, chunk: int = CHUNK) -> list[int]:
    """Token ids of a prompt of so many chunks."""
    count = int(num_chunks * chunk)
    return torch.randint(0, 50_000, (count,), generator=torch.Generator().manual_seed(seed + 1000)).tolist()


class CpuConnector(MockGPUConnector):
    """Moves KV between memory objects and a CPU tensor ``[2, layers, tokens, width]`` given as ``kv``."""

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            obj.tensor.copy_(kwargs["kv"][:, :, start:end, :])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            kwargs["kv"][:, :, start:end, :] = obj.tensor


class LayerwiseCpuConnector(VLLMPagedMemLayerwiseGPUConnector):
    """Moves the KV of one layer after the other, as LMCache demands with ``use_layerwise``."""

    def __init__(self, kv_shape: tuple[int, ...]) -> None:
        self.num_layers = kv_shape[0]
        self.width = kv_shape[3] * kv_shape[4]

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([num_tokens, 2, self.width])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> Iterator[None]:
        yield
        for layer, objs in enumerate(memory_objs):
            for obj, start, end in zip(objs, starts, ends, strict=True):
                obj.tensor.copy_(kwargs["kv"][:, layer, start:end, :].transpose(0, 1))
            yield


class GatedFiles(FileLayer):
    """A disk on which one kind of system call waits: it says when the first one ``arrived``, until ``open_gate``."""

    def __init__(self, call: str) -> None:
        self.arrived = threading.Event()
        self._gate = threading.Event()
        real = getattr(FileLayer, call)

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.arrived.set()
            assert self._gate.wait(60), "nobody has opened the gate"
            return real(*args, **kwargs)

        setattr(self, call, gated)

    def open_gate(self) -> None:
        self._gate.set()


@contextlib.contextmanager
def logged(logger: str, level: int = logging.INFO) -> Iterator[list[str]]:
    """The messages of a logger (LMCache's do not propagate, so pytest's caplog does not see them)."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    target = logging.getLogger(logger)
    before = target.level
    target.addHandler(handler)
    target.setLevel(min(level, before or level))
    try:
        yield messages
    finally:
        target.removeHandler(handler)
        target.setLevel(before)


def our_threads() -> list[str]:
    """The names of this package's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hs-")]


def chunk_files(directory: object) -> list[Path]:
    """The chunk files below a directory, archived and quarantined ones included."""
    # os.walk passes over a directory that vanishes meanwhile, such as one of the trash; Path.rglob raises.
    walk = os.walk(str(directory))
    return sorted(Path(folder, file) for folder, _, files in walk for file in files if file.endswith(SUFFIX))


def make_metadata(**changes: Any) -> LMCacheMetadata:
    chunk = changes.pop("chunk", CHUNK)
    values: dict[str, Any] = {
        "model_name": "org/test-model",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (KV_LAYERS, 2, chunk, KV_HEADS, KV_HEAD),
        "use_mla": False,
        "role": "worker",
        "chunk_size": chunk,
    }
    return LMCacheMetadata(**(values | changes))


def make_config(
    cold_path: object,
    *,
    plugin: str = "hs_tiered",
    hot_bytes: int = 16 * MIB,
    settings: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> LMCacheEngineConfig:
    """An engine config with the plugin; ``settings`` are ours, without their prefix."""
    prefix = f"storage_plugin.{plugin}."
    ours = {"cold_path": str(cold_path), "max_cold_size": 1, "min_free_disk": 0, **(settings or {})}
    extra_config = {
        f"{prefix}module_path": "lmcache_hs_backend",
        f"{prefix}class_name": "HSTieredBackend",
        **{prefix + key: value for key, value in ours.items()},
        **(extra or {}),
    }
    values: dict[str, Any] = {
        "chunk_size": CHUNK,
        "local_cpu": True,
        "max_local_cpu_size": 0.02,
        "save_unfull_chunk": False,
        "enable_hidden_state_cache": True,
        "max_hidden_state_cpu_size": hot_bytes / GIB,
        "storage_plugins": [plugin],
        "extra_config": extra_config,
        "lmcache_instance_id": f"test-{next(_numbers)}",
    }
    return LMCacheEngineConfig.from_defaults(**(values | changes))


class Engine:
    """A real engine, its store, and KV by seed. Use as a context manager."""

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata | None = None) -> None:
        self.id = f"engine-{next(_numbers)}"
        self.config = config
        self.metadata = metadata or make_metadata(chunk=config.chunk_size)
        connector = LayerwiseCpuConnector if config.use_layerwise else CpuConnector
        self.engine = LMCacheEngineBuilder.get_or_create(
            self.id,
            config,
            self.metadata,
            connector(self.metadata.kv_shape),
            lambda tensor, source: tensor,
            lambda obj, source: obj,
        )
        self.engine.post_init()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self.id)

    @property
    def store(self) -> Any:
        return self.engine.hidden_state_store

    @property
    def manager(self) -> Any:
        return self.engine.storage_manager

    @property
    def plugin(self) -> Any:
        """Our façade, audited or not."""
        backend = self.manager.storage_backends["hs_tiered"]
        return getattr(backend, "real_backend", backend)

    def backend(self, name: str) -> Any:
        """One of the storage backends, audited or not."""
        backend = self.manager.storage_backends[name]
        return getattr(backend, "real_backend", backend)

    def kv(self, tokens: list[int], seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, KV_LAYERS, len(tokens), KV_HEADS * KV_HEAD, generator=generator).to(torch.bfloat16)

    def store_kv(self, tokens: list[int], **kwargs: Any) -> torch.Tensor:
        kv = self.kv(tokens)
        if self.config.use_layerwise:
            for _ in self.engine.store_layer(torch.tensor(tokens), kv=kv, **kwargs):
                pass
        else:
            self.engine.store(torch.tensor(tokens), kv=kv, **kwargs)
        return kv

    def store_both(self, tokens: list[int], rows: torch.Tensor, **kwargs: Any) -> None:
        """KV first, then the hidden states of layer 0, all of them."""
        self.store_kv(tokens)
        stored = self.store.store_hidden_states(tokens, rows, **kwargs)
        assert stored == len(tokens) // self.config.chunk_size

    def retrieve(self, tokens: list[int], **kwargs: Any) -> Any:
        return self.store.retrieve_hidden_states(tokens, **kwargs)

    def served(self, tokens: list[int], **kwargs: Any) -> int:
        """How many tokens of hidden states a retrieve gives."""
        rows = self.retrieve(tokens, **kwargs)
        return 0 if rows is None else len(rows)

    def make_cold(self, tokens: list[int]) -> None:
        """Have a prompt's chunks leave RAM: written, then crowded out by another prompt's rows."""
        store = self.store
        assert store.flush(10) == 0
        filler = tokens_of(store.stats()["capacity_bytes"] // CHUNK_BYTES, seed=next(_numbers) + 500)
        self.store_both(filler, rows_of(len(filler)))
        assert store.flush(10) == 0
        assert all(self.tiers_of(key) == (False, True) for key in self.keys(tokens))

    def tiers_of(self, key: Any, layer_idx: int = 0) -> tuple[bool, bool]:
        """Whether a layer of a chunk is in RAM, and whether it is on disk."""
        return (
            self.plugin.hot.contains(HiddenStateKey(key, layer_idx)),
            self.plugin.cold.contains(HiddenStateKey(key, layer_idx)),
        )

    def use_files(self, files: FileLayer) -> None:
        """Put a disk that misbehaves under the running store."""
        self.store.debug.use_files(files)

    @property
    def files(self) -> list[Path]:
        """The chunk files of this engine's namespace."""
        return chunk_files(self.store.tiers.directory)

    def keys(self, tokens: list[int], request_configs: dict[str, Any] | None = None) -> list[Any]:
        database = self.engine.token_database
        return [key for _, _, key in database.process_tokens(tokens=tokens, request_configs=request_configs)]

    def evict_kv(self, key: Any) -> None:
        """As LMCache's own LRU does: the backend drops it and tells nobody."""
        for backend in self.manager.storage_backends.values():
            real = getattr(backend, "real_backend", backend)
            if not getattr(real, "holds_no_kv", False):
                real.remove(key)

    def wait(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        wait_until(condition, seconds)

    def settled(self) -> Any:
        """The store, with everything that was on disk at start known."""
        assert self.store.tiers.wait_recovered(20)
        return self.store
