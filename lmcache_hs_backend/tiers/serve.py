"""Rows on their way out: walk the prompt, ask for its KV, read what is cold, copy what is hot.

The caller gets a true prefix of the prompt in memory that nobody else writes, now or later. Cold chunks
are read and converted by the I/O threads, all at once, while the caller's thread copies the hot ones. No
chunk can leave RAM in between: the walk leases what it found.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec, Presence
from lmcache_hs_backend.tiers.headers import ensure_read
from lmcache_hs_backend.tiers.hot import Move
from lmcache_hs_backend.tiers.index import Entry, Standing
from lmcache_hs_backend.tiers.pair import Read, TierPair, Waiter


class _Hit(NamedTuple):
    """A leased chunk of a walk, and the layers of it that must be read."""

    ref: ChunkRef
    entry: Entry
    cold: tuple[int, ...]


class Serve:
    """Retrieves rows from the tiers."""

    def __init__(self, pair: TierPair) -> None:
        self.closed = False
        self._pair = pair
        self._pin = torch.cuda.is_available()

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
        waiter = Waiter()
        with pair.lock:
            hits, specs, miss = self._walk(refs, layer_idxs, dtype is None)
        served = 0
        try:
            asked_ns = time.monotonic_ns()
            answers = pair.presence([hit.ref.kv_key for hit in hits], False)
            with pair.lock:
                known, miss = self._judge(hits, answers, asked_ns, miss)
            cold: list[int] = []
            if known:
                tokens = hits[known - 1].ref.end
                rows = {spec.layer_idx: self._output(tokens, spec, dtype) for spec in specs}
                cold = self._submit_reads(hits[:known], rows, waiter)
                self._copy_hot(hits[:known], rows)
                served, miss = self._await_reads(known, cold, waiter, deadline, miss)
        finally:
            waiter.gave_up = True
            with pair.lock:
                for hit in hits[served:]:
                    pair.release(hit.entry)
                pair.release_used([hit.entry for hit in hits[:served]])
        if miss is not None:
            pair.metrics.add(f"misses_{miss}")
        if not served:
            return {}
        from_disk = sum(position < served for position in cold)
        pair.metrics.add("hits_hot", served - from_disk)
        pair.metrics.add("hits_cold", from_disk)
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
                if pair.mover.is_busy(entry.name):
                    continue  # somebody reads or writes it already
                wanted = entry.layer_idxs() if layer_idxs is None else set(layer_idxs)
                if not all(entry.has(layer_idx) for layer_idx in wanted):
                    return
                cold = [layer_idx for layer_idx in sorted(wanted) if layer_idx not in entry.hot]
                specs = [entry.spec(layer_idx) for layer_idx in cold]
                room -= sum(spec.nbytes(entry.num_tokens) for spec in specs if spec is not None)
                if room < 0:
                    return
                if cold:
                    pair.mover.submit(Read(pair, entry, cold))

    # -- the walk, lock held -----------------------------------------------------------------------------

    def _walk(
        self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], native: bool
    ) -> tuple[list[_Hit], list[LayerSpec], str | None]:
        """Lease the chunks, from the first on, that have every layer in one shape.

        Returns them, the layers of the first of them, and why the next chunk does not count.
        """
        hits: list[_Hit] = []
        first: list[LayerSpec] = []
        if self.closed:
            return hits, first, None
        pair = self._pair
        entries, readable = pair.index.entries, pair.cold.readable
        for ref in refs:
            entry = entries.get(ref.name)
            if entry is None or entry.standing is Standing.UNREAD:
                return hits, first, "absent"
            if entry.prefix != ref.prefix or entry.num_tokens != ref.end - ref.start:
                return hits, first, "collision"
            specs = []
            cold: tuple[int, ...] = ()
            for layer_idx in layer_idxs:
                slot = entry.hot.get(layer_idx)
                spec = slot.spec if slot is not None else entry.spec(layer_idx)
                if spec is None:
                    return hits, first, "layer"
                if slot is None:
                    if not readable:
                        return hits, first, "offline"
                    cold += (layer_idx,)
                specs.append(spec)
            if not hits:
                first = specs
            elif specs != first and (native or [s.hidden_dim for s in specs] != [s.hidden_dim for s in first]):
                return hits, first, "shape"
            pair.lease(entry)
            hits.append(_Hit(ref, entry, cold))
        return hits, first, None

    def _judge(
        self, hits: Sequence[_Hit], answers: Sequence[Presence], asked_ns: int, miss: str | None
    ) -> tuple[int, str | None]:
        """How many of the chunks may be served, as to their KV; those whose KV is gone leave both tiers."""
        known = next((n for n, answer in enumerate(answers) if answer is not Presence.PRESENT), len(hits))
        for hit in hits[:known]:
            if hit.entry.standing is not Standing.CONFIRMED or hit.entry.uncounted:
                self._pair.confirm(hit.entry, hit.ref.kv_key)
                hit.entry.uncounted = frozenset()
        for hit, answer in zip(hits[known:], answers[known:], strict=True):
            gone = answer is Presence.GONE and hit.entry.standing is Standing.CONFIRMED
            if hit is hits[known]:
                miss = "kv_gone" if gone else "kv_absent" if answer is Presence.GONE else "kv_unknown"
            if gone and hit.entry.seen_ns < asked_ns:  # nobody has seen it since
                self._pair.kv_gone(hit.entry)
        return known, miss

    # -- the rows, without the lock ----------------------------------------------------------------------

    def _output(self, tokens: int, spec: LayerSpec, dtype: torch.dtype | None) -> torch.Tensor:
        hidden_dim, dtype = spec.hidden_dim, dtype or spec.dtype
        if self._pin:
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
                    if not hit.cold or layer_idx not in hit.cold
                ],
            )

    def _submit_reads(self, hits: Sequence[_Hit], rows: Mapping[int, torch.Tensor], waiter: Waiter) -> list[int]:
        """Have all cold chunks read into their part of the result, side by side; which ones they are."""
        cold = [position for position, hit in enumerate(hits) if hit.cold]
        results = {
            position: {idx: rows[idx][hits[position].ref.start : hits[position].ref.end] for idx in hits[position].cold}
            for position in cold
        }
        with self._pair.lock:
            for position, result in results.items():
                hit = hits[position]
                self._pair.mover.submit(Read(self._pair, hit.entry, hit.cold, position, waiter, result))
        return cold

    @staticmethod
    def _await_reads(
        known: int, cold: Collection[int], waiter: Waiter, deadline: float, miss: str | None
    ) -> tuple[int, str | None]:
        """How many chunks are whole when every read is over, or the time is, and why the next one is not."""
        waiting = set(cold)
        served = known
        while waiting:
            try:
                arrival = waiter.arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if min(waiting) < served:
                    served, miss = min(waiting), "timeout"
                break
            waiting.remove(arrival.position)
            if arrival.miss is not None and arrival.position < served:
                served, miss = arrival.position, arrival.miss
        return served, miss
