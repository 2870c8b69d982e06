"""The hot tier: chunks in slots of the arena, and who leaves when it is full.

Allocation and eviction happen under the store's lock and move no bytes: an evicted chunk is clean, so
leaving is only a free. Copies in and out happen without the lock, on slots that cannot be freed
meanwhile: new ones belong to the call that fills them, old ones are leased. This module never looks at
files; making a chunk clean is somebody else's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from lmcache_hs_backend.arena import Arena
from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.tiers.copying import Crew
from lmcache_hs_backend.tiers.index import Entry, Index, Slot, slot_bytes
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

#: Rows of one layer of one chunk on their way between a tensor and a slot: the first row in the tensor, how many, and
#: the slot.
Move = tuple[int, int, Slot]
#: A layer of a chunk that wants a slot, and of how many bytes.
_Need = tuple[LayerSpec, int]


class HotTier:
    """Slots for chunks, within a fixed number of bytes."""

    def __init__(self, capacity: int, index: Index, on_evict: Callable[[Entry], None], crew: Crew) -> None:
        """``on_evict`` is told, under the lock, of every chunk that has left to make room; ``crew`` copies."""
        self.arena = Arena(capacity)
        self._index = index
        self._on_evict = on_evict
        self._crew = crew
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def used_bytes(self) -> int:
        return self.arena.capacity - self.arena.free_bytes

    @property
    def ready_bytes(self) -> int:
        """Bytes that can be had at once: free, or held by chunks that may leave."""
        return self.arena.free_bytes + self._index.clean_bytes

    # -- under the store's lock ------------------------------------------------------------------------

    def allocate(self, chunks: Sequence[tuple[int, Sequence[LayerSpec]]]) -> list[dict[int, Slot]]:
        """Slots for as many chunks as there is room for, from the first on: layer_idx → slot for each.

        A chunk is ``(num_tokens, layers)``; it gets all its slots or none. Clean chunks leave, least
        recently used first, as far as that helps.
        """
        ready = self.ready_bytes
        wanted = 0
        needs: list[list[_Need]] = []
        for tokens, specs in chunks:
            need = [(spec, slot_bytes(spec, tokens)) for spec in specs]
            nbytes = sum([nbytes for _, nbytes in need])
            if wanted + nbytes > ready:
                break
            wanted += nbytes
            needs.append(need)
        if not needs:
            return []
        while self.arena.free_bytes < wanted and self._evict_one():
            pass
        placed = self._place(needs)
        # Enough bytes, but scattered: only now does a further chunk have to leave for the first one's sake.
        while not placed and self._evict_one():
            placed = self._place(needs[:1])
        return placed

    def free(self, slots: Mapping[int, Slot]) -> None:
        """Give slots back that no entry holds."""
        for slot in slots.values():
            self.arena.free(slot.offset, slot.nbytes)

    def vacate(self, entry: Entry) -> None:
        """Free all slots of an entry that nobody leases."""
        slots, entry.hot = entry.hot, {}
        self.free(slots)

    def _evict_one(self) -> bool:
        entry = self._index.oldest(self._index.clean.values())
        if entry is None:
            return False
        self.evict(entry)
        return True

    def evict(self, entry: Entry) -> None:
        """A clean chunk leaves."""
        self.vacate(entry)
        self._index.settle(entry)
        self._on_evict(entry)

    def _place(self, needs: Sequence[Sequence[_Need]]) -> list[dict[int, Slot]]:
        """Slots layer by layer, so that the same layer of neighbouring chunks lies side by side."""
        placed: list[dict[int, Slot]] = [{} for _ in needs]
        by_layer: dict[_Need, list[int]] = {}
        for number, chunk in enumerate(needs):
            for need in chunk:
                by_layer.setdefault(need, []).append(number)
        fit = len(needs)
        for (spec, nbytes), numbers in by_layer.items():
            offsets = self.arena.allocate(nbytes, len(numbers))
            for number, offset in zip(numbers, offsets, strict=False):
                placed[number][spec.layer_idx] = Slot(offset, nbytes, spec)
            if len(offsets) < len(numbers):
                fit = min(fit, numbers[len(offsets)])
        for slots in placed[fit:]:
            self.free(slots)
        return placed[:fit]

    # -- without it ------------------------------------------------------------------------------------

    def copy_in(self, rows: torch.Tensor, moves: Iterable[Move]) -> None:
        """Copy rows of one layer into their slots, one copy per run of adjacent slots.

        A GPU tensor is copied asynchronously; call ``synchronize`` before the slots are published.
        """
        rows = rows.detach()  # or the whole tier would be a function of them, in the eyes of autograd
        if rows.is_cuda:
            stream = self._stream(rows.device)
            stream.wait_stream(torch.cuda.current_stream(rows.device))
            with torch.cuda.stream(stream):
                for source, slot in self._runs(rows, moves):
                    slot.copy_(source, non_blocking=True)
            rows.record_stream(stream)
        else:
            self._crew.copy([(slot, source) for source, slot in self._runs(rows, moves)])

    def synchronize(self, device: torch.device) -> None:
        """Wait until the copies from a GPU have arrived."""
        if device.type == "cuda":
            self._stream(device).synchronize()

    def copy_out(self, parts: Iterable[tuple[torch.Tensor, Iterable[Move]]], *, reading: bool = False) -> None:
        """Copy leased slots into rows, layer by layer, converting to the dtype of the rows. ``reading``: see Crew."""
        pairs = [pair for rows, moves in parts for pair in self._runs(rows, moves)]
        if pairs:
            self._crew.copy(pairs, reading=reading)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:  # two first stores may both make one; all use the same in the end
            self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _runs(self, rows: torch.Tensor, moves: Iterable[Move]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal shape: rows of the tensor, and the memory of one or more slots.

        Slots that follow each other both in the tensor and, without a gap, in memory make one pair.
        """
        pairs = []
        spec: LayerSpec | None = None
        # The run so far; ``end`` is where its next slot would begin.
        row = tokens = offset = end = row_bytes = 0
        for first_row, num_tokens, slot in moves:
            begin, nbytes, its_spec = slot
            if begin == end and first_row == row + tokens and its_spec == spec:
                tokens += num_tokens
            else:
                if spec is not None:
                    pairs.append(self._pair(rows, row, tokens, offset, spec))
                row, tokens, offset, spec = first_row, num_tokens, begin, its_spec
                row_bytes = spec.nbytes(1)
            end = begin + nbytes if nbytes == num_tokens * row_bytes else -1  # padding ends a run
        if spec is not None:
            pairs.append(self._pair(rows, row, tokens, offset, spec))
        return pairs

    def _pair(
        self, rows: torch.Tensor, row: int, tokens: int, offset: int, spec: LayerSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part = rows if tokens == rows.shape[0] else rows[row : row + tokens]
        return part, self.arena.rows_at(offset, tokens, spec.hidden_dim, TORCH_DTYPES[spec.dtype])
