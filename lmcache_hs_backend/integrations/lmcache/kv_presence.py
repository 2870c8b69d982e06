"""Does LMCache still hold the KV of a chunk? Present, gone, or unknown.

Only "gone" deletes hidden states, so it needs proof: every backend was asked and answered for itself, none
of them was frozen out, bypassed, missing, disconnected, of a kind that cannot know, or in the middle of
storing that very chunk. A ``contains`` that returns True is believed at once, from any backend.

Backends that answer from memory are asked first. What they do not have is asked of the others, of all of them at once
and within one deadline (``slow_backends``). Never called under a lock; on the storage manager's own event loop
(where a remote ``contains`` waits for itself) no backend is asked.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from lmcache_hs_backend.chunk import KeyForm, Presence
from lmcache_hs_backend.integrations.lmcache.compat import CacheEngineKey, real_backend
from lmcache_hs_backend.integrations.lmcache.slow_backends import SlowBackends

#: Backends whose ``contains`` says False for KV that they can deliver, or has side effects.
_CANNOT_KNOW = ("P2PBackend", "PDBackend", "PDBackendAsync")
#: Backends that answer from a table in memory, so that asking them never blocks.
_MEMORY_ONLY = ("LocalCPUBackend", "LocalDiskBackend")


def short_keys() -> KeyForm:
    """Keep a CacheEngineKey by its hash alone: the rest, 170 bytes, is equal for all chunks of an engine.

    A key with tags, or another engine's, is kept whole.
    """
    first: list[CacheEngineKey] = []

    def keep(key: Any) -> Any:
        if type(key) is not CacheEngineKey or key.tags:
            return key
        if not first:
            first.append(dataclasses.replace(key, request_configs=None))
        ours = first[0]
        equal = (
            key.model_name == ours.model_name
            and key.worker_id == ours.worker_id
            and key.world_size == ours.world_size
            and key.dtype is ours.dtype
        )
        return key.chunk_hash if equal else key

    def whole(kept: Any) -> Any:
        if kept is None or isinstance(kept, CacheEngineKey):
            return kept
        return dataclasses.replace(first[0], chunk_hash=kept)

    return KeyForm(keep, whole)


class KvPresence:
    """Asks the storage manager of one engine. Until one is bound, every KV counts as present."""

    def __init__(self, use_layerwise: bool, timeout_sec: float) -> None:
        """``timeout_sec``: how long the backends that may block can take for one call, all together."""
        self._use_layerwise = use_layerwise
        self._slow = SlowBackends(timeout_sec)
        self._storage_manager: Any = None
        self._engine: weakref.ref[Any] | None = None
        self._seen: set[str] = set()  # names of all KV backends that there ever were

    def bind(self, storage_manager: Any) -> None:
        """The storage manager to ask: LMCache's, or anything with its ``contains``."""
        self._storage_manager = storage_manager

    def watch(self, engine: Any) -> None:
        """An engine that reports itself unhealthy makes every absence unknown."""
        self._engine = weakref.ref(engine)

    def ask(self, keys: Sequence[Any], memory_only: bool) -> list[Presence]:
        """One answer per CacheEngineKey, in order. ``memory_only``: ask only where it cannot block."""
        manager = self._storage_manager
        if manager is None:
            return [Presence.PRESENT] * len(keys)
        if not keys:
            return []
        if getattr(manager, "thread", None) is threading.current_thread():
            return [Presence.UNKNOWN] * len(keys)
        if self._use_layerwise:
            keys = [key.get_first_layer() for key in keys]
        if not hasattr(manager, "storage_backends"):
            return [Presence.PRESENT if manager.contains(key) is not None else Presence.GONE for key in keys]
        return self._ask_backends(manager, keys, memory_only)

    def _ask_backends(self, manager: Any, keys: Sequence[Any], memory_only: bool) -> list[Presence]:
        backends = {
            name: backend
            for name, backend in list(manager.storage_backends.items())
            if not getattr(real_backend(backend), "holds_no_kv", False)
        }
        self._seen |= backends.keys()
        reachable = _reachable(manager, backends)
        quick = {name: backend for name, backend in reachable.items() if _is_memory_only(backend)}
        slow = {name: backend for name, backend in reachable.items() if name not in quick}
        present = 0
        for backend in quick.values():  # as LMCache walks: each takes up where the one before it ended
            present += backend.batched_contains(list(keys[present:])) if present < len(keys) else 0
        answers = [Presence.PRESENT] * present
        if present == len(keys):
            return answers
        # That walk passes each backend once, so it stops at the first prefix that is spread over two.
        asked = {} if memory_only else slow
        certain = quick.keys() | asked.keys() == backends.keys() and self._complete(manager, backends)
        rest = keys[present:]
        # First whether it is on its way: a put that ends between the two questions is then seen by the second.
        unsure = [
            not certain or any(_in_put_tasks(backend, key) for backend in (*quick.values(), *asked.values()))
            for key in rest
        ]
        held: list[bool | None] = [any(backend.contains(key) for backend in quick.values()) for key in rest]
        absent = [number for number, here in enumerate(held) if not here]
        if asked and absent:
            found = self._slow.ask(asked, [rest[number] for number in absent])
            for number, here in zip(absent, found, strict=True):
                held[number] = here
        for here, doubt in zip(held, unsure, strict=True):
            answers.append(Presence.PRESENT if here else Presence.UNKNOWN if doubt or here is None else Presence.GONE)
        return answers

    def close(self) -> None:
        """Ask the backends no more."""
        self._slow.close()

    def _complete(self, manager: Any, backends: dict[str, Any]) -> bool:
        """Whether there is no other place where the KV may be."""
        engine = self._engine() if self._engine is not None else None
        healthy = engine is None or engine.is_healthy()
        # A backend that has been closed may come back, with all that it held.
        return healthy and self._seen == backends.keys() and not any(map(_cannot_know, backends.values()))


def _reachable(manager: Any, backends: dict[str, Any]) -> dict[str, Any]:
    """The backends from which LMCache would load KV now."""
    bypassed, frozen = set(manager.get_bypassed_backends()), manager.is_frozen()
    return {
        name: backend
        for name, backend in backends.items()
        if name not in bypassed and not (frozen and name != "LocalCPUBackend")
    }


def _in_put_tasks(backend: Any, key: Any) -> bool:
    try:
        return bool(backend.exists_in_put_tasks(key))
    except NotImplementedError:
        return False


def _is_memory_only(backend: Any) -> bool:
    return type(real_backend(backend)).__name__ in _MEMORY_ONLY


def _cannot_know(backend: Any) -> bool:
    backend = real_backend(backend)
    if type(backend).__name__ in _CANNOT_KNOW:
        return True
    # A RemoteBackend without a connection answers False for everything.
    return hasattr(backend, "connection") and backend.connection is None
