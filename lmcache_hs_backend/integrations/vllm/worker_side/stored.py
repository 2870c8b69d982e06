"""Which chunks of the captured layers the tiers hold, where, and what waits until one is on disk.

``StoredChunks`` answers for single chunks, on any thread. ``PendingChunks`` keeps those that are not on disk yet, and
what is to happen when they are. It looks at a bounded number of them at a time, so that its cost per stored chunk does
not grow with how many wait: a disk that is paused or away may leave tens of thousands waiting.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_hs_backend.integrations.vllm.protocol import ReadyChunk
from lmcache_hs_backend.integrations.vllm.worker_side.tails import Tails, shorter
from lmcache_hs_backend.tiered import TieredStore


class StoredPlace(enum.Enum):
    """Where the tiers hold all layers of a chunk."""

    DISK = enum.auto()  # perhaps in RAM as well
    RAM = enum.auto()  # at least one layer is not on disk yet
    NOWHERE = enum.auto()


class StoredChunks:
    """The chunks of one store, as far as one connector's layers go. Thread-safe."""

    def __init__(self, store: TieredStore, layer_idxs: Sequence[int], tails: Tails) -> None:
        self._store = store
        self._layer_idxs = layer_idxs
        self._tails = tails
        self._lock = threading.Lock()  # guards _tails

    def place(self, name: bytes) -> StoredPlace:
        """Where a chunk is. Index only."""
        found = StoredPlace.DISK
        for idx in self._layer_idxs:
            hot, cold = self._store.has(name, idx)
            if not hot and not cold:
                return StoredPlace.NOWHERE
            if not cold:
                found = StoredPlace.RAM
        return found

    def readable(self, name: bytes) -> bool:
        """Whether all rows of a chunk can be read now. Index only."""
        return self._store.covered([name], self._layer_idxs) == 1

    def longer(self, chunk: ReadyChunk) -> str | None:
        """The hash of a readable chunk that begins with all tokens of this one and goes on, or None."""
        ref = chunk.ref
        with self._lock:
            longer = self._tails.longer(ref.chunk_hash, ref.parent, chunk.ids)
        return longer if longer is not None and self.readable(self.name(longer)) else None

    def add(self, chunk: ReadyChunk) -> list[bytes]:
        """Remember a chunk that is stored. The names of the tails that it may have made superfluous."""
        ref = chunk.ref
        with self._lock:
            lengths = self._tails.lengths(ref.parent)
            self._tails.add(ref.chunk_hash, ref.parent, chunk.ids)
            superfluous = shorter(ref.chunk_hash, ref.parent, chunk.ids, lengths)
            for ids in superfluous:
                self._tails.forget(ref.parent, ids)
        return [self.name(hash_hex) for hash_hex in superfluous.values()]

    def add_earlier(self, hash_hex: str, parent: str, ids: bytes) -> bytes | None:
        """Remember a chunk of an earlier run. The name of a longer one that this run has stored, or None."""
        with self._lock:
            longer = self._tails.longer(hash_hex, parent, ids)
            self._tails.add(hash_hex, parent, ids)
        return None if longer is None else self.name(longer)

    def name(self, hash_hex: str) -> bytes:
        """The name of a chunk's file."""
        return self._tails.name(hash_hex)


class PendingChunks:
    """Chunks that are not on disk yet, and what waits for each. Not thread-safe."""

    def __init__(self, chunks: StoredChunks) -> None:
        self._chunks = chunks
        self._waiting: OrderedDict[bytes, list[Callable[[bool], None]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: bytes, then: Callable[[bool], None] | None = None) -> None:
        """Watch a chunk that is in RAM.

        Args:
            name: The chunk's.
            then: Called by ``look`` once the chunk is on disk (True) or in no tier any more (False).
        """
        calls = self._waiting.setdefault(name, [])
        if then is not None:
            calls.append(then)

    def look(self, most_settled: int, most_waiting: int) -> list[bytes]:
        """Look at chunks, those first that were not looked at for longest.

        Args:
            most_settled: End after so many that are no longer pending.
            most_waiting: End after so many that still are.

        Returns:
            The names of those that are on disk now. They, and those in no tier, are forgotten.
        """
        on_disk = []
        settled = waiting = 0
        for _ in range(len(self._waiting)):
            if settled == most_settled or waiting == most_waiting:
                break
            name = next(iter(self._waiting))
            place = self._chunks.place(name)
            if place is StoredPlace.RAM:
                self._waiting.move_to_end(name)
                waiting += 1
                continue
            settled += 1
            if place is StoredPlace.DISK:
                on_disk.append(name)
            for then in self._waiting.pop(name):
                then(place is StoredPlace.DISK)
        return on_disk
