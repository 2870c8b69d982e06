"""Rows on their way out: walk the prompt, ask for its KV, read what is cold, copy what is hot.

The caller gets a true prefix of the prompt in memory that nothing else writes, now or later. Cold chunks are read by
the I/O threads, all at once, while the caller's thread copies the hot ones, and then what has arrived. No chunk can
leave RAM in between: the walk pins what it found.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec, Presence
from lmcache_hs_backend.tiers.flows.copier import Copier
from lmcache_hs_backend.tiers.flows.core import PIECE, Core
from lmcache_hs_backend.tiers.flows.read import Headers, PendingReads, Reads
from lmcache_hs_backend.tiers.memory.copies import alone, copy_serially
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES
from lmcache_hs_backend.tiers.memory.runs import Move
from lmcache_hs_backend.tiers.state import making_room, reading
from lmcache_hs_backend.tiers.state.entries import ChunkEntry
from lmcache_hs_backend.tiers.state.reading import PromptWalk

logger = logging.getLogger(__name__)

#: With so few reads there is nothing that torch's threads could get in the way of.
_FEW_READS = 2


class Outputs(Protocol):
    """What a caller of ``retrieve`` provides whose result the store's own memory would not do for."""

    def copy_hot(self, moves: Mapping[int, Sequence[Move]]) -> dict[int, torch.Tensor]:
        """Have rows that are all in RAM copied to wherever the caller wants them; the slots are pinned until then.

        Returns tensors of the result's shapes (on the ``meta`` device if the rows are elsewhere). What it raises ends
        the call.
        """

    def rows(self, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Contiguous ``[num_tokens, hidden_dim]``, contents undefined. Raises MemoryError when there is none."""


class Retrieve:
    """Retrieves rows from the tiers."""

    def __init__(self, core: Core, copier: Copier, reads: Reads, headers: Headers) -> None:
        self._core = core
        self._copier = copier
        self._reads = reads
        self._headers = headers

    def retrieve(
        self,
        refs: Sequence[ChunkRef],
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None,
        outputs: Outputs | None = None,
    ) -> dict[int, torch.Tensor]:
        """layer_idx → CPU rows ``[num_tokens, hidden_dim]`` of the longest prefix that has every layer.

        ``dtype`` None gives the dtype in which the rows are kept. Empty when not even the first chunk is there. Every
        reason to end early is counted.
        """
        walk = PromptWalk()
        with walk.running:
            try:
                return self._retrieve(walk, refs, layer_idxs, dtype, outputs)
            finally:
                self._end(walk)

    def _retrieve(
        self,
        walk: PromptWalk,
        refs: Sequence[ChunkRef],
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None,
        outputs: Outputs | None,
    ) -> dict[int, torch.Tensor]:
        core, state = self._core, self._core.state
        if core.closed:
            return {}
        deadline = time.monotonic() + core.config.read_timeout_sec
        if state.orders.unread_files:
            self._headers.ensure_read(refs, core.config.read_timeout_sec)
        pending: PendingReads | None = None
        readable, native = core.disk.health.readable, dtype is None
        known, served = 0, 0
        cold: list[int] = []
        rows: dict[int, torch.Tensor] = {}
        try:
            for piece in core.pieces(refs):
                with core.lock, core.step:
                    if core.closed:
                        return {}
                    state.calls.add(walk)
                    reading.prepare_retrieve(state, walk, piece, layer_idxs, native=native, readable=readable)
                if walk.miss is not None:
                    break
            known, miss, asked_ns = len(walk.entries), walk.miss, time.monotonic_ns()
            found = refs if known == len(refs) else refs[:known]
            answers = core.presence([ref.kv_key for ref in found], False)
            if not reading.nothing_to_judge(walk, answers):
                known, miss = self._judge(refs, walk, answers, asked_ns)
                found = refs[:known]
            if walk.cold:
                deadline += (time.monotonic_ns() - asked_ns) / 1e9  # the disk is not to blame for a slow LMCache
                cold = [position for position in walk.cold if position < known]
            if cold:  # first of all: the disk takes longest
                pending = PendingReads(refs, walk)
                self._submit_reads(walk, cold, pending)
            if known and outputs is not None and not cold:
                rows, served = outputs.copy_hot(self._hot_moves(found, walk)), known
            elif known:
                rows = self._outputs(found[-1].end, walk.specs, dtype, outputs)
                if pending is not None:
                    pending.result = rows
                if rows:
                    self._copier.copy_out(rows, self._hot_moves(found, walk), reading=bool(walk.cold))
                    served = known
                    if pending is not None:
                        served, miss = self._await_reads(known, cold, pending, deadline, miss)
                else:
                    miss = "memory"
            walk.served = served
        finally:
            if pending is not None:
                pending.cancel()
        from_disk = sum([position < served for position in cold]) if cold else 0
        counts = {"hits_hot": served - from_disk, "hits_cold": from_disk} if cold else {"hits_hot": served}
        if miss is not None:
            counts[f"misses_{miss}"] = 1
            if miss == "timeout":
                core.disk.health.call_timed_out()
        core.metrics.add_all(counts)
        if served == known:
            return rows
        if not served:
            return {}
        tokens = refs[served - 1].end
        return {layer_idx: tensor[:tokens] for layer_idx, tensor in rows.items()}

    def _judge(
        self, refs: Sequence[ChunkRef], walk: PromptWalk, answers: Sequence[Presence], asked_ns: int
    ) -> tuple[int, str | None]:
        """How many of the walk's chunks may be served, and why the next one may not."""
        core, state = self._core, self._core.state
        writable, now_ns = core.disk.health.writable, time.monotonic_ns()
        with core.lock, core.step:
            known, miss = reading.judge_presence(state, refs, walk, answers, asked_ns, now_ns, writable=writable)
            if known < len(walk.entries) and state.jobs.ready:
                core.wake()
        return known, miss

    def _end(self, call: PromptWalk) -> None:
        """Unpin the chunks of a call, the last ones first; those that were served become the youngest."""
        core, since = self._core, 0.0
        while True:
            unserved = len(call.entries) - call.served
            count = unserved if unserved > 0 else len(call.entries)
            with core.lock, core.step:
                if count:
                    reading.end_part(core.state, call, count if count < PIECE else PIECE, served=unserved <= 0)
                if not call.entries:
                    core.end(call)
                    return
            since = core.make_a_break(since)

    def prefetch(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int] | None) -> None:
        """Promote the cold chunks of a prompt's prefix, as far as there is room. Returns at once."""
        core = self._core
        if not core.disk.health.readable:
            return
        with core.lock, core.step:
            if core.closed:
                return
            for entry, cold in reading.plan_prefetch(core.state, refs, layer_idxs):
                self._reads.submit(entry, cold)

    # -- the rows, without the lock ----------------------------------------------------------------------

    def _outputs(
        self, tokens: int, specs: Sequence[LayerSpec], dtype: torch.dtype | None, outputs: Outputs | None
    ) -> dict[int, torch.Tensor]:
        """layer_idx → memory for its rows; none at all when the system has not enough."""
        memory = (self._core.pool if outputs is None else outputs).rows
        rows = {}
        try:
            for layer_idx, name, hidden_dim in specs:
                rows[layer_idx] = memory(tokens, hidden_dim, TORCH_DTYPES[name] if dtype is None else dtype)
        except (OSError, MemoryError, RuntimeError) as error:  # mmap's, Python's and torch's ways to say it
            logger.warning("no memory for %d rows of %d layer(s): %s", tokens, len(specs), error)
            return {}
        return rows

    def _hot_moves(self, refs: Sequence[ChunkRef], walk: PromptWalk) -> dict[int, list[Move]]:
        """layer_idx → its rows that are in slots."""
        moves: dict[int, list[Move]] = {}
        for spec in walk.specs:
            layer_idx = spec.layer_idx
            pairs: Iterable[tuple[ChunkRef, ChunkEntry]] = zip(refs, walk.entries, strict=False)
            if walk.cold:
                pairs = [pair for n, pair in enumerate(pairs) if layer_idx not in walk.cold.get(n, ())]
            moves[layer_idx] = [(ref.start, entry.num_tokens, entry.hot[layer_idx]) for ref, entry in pairs]
        return moves

    def _submit_reads(self, walk: PromptWalk, positions: Sequence[int], pending: PendingReads) -> None:
        """Have cold chunks read side by side, into slots that are side by side as far as there is room."""
        core, entries = self._core, walk.entries
        promote = core.config.promote
        for piece in core.pieces(positions):
            with core.lock, core.step:
                if promote:
                    chunks = [(entries[p].num_tokens, entries[p].specs(walk.cold[p])) for p in piece]
                    slots = making_room.allocate(core.state, chunks)
                    pending.reserved.update(zip(piece, slots, strict=False))
                    promote = len(slots) == len(piece)
                for p in piece:
                    self._reads.submit(entries[p], walk.cold[p], p, pending)

    def _await_reads(
        self, served: int, cold: Collection[int], pending: PendingReads, deadline: float, miss: str | None
    ) -> tuple[int, str | None]:
        """Check and copy what arrives to its place in the result.

        Returns the number of chunks, of ``served``, that are complete when every read is over or the deadline has
        passed, and the miss reason of the next one.
        """
        waiting = set(cold)
        copy = torch.Tensor.copy_ if len(cold) <= _FEW_READS else copy_serially
        with torch.inference_mode(), alone() if copy is copy_serially else contextlib.nullcontext():
            while waiting:
                try:
                    read = pending.get(deadline)
                except queue.Empty:
                    if min(waiting) < served:
                        served, miss = min(waiting), "timeout"
                    break
                if not self._reads.finish(read, copy):
                    continue
                waiting.remove(read.position)
                if read.miss is not None and read.position < served:
                    served, miss = read.position, read.miss
        return served, miss
