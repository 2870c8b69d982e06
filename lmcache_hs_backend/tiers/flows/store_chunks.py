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
from lmcache_hs_backend.tiers.state.entries import Slot
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
        self.settle()

    def settle(self) -> None:
        """Wait for copies from a GPU."""
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
        core, state = self._core, self._core.state
        began = time.monotonic()
        deadline = began + (core.config.store_wait_ms / 1000 if wait_sec is None else wait_sec)
        layer_idxs = [spec.layer_idx for spec in source.specs]
        specs = source.specs[:MAX_LAYERS]
        if row_offset:
            refs = [ref for ref in refs if ref.start >= row_offset]
        self._headers.ensure_read(refs, deadline - time.monotonic())
        answers = core.presence([ref.kv_key for ref in refs], True)
        with core.lock:
            plan = storing.plan_store(state, refs, specs, answers, time.monotonic_ns())
            held = 0 if plan.missing else reading.held(state, refs, layer_idxs)
        stored, missing, done = plan.stored, plan.missing, 0
        if missing:
            demand = Demand(state, began)
            try:
                while done < len(missing):
                    placed = self._place(missing[done:], plan.refs, deadline, demand)
                    if not placed:
                        with core.lock:
                            state.tally.loss("no_room", len(missing) - done)
                        break
                    batch = missing[done : done + len(placed)]
                    self._copy(batch, placed, source, specs, row_offset)
                    stored += self._publish(plan, batch, placed, ids, first_id, done)
                    done += len(placed)
            finally:
                with core.lock:
                    demand.end()
                    held = 0 if core.closed else reading.held(state, refs, layer_idxs)
                    if len(plan.refs) <= PIECE:
                        storing.end_store(state, plan.refs)
                if len(plan.refs) > PIECE:
                    self._touch(plan.refs)
        if stored:
            core.metrics.add("stored_chunks", stored)
        return Stored(stored, held)

    def _touch(self, refs: Sequence[ChunkRef]) -> None:
        """The chunks of the prompt become the youngest, the first one youngest of all."""
        for piece in self._core.pieces(refs, from_end=True):
            with self._core.lock:
                storing.end_store(self._core.state, piece)

    def _place(
        self, missing: Sequence[MissingLayers], refs: Sequence[ChunkRef], deadline: float, demand: Demand
    ) -> list[dict[int, Slot]]:
        """Slots for the first of ``missing``, as many as there is room for; none when there is no room."""
        core, state = self._core, self._core.state
        placed: list[dict[int, Slot]] = []
        try:
            for piece in core.pieces(missing):
                with core.lock:
                    if not placed:
                        slots = self._wait_for_room(missing, refs, deadline, demand)
                    else:
                        slots = making_room.allocate(state, [(one.ref.num_tokens, one.specs) for one in piece])
                    placed += slots
                if len(slots) < len(piece):
                    break
        except BaseException:
            with core.lock:
                storing.abort_store(state, placed)
            raise
        return placed

    def _wait_for_room(
        self, missing: Sequence[MissingLayers], refs: Sequence[ChunkRef], deadline: float, demand: Demand
    ) -> list[dict[int, Slot]]:
        """Lock held, given up while waiting. Slots for PIECE of ``missing`` at most; none when there is no room."""
        core, state = self._core, self._core.state
        chunks = [(one.ref.num_tokens, one.specs) for one in missing[:PIECE]]
        first = missing[0].nbytes
        if first > core.arena.capacity:
            return []
        spare: frozenset[bytes] = frozenset()
        while not core.closed:
            placed = making_room.allocate(state, chunks)
            if placed:
                if state.wanted_bytes:
                    # What was asked for is taken: a further write would only clean this prompt's own prefix.
                    demand.lower(state.ready_bytes + sum(one.nbytes for one in missing[len(placed) :]))
                return placed
            if not core.disk.health.writable or core.recovery_is_late or state.purge_pending:
                spare = spare or frozenset(ref.name for ref in refs)
                if not making_room.discard_dirty(state, spare):
                    return []
                continue
            needed = sum(one.nbytes for one in missing) - state.ready_bytes
            now = time.monotonic()
            if not demand.is_promised(needed, now, deadline, starting=not core.recovered):
                return []
            # A few chunks at a time: what is written beyond need would be evicted from this prompt's prefix. The
            # demand stands until the call ends, so that the disk works while the caller's thread copies.
            demand.set(state.ready_bytes + min(max(needed, first), core.config.io_threads * first))
            core.wake()
            core.space_freed.wait(min(deadline - now, _LOOK_AGAIN_SEC))
        return []

    def _copy(
        self,
        batch: Sequence[MissingLayers],
        placed: Sequence[Mapping[int, Slot]],
        source: RowSource,
        specs: Sequence[LayerSpec],
        offset: int,
    ) -> None:
        moves = {
            spec.layer_idx: [
                (one.ref.start - offset, one.ref.num_tokens, slots[spec.layer_idx])
                for one, slots in zip(batch, placed, strict=True)
                if spec.layer_idx in slots
            ]
            for spec in specs
        }
        try:
            source.copy_in(moves)
        except BaseException:
            source.settle()  # if that fails too, the slots stay taken: something may still write them
            with self._core.lock:
                storing.abort_store(self._core.state, placed)
            raise

    def _publish(
        self,
        plan: StorePlan,
        batch: Sequence[MissingLayers],
        placed: Sequence[dict[int, Slot]],
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
        parts = zip(
            core.pieces(batch, from_end=not streaming), core.pieces(placed, from_end=not streaming), strict=True
        )
        for part, slots in parts:
            with core.lock:
                stored += storing.commit_store(
                    core.state, plan, part, slots, describe, time.monotonic(), streaming=streaming, more=more
                )
                core.rows_came()
        return stored
