"""Which KV is gone, from the events of LMCache's MP server; nothing is ever asked in the path of a call.

KV is gone when L1 (RAM) has deleted it and L2 (disks, remotes) does not hold it. With L2 adapters the second is known
only of KV that was seen stored there, or found there, and then seen deleted; of other KV it is unknown, and its rows
stay until the size limits take them. Rows whose KV is unknown are served: without their KV they are useless, not wrong.
L2 may hold more than there is memory to remember: of more than a million pieces of KV the oldest become unknown.

LMCache calls the listeners under its own locks, so they do nothing but put the event in a queue; a thread goes through
it, and judges KV by the state in which a batch of events leaves it: KV that is stored again at once is not gone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from lmcache_hs_backend.integrations.lmcache_mp.mp_api import (
    L1ManagerListener,
    L2AdapterListener,
    l1_managers,
    l2_adapters,
)

logger = logging.getLogger(__name__)

#: Places where KV is, as bits: L2, and each L1 manager.
_L2 = 1
_SEEN_IN_L2 = 2  # no place, but the knowledge that makes a deletion from L2 a proof
_FIRST_L1 = 4

_MOST_PLACES = 1 << 20

#: (places to add, places to take away, keys)
_Event = tuple[int, int, list[Any]]


class _L1Events(L1ManagerListener):  # type: ignore[misc]
    """What one L1 manager does with KV."""

    def __init__(self, put: Callable[[_Event], None], place: int) -> None:
        self._put = put
        self._place = place

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        self._put((self._place, 0, keys))

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[Any]) -> None:
        self._put((self._place | _L2 | _SEEN_IN_L2, 0, keys))  # it has been loaded from L2

    def on_l1_keys_deleted_by_manager(self, keys: list[Any]) -> None:
        self._put((0, self._place, keys))

    def on_l1_keys_reserved_read(self, keys: list[Any]) -> None:
        pass

    def on_l1_keys_read_finished(self, keys: list[Any]) -> None:
        pass

    def on_l1_keys_reserved_write(self, keys: list[Any]) -> None:
        pass

    def on_l1_keys_accessed(self, keys: list[Any]) -> None:
        pass


class _L2Events(L2AdapterListener):  # type: ignore[misc]
    """What the L2 adapters do with KV."""

    def __init__(self, put: Callable[[_Event], None]) -> None:
        self._put = put

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self._put((_L2 | _SEEN_IN_L2, 0, keys))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self._put((_L2 | _SEEN_IN_L2, 0, keys))

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self._put((0, _L2, keys))


class KvEvents:
    """Follows the KV of a storage manager, and reports to ``on_gone`` chunks as (model, hash, salt)."""

    def __init__(self, storage_manager: Any, on_gone: Callable[[Iterable[tuple[str, bytes, str]]], object]) -> None:
        self._storage_manager = storage_manager
        self._on_gone = on_gone
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._places: dict[Any, int] = {}  # of KV that is somewhere; the thread's
        self._thread = threading.Thread(target=self._follow, name="hs-kv-events", daemon=True)
        self._thread.start()
        managers = l1_managers(storage_manager)
        for number, manager in enumerate(managers):
            manager.register_listener(_L1Events(self._put, _FIRST_L1 << number))
        if managers:
            storage_manager.register_l2_listener(_L2Events(self._put))
        else:
            logger.warning("this LMCache shows no L1 manager: hidden states stay when their KV is gone")

    def close(self) -> None:
        """Follow no more. LMCache keeps the listeners; their events are ignored."""
        self._events.put(None)
        self._thread.join(1.0)

    def _put(self, event: _Event) -> None:
        if event[2] and self._thread.is_alive():
            self._events.put(event)

    def _follow(self) -> None:
        while True:
            event = self._events.get()
            left: dict[Any, None] = {}
            while event is not None:
                self._apply(event, left)
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    break
            else:
                return
            try:
                gone = [key for key in left if self._is_gone(key)]
                if gone:
                    self._on_gone([(key.model_name, key.chunk_hash, key.cache_salt) for key in gone])
            except Exception:  # a bug of ours must not end the coupling
                logger.exception("hidden states of deleted KV stay")

    def _apply(self, event: _Event, left: dict[Any, None]) -> None:
        added, taken, keys = event
        for key in keys:
            # Other groups hold windows, whose KV leaves early; a chunk's KV is that of the first.
            if key.object_group_id == 0:
                self._places[key] = (self._places.get(key, 0) | added) & ~taken
                if taken:
                    left[key] = None
        while len(self._places) > _MOST_PLACES:
            del self._places[next(iter(self._places))]

    def _is_gone(self, key: Any) -> bool:
        """Whether KV that some place has deleted is nowhere, and that is known. What is nowhere is forgotten."""
        places = self._places.get(key, 0)
        if places & ~_SEEN_IN_L2:
            return False
        self._places.pop(key, None)
        adapters = l2_adapters(self._storage_manager)
        # With several adapters a deletion does not say from which.
        return adapters == 0 or (adapters == 1 and bool(places & _SEEN_IN_L2))
