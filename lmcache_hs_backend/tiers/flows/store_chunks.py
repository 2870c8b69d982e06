"""Rows on their way in: find room, copy, publish.

Everything runs on the caller's thread and none of it touches a file: room is made by freeing clean chunks, and when
there are none, by waiting a bounded time for the I/O threads. A call keeps a true prefix of what it was given, or all
of it, and never drops one of its own chunks to make room for another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import torch

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkMeta, ChunkRef, LayerSpec
from lmcache_hs_backend.format.header import MAX_LAYERS, Description
from lmcache_hs_backend.tiers.flows.copier import Copier
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.read import Headers
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES
from lmcache_hs_backend.tiers.state import making_room, reading, storing
from lmcache_hs_backend.tiers.state.entries import Slot
from lmcache_hs_backend.tiers.state.storing import MissingLayers, StorePlan
from lmcache_hs_backend.tiers.state.writing import Demand, is_pressed

#: A pin that ends makes room without a notification, so a waiting store looks again this often.
_LOOK_AGAIN_SEC = 0.05


class Stored(NamedTuple):
    """What a call of store has come to."""

    new: int  # chunks that newly hold at least one of the layers; one recovered from disk counts once, too
    held: int  # chunks of the call's range that hold all of the layers when it returns


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
    ) -> Stored:
        """Keep layers of the chunks that start at or after token ``row_offset``, where ``rows`` begin.

        ``rows``: layer_idx → ``[num_tokens, hidden_dim]`` in one of DTYPE_NAMES, on any device, outside autograd; a
        chunk has at most format.header.MAX_LAYERS, further ones are left out. ``ids``: all token ids. A chunk
        recovered from disk counts as new the first time it is stored in this process, though nothing is copied.
        ``wait_sec``: how long to wait for room; None: the setting's time.
        """
        core, state = self._core, self._core.state
        began = time.monotonic()
        deadline = began + (core.config.store_wait_ms / 1000 if wait_sec is None else wait_sec)
        layer_idxs = rows.keys()
        if len(rows) > MAX_LAYERS:
            rows = dict(itertools.islice(rows.items(), MAX_LAYERS))
        if row_offset:
            refs = [ref for ref in refs if ref.start >= row_offset]
        specs = [LayerSpec(idx, DTYPE_NAMES[tensor.dtype], tensor.shape[1]) for idx, tensor in rows.items()]
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
                    with core.lock:
                        placed = self._place(missing[done:], plan.refs, deadline, demand)
                        if not placed:
                            state.tally.loss("no_room", len(missing) - done)
                            break
                    batch = missing[done : done + len(placed)]
                    self._copy(batch, placed, rows, row_offset)
                    stored += self._publish(plan, batch, placed, ids, done)
                    done += len(placed)
            finally:
                with core.lock:
                    demand.end()
                    storing.end_store(state, plan.refs)
                    held = 0 if core.closed else reading.held(state, refs, layer_idxs)
        core.metrics.add("stored_chunks", stored)
        return Stored(stored, held)

    def _place(
        self, missing: Sequence[MissingLayers], refs: Sequence[ChunkRef], deadline: float, demand: Demand
    ) -> list[dict[int, Slot]]:
        """Lock held, given up while waiting. Slots for the first of ``missing``; none when there is no room."""
        core, state = self._core, self._core.state
        chunks = [(one.ref.num_tokens, one.specs) for one in missing]
        first = missing[0].nbytes
        if first > core.arena.capacity:
            return []
        spare: frozenset[bytes] = frozenset()
        while not core.closed:
            placed = making_room.allocate(state, chunks)
            if placed:
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
        rows: Mapping[int, torch.Tensor],
        offset: int,
    ) -> None:
        try:
            for layer_idx, tensor in rows.items():
                moves = [
                    (one.ref.start - offset, one.ref.num_tokens, slots[layer_idx])
                    for one, slots in zip(batch, placed, strict=True)
                    if layer_idx in slots
                ]
                self._copier.copy_in(tensor, moves)
            self._await_copies(rows)
        except BaseException:
            self._await_copies(rows)  # if that fails too, the slots stay taken: something may still write them
            with self._core.lock:
                storing.abort_store(self._core.state, placed)
            raise

    def _await_copies(self, rows: Mapping[int, torch.Tensor]) -> None:
        for device in {tensor.device for tensor in rows.values()}:
            self._copier.synchronize(device)

    def _publish(
        self,
        plan: StorePlan,
        batch: Sequence[MissingLayers],
        placed: Sequence[dict[int, Slot]],
        ids: bytes,
        done: int,
    ) -> int:
        """The copied rows become part of their chunks; how many chunks are newly counted."""
        core = self._core

        def describe(ref: ChunkRef) -> Description:
            created_at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            meta = ChunkMeta(
                ref.key, ref.chunk_hash, ref.parent, ref.prefix, ref.start, ref.num_tokens,
                self._model, created_at, self._capture,
            )  # fmt: skip
            return Description(meta, ids[ref.start * TOKEN_BYTES : ref.end * TOKEN_BYTES])

        more = done + len(batch) < len(plan.missing)
        with core.lock:
            stored = storing.commit_store(
                core.state, plan, batch, placed, describe, time.monotonic(), streaming=done > 0, more=more
            )
            if is_pressed(core.state, core.policy):  # else the next tick is soon enough
                core.wake()
        return stored
