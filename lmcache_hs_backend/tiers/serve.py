"""Rows on their way out: walk the prompt, ask for its KV, read what is cold, copy what is hot.

The caller gets a true prefix of the prompt in memory that nobody else writes, now or later. Cold chunks
are read by the I/O threads, all at once, while the caller's thread copies the hot ones, and then what has
arrived. No chunk can leave RAM in between: the walk leases what it found.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec, Presence
from lmcache_hs_backend.tiers.copying import alone, copy_serially
from lmcache_hs_backend.tiers.headers import ensure_read
from lmcache_hs_backend.tiers.index import CONFIRMED, UNREAD, Entry
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES
from lmcache_hs_backend.tiers.pair import TierPair
from lmcache_hs_backend.tiers.reads import Read, Waiter

logger = logging.getLogger(__name__)

#: With so few reads there is nothing that torch's threads could get in the way of.
_FEW_READS = 2


@dataclass(slots=True)
class _Walk:
    """What a walk over a prompt has found: its leased chunks, from the first on."""

    entries: list[Entry]
    cold: dict[int, tuple[int, ...]]  # by position: the layers that must be read
    specs: list[LayerSpec]  # of the first chunk
    miss: str | None = None  # why the next chunk does not count


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
        waiter: Waiter | None = None
        with pair.lock:
            walk = self._walk(refs, layer_idxs, dtype is None)
        entries, miss, known, served = walk.entries, walk.miss, 0, 0
        cold: list[int] = []
        try:
            asked_ns = time.monotonic_ns()
            answers = pair.presence([ref.kv_key for ref in refs[: len(entries)]], False)
            deadline += (time.monotonic_ns() - asked_ns) / 1e9  # the disk is not to blame for a slow LMCache
            with pair.lock:
                known, miss = self._judge(refs, entries, answers, asked_ns, miss)
            cold = [position for position in walk.cold if position < known]
            if cold:  # first of all: the disk takes longest
                waiter = Waiter(refs)
                self._submit_reads(walk, cold, waiter)
            rows = self._outputs(refs[known - 1].end, walk.specs, dtype) if known else {}
            if known and not rows:
                miss = "memory"
            elif known:
                if waiter is not None:
                    waiter.result = rows
                self._copy_hot(refs[:known], walk, rows)
                served, miss = (
                    (known, miss) if waiter is None else self._await_reads(known, cold, waiter, deadline, miss)
                )
        finally:
            if waiter is not None:
                waiter.give_up(pair)
            with pair.lock:
                for entry in entries[served:]:
                    pair.release(entry)
                pair.release_used(entries[:served])
        from_disk = sum(position < served for position in cold)
        counts = {"hits_hot": served - from_disk, "hits_cold": from_disk}
        if miss is not None:
            counts[f"misses_{miss}"] = 1
        pair.metrics.add_all(counts)
        if not served:
            return {}
        if served == known:
            return rows
        tokens = refs[served - 1].end
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
                if entry is None or entry.prefix != ref.prefix or entry.standing is UNREAD:
                    return
                if pair.mover.is_busy(entry.name):
                    continue  # somebody reads or writes it already
                wanted = entry.layer_idxs() if layer_idxs is None else set(layer_idxs)
                if not all(entry.has(layer_idx) for layer_idx in wanted):
                    return
                cold = [layer_idx for layer_idx in sorted(wanted) if layer_idx not in entry.hot]
                room -= sum(spec.nbytes(entry.num_tokens) for spec in entry.specs(cold))
                if room < 0:
                    return
                if cold:
                    pair.mover.submit(Read(pair, entry, cold))

    def held(self, refs: Iterable[ChunkRef], layer_idxs: Collection[int]) -> int:
        """How many of the chunks have every layer for just these tokens, in either tier."""
        count = 0
        with self._pair.lock:
            for ref in () if self.closed else refs:
                entry = self._pair.index.get(ref.name)
                if entry is not None and entry.prefix == ref.prefix and entry.num_tokens == ref.num_tokens:
                    count += all(map(entry.has, layer_idxs))
        return count

    # -- the walk, lock held -----------------------------------------------------------------------------

    def _walk(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], native: bool) -> _Walk:
        """Lease the chunks, from the first on, that have every layer in one shape."""
        walk = _Walk([], {}, [])
        if not self.closed:
            walk.miss = self._look_up(refs, layer_idxs, native, walk)
            self._pair.lease(*walk.entries)
        return walk

    def _look_up(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], native: bool, walk: _Walk) -> str | None:
        """Add to the walk what may be served. Why the chunk behind it may not; None at the prompt's end."""
        pair = self._pair
        found, first = walk.entries, walk.specs
        entries, readable = pair.index.entries, pair.cold.readable
        for ref in refs:
            entry = entries.get(ref.name)
            if entry is None or entry.standing is UNREAD:
                return "absent"
            if entry.prefix != ref.prefix or entry.num_tokens != ref.end - ref.start:
                return "collision"
            specs = []
            cold: tuple[int, ...] = ()
            for layer_idx in layer_idxs:
                slot = entry.hot.get(layer_idx)
                spec = slot.spec if slot is not None else entry.spec(layer_idx)
                if spec is None:
                    return "layer"
                if slot is None:
                    if not readable:
                        return "offline"
                    cold += (layer_idx,)
                specs.append(spec)
            if not found:
                first += specs
            elif specs != first and (native or [s.hidden_dim for s in specs] != [s.hidden_dim for s in first]):
                return "shape"
            if cold:
                walk.cold[len(found)] = cold
            found.append(entry)
        return None

    def _judge(
        self,
        refs: Sequence[ChunkRef],
        entries: Sequence[Entry],
        answers: Sequence[Presence],
        asked_ns: int,
        miss: str | None,
    ) -> tuple[int, str | None]:
        """How many of the chunks may be served, as to their KV; those whose KV is gone leave both tiers."""
        present = Presence.PRESENT
        known = next((n for n, answer in enumerate(answers) if answer is not present), len(entries))
        seen_ns = time.monotonic_ns()
        for position, entry in enumerate(entries[:known]):
            if entry.standing is not CONFIRMED or entry.uncounted:
                self._pair.confirm(entry, refs[position].kv_key, seen_ns)
                entry.uncounted = frozenset()
        for position in range(known, len(entries)):
            entry, answer = entries[position], answers[position]
            gone = answer is Presence.GONE and entry.standing is CONFIRMED
            if position == known:
                miss = "kv_gone" if gone else "kv_absent" if answer is Presence.GONE else "kv_unknown"
            if gone and entry.seen_ns < asked_ns:  # nobody has seen it since
                self._pair.kv_gone(entry)
        return known, miss

    # -- the rows, without the lock ----------------------------------------------------------------------

    def _outputs(self, tokens: int, specs: Sequence[LayerSpec], dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
        """layer_idx → memory for its rows; none at all when the system has not enough."""
        try:
            return {spec.layer_idx: self._output(tokens, spec, dtype) for spec in specs}
        except (OSError, MemoryError, RuntimeError) as error:  # mmap's, Python's and torch's ways to say it
            logger.warning("no memory for %d rows of %d layer(s): %s", tokens, len(specs), error)
            return {}

    def _output(self, tokens: int, spec: LayerSpec, dtype: torch.dtype | None) -> torch.Tensor:
        hidden_dim, dtype = spec.hidden_dim, dtype or TORCH_DTYPES[spec.dtype]
        if self._pin:
            # Recycling a region of ours under a copy that is still running would corrupt it; torch knows.
            return torch.empty(tokens, hidden_dim, dtype=dtype, pin_memory=True)
        return self._pair.pool.get(tokens * hidden_dim * dtype.itemsize).rows(tokens, hidden_dim, dtype)

    def _copy_hot(self, refs: Sequence[ChunkRef], walk: _Walk, rows: Mapping[int, torch.Tensor]) -> None:
        parts = []
        for layer_idx, tensor in rows.items():
            pairs: Iterable[tuple[ChunkRef, Entry]] = zip(refs, walk.entries, strict=False)
            if walk.cold:
                pairs = [pair for n, pair in enumerate(pairs) if layer_idx not in walk.cold.get(n, ())]
            parts.append((tensor, [(ref.start, entry.num_tokens, entry.hot[layer_idx]) for ref, entry in pairs]))
        self._pair.hot.copy_out(parts, reading=bool(walk.cold))

    def _submit_reads(self, walk: _Walk, positions: Sequence[int], waiter: Waiter) -> None:
        """Have cold chunks read side by side, into slots that lie side by side as far as there is room."""
        pair, entries = self._pair, walk.entries
        with pair.lock:
            if pair.config.promote:
                chunks = [(entries[p].num_tokens, entries[p].specs(walk.cold[p])) for p in positions]
                waiter.reserved = dict(zip(positions, pair.hot.allocate(chunks), strict=False))
            for p in positions:
                pair.mover.submit(Read(pair, entries[p], walk.cold[p], p, waiter))

    @staticmethod
    def _await_reads(
        served: int, cold: Collection[int], waiter: Waiter, deadline: float, miss: str | None
    ) -> tuple[int, str | None]:
        """Check and copy what arrives to its place in the result.

        Of ``served`` chunks, how many are whole when every read is over, or the time is, and why the next one is not.
        """
        waiting = set(cold)
        copy = torch.Tensor.copy_ if len(cold) <= _FEW_READS else copy_serially
        with torch.inference_mode(), alone() if copy is copy_serially else contextlib.nullcontext():
            while waiting:
                try:
                    read = waiter.get(deadline)
                except queue.Empty:
                    if min(waiting) < served:
                        served, miss = min(waiting), "timeout"
                    break
                if not read.finish(copy):
                    continue
                waiting.remove(read.position)
                if read.miss is not None and read.position < served:
                    served, miss = read.position, read.miss
        return served, miss
