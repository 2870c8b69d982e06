"""Rows on their way in: find room, copy, publish.

Everything runs on the caller's thread and none of it touches a file: room is made by freeing clean
chunks, and when there are none, by waiting a bounded time for the I/O threads. A call keeps a true prefix
of what it was given, or all of it, and never drops one of its own chunks to make room for another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import torch

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkMeta, ChunkRef, LayerSpec, Presence
from lmcache_hs_backend.format.header import MAX_LAYERS, Description
from lmcache_hs_backend.tiers.cleaner import Cleaner
from lmcache_hs_backend.tiers.headers import ensure_read
from lmcache_hs_backend.tiers.index import CONFIRMED, UNCONFIRMED, UNREAD, Entry, Slot, slot_bytes
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES
from lmcache_hs_backend.tiers.pair import TierPair

#: A lease that ends makes room without anybody being told, so a waiting store looks again this often.
_LOOK_AGAIN_SEC = 0.05


class _Want(NamedTuple):
    """Layers of one chunk that neither tier has yet."""

    ref: ChunkRef
    specs: Sequence[LayerSpec]
    present: bool  # the KV was seen
    counted: bool  # the call's result counts this chunk already

    @property
    def nbytes(self) -> int:
        return sum(slot_bytes(spec, self.ref.num_tokens) for spec in self.specs)


class _Demand:
    """What one call asks of the cleaner. The store's lock guards it."""

    def __init__(self, cleaner: Cleaner) -> None:
        self._cleaner = cleaner
        self._nbytes = 0

    def set(self, nbytes: int) -> None:
        self._cleaner.wanted_bytes += nbytes - self._nbytes
        self._nbytes = nbytes

    def lower(self, nbytes: int) -> None:
        self.set(min(self._nbytes, nbytes))


