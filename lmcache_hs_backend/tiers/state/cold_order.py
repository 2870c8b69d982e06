"""The chunks that have a file which may be deleted, least recently used first.

There may be ten million of them, so the order is a ring through the entries themselves: two links in each, where an
OrderedDict takes 120 bytes for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_hs_backend.tiers.state.entries import ChunkEntry


class ColdOrder:
    """A ring of entries, closed by one that is no chunk. Only ``Orders`` changes it, under the store's lock.

    An entry is in one ring at most: its links say that it is, and ``older`` is None where it is not.
    """

    def __init__(self) -> None:
        """Empty."""
        #: Between the youngest and the oldest.
        self.end = end = ChunkEntry(b"")
        end.older = end.younger = end
        self._count = 0
        # Of the walk of next_batch: whom it visits next, and how many more at most in this round.
        self._next: ChunkEntry = end
        self._left = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ChunkEntry]:
        """From the oldest on. The order must not change meanwhile."""
        end = self.end
        entry = end.younger
        while entry is not end:
            yield entry
            entry = entry.younger

    def add(self, entry: ChunkEntry) -> None:
        """A chunk becomes the youngest, unless it has a place already."""
        if entry.older is None:
            self._count += 1
            self._append(entry)

    def remove(self, entry: ChunkEntry) -> None:
        """A chunk leaves, if it is here."""
        if entry.older is not None:
            self._count -= 1
            self._unlink(entry)
            entry.older = entry.younger = None

    def touch(self, entry: ChunkEntry) -> None:
        """A chunk becomes the youngest, if it is here. Written out, as every hit does it for each of its chunks."""
        end, older, younger = self.end, entry.older, entry.younger
        if younger is None or younger is end:
            return
        if entry is self._next:
            self._next = younger
        older.younger, younger.older = younger, older
        entry.older = last = end.older
        entry.younger = end
        last.younger = end.older = entry

    def popitem(self) -> tuple[bytes, ChunkEntry]:
        """The oldest leaves. Raises KeyError when there is none, as a dict does."""
        if not self._count:
            raise KeyError("the order is empty")
        entry: ChunkEntry = self.end.younger
        self.remove(entry)
        return entry.name, entry

    def next_batch(self, count: int) -> list[ChunkEntry]:
        """The next ``count`` chunks of a walk over all of them, from the oldest on; none when its round is over.

        Chunks that are used meanwhile move to the end of the walk, so a round ends at the latest when it has visited
        as many as there were at its beginning.
        """
        batch: list[ChunkEntry] = []
        while len(batch) < count and self._left and self._next is not self.end:
            batch.append(self._next)
            self._left -= 1
            self._next = self._next.younger
        if not batch:
            self._next, self._left = self.end.younger, self._count
        return batch

    def _append(self, entry: ChunkEntry) -> None:
        end = self.end
        last = end.older
        entry.older, entry.younger = last, end
        last.younger = end.older = entry

    def _unlink(self, entry: ChunkEntry) -> None:
        older, younger = entry.older, entry.younger
        older.younger, younger.older = younger, older
        if entry is self._next:
            self._next = younger
