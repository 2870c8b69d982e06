"""Which dirty chunk is written next, and when. Asked by idle I/O threads; changes nothing but a claim.

Under the store's lock, in constant time. Three reasons to write, in this order: somebody waits (a store
for room, a flush), free and clean memory falls short, a chunk has been dirty for too long. A chunk that
got a layer a moment ago is left alone meanwhile unless somebody waits: its other layers are probably on their
way, and each would mean another write of the whole file. How long a moment is depends on how much room is
left: a store that comes faster than chunks settle must not have to wait for the disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from lmcache_hs_backend.tiers.index import Entry
from lmcache_hs_backend.tiers.mover import IDLE_SEC, FileOp
from lmcache_hs_backend.tiers.pair import TierPair, Write

SETTLE_SEC = 0.2


class Cleaner:
    """The choice of writes for one pair of tiers."""

    def __init__(self, pair: TierPair) -> None:
        self.enabled = False  # not before it is known what is on disk already
        self.flushing = 0  # calls that wait until everything is written
        self.wanted_bytes = 0  # what stores that found no room want free or clean; no more is written for them
        self._pair = pair
        self._enabled_by = time.monotonic() + pair.config.read_timeout_sec

    @property
    def late(self) -> bool:
        """Whether it takes so long to see what is on disk that nobody shall wait for a chunk to become clean."""
        return not self.enabled and time.monotonic() > self._enabled_by

    def next_write(self) -> FileOp | float:
        """Lock held. A write to do now, or the seconds after which to ask again."""
        pair = self._pair
        if not self.enabled or not pair.cold.writable or not pair.index.aging:
            return IDLE_SEC
        now = time.monotonic()
        if now < self._pair.write_again_at:
            return self._pair.write_again_at - now
        wait = IDLE_SEC
        ready, target = pair.hot.ready_bytes, pair.config.clean_fraction * pair.hot.arena.capacity
        soon = ready + pair.writing_bytes
        awaited = self.flushing or soon < self.wanted_bytes
        if awaited or ready < target:
            entry = self._first(pair.index.dirty.values())
            if entry is not None:
                settled = 0.0 if awaited else entry.stored_at + SETTLE_SEC * min(1.0, soon / target) - now
                if settled <= 0:
                    return Write(pair, entry)
                wait = min(wait, settled)
        entry = self._first(pair.index.aging.values())
        if entry is not None:
            due = max(entry.dirty_since + pair.config.write_back_sec, entry.stored_at + SETTLE_SEC) - now
            if due <= 0:
                return Write(pair, entry)
            wait = min(wait, due)
        return wait

    def _first(self, entries: Iterable[Entry]) -> Entry | None:
        """The first that no operation is busy with; only as many are passed over as are in flight."""
        for entry in entries:
            if not entry.claimed and not self._pair.mover.is_busy(entry.name):
                return entry
        return None
