"""Rows on their way in: find room, copy, publish.

Everything runs on the caller's thread and none of it touches a file: room is made by freeing clean chunks, and when
there are none, by waiting a bounded time for the I/O threads. A call keeps a true prefix of what it was given, or all
of it, and never drops one of its own chunks to make room for another.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import NamedTuple, Protocol

import torch

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkMeta, ChunkRef, LayerSpec
from lmcache_hs_backend.format.header import MAX_LAYERS, Description
from lmcache_hs_backend.tiers.flows.copier import Copier
from lmcache_hs_backend.tiers.flows.core import PIECE, Core
from lmcache_hs_backend.tiers.flows.read import Headers
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES
from lmcache_hs_backend.tiers.memory.runs import Move
from lmcache_hs_backend.tiers.state import making_room, reading, storing
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.storing import MissingLayers, StorePlan
from lmcache_hs_backend.tiers.state.writing import Demand

#: A pin that ends makes room without a notification, so a waiting store looks again this often.
_LOOK_AGAIN_SEC = 0.05


class Stored(NamedTuple):
    """What a call of store has come to."""

    new: int  # chunks that newly hold at least one of the layers; one recovered from disk counts once, too
    held: int  # chunks of the call's range that hold all of the layers when it returns


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


class TensorRows:
    """Rows of a caller in this process: layer_idx → ``[num_tokens, hidden_dim]``, on any device, outside autograd."""

    def __init__(self, copier: Copier, rows: Mapping[int, torch.Tensor]) -> None:
        """``rows``: of dtypes in DTYPE_NAMES."""
        self.specs: Sequence[LayerSpec] = [
            LayerSpec(idx, DTYPE_NAMES[tensor.dtype], tensor.shape[1]) for idx, tensor in rows.items()
        ]
        self._copier = copier
        self._rows = rows

    def copy_in(self, moves: Mapping[int, Sequence[Move]]) -> None:
        """See RowSource."""
        for layer_idx, its_moves in moves.items():
            self._copier.copy_in(self._rows[layer_idx], its_moves)
        self._await_device()

    def settle(self) -> None:
        """Wait for threads that helped, and for copies from a GPU."""
        self._copier.settle()
        self._await_device()

    def _await_device(self) -> None:
        for device in {rows.device for rows in self._rows.values() if rows.is_cuda}:
            self._copier.synchronize(device)


@functools.lru_cache(maxsize=1)
def _as_utc(seconds: int) -> str:
    """A time as files say it. Kept for the calls of the same second: with cold caches it takes as long as a copy."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """Stores rows into the tiers."""

    def __init__(self, core: Core, copier: Copier, headers: Headers, model: str, capture: str) -> None:
        """``model`` and ``capture`` are what chunk files will say of their writer."""
        self._core = core
        self._copier = copier
        self._headers = headers
        self._model = model
        self._capture = capture

    def store(
        self,
        refs: Sequence[ChunkRef],
        ids: bytes,
        rows: Mapping[int, torch.Tensor],
        row_offset: int,
        wait_sec: float | None = None,
        first_id: int = 0,
    ) -> Stored:
        """``store_from`` for rows in this process: layer_idx → ``[num_tokens, hidden_dim]``, see TensorRows."""
        return self.store_from(refs, ids, TensorRows(self._copier, rows), row_offset, wait_sec, first_id)

    def store_from(
        self,
        refs: Sequence[ChunkRef],
        ids: bytes,
        source: RowSource,
        row_offset: int,
        wait_sec: float | None = None,
        first_id: int = 0,
    ) -> Stored:
        """Keep layers of the chunks that start at or after token ``row_offset``, where the rows begin.

        ``ids``: all token ids from position ``first_id`` on. A chunk recovered from disk counts as new the first time
        it is stored in this process, though nothing is copied. ``wait_sec``: how long to wait for room; None: the
        setting's time.
        """
        call = ActiveCall()
        with call.running:
            try:
                return self._store(call, refs, ids, source, row_offset, wait_sec, first_id)
            finally:
                if call in self._core.state.calls:  # else it has ended with its last transition
                    with self._core.lock, self._core.step:
                        self._core.end(call)

    def _store(
        self,
        call: ActiveCall,
        refs: Sequence[ChunkRef],
        ids: bytes,
        source: RowSource,
        row_offset: int,
        wait_sec: float | None,
        first_id: int,
    ) -> Stored:
        core, state = self._core, self._core.state
        if core.closed:
            return Stored(0, 0)
        began = time.monotonic()
        deadline = began + (core.config.store_wait_ms / 1000 if wait_sec is None else wait_sec)
        layer_idxs = [spec.layer_idx for spec in source.specs]
        specs = source.specs[:MAX_LAYERS]
        if row_offset:
            refs = [ref for ref in refs if ref.start >= row_offset]
        self._headers.ensure_read(refs, deadline - time.monotonic())
        answers = core.presence([ref.kv_key for ref in refs], True)
        with core.lock, core.step:
            if core.closed:
                return Stored(0, 0)
            plan = storing.plan_store(state, refs, specs, answers, time.monotonic_ns())
            if plan.missing:
                state.calls.add(call)
                held = 0
            else:
                held = reading.held(state, refs, layer_idxs)
        stored, missing, done = plan.stored, plan.missing, 0
        if missing:
            call.slots = []
            demand = Demand(state, call, began)
            try:
                while done < len(missing):
                    self._place(call, missing[done:], plan.refs, deadline, demand)
                    count = len(call.slots)
                    if not count:
                        with core.lock, core.step:
                            state.tally.loss("no_room", len(missing) - done)
                        break
                    batch = missing[done : done + count]
                    self._copy(call, batch, source, specs, row_offset)
                    stored += self._publish(call, plan, batch, ids, first_id, done)
                    done += count
            finally:
                with core.lock, core.step:
                    held = 0 if core.closed else reading.held(state, refs, layer_idxs)
                    if len(plan.refs) <= PIECE:
                        storing.end_store(state, plan.refs)
                        core.end(call)
                if len(plan.refs) > PIECE:
                    self._touch(plan.refs)
        if stored:
            core.metrics.add("stored_chunks", stored)
        return Stored(stored, held)

    def _touch(self, refs: Sequence[ChunkRef]) -> None:
        """The chunks of the prompt become the youngest, the first one youngest of all."""
        for piece in self._core.pieces(refs, from_end=True):
            with self._core.lock, self._core.step:
                storing.end_store(self._core.state, piece)

    def _place(
        self,
        call: ActiveCall,
        missing: Sequence[MissingLayers],
        refs: Sequence[ChunkRef],
        deadline: float,
        demand: Demand,
    ) -> None:
        """Get slots for the first of ``missing``, as many as there is room for: ``call.slots``, which is empty."""
        core, state = self._core, self._core.state
        for piece in core.pieces(missing):
            before = len(call.slots)
            if not before:
                self._wait_for_room(call, missing, refs, deadline, demand)
            else:
                with core.lock, core.step:
                    call.slots += making_room.allocate(state, [(one.ref.num_tokens, one.specs) for one in piece])
            if len(call.slots) < before + len(piece):
                return

    def _wait_for_room(
        self,
        call: ActiveCall,
        missing: Sequence[MissingLayers],
        refs: Sequence[ChunkRef],
        deadline: float,
        demand: Demand,
    ) -> None:
        """Get slots for PIECE of ``missing`` at most; none when there is no room."""
        core = self._core
        while True:
            with core.lock, core.step:
                wait = self._look_for_room(call, missing, refs, deadline, demand)
                if wait is None:
                    return
                ticket = core.space_freed.ticket()
            core.space_freed.wait(ticket, wait)

    def _look_for_room(
        self,
        call: ActiveCall,
        missing: Sequence[MissingLayers],
        refs: Sequence[ChunkRef],
        deadline: float,
        demand: Demand,
    ) -> float | None:
        """Lock held. Get slots, or the seconds after which to look again; None when that is not worth it."""
        core, state = self._core, self._core.state
        chunks = [(one.ref.num_tokens, one.specs) for one in missing[:PIECE]]
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
                spare = spare or frozenset(ref.name for ref in refs)
                if not making_room.discard_dirty(state, spare):
                    return None
                continue
            needed = sum(one.nbytes for one in missing) - state.ready_bytes
            now = time.monotonic()
            if not demand.is_promised(needed, now, deadline, starting=not core.recovered):
                return None
            # A few chunks at a time: what is written beyond need would be evicted from this prompt's prefix. The
            # demand stands until the call ends, so that the disk works while the caller's thread copies.
            demand.set(state.ready_bytes + min(max(needed, first), core.config.io_threads * first))
            core.wake()
            return min(deadline - now, _LOOK_AGAIN_SEC)
        return None

    def _copy(
        self,
        call: ActiveCall,
        batch: Sequence[MissingLayers],
        source: RowSource,
        specs: Sequence[LayerSpec],
        offset: int,
    ) -> None:
        moves = {
            spec.layer_idx: [
                (one.ref.start - offset, one.ref.num_tokens, slots[spec.layer_idx])
                for one, slots in zip(batch, call.slots, strict=True)
                if spec.layer_idx in slots
            ]
            for spec in specs
        }
        call.writer = source  # from here on the slots are only free again when it is at rest
        try:
            source.copy_in(moves)
        except BaseException:
            try:
                source.settle()
            except Exception:
                call.lost = True  # they stay taken: something may still write them
                raise
            call.writer = None
            raise
        call.writer = None

    def _publish(
        self,
        call: ActiveCall,
        plan: StorePlan,
        batch: Sequence[MissingLayers],
        ids: bytes,
        first_id: int,
        done: int,
    ) -> int:
        """The copied rows become part of their chunks; how many chunks are newly counted."""
        core = self._core

        def describe(ref: ChunkRef) -> Description:
            meta = ChunkMeta(
                ref.key, ref.chunk_hash, ref.parent, ref.prefix, ref.start, ref.num_tokens,
                self._model, _as_utc(int(time.time())), self._capture,
            )  # fmt: skip
            begin, end = (ref.start - first_id) * TOKEN_BYTES, (ref.end - first_id) * TOKEN_BYTES
            return Description(meta, ids[begin:end])

        stored, streaming = 0, done > 0
        more = done + len(batch) < len(plan.missing) or len(batch) > PIECE
        # The end of a prompt is to leave first, so it enters the orders first; of what passes through, it comes last.
        for part in core.pieces(batch, from_end=not streaming):
            mine = slice(0, len(part)) if streaming else slice(-len(part), None)
            with core.lock, core.step:
                stored += storing.commit_store(
                    core.state, plan, part, call.slots[mine], describe, time.monotonic(), streaming=streaming, more=more
                )
                del call.slots[mine]  # they are the chunks' now
                core.rows_came()
        return stored
