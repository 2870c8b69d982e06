"""Rows on their way out: walk the prompt, ask for its KV, read what is cold, copy what is hot.

The caller gets a true prefix of the prompt in memory that nobody else writes, now or later. Cold chunks
are read by the I/O threads, all at once, while the caller's thread copies the hot ones and then each
cold one as it arrives. No chunk can leave RAM in between: the walk leases what it found.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec, Presence
from lmcache_hs_backend.tiers.headers import ensure_read
from lmcache_hs_backend.tiers.hot import Move
from lmcache_hs_backend.tiers.index import Entry, Standing
from lmcache_hs_backend.tiers.pair import Arrival, Read, TierPair


class _Hit(NamedTuple):
    """A leased chunk of a walk: how its layers are kept, and which of them must be read."""

    ref: ChunkRef
    entry: Entry
    specs: dict[int, LayerSpec]
    cold: list[int]


class Serve:
    """Retrieves rows from the tiers."""

    def __init__(self, pair: TierPair) -> None:
        self.closed = False
        self._pair = pair

    def retrieve(
        self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], dtype: torch.dtype | None
    ) -> dict[int, torch.Tensor]:
        """layer_idx → CPU rows ``[num_tokens, hidden_dim]`` of the longest prefix that has every layer.

        ``dtype`` None gives the dtype in which the rows are kept. Empty when not even the first chunk is
        there. Every reason to end early is counted.
        """
        pair = self._pair
        deadline = time.monotonic() + pair.config.read_timeout_sec
        ensure_read(pair, refs, deadline - time.monotonic())
        with pair.lock:
            known, _ = self._prefix(refs, layer_idxs, dtype is None)
        answers = pair.presence([ref.kv_key for ref in refs[:known]], False)
        arrivals: SimpleQueue[Arrival] = SimpleQueue()
        with pair.lock:
            hits, miss = self._lease(refs, layer_idxs, dtype is None, answers)
            reads = {
                position: Read(pair, hit.entry, hit.cold, position, arrivals)
                for position, hit in enumerate(hits)
                if hit.cold
            }
            for read in reads.values():
                pair.mover.submit(read)
        served = 0
        try:
            if hits:
                rows = self._outputs(hits, layer_idxs, dtype)
                self._copy_hot(hits, rows)
                served, miss = self._copy_cold(hits, rows, reads, arrivals, deadline, miss)
        finally:
            with pair.lock:
                for hit in hits:
                    pair.release(hit.entry)
                pair.index.touch([hit.entry for hit in hits[:served]])
        if miss is not None:
            pair.metrics.add(f"misses_{miss}")
        if not served:
            return {}
        cold = sum(position < served for position in reads)
        pair.metrics.add("hits_hot", served - cold)
        pair.metrics.add("hits_cold", cold)
        tokens = hits[served - 1].ref.end
        return {layer_idx: tensor[:tokens] for layer_idx, tensor in rows.items()}

    def prefetch(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int] | None) -> None:
        """Promote the cold chunks of a prompt's prefix, as far as there is room. Nobody waits."""
        pair = self._pair
        with pair.lock:
            if self.closed or not pair.cold.readable:
                return
            room = pair.hot.ready_bytes
            for ref in refs:
                entry = pair.index.get(ref.name)
                if entry is None or entry.prefix != ref.prefix or entry.standing is Standing.UNREAD:
                    return
                wanted = entry.layer_idxs() if layer_idxs is None else set(layer_idxs)
                if not all(entry.has(layer_idx) for layer_idx in wanted):
                    return
                cold = [layer_idx for layer_idx in sorted(wanted) if layer_idx not in entry.hot]
                specs = [entry.spec(layer_idx) for layer_idx in cold]
                room -= sum(spec.nbytes(entry.num_tokens) for spec in specs if spec is not None)
                if room < 0:
                    return
                if cold:
                    pair.mover.submit(Read(pair, entry, cold, 0, None))

    # -- the walk, lock held -----------------------------------------------------------------------------

    def _prefix(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], native: bool) -> tuple[int, str | None]:
        """How many chunks have every layer in one shape, and why the next one does not count."""
        if self.closed:
            return 0, None
        pair = self._pair
        readable = pair.cold.readable
        shape: list[LayerSpec] | None = None
        for number, ref in enumerate(refs):
            entry = pair.index.get(ref.name)
            if entry is None or entry.standing is Standing.UNREAD:
                return number, "absent"
            if entry.prefix != ref.prefix:
                return number, "collision"
            specs = []
            for layer_idx in layer_idxs:
                spec = entry.spec(layer_idx)
                if spec is None:
                    return number, "layer"
                if not readable and layer_idx not in entry.hot:
                    return number, "offline"
                specs.append(spec if native else spec._replace(dtype=torch.float32))
            if shape is None:
                shape = specs
            elif shape != specs:
                return number, "shape"
        return len(refs), None

    def _lease(
        self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], native: bool, answers: Sequence[Presence]
    ) -> tuple[list[_Hit], str | None]:
        """The chunks that may be served now, leased; chunks whose KV is gone leave both tiers."""
        pair = self._pair
        known, miss = self._prefix(refs, layer_idxs, native)
        hits: list[_Hit] = []
        ended = False
        for ref, answer in zip(refs[:known], answers, strict=False):
            entry = pair.index.get(ref.name)
            if entry is None:  # the same chunk twice in one prompt, dropped a moment ago
                break
            if answer is Presence.PRESENT:
                if not ended:
                    pair.confirm(entry, ref.kv_key)
                    entry.uncounted = frozenset()
                    cold = [layer_idx for layer_idx in layer_idxs if layer_idx not in entry.hot]
                    specs = {idx: spec for idx in layer_idxs if (spec := entry.spec(idx)) is not None}
                    hits.append(_Hit(ref, entry, specs, cold))
                    pair.lease(entry)
                continue
            if not ended:
                ended = True
                miss = "kv_unknown" if answer is Presence.UNKNOWN else "kv_absent"
                if answer is Presence.GONE and entry.standing is Standing.CONFIRMED:
                    miss = "kv_gone"
            if answer is Presence.GONE and entry.standing is Standing.CONFIRMED:
                pair.kv_gone(entry)
        if not ended and len(hits) < known:
            miss = "absent"  # it came after the KV was asked for
        return hits, miss

    # -- the rows, without the lock ----------------------------------------------------------------------

    def _outputs(
        self, hits: Sequence[_Hit], layer_idxs: Sequence[int], dtype: torch.dtype | None
    ) -> dict[int, torch.Tensor]:
        tokens = hits[-1].ref.end
        rows = {}
        for layer_idx in layer_idxs:
            spec = hits[0].specs[layer_idx]
            rows[layer_idx] = self._output(tokens, spec.hidden_dim, dtype or spec.dtype)
        return rows

    def _output(self, tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        if torch.cuda.is_available():
            # Recycling a region of ours under a copy that is still running would corrupt it; torch knows.
            return torch.empty(tokens, hidden_dim, dtype=dtype, pin_memory=True)
        return self._pair.pool.get(tokens * hidden_dim * dtype.itemsize).rows(tokens, hidden_dim, dtype)

    def _copy_hot(self, hits: Sequence[_Hit], rows: Mapping[int, torch.Tensor]) -> None:
        for layer_idx, tensor in rows.items():
            self._pair.hot.copy_out(
                tensor,
                [
                    Move(hit.ref.start, hit.ref.num_tokens, hit.entry.hot[layer_idx])
                    for hit in hits
                    if layer_idx not in hit.cold
                ],
            )

    def _copy_cold(
        self,
        hits: Sequence[_Hit],
        rows: Mapping[int, torch.Tensor],
        reads: Mapping[int, Read],
        arrivals: SimpleQueue[Arrival],
        deadline: float,
        miss: str | None,
    ) -> tuple[int, str | None]:
        """Copy each cold chunk as it arrives; how many chunks are whole, and why the next one is not."""
        waiting = dict(reads)
        served = len(hits)
        while waiting:
            try:
                arrival = arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for read in waiting.values():
                    read.cancelled = True  # what has not started need not
                if min(waiting) < served:
                    served, miss = min(waiting), "timeout"
                break
            del waiting[arrival.position]
            if arrival.miss is not None and arrival.position < served:
                served, miss = arrival.position, arrival.miss
            elif arrival.position < served:
                self._copy_arrival(hits[arrival.position], rows, arrival)
        return served, miss

    def _copy_arrival(self, hit: _Hit, rows: Mapping[int, torch.Tensor], arrival: Arrival) -> None:
        ref = hit.ref
        for layer_idx in hit.cold:
            buffer = arrival.scratch.get(layer_idx)
            if buffer is None:
                self._pair.hot.copy_out(rows[layer_idx], [Move(ref.start, ref.num_tokens, hit.entry.hot[layer_idx])])
            else:
                spec = hit.specs[layer_idx]
                rows[layer_idx][ref.start : ref.end].copy_(buffer.rows(ref.num_tokens, spec.hidden_dim, spec.dtype))
