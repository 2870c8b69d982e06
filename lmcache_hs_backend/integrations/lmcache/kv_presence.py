"""Does LMCache still hold the KV of a chunk? Present, gone, or nobody can say.

Only "gone" deletes hidden states, so it needs proof: every backend was asked and answered for itself, none
of them was frozen out, bypassed, missing, disconnected, of a kind that cannot know, or in the middle of
storing that very chunk. A ``contains`` that returns True is believed at once, from any backend.

May block on a remote backend, for a bounded time where that is up to us; it is never called under a lock,
and on the storage manager's own event loop (where a remote ``contains`` waits for itself) it asks nobody.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.integrations.lmcache.compat import real_backend

#: Backends whose ``contains`` says False for KV that they can deliver, or has side effects.
_CANNOT_KNOW = ("P2PBackend", "PDBackend", "PDBackendAsync")
#: Backends that answer from a table in memory, so that asking them never blocks.
_MEMORY_ONLY = ("LocalCPUBackend", "LocalDiskBackend")
#: How long a remote connection may take to say that it does not have a chunk.
_REMOTE_SEC = 2.0


class KvPresence:
    """Asks the storage manager of one engine. Until one is bound, every KV counts as present."""

    def __init__(self, use_layerwise: bool) -> None:
        self._use_layerwise = use_layerwise
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
        quick = all(map(_is_memory_only, backends.values()))
        answers: list[Presence] = []
        if quick or not memory_only:
            answers = [Presence.PRESENT] * manager.batched_contains(list(keys))[0]
            if len(answers) == len(keys):
                return answers
        # The batched walk passes each backend once, so it stops at the first prefix that is spread over two.
        reachable = self._reachable(manager, backends, memory_only)
        certain = len(reachable) == len(backends) and self._complete(manager, backends)
        for number in range(len(answers), len(keys)):
            if answers and answers[-1] is not Presence.PRESENT and not quick:
                # The prefix has ended. To know of each later chunk whether it is an orphan is not worth a
                # question over the network.
                answers += [Presence.UNKNOWN] * (len(keys) - number)
                break
            answers.append(_ask_each(reachable, keys[number], certain))
        return answers

    def _reachable(self, manager: Any, backends: dict[str, Any], memory_only: bool) -> list[Any]:
        """The backends from which LMCache would load KV now, or those of them that answer at once."""
        bypassed, frozen = set(manager.get_bypassed_backends()), manager.is_frozen()
        return [
            backend
            for name, backend in backends.items()
            if name not in bypassed
            and not (frozen and name != "LocalCPUBackend")
            and (not memory_only or _is_memory_only(backend))
        ]

    def _complete(self, manager: Any, backends: dict[str, Any]) -> bool:
        """Whether there is no other place where the KV may be."""
        engine = self._engine() if self._engine is not None else None
        healthy = engine is None or engine.is_healthy()
        # A backend that has been closed may come back, with all that it held.
        return healthy and self._seen == backends.keys() and not any(map(_cannot_know, backends.values()))


def _ask_each(backends: Sequence[Any], key: Any, certain: bool) -> Presence:
    # First whether it is on its way: a put that ends between the two questions is then seen by the second.
    unsure = not certain or any(_in_put_tasks(backend, key) for backend in backends)
    for backend in backends:
        held = _contains(real_backend(backend), backend, key)
        if held:
            return Presence.PRESENT
        unsure |= held is None
    return Presence.UNKNOWN if unsure else Presence.GONE


def _contains(real: Any, backend: Any, key: Any) -> bool | None:
    """Whether a backend has the key; None when it does not know."""
    connection = getattr(real, "connection", None)
    if connection is None or not hasattr(connection, "exists"):
        return bool(backend.contains(key))
    # RemoteBackend.contains turns every error into False and has no timeout, so ask its connection.
    if getattr(real, "_mla_worker_id_as0_mode", False):
        key = key.with_new_worker_id(0)
    future = asyncio.run_coroutine_threadsafe(connection.exists(key), real.loop)
    try:
        return bool(future.result(_REMOTE_SEC))
    except Exception:  # noqa: BLE001 - whatever a third party's connection raises, it does not know
        future.cancel()
        return None


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
