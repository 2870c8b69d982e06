"""Does LMCache still hold the KV of a chunk? Present, gone, or nobody can say.

Only "gone" deletes hidden states, so it needs proof: every backend was asked, none of them was frozen
out, bypassed, disconnected, of a kind that cannot know, or in the middle of storing that very chunk. A
``contains`` that returns True is believed at once, from any backend.

May block on a remote backend; it is never called under a lock, and on the storage manager's own event
loop (where a remote ``contains`` waits for itself) it asks nobody.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.integrations.lmcache.compat import real_backend

#: Backends whose ``contains`` says False for KV that they can deliver, or has side effects.
_CANNOT_KNOW = ("P2PBackend", "PDBackend", "PDBackendAsync")
#: Backends that answer from a table in memory, so that asking them never blocks.
_MEMORY_ONLY = ("LocalCPUBackend", "LocalDiskBackend")


class KvPresence:
    """Asks the storage manager of one engine. Until one is bound, every KV counts as present."""

    def __init__(self, use_layerwise: bool) -> None:
        self._use_layerwise = use_layerwise
        self._storage_manager: Any = None
        self._engine: weakref.ref[Any] | None = None

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
        backends = list(_kv_backends(manager))
        reachable = [(name, b) for name, b in backends if not memory_only or _is_memory_only(b)]
        present = 0
        if not memory_only or len(reachable) == len(backends):
            present, _ = manager.batched_contains(list(keys))
        # The batched walk passes each backend once, so it stops at the first prefix that is spread over two.
        answers = [Presence.PRESENT] * present
        rest = keys[present:]
        if rest:
            certain = len(reachable) == len(backends) and self._can_prove_absence(manager, backends)
            bypassed = set(manager.get_bypassed_backends())
            frozen = manager.is_frozen()
            asked = [
                backend
                for name, backend in reachable
                if name not in bypassed and not (frozen and name != "LocalCPUBackend")
            ]
            absent = Presence.GONE if certain else Presence.UNKNOWN
            answers += [_ask_each(asked, key, absent) for key in rest]
        return answers

    def _can_prove_absence(self, manager: Any, backends: Sequence[tuple[str, Any]]) -> bool:
        engine = self._engine() if self._engine is not None else None
        if engine is not None and not engine.is_healthy():
            return False
        if manager.is_frozen() or manager.get_bypassed_backends():
            return False
        return not any(_cannot_know(backend) for _, backend in backends)


def _kv_backends(manager: Any) -> Iterator[tuple[str, Any]]:
    """The storage backends that may hold KV: all but our own façade."""
    for name, backend in list(manager.storage_backends.items()):
        if not getattr(real_backend(backend), "holds_no_kv", False):
            yield name, backend


def _ask_each(backends: Sequence[Any], key: Any, absent: Presence) -> Presence:
    # First whether it is on its way: a put that ends between the two questions is then seen by the second.
    on_its_way = any(_in_put_tasks(backend, key) for backend in backends)
    if any(backend.contains(key) for backend in backends):
        return Presence.PRESENT
    return Presence.UNKNOWN if on_its_way else absent


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
