"""The one mutable picture of both tiers, and the steps that every transition is made of.

``TierState`` brings the index, the orders, the free list, the accounts and the queue of jobs together. The
transitions proper are the functions of the modules beside this one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from lmcache_hs_backend.chunk import WHOLE_KEYS, Presence
from lmcache_hs_backend.format.header import FileLayout
from lmcache_hs_backend.format.layout import FoundFile
from lmcache_hs_backend.tiers.state.accounts import DiskAccounts
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.entries import (
    ABSENT,
    CONFIRMED,
    LOCAL,
    NO_SLOTS,
    REMOVED,
    UNCONFIRMED,
    UNREAD,
    ChunkEntry,
    Generation,
    Slot,
)
from lmcache_hs_backend.tiers.state.jobs import ArchiveJob, DeleteJob, JobQueue, WriteJob
from lmcache_hs_backend.tiers.state.orders import Orders
from lmcache_hs_backend.tiers.state.slots import FreeList
from lmcache_hs_backend.tiers.state.write_rate import WriteRate


class Tally:
    """What was counted since it was last taken: counters by name, and lost chunks by reason (metrics.DROPS)."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count something; ``name`` is one of metrics.COUNTERS."""
        self.counts[name] += count

    def loss(self, reason: str, chunks: int = 1) -> None:
        """Count chunks that are lost; ``reason`` is one of metrics.DROPS."""
        self.losses[reason] += chunks

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """Both, and start again from nothing."""
        taken = self.counts, self.losses
        self.counts, self.losses = Counter(), Counter()
        return taken


class VictimKind(Enum):
    """What a file is, in the order in which files leave. The values are the fields of DiskAccounts."""

    QUARANTINE = "quarantine"
    DEAD = "dead"
    ARCHIVE = "archive"
    OWN = "own"


@dataclass(eq=False)
class Victim:
    """A file that is being deleted for lack of room."""

    kind: VictimKind
    size: int
    name: bytes = b""  # of the chunk, for OWN and ARCHIVE: busy until the eviction ends
    file: FoundFile | None = None  # for QUARANTINE
    directory: str = ""  # for DEAD: the namespace
    entry: ChunkEntry | None = None  # for OWN
    layout: FileLayout | None = None  # what the entry's file held, for abort
    digests: bytes = b""
    in_bucket: bool = False  # for ARCHIVE: the shared tier holds it too


class ChunkTable(Protocol):
    """A table of chunks that is let go of bit by bit."""

    def __len__(self) -> int: ...

    def popitem(self) -> tuple[bytes, ChunkEntry]:
        """Take one out."""
        ...


