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
from typing import NamedTuple

import torch

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkMeta, ChunkRef, LayerSpec
from lmcache_hs_backend.format.header import MAX_LAYERS, Description
from lmcache_hs_backend.tiers.flows.copier import Copier
from lmcache_hs_backend.tiers.flows.core import PIECE, Core
from lmcache_hs_backend.tiers.flows.read import Headers
from lmcache_hs_backend.tiers.flows.store_call import ActiveStore, Room, RowSource
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES
from lmcache_hs_backend.tiers.memory.runs import Move
from lmcache_hs_backend.tiers.state import making_room, reading, storing
from lmcache_hs_backend.tiers.state.storing import MissingLayers


class Stored(NamedTuple):
    """What a call of store has come to."""

    new: int  # chunks that newly hold at least one of the layers; one recovered from disk counts once, too
    held: int  # chunks of the call's range that hold all of the layers when it returns


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
        wait_sec = self._core.config.store_wait_ms / 1000 if wait_sec is None else wait_sec
        call = ActiveStore(refs, ids, source, row_offset, first_id, wait_sec)
        with call.running:
            try:
                return self._store(call)
            finally:
                if call in self._core.state.calls:  # else it has ended with its last transition
                    with self._core.lock, self._core.step:
                        self._core.end(call)

    def _store(self, call: ActiveStore) -> Stored:
        core, state, refs = self._core, self._core.state, call.refs
        if core.closed:
            return Stored(0, 0)
        if state.orders.unread_files:
            self._headers.ensure_read(refs, call.deadline - call.began)
        answers = core.presence([ref.kv_key for ref in refs], True)
        specs = call.source.specs
        short = len(refs) <= PIECE  # such a call takes all that it needs in one transition, and ends with another one
        with core.lock, core.step:
            if core.closed:
                return Stored(0, 0)
            call.plan = plan = storing.plan_store(state, refs, specs[:MAX_LAYERS], answers, time.monotonic_ns(), PIECE)
            if plan.missing:
                state.calls.add(call)
                if short:
                    call.slots = making_room.allocate(state, storing.needs(plan.missing))
            elif short:
                return self._counted(plan.stored, reading.held(state, refs, call.layer_idxs))
        since = 0.0
        while plan.planned < len(plan.refs):
            since = core.make_a_break(since)
            with core.lock, core.step:
                if core.closed:
                    return Stored(0, 0)
                storing.plan_more(state, plan, PIECE)
                state.calls.add(call)
        new, held = plan.stored, None
        room: Room | None = None
        while missing := call.missing:
            if not call.slots:
                room = room or Room(core, call)
                room.find()
            if not call.slots:
                with core.lock, core.step:
                    state.tally.loss("no_room", len(missing))
                break
            batch = missing[: len(call.slots)]
            self._copy(call, batch)
            stored, held = self._publish(call, batch, last=short and len(batch) == len(missing))
            new += stored
            call.done += len(batch)
        if held is None:
            held = self._end(call)
        return self._counted(new, held)

    def _counted(self, new: int, held: int) -> Stored:
        if new:
            self._core.metrics.add("stored_chunks", new)
        return Stored(new, held)

    def _copy(self, call: ActiveStore, batch: Sequence[MissingLayers]) -> None:
        source, offset = call.source, call.row_offset
        moves = {
            spec.layer_idx: [
                (one.ref.start - offset, one.ref.num_tokens, slots[spec.layer_idx])
                for one, slots in zip(batch, call.slots, strict=True)
                if spec.layer_idx in slots
            ]
            for spec in call.plan.specs
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

    def _publish(self, call: ActiveStore, batch: Sequence[MissingLayers], *, last: bool) -> tuple[int, int | None]:
        """The copied rows become part of their chunks; how many chunks are newly counted.

        ``last``: nothing is left of a call that is short. Then it ends with that, and the second figure says how many
        chunks are held.
        """
        core, state = self._core, self._core.state
        stored, held, streaming = 0, None, call.done > 0
        more = len(batch) < len(call.missing) or len(batch) > PIECE
        # The end of a prompt is to leave first, so it enters the orders first; of what passes through, it comes last.
        for part in core.pieces(batch, from_end=not streaming):
            mine = slice(0, len(part)) if streaming else slice(-len(part), None)
            with core.lock, core.step:
                stored += storing.commit_store(
                    state, call.plan, part, call.slots[mine], functools.partial(self._describe, call),
                    time.monotonic(), streaming=streaming, more=more,
                )  # fmt: skip
                del call.slots[mine]  # they are the chunks' now
                core.rows_came()
                if last:
                    held = 0 if core.closed else reading.held(state, call.refs, call.layer_idxs)
                    storing.end_store(state, call.plan.refs)
                    core.end(call)
        return stored, held

    def _describe(self, call: ActiveStore, ref: ChunkRef) -> Description:
        """What a file says of a chunk beside its rows."""
        meta = ChunkMeta(
            ref.key, ref.chunk_hash, ref.parent, ref.prefix, ref.start, ref.num_tokens,
            self._model, _as_utc(int(time.time())), self._capture,
        )  # fmt: skip
        begin, end = (ref.start - call.first_id) * TOKEN_BYTES, (ref.end - call.first_id) * TOKEN_BYTES
        return Description(meta, call.ids[begin:end])

    def _end(self, call: ActiveStore) -> int:
        """The chunks of the prompt become the youngest, the first one youngest of all. Returns how many are held."""
        core, state, held = self._core, self._core.state, 0
        for piece in core.pieces(call.refs):
            with core.lock, core.step:
                held += 0 if core.closed else reading.held(state, piece, call.layer_idxs)
        for piece in core.pieces(call.plan.refs, from_end=True):
            with core.lock, core.step:
                storing.end_store(state, piece)
        return held
