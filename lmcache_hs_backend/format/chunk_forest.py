"""Chunks as a forest: which continues which, and what is below each.

What makes one chunk the parent of another is a parameter, because readers ask for different things: a listing believes
the hashes in the headers (``by_hash``), a data set wants the chunk and everything before it to be usable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

#: Parents that are no position: the chunk is a sequence's first; what precedes it is not here; it is to be left out.
FIRST = -1
MISSING = -2
EXCLUDED = -3


class Linked(Protocol):
    """What ``by_hash`` has to know of a chunk."""

    @property
    def chunk_hash(self) -> str:
        """Of the chunk itself."""
        ...

    @property
    def parent_hash(self) -> str:
        """Of the chunk before it, empty for a first one."""
        ...

    @property
    def start(self) -> int:
        """Its first token."""
        ...

    @property
    def end(self) -> int:
        """The token after its last one."""
        ...


C = TypeVar("C")
L = TypeVar("L", bound=Linked)


class ChunkForest(Generic[C]):
    """Chunks, linked. A chunk is its position in ``chunks``; parents come before their children.

    Attributes:
        chunks: In the order of their start.
        parents: For each its parent's position, or FIRST, MISSING or EXCLUDED.
    """

    def __init__(self, chunks: Sequence[C], link: Callable[[Sequence[C]], Iterable[int]]) -> None:
        """``link`` gives the parents of chunks that are sorted by start, in their order."""
        self.chunks = chunks
        self.parents: list[int] = []
        self._children: dict[int, list[int]] = defaultdict(list)
        for position, parent in enumerate(link(chunks)):
            self.parents.append(parent)
            self._children[parent].append(position)

    def children(self, position: int) -> Sequence[int]:
        """The chunks that continue a chunk; of FIRST: those that begin a sequence; of MISSING: the orphans."""
        return self._children.get(position, ())

    def chain(self, position: int) -> list[int]:
        """From the first chunk that is here to this one."""
        chain = []
        while position >= 0:
            chain.append(position)
            position = self.parents[position]
        chain.reverse()
        return chain

    def ends(self) -> Iterator[int]:
        """The chunks that nothing continues: each ends a sequence."""
        return (position for position, parent in enumerate(self.parents) if self.is_end(position) and parent > EXCLUDED)

    def is_end(self, position: int) -> bool:
        """Whether nothing continues a chunk."""
        return position not in self._children

    def below(self, values: Iterable[int]) -> list[int]:
        """For each chunk the sum of the values of itself and of everything below it."""
        sums = list(values)
        for position in range(len(sums) - 1, -1, -1):
            parent = self.parents[position]
            if parent >= 0:
                sums[parent] += sums[position]
        return sums

    def above(self, values: Iterable[int]) -> list[int]:
        """For each chunk the sum of the values of itself and of everything in front of it."""
        sums = list(values)
        for position, parent in enumerate(self.parents):
            if parent >= 0:
                sums[position] += sums[parent]
        return sums


def by_hash(chunks: Sequence[L]) -> Iterator[int]:
    """Parents as the headers name them: the chunk of that hash that ends where this one starts. Compares no digest."""
    ends: dict[tuple[str, int], int] = {}
    for position, chunk in enumerate(chunks):
        if chunk.parent_hash:
            yield ends.get((chunk.parent_hash, chunk.start), MISSING)
        else:
            yield FIRST if not chunk.start else MISSING
        ends.setdefault((chunk.chunk_hash, chunk.end), position)