class Intake:
    """Stores rows into the tiers."""

    def __init__(self, pair: TierPair, cleaner: Cleaner, model: str, capture: str) -> None:
        self.closed = False
        self._pair = pair
        self._cleaner = cleaner
        self._model = model
        self._capture = capture

    def store(
        self,
        refs: Sequence[ChunkRef],
        ids: bytes,
        rows: Mapping[int, torch.Tensor],
        row_offset: int,
        wait_sec: float | None = None,
    ) -> int:
        """Keep layers of the chunks that start at or after token ``row_offset``, where ``rows`` begin.

        ``rows``: layer_idx → ``[num_tokens, hidden_dim]`` in one of chunk.DTYPES, on any device; a chunk has at
        most chunk_header.MAX_LAYERS, further ones are left out. ``ids``: all token ids. Returns the number of chunks
        that newly hold one of the layers; a chunk recovered from disk counts the first time it is stored in
        this process, though nothing is copied. ``wait_sec``: how long to wait for room; None: the setting's time.
        """
        pair = self._pair
        deadline = time.monotonic() + (pair.config.store_wait_ms / 1000 if wait_sec is None else wait_sec)
        rows = dict(itertools.islice(rows.items(), MAX_LAYERS))
        refs = [ref for ref in refs if ref.start >= row_offset]
        specs = [LayerSpec(layer_idx, DTYPE_NAMES[tensor.dtype], tensor.shape[1]) for layer_idx, tensor in rows.items()]
        ensure_read(pair, refs, deadline - time.monotonic())
        answers = pair.presence([ref.kv_key for ref in refs], True)
        with pair.lock:
            refs, wants, stored = self._plan(refs, specs, answers)
        done = 0
        demand = _Demand(self._cleaner)
        try:
            while done < len(wants):
                with pair.lock:
                    placed = self._place(wants[done:], refs, deadline, demand)
                if not placed:
                    pair.metrics.loss("no_room", len(wants) - done)
                    break
                batch = wants[done : done + len(placed)]
                self._copy(batch, placed, rows, row_offset)
                with pair.lock:
                    more = done + len(placed) < len(wants)
                    stored += self._publish(batch, placed, ids, streaming=done > 0, more=more)
                done += len(placed)
        finally:
            with pair.lock:
                demand.set(0)
        if wants:  # else the plan has touched them all
            with pair.lock:
                entries = [pair.index.get(ref.name) for ref in refs]
                pair.index.touch([entry for entry in entries if entry is not None])
        pair.metrics.add("stored_chunks", stored)
        return stored

    def _plan(
        self, refs: Sequence[ChunkRef], specs: Sequence[LayerSpec], answers: Sequence[Presence]
    ) -> tuple[list[ChunkRef], list[_Want], int]:
        """Lock held. The chunks up to the first that cannot be stored, what of them is new, what counts."""
        index, wants, stored, seen_ns = self._pair.index, [], 0, time.monotonic_ns()
        layer_idxs = frozenset(spec.layer_idx for spec in specs)
        seen = Presence.PRESENT
        known = []
        for number, (ref, answer) in enumerate(zip(refs, answers, strict=True)):
            entry = index.get(ref.name)
            present = answer is seen
            if entry is None or entry.standing is UNREAD:
                wants.append(_Want(ref, specs, present, counted=False))
                continue
            if entry.prefix != ref.prefix or entry.num_tokens != ref.end - ref.start:
                self._pair.metrics.loss("collision", len(refs) - number)
                refs = refs[:number]
                break
            missing, reshaped = [], False
            for spec in specs:
                old = entry.spec(spec.layer_idx)
                if old is None:
                    missing.append(spec)
                elif old.hidden_dim != spec.hidden_dim:
                    reshaped = True
            if reshaped:
                # The same tokens with rows of another width: of another model, under a name that has not changed.
                self._pair.metrics.loss("reshaped")
                self._pair.forget(entry)
                wants.append(_Want(ref, specs, present, counted=False))
                continue
            if present:
                self._pair.confirm(entry, ref.kv_key, seen_ns)
            known.append(entry)
            counted = False
            if entry.uncounted:
                counted = bool(entry.uncounted & layer_idxs)
                entry.uncounted -= layer_idxs
                stored += counted
            if missing and len(missing) + len(entry.layer_idxs()) <= MAX_LAYERS:
                wants.append(_Want(ref, missing, present, counted))
        index.touch(known)  # what this prompt already has shall not leave to make room for its rest
        return list(refs), wants, stored

    def _place(
        self, wants: Sequence[_Want], refs: Sequence[ChunkRef], deadline: float, demand: _Demand
    ) -> list[dict[int, Slot]]:
        """Lock held, given up while waiting. Slots for the first of ``wants``; none when there is no room."""
        pair = self._pair
        chunks = [(want.ref.num_tokens, want.specs) for want in wants]
        if wants[0].nbytes > pair.hot.arena.capacity:
            return []
        spare: frozenset[bytes] = frozenset()
        while not self.closed:
            placed = pair.hot.allocate(chunks)
            if placed:
                # What was asked for is taken: a further write would only clean this prompt's own prefix.
                demand.lower(pair.hot.ready_bytes + sum(want.nbytes for want in wants[len(placed) :]))
                return placed
            if not pair.cold.writable or self._cleaner.late:
                spare = spare or frozenset(ref.name for ref in refs)
                if not pair.discard_dirty(spare):
                    return []
                continue
            left = deadline - time.monotonic()
            needed = sum(want.nbytes for want in wants) - pair.hot.ready_bytes
            if left <= 0 or (pair.rate.bytes_per_sec and needed > left * pair.rate.bytes_per_sec):
                return []
            # A few chunks at a time: what is written beyond need would be evicted from this prompt's prefix. The
            # demand stands until the call ends, so that the disk works while the caller's thread copies.
            first = wants[0].nbytes
            demand.set(pair.hot.ready_bytes + min(max(needed, first), pair.config.io_threads * first))
            pair.mover.wake()
            pair.room.wait(min(left, _LOOK_AGAIN_SEC))
        return []

    def _copy(
        self,
        batch: Sequence[_Want],
        placed: Sequence[Mapping[int, Slot]],
        rows: Mapping[int, torch.Tensor],
        offset: int,
    ) -> None:
        hot = self._pair.hot
        try:
            for layer_idx, tensor in rows.items():
                moves = [
                    (want.ref.start - offset, want.ref.num_tokens, slots[layer_idx])
                    for want, slots in zip(batch, placed, strict=True)
                    if layer_idx in slots
                ]
                hot.copy_in(tensor, moves)
            self._await_copies(rows)
        except BaseException:
            self._await_copies(rows)  # if that fails too, the slots stay taken: something may still write them
            with self._pair.lock:
                for slots in placed:
                    hot.free(slots)
            raise

    def _await_copies(self, rows: Mapping[int, torch.Tensor]) -> None:
        for device in {tensor.device for tensor in rows.values()}:
            self._pair.hot.synchronize(device)

    def _publish(
        self, batch: Sequence[_Want], placed: Sequence[dict[int, Slot]], ids: bytes, *, streaming: bool, more: bool
    ) -> int:
        """Lock held. The copied rows become part of their chunks; how many chunks are newly counted."""
        pair = self._pair
        created_at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        now = time.monotonic()
        stored = 0
        entries = []
        for want, slots in zip(batch, placed, strict=True):
            ref = want.ref
            entry = pair.index.get(ref.name)
            if entry is None:
                standing = CONFIRMED if want.present else UNCONFIRMED
                entry = Entry(ref.name, standing, ref.prefix, ref.num_tokens, ref.kv_key, slots)
                self._describe(entry, ref, ids, created_at)
                entry.stored_at = now
                pair.index.add(entry)
            else:
                if entry.standing is UNREAD:
                    pair.adopt(entry, ref, want.present)
                # Meanwhile another call may have stored the chunk, or a colliding one, or recovery have found it.
                if entry.prefix != ref.prefix or entry.num_tokens != ref.end - ref.start:
                    pair.hot.free(slots)
                    pair.metrics.loss("collision")
                    continue
                fresh = {idx: slot for idx, slot in slots.items() if not entry.has(idx)}
                pair.hot.free({idx: slot for idx, slot in slots.items() if idx not in fresh})
                if not fresh and not entry.uncounted & slots.keys():
                    continue
                entry.uncounted -= slots.keys()
                if fresh:
                    entry.hot.update(fresh)
                    entry.refused = ""
                    if entry.described is None:
                        self._describe(entry, ref, ids, created_at)
                    entry.stored_at = now
                    pair.index.settle(entry)
            entries.append(entry)
            stored += not want.counted
        if streaming:
            # What does not fit beside the prefix passes through the last slots: written first, evicted first.
            for entry in entries:
                pair.index.age(entry)
        elif more:
            pair.index.touch(entries)
        pair.mover.wake()
        return stored

    def _describe(self, entry: Entry, ref: ChunkRef, ids: bytes, created_at: str) -> None:
        """What a file of the chunk will say of it, kept for as long as it has rows in RAM."""
        meta = ChunkMeta(
            ref.key, ref.chunk_hash, ref.parent, ref.prefix, ref.start, ref.num_tokens,
            self._model, created_at, self._capture,
        )  # fmt: skip
        entry.described = Description(meta, ids[ref.start * TOKEN_BYTES : ref.end * TOKEN_BYTES])
