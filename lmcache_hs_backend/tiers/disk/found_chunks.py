"""What a start finds on disk, 32 bytes a chunk: for ten million chunks, lists of objects would take gigabytes.

Numbers only: no I/O, no state of chunks, no lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch

from lmcache_hs_backend.format.layout import FoundFile

_NAME_BYTES = 16


class FoundChunks:
    """Names, sizes and times of last use of chunk files. Filled once, then put into order, then read."""

    def __init__(self) -> None:
        """Empty."""
        self._names = bytearray()
        self._sizes = array("q")
        self._used_ns = array("q")
        self._order = array("q")

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, file: FoundFile) -> None:
        """One more chunk's file. Its path is not kept: the name says it."""
        self._names += file.name
        self._sizes.append(file.size)
        self._used_ns.append(file.mtime_ns)

    def sort(self) -> None:
        """Order them by last use. Python's own sort of millions would hold the interpreter for seconds.

        The order is an array and no tensor: each look into a tensor lets go of the interpreter for a moment, and a
        thread that waits for it and wakes too late each time gets it only when all is done.
        """
        self._order = array("q", bytes(8 * len(self)))
        if len(self):
            order = torch.frombuffer(self._used_ns, dtype=torch.int64).argsort(stable=True)
            torch.frombuffer(self._order, dtype=torch.int64).copy_(order)

    def by_use(self, size: int) -> Iterator[list[FoundFile]]:
        """Least recently used first, ``size`` at a time; the paths are empty."""
        for begin in range(0, len(self), size):
            batch = self._order[begin : begin + size]
            yield [FoundFile("", self._sizes[i], self._used_ns[i], self._name(i)) for i in batch]

    def names_by_use(self, size: int) -> Iterator[list[bytes]]:
        """Names, most recently used first, ``size`` at a time."""
        for end in range(len(self), 0, -size):
            batch = self._order[max(end - size, 0) : end]
            yield [self._name(i) for i in reversed(batch)]

    def _name(self, number: int) -> bytes:
        return bytes(self._names[number * _NAME_BYTES : (number + 1) * _NAME_BYTES])