class TierState:
    """See the module's text. The store's lock guards all of it."""

    def __init__(
        self,
        capacity: int,
        *,
        archive_gone: bool,
        max_cold_bytes: int,
        share: str = "",
        keep_key: Callable[[Any], Any] = WHOLE_KEYS.keep,
    ) -> None:
        """``capacity``: bytes of the hot tier. ``archive_gone``: keep the files of chunks whose KV is gone.

        ``share``: see Orders; empty without a shared tier. ``keep_key``: see KeyForm.

        Raises ValueError when the hot tier cannot hold a page.
        """
        self.free_list = FreeList(capacity)
        self.entries: dict[bytes, ChunkEntry] = {}
        self.orders = Orders(share)
        self.accounts = DiskAccounts()
        self.jobs = JobQueue()
        self.rate = WriteRate()
        self.tally = Tally()
        self.archive_gone = archive_gone
        self.keep_key = keep_key
        self.max_cold_bytes = max_cold_bytes
        self.epoch = 0  # how often everything was cleared
        self.generation = Generation()
        self.purge_pending = False  # what was cleared is still in its place on disk: no file may be written
        self.confirmed_chunks = 0
        # What callers and writers want of the write policy.
        self.flushing = 0  # calls that wait until everything is written
        self.wanted_bytes = 0  # what stores that found no room want free or clean
        self.writing_bytes = 0  # slots of chunks that are being written, and will be clean when that is done
        self.pressed_since = 0.0  # since when a write was wanted at once (monotonic); 0: none is
        self.write_again_at = 0.0  # no write starts before (monotonic): the last one found no room
        self.waited_in_vain_at = -math.inf  # when a store last waited for a disk that wrote nothing (monotonic)
        self.eviction_helps = True  # deleting files makes room on the disk, as far as is known
        self.undeletable: set[bytes] = set()  # leftovers whose deletion has failed, to be tried again
        # What is in flight, for the accounts to add up.
        self.loaned_bytes = 0  # slots that were given out and are no chunk's yet
        self.detached_bytes = 0  # slots of dropped chunks that are still pinned
        self.calls: set[ActiveCall] = set()
        self.writes: set[WriteJob] = set()
        self.evictions: set[Victim] = set()
        self._layouts: dict[FileLayout, FileLayout] = {}
        self._sizes: dict[int, int] = {}
        self._to_visit: list[bytes] = []  # by next_batch

    @property
    def ready_bytes(self) -> int:
        """Bytes of the hot tier that can be had at once: free, or held by chunks that may leave."""
        return self.free_list.free_bytes + self.orders.clean_bytes

    @property
    def unconfirmed_chunks(self) -> int:
        """Chunks whose KV has not been seen in this process."""
        return len(self.entries) - self.confirmed_chunks

    # -- chunks ------------------------------------------------------------------------------------------

    def add(self, entry: ChunkEntry) -> None:
        """A new chunk enters the index, youngest of all."""
        entry.generation = self.generation
        self.entries[entry.name] = entry
        self.confirmed_chunks += entry.kv is CONFIRMED
        entry.used_ns = self.orders.tick()
        self.orders.reindex(entry)

    def share(self, layout: FileLayout) -> FileLayout:
        """One object for equal layouts: a million chunks have a handful of them."""
        return self._layouts.setdefault(layout, layout)

    def set_size(self, entry: ChunkEntry, size: int) -> None:
        """How many bytes the file of a chunk in the index has. One int object for equal sizes, as for layouts."""
        self.accounts.own += size - entry.size
        entry.size = self._sizes.setdefault(size, size)

    def next_batch(self, count: int) -> list[ChunkEntry]:
        """The next chunks, ``count`` at most; calling it again and again visits all, without a copy of the index.

        First those with a file, from the least recently used on, then those that may be in RAM only.
        """
        if self._to_visit:
            names, self._to_visit[-count:] = self._to_visit[-count:], []
            return [entry for name in names if (entry := self.entries.get(name)) is not None]
        batch = self.orders.cold.next_batch(count)
        if not batch:
            self._to_visit = [*self.orders.dirty, *self.orders.clean]
        return batch

    # -- pins --------------------------------------------------------------------------------------------

    def pin(self, entries: Iterable[ChunkEntry]) -> None:
        """Keep the slots of these chunks where they are until ``unpin``, also when they are dropped."""
        park = self.orders.park
        for entry in entries:
            entry.pins += 1
            if entry.pins == 1 and entry.clean_bytes > 0:
                park(entry)

    def unpin(self, entries: Sequence[ChunkEntry]) -> None:
        """End a pin on each; the last one of a chunk that was dropped frees its slots."""
        unpark, dirty = self.orders.unpark, self.orders.dirty
        for entry in reversed(entries):  # the first of a sequence ends up youngest
            entry.pins -= 1
            if entry.pins:
                continue
            if entry.dropped:
                self.detached_bytes -= entry.hot_bytes
                self._vacate(entry)
            elif entry.name not in dirty:  # where a pin changes nothing
                unpark(entry)

    # -- slots -------------------------------------------------------------------------------------------

    def return_slots(self, slots: Iterable[Slot]) -> None:
        """Free slots on loan: given out by ``allocate``, and no chunk's."""
        free = self.free_list.free
        for offset, nbytes, _ in slots:
            free(offset, nbytes)
            self.loaned_bytes -= nbytes

    def add_slots(self, entry: ChunkEntry, slots: Mapping[int, Slot]) -> None:
        """Slots on loan hold good rows of a chunk: they are the chunk's."""
        nbytes = sum([slot.nbytes for slot in slots.values()])
        self.loaned_bytes -= nbytes
        entry.hot = {**entry.hot, **slots}
        if entry.dropped:
            self.detached_bytes += nbytes
        else:
            self.orders.reindex(entry)

    def _vacate(self, entry: ChunkEntry) -> None:
        """Free all slots of a chunk that is not pinned."""
        slots, entry.hot = entry.hot, NO_SLOTS
        entry.metadata = None
        entry.dirty_since = 0.0
        if not self.orders.share:  # only an upload asks for it then
            entry.stored_at = 0.0
        free = self.free_list.free
        for offset, nbytes, _ in slots.values():
            free(offset, nbytes)

    def leave_ram(self, entry: ChunkEntry) -> None:
        """The rows of a chunk that is not pinned leave RAM. Without a file, the chunk is dropped."""
        self._vacate(entry)
        if entry.file is ABSENT:
            self.drop(entry)
            return
        if entry.file is UNREAD:  # nothing is known of it again, but that it has a file
            self.confirmed_chunks -= entry.kv is CONFIRMED
            entry.prefix, entry.num_tokens, entry.kv_key, entry.kv = b"", 0, None, UNCONFIRMED
        self.orders.reindex(entry)

    # -- leaving -----------------------------------------------------------------------------------------

    def drop(self, entry: ChunkEntry, *, archive: bool = False) -> None:
        """A chunk leaves both tiers: RAM at once, the disk when what its name has in flight is over.

        ``archive``: keep its file, with the layers that only RAM holds, in the archive.
        """
        name = entry.name
        dirty = archive and entry.dirty
        if entry.has_file:
            self.accounts.own -= entry.size
            self.accounts.set_leftover(name, entry.size)
        if archive and (dirty or entry.has_file):
            if dirty:
                self.pin([entry])
            self.jobs.submit(ArchiveJob(entry, pinned=dirty))
        elif entry.has_file or self.jobs.is_busy(name):
            self.jobs.submit(DeleteJob(name))
        del self.entries[name]
        self.confirmed_chunks -= entry.kv is CONFIRMED
        entry.generation = REMOVED
        self.orders.reindex(entry)
        if entry.pins:
            self.detached_bytes += entry.hot_bytes
        else:
            self._vacate(entry)

    def file_gone(self, entry: ChunkEntry) -> None:
        """There is no file of a chunk any more. Rows in RAM stay, and are dirty; without them it is dropped.

        ``drop_reason`` must be set before where the rows shall not be written again.
        """
        if entry.dropped:
            self.accounts.remove_leftover(entry.name)
            return
        self.accounts.own -= entry.size
        entry.file, entry.size, entry.layout, entry.digests, entry.share = ABSENT, 0, None, b"", LOCAL
        if entry.hot:
            self.orders.reindex(entry)
        else:
            self.drop(entry)

    def clear(self) -> tuple[int, list[ChunkTable]]:
        """Every chunk leaves both tiers; the archive stays. ``purged`` when that is durable on disk.

        Takes time for the chunks in RAM only. Returns how many chunks there were, and the tables of them, which the
        caller lets go of bit by bit: to free a million entries at once holds up every thread.
        """
        entries, orders = self.entries, self.orders
        hot = [entry for order in (orders.clean, orders.dirty) for entry in order.values() if not entry.pins]
        self.generation.cleared = True
        self.forget_all()
        for entry in hot:
            self._vacate(entry)
        self.detached_bytes = self.free_list.used_bytes - self.loaned_bytes
        return len(entries), [entries, orders.clean, orders.dirty, orders.aging, orders.cold]

    def forget_all(self) -> None:
        """The index is empty: its generation was cleared. Repeated by ``mending`` should it be cut short."""
        self.epoch += 1
        self.purge_pending = True
        self.entries = {}
        self.orders = Orders(self.orders.share)
        self.confirmed_chunks = 0
        self.accounts.clear()
        self.undeletable.clear()
        self.generation = Generation()

    def purged(self) -> None:
        """What was cleared is in the trash: files may be written again."""
        self.purge_pending = False

    # -- KV ----------------------------------------------------------------------------------------------

    def confirm(self, entry: ChunkEntry, kv_key: Any, seen_ns: int) -> None:
        """The KV of a chunk was seen present at ``seen_ns`` (monotonic): from now on its absence means something."""
        entry.kv_seen_ns = seen_ns
        if entry.kv is UNCONFIRMED and not entry.dropped:
            entry.kv, entry.kv_key = CONFIRMED, self.keep_key(kv_key)
            self.confirmed_chunks += 1

    def kv_answered(self, entry: ChunkEntry, answer: Presence, asked_ns: int, *, writable: bool) -> bool:
        """Apply the answer GONE to a chunk; True when the chunk was confirmed, so that this is proof.

        The answer counts only if its KV was not seen since the question was asked (``asked_ns``, monotonic).
        ``writable``: whether the disk takes an archived chunk's rows.
        """
        if answer is not Presence.GONE or entry.kv is not CONFIRMED:
            return False
        if entry.kv_seen_ns < asked_ns and not entry.dropped:
            self.kv_gone(entry, writable=writable)
        return True

    def kv_gone(self, entry: ChunkEntry, *, writable: bool) -> None:
        """LMCache has lost the KV of a chunk: it is deleted, or archived."""
        self.tally.add("kv_gone_deleted")
        archive = self.archive_gone
        if archive and entry.dirty and not writable:
            self.tally.loss("archive")  # its slots are not kept for a disk that may never come back
            archive = False
        self.drop(entry, archive=archive)
