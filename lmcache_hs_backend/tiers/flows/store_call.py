"""One call of store: what it brings, and the slots that it finds for that.

Room is made by freeing clean chunks, and when there are none, by waiting a bounded time for the I/O threads. No chunk
of the call itself is dropped to make room for another one of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec
from lmcache_hs_backend.tiers.flows.core import PIECE, Core
from lmcache_hs_backend.tiers.memory.runs import Move
from lmcache_hs_backend.tiers.state import making_room, storing
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.storing import MissingLayers, StorePlan
from lmcache_hs_backend.tiers.state.writing import Demand

#: A pin that ends makes room without a notification, so a waiting store looks again this often.
_LOOK_AGAIN_SEC = 0.05


class RowSource(Protocol):
    """Rows that are to be stored, in this process or another, and who copies them."""

    #: What is to be stored; a chunk has at most format.header.MAX_LAYERS layers, further ones are left out.
    specs: Sequence[LayerSpec]

    def copy_in(self, moves: Mapping[int, Sequence[Move]]) -> None:
        """Copy rows of each layer into their slots, and return when all of them are there."""

    def settle(self) -> None:
        """Called when ``copy_in`` has raised: return as soon as nothing writes into those slots any more.

        If it raises instead, that cannot be known, and the slots are never used again.
        """


class ActiveStore(ActiveCall):
    """A call of store: what it was given, and how far it has come. What it holds is written down as for every call."""

    plan: StorePlan  # set by its first transition

    def __init__(
        self,
        refs: Sequence[ChunkRef],
        ids: bytes,
        source: RowSource,
        row_offset: int,
        first_id: int,
        wait_sec: float,
    ) -> None:
        """The arguments of ``Store.store_from``; only chunks that start at or after ``row_offset`` count."""
        super().__init__()
        self.refs = [ref for ref in refs if ref.start >= row_offset] if row_offset else refs
        self.ids = ids
        self.source = source
        self.layer_idxs = [spec.layer_idx for spec in source.specs]
        self.row_offset = row_offset
        self.first_id = first_id
        self.began = began = time.monotonic()
        self.deadline = began + wait_sec  # until then it may wait for room
        self.done = 0  # so many of ``plan.missing`` are stored

    @property
    def missing(self) -> Sequence[MissingLayers]:
        """What is still to be stored."""
        return self.plan.missing[self.done :] if self.done else self.plan.missing


class Room:
    """Finds room for one call, which writes down what it got in the transition that gets it."""

    def __init__(self, core: Core, call: ActiveStore) -> None:
        self._core = core
        self._call = call
        self._demand = Demand(core.state, call, call.began)

    def find(self) -> None:
        """Get slots for the first chunks that are missing, as many as there is room for. The call has none."""
        core, call = self._core, self._call
        call.slots = []
        missing = call.missing
        for piece in core.pieces(missing):
            before = len(call.slots)
            if not before:
                self._wait(missing)
            else:
                with core.lock, core.step:
                    call.slots += making_room.allocate(core.state, storing.needs(piece))
            if len(call.slots) < before + len(piece):
                return

    def _wait(self, missing: Sequence[MissingLayers]) -> None:
        """Get slots for PIECE of ``missing`` at most; none when there is no room."""
        core = self._core
        while True:
            with core.lock, core.step:
                seconds = self._look(missing)
                if seconds is None:
                    return
                ticket = core.space_freed.ticket()
            core.space_freed.wait(ticket, seconds)

    def _look(self, missing: Sequence[MissingLayers]) -> float | None:
        """Lock held. Get slots, or the seconds after which to look again; None when that is not worth it."""
        core, state, call, demand = self._core, self._core.state, self._call, self._demand
        chunks = storing.needs(missing[:PIECE])
        first = missing[0].nbytes
        if first > core.arena.capacity:
            return None
        spare: frozenset[bytes] = frozenset()
        while not core.closed:
            call.slots += making_room.allocate(state, chunks)
            if call.slots:
                if state.wanted_bytes:
                    # What was asked for is taken: a further write would only clean this prompt's own prefix.
                    demand.lower(state.ready_bytes + sum(one.nbytes for one in missing[len(call.slots) :]))
                return None
            if not core.disk.health.writable or core.recovery_is_late or state.purge_pending:
                spare = spare or frozenset(ref.name for ref in call.plan.refs)
                if not making_room.discard_dirty(state, spare):
                    return None
                continue
            needed = sum(one.nbytes for one in missing) - state.ready_bytes
            now = time.monotonic()
            if not demand.is_promised(needed, now, call.deadline, starting=not core.recovered):
                return None
            # A few chunks at a time: what is written beyond need would be evicted from this prompt's prefix. The
            # demand stands until the call ends, so that the disk works while the caller's thread copies.
            demand.set(state.ready_bytes + min(max(needed, first), core.config.io_threads * first))
            core.wake()
            return min(call.deadline - now, _LOOK_AGAIN_SEC)
        return None
