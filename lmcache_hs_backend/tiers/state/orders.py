"""The orders in which chunks are written, leave RAM and leave the disk, and the sums over them.

``reindex`` derives the places of an entry from its state, so it is called after every change that moves one.
``park`` and ``unpark`` are its short form for a pin that begins and ends with nothing changed in between, which
is what every hit does.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lmcache_hs_backend.tiers.state.cold_order import ColdOrder
from lmcache_hs_backend.tiers.state.entries import ABSENT, KNOWN, LEAVING, LOCAL, SHARED, UNREAD, ChunkEntry

#: Chunks enter an order when their write ends, and writes that run side by side end in any order; so the first few
#: are compared by their last use.
_LRU_WINDOW = 16


class Orders:
    """Least recently used first, each.

    ``clean``: may leave RAM at once: hot, nothing to write, not pinned. ``dirty``: must be written first.
    ``aging``: the same chunks by how long they have been dirty. ``cold``: chunks with a file that may be deleted.
    ``to_share``: those of them that are to be uploaded, in the order in which they came. ``shared``: those that the
    bucket holds too.
    """

    def __init__(self, share: str = "") -> None:
        """``share``: which chunks are to be uploaded: ``all``, ``reused``, ``archive``, or none."""
        self.share = share
        self.shares_archive = share in ("all", "archive")  # whether archived files are
        self.to_share: OrderedDict[bytes, ChunkEntry] = OrderedDict()
        self.shared: OrderedDict[bytes, ChunkEntry] = OrderedDict()
        self.clean: OrderedDict[bytes, ChunkEntry] = OrderedDict()
        self.dirty: OrderedDict[bytes, ChunkEntry] = OrderedDict()
        self.aging: OrderedDict[bytes, ChunkEntry] = OrderedDict()
        self.cold = ColdOrder()
        self.clean_bytes = 0
        self.hot_chunks = 0
        self.dirty_chunks = 0
        self.unread_files = 0
        self._used_early: list[ChunkEntry] = []  # see date
        self._last_ns = 0

    def reindex(self, entry: ChunkEntry) -> None:
        """Put an entry into the orders that fit its state, and no others."""
        name, file = entry.name, entry.file
        in_index = not entry.dropped
        hot = in_index and bool(entry.hot)
        dirty = hot and entry.dirty
        to_write = dirty and not entry.drop_reason
        evictable = hot and not to_write and not entry.pins
        unread = in_index and file is UNREAD
        if in_index and file is not ABSENT and file is not LEAVING:
            self.cold.add(entry)
        else:
            self.cold.remove(entry)
        if self.share:
            self._reindex_shared(entry, in_index and file is KNOWN)
        if to_write:
            self.dirty.setdefault(name, entry)
            if name not in self.aging:
                entry.dirty_since = time.monotonic()
                self.aging[name] = entry
        else:
            self._leave(self.dirty, entry)
            self._leave(self.aging, entry)
        if evictable:
            self.clean.setdefault(name, entry)
        else:
            self._leave(self.clean, entry)
        clean_bytes = entry.hot_bytes if evictable else 0
        if entry.clean_bytes > 0:
            self.clean_bytes -= entry.clean_bytes
        self.clean_bytes += clean_bytes
        entry.clean_bytes = clean_bytes
        counted, entry.counted = entry.counted, hot | dirty << 1 | unread << 2
        if counted != entry.counted:
            self.hot_chunks += hot - (counted & 1)
            self.dirty_chunks += dirty - (counted >> 1 & 1)
            self.unread_files += unread - (counted >> 2)

    def mend(self, entries: Iterable[ChunkEntry]) -> None:
        """Put all chunks of the index in order again, by their last use. See ``mending``."""
        self.to_share, self.shared = OrderedDict(), OrderedDict()
        self.clean, self.dirty, self.aging, self.cold = OrderedDict(), OrderedDict(), OrderedDict(), ColdOrder()
        self.clean_bytes = self.hot_chunks = self.dirty_chunks = self.unread_files = 0
        entries = sorted(entries, key=lambda entry: entry.used_ns)
        since = {entry.name: entry.dirty_since for entry in entries}
        for entry in entries:
            entry.older = entry.younger = None
            entry.counted = entry.clean_bytes = 0
            self.reindex(entry)
        for entry in sorted(self.aging.values(), key=lambda entry: since[entry.name] or entry.dirty_since):
            entry.dirty_since = since[entry.name] or entry.dirty_since
            self.aging.move_to_end(entry.name)

    def is_wanted(self, entry: ChunkEntry) -> bool:
        """Whether a chunk of this store is to be uploaded, once it has a file."""
        return self.share == "all" or (self.share == "reused" and entry.reused)

    def _reindex_shared(self, entry: ChunkEntry, readable: bool) -> None:
        if readable and entry.share is LOCAL and self.is_wanted(entry):
            self.to_share.setdefault(entry.name, entry)
        else:
            self._leave(self.to_share, entry)
        if readable and entry.share is SHARED:
            self.shared.setdefault(entry.name, entry)
        else:
            self._leave(self.shared, entry)

    @staticmethod
    def _leave(order: OrderedDict[bytes, ChunkEntry], entry: ChunkEntry) -> None:
        # A chunk that was dropped while pinned may have a successor of the same name by now.
        if order.get(entry.name) is entry:
            del order[entry.name]

    def park(self, entry: ChunkEntry) -> None:
        """A first pin on a clean chunk: it may not leave RAM. ``unpark`` or ``reindex`` undoes it."""
        nbytes = entry.clean_bytes
        del self.clean[entry.name]
        self.clean_bytes -= nbytes
        entry.clean_bytes = -nbytes

    def unpark(self, entry: ChunkEntry) -> None:
        """The last pin has ended: the chunk may leave RAM again, if it might before."""
        nbytes = -entry.clean_bytes
        if nbytes > 0:  # it has not been reindexed in between
            entry.clean_bytes = nbytes
            self.clean_bytes += nbytes
            self.clean[entry.name] = entry
        else:
            self.reindex(entry)

    def touch(self, entries: Sequence[ChunkEntry]) -> None:
        """A sequence was used: its chunks become the youngest, the first one youngest of all."""
        clean, dirty, cold, shared, youngest = self.clean, self.dirty, self.cold, self.shared, self.cold.end
        for used_ns, entry in enumerate(reversed(entries), self.tick()):
            if not entry.generation.cleared:
                name = entry.name
                entry.used_ns = self._last_ns = used_ns
                if name in clean:
                    clean.move_to_end(name)
                elif name in dirty:
                    dirty.move_to_end(name)
                younger = entry.younger
                if younger is not None and younger is not youngest:
                    cold.touch(entry)
                if shared and name in shared:
                    shared.move_to_end(name)

    def age(self, entry: ChunkEntry) -> None:
        """Make an entry the first to leave RAM: the suffix of a sequence that does not fit."""
        for order in (self.clean, self.dirty):
            if entry.name in order:
                entry.used_ns = min(entry.used_ns, next(iter(order.values())).used_ns - 1)
                order.move_to_end(entry.name, last=False)

    @staticmethod
    def oldest(entries: Iterable[ChunkEntry]) -> ChunkEntry | None:
        """The least recently used of an order (see ``_LRU_WINDOW``)."""
        return min(itertools.islice(entries, _LRU_WINDOW), key=lambda entry: entry.used_ns, default=None)

    def tick(self) -> int:
        """Nanoseconds of the wall clock, strictly ascending whatever the clock does."""
        now, last = time.time_ns(), self._last_ns
        self._last_ns = now = now if now > last else last + 1
        return now

    def date(self, entry: ChunkEntry, used_ns: int) -> None:
        """When a chunk found at start was last used, called in that order. A use since the start counts more."""
        entry.saved_ns = used_ns
        if entry.used_ns:
            self._used_early.append(entry)
        else:
            entry.used_ns = used_ns
        self.cold.touch(entry)

    def all_dated(self) -> None:
        """That was the last of them: those that were used before they had a date are the youngest."""
        used, self._used_early = self._used_early, []
        for entry in sorted(used, key=lambda entry: entry.used_ns):
            if not entry.dropped:
                self.cold.touch(entry)
