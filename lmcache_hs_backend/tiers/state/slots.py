"""Which bytes of the hot tier are free: segregated fit with coalescing, in constant time.

(Except where free memory is scattered over many different sizes.) The memory itself is ``memory.arena``'s; this
module only knows offsets.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_hs_backend.format.pages import ALIGN


class FreeList:
    """Slots ``(offset, nbytes)`` of a region, both multiples of 4096.

    The smallest free run that can hold a request is cut, so what was freed together is given out together again.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: bytes of the region, rounded down to a multiple of 4096. Raises ValueError below one page."""
        self.capacity = capacity // ALIGN * ALIGN
        if self.capacity <= 0:
            raise ValueError(f"a hot tier of {capacity} bytes cannot hold one page of {ALIGN} bytes")
        self.free_bytes = self.capacity
        # Free runs, three ways: by where they start, by where they end, and by how long they are.
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sizes: dict[int, dict[int, None]] = {}
        self._insert(0, self.capacity)

    @property
    def used_bytes(self) -> int:
        """Bytes that are not free."""
        return self.capacity - self.free_bytes

    def allocate(self, nbytes: int, count: int = 1) -> list[int]:
        """Offsets of up to ``count`` slots of ``nbytes`` (a multiple of 4096), adjacent as far as possible.

        Fewer than ``count`` when memory is short; ascending within each free run that is used.
        """
        offsets: list[int] = []
        while len(offsets) < count:
            run = self._pick((count - len(offsets)) * nbytes, nbytes)
            if run is None:
                break
            start, size = run
            fit = min(count - len(offsets), size // nbytes)
            self._remove(start)
            offsets.extend(range(start, start + fit * nbytes, nbytes))
            if size > fit * nbytes:
                self._insert(start + fit * nbytes, size - fit * nbytes)
        self.free_bytes -= len(offsets) * nbytes
        return offsets

    def free(self, offset: int, nbytes: int) -> None:
        """Give a slot back; it joins with its free neighbours."""
        self.free_bytes += nbytes
        before = self._ends.get(offset)
        if before is not None:
            self._remove(before)
            nbytes += offset - before
            offset = before
        after = self._starts.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes)
            nbytes += after
        self._insert(offset, nbytes)

    def mend(self, used: Iterable[tuple[int, int]]) -> None:
        """Everything but these slots, ``(offset, nbytes)``, is free. See ``mending``."""
        self._starts, self._ends, self._sizes = {}, {}, {}
        self.free_bytes = end = 0
        for offset, nbytes in [*sorted(used), (self.capacity, 0)]:
            if offset > end:
                self._insert(end, offset - end)
                self.free_bytes += offset - end
            end = max(end, offset + nbytes)

    def runs(self) -> list[tuple[int, int]]:
        """The free runs as ``(offset, nbytes)``, ascending. For checks."""
        return sorted(self._starts.items())

    def _pick(self, wanted: int, least: int) -> tuple[int, int] | None:
        """The smallest free run of at least ``wanted`` bytes, else the largest of at least ``least``."""
        if wanted in self._sizes:
            size = wanted
        else:
            size = min((s for s in self._sizes if s > wanted), default=0) or max(self._sizes, default=0)
            if size < least:
                return None
        return next(iter(self._sizes[size])), size

    def _insert(self, start: int, size: int) -> None:
        self._starts[start] = size
        self._ends[start + size] = start
        self._sizes.setdefault(size, {})[start] = None

    def _remove(self, start: int) -> None:
        size = self._starts.pop(start)
        del self._ends[start + size]
        same = self._sizes[size]
        del same[start]
        if not same:
            del self._sizes[size]
