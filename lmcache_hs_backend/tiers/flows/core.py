"""What every flow shares: the state and its lock, the memory, the disk, and the question for KV.

The lock guards ``state`` and nothing else. It is held for one transition at a time: never during I/O, a copy of rows,
a call into LMCache, or logging. Locks are taken in this order, each one optional: ``MakingRoom``'s two locks, this
lock, and then one of the small locks that guard only themselves (metrics, health, the buffer pool). With
``HS_STRICT=1`` every invariant is checked whenever the lock is given up (see ``strict``).

Order of a demotion: file published → index says cold → slot freed. A chunk that is being written is hot until then;
a slot that is being read is pinned, and outlives its chunk until the pin ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from lmcache_hs_backend.chunk import WHOLE_KEYS, AskPresence, KeyForm, Presence
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.header import BadChunk
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.disk.chunk_files import ChunkFiles
from lmcache_hs_backend.tiers.flows.bell import Bell
from lmcache_hs_backend.tiers.flows.strict import transition
from lmcache_hs_backend.tiers.memory.arena import Arena, MapMemory, map_memory
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from lmcache_hs_backend.tiers.state import calls, recovering
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.entries import ChunkEntry
from lmcache_hs_backend.tiers.state.tier_state import TierState
from lmcache_hs_backend.tiers.state.writing import WritePolicy, is_pressed

if TYPE_CHECKING:
    from lmcache_hs_backend.tiers.flows.share import Share

logger = logging.getLogger(__name__)

MIN_IDLE_BUFFERS = 256 << 20
#: So many chunks of a long call are handled under the lock in one go, which takes a tenth of a millisecond to two.
PIECE = 128
#: After so long, others get the lock, if there are any. A thread that waits for it needs so long to wake up; after a
#: shorter break the long call would have it again before.
_TURN_SEC = 1e-3
_BREAK_SEC = 20e-6

T = TypeVar("T")


def all_present(kv_keys: Sequence[object], memory_only: bool) -> Sequence[Presence]:
    """The answer of a store that is coupled to no KV cache."""
    return [Presence.PRESENT] * len(kv_keys)


def ask_presence(
    ask: AskPresence, metrics: Metrics, kv_keys: Sequence[object], memory_only: bool
) -> Sequence[Presence]:
    """Ask for the KV of chunks. Never raises: a cache that cannot be asked does not know."""
    try:
        return ask(kv_keys, memory_only)
    except Exception as error:  # noqa: BLE001 - LMCache's backends are third parties, and serving must go on
        metrics.add("errors_presence")
        logger.debug("cannot ask for the KV of %d chunk(s): %r", len(kv_keys), error)
        return [Presence.UNKNOWN] * len(kv_keys)


class Core:
    """See the module's text."""

    #: The cold tier's files, set before any flow starts. Offline until the namespace is open.
    disk: ChunkFiles
    #: The flow of the shared tier, when there is one.
    share: Share | None = None

    def __init__(
        self,
        config: TieredConfig,
        capacity: int,
        ask: AskPresence,
        metrics: Metrics,
        map_hot: MapMemory = map_memory,
        kv_keys: KeyForm = WHOLE_KEYS,
    ) -> None:
        """Reserve ``capacity`` bytes for the hot tier. Raises ValueError, OverflowError or OSError."""
        self.config = config
        self.metrics = metrics
        self.ask = ask
        self._whole_key = kv_keys.whole
        self.closed = False
        self.called_at = 0.0  # when a store or retrieve last began or ended (monotonic)
        self.watched = False  # an I/O thread looks by itself, in a moment, whether memory is short; the lock guards it
        self.recovered = False  # what is on disk is counted: writes may start
        self._recovered_by = time.monotonic() + config.read_timeout_sec
        self.state = TierState(
            capacity,
            archive_gone=config.on_kv_gone == "archive",
            max_cold_bytes=config.max_cold_bytes,
            share=config.uploads,
            keep_key=kv_keys.keep,
        )
        self.min_free_bytes = config.min_free_bytes
        self.arena = Arena(self.state.free_list.capacity, map_hot)
        self.pool = BufferPool(max(MIN_IDLE_BUFFERS, capacity // 8))
        self.policy = WritePolicy(config.clean_fraction * self.arena.capacity, config.write_back_sec)
        self.lock = threading.Lock()  # always ``with core.lock, core.step``: see transition
        self.step = transition(self.state, self._mended)
        self.space_freed = Bell()  # a chunk became clean, a call has ended, or the disk's health has changed
        self.all_written = Bell()  # nothing is left to write, or the disk's health has changed
        # An I/O thread has something to do. No other thread waits here: a wait that an exception ends does harm.
        self.work = threading.Condition(self.lock)

    def after_fork_in_child(self, *, held: bool) -> None:
        """Other threads are not here, and the locks that they had are never given up.

        ``held``: the forking thread has the store's lock, so the state is whole. Otherwise this child cannot use it.
        """
        if held:
            self.lock.release()
        else:
            self.closed = True
            self.lock = threading.Lock()
            self.work = threading.Condition(self.lock)
        for part in (self.metrics, self.pool, self.disk.health):
            part.renew_lock()

    @property
    def may_write(self) -> bool:
        """Whether a write may start: it is known what is on disk, what was cleared is gone, and there is room."""
        return self.recovered and not self.state.purge_pending and self.disk.health.writable

    @property
    def recovery_is_late(self) -> bool:
        """Whether it takes so long to see what is on disk that no call shall wait for a chunk to become clean."""
        return not self.recovered and time.monotonic() > self._recovered_by

    def wake(self) -> None:
        """Lock held. There may be something for an I/O thread: one idle thread looks, and has the next one look."""
        self.work.notify()

    def rows_came(self) -> None:
        """Lock held. If that has made memory short, a thread looks: by itself where one is about to, or woken once."""
        if not self.watched and is_pressed(self.state, self.policy):
            self.wake()

    def wait_for_work(self, seconds: float) -> None:
        """Lock held, in a transition. An I/O thread gives both up until there is something to do, or for so long."""
        self.step.__exit__()
        self.work.wait(seconds)
        self.step.__enter__()

    def _mended(self) -> None:
        """Lock held. A transition was cut short, and whom it was to wake it may not have woken."""
        self.state.tally.add("errors_interrupted")
        self.work.notify_all()
        self.space_freed.ring()
        self.all_written.ring()

    @property
    def callers(self) -> int:
        """Calls that are using slots. A call that has lost its slots for good is none any more."""
        return sum(call.uses_slots and not call.lost for call in list(self.state.calls))

    def end(self, call: ActiveCall) -> None:
        """Lock held. Give back what a call still holds."""
        freed_names = bool(call.handed_over)
        calls.end(self.state, call)
        if freed_names:
            self.wake()
        if self.closed:
            self.space_freed.ring()

    def count(self) -> None:
        """Lock held. Bring what the state has counted to the metrics."""
        if self.state.tally.counts or self.state.tally.losses:
            counts, losses = self.state.tally.take()
            self.metrics.add_all(counts)
            for reason, chunks in losses.items():
                self.metrics.loss(reason, chunks)

    def flush(self, timeout: float) -> int:
        """Have every dirty chunk written, waiting ``timeout`` seconds at most. Returns how many still are to be."""
        state, deadline = self.state, time.monotonic() + timeout
        call = ActiveCall()
        call.uses_slots = False
        with call.running:
            try:
                with self.lock, self.step:
                    state.calls.add(call)
                    call.flushing = True
                    state.flushing += 1
                    self.wake()
                while True:
                    with self.lock, self.step:
                        left, rest = len(state.orders.aging), deadline - time.monotonic()
                        if not left or not self.disk.health.writable or rest <= 0:
                            return left
                        ticket = self.all_written.ticket()
                    self.all_written.wait(ticket, min(0.1, rest))
            finally:
                with self.lock, self.step:
                    self.end(call)

    # -- without the lock ------------------------------------------------------------------------------

    def pieces(self, items: Sequence[T], *, from_end: bool = False) -> Iterable[Sequence[T]]:
        """The items in parts of PIECE, each to be handled under the lock, with breaks for other calls in between."""
        if len(items) <= PIECE:
            return (items,) if items else ()
        return self._parts(items, from_end)

    def _parts(self, items: Sequence[T], from_end: bool) -> Iterator[Sequence[T]]:
        begins, since = range(0, len(items), PIECE), 0.0
        for number, begin in enumerate(reversed(begins) if from_end else begins):
            if number:
                since = self.make_a_break(since)
            yield items[begin : begin + PIECE]

    @staticmethod
    def make_a_break(since: float) -> float:
        """Let others have the lock, if the last break (monotonic; 0: none) is long enough ago. Returns when it was.

        Whether others wait is not known: who does has done nothing yet that could be seen.
        """
        if time.monotonic() - since < _TURN_SEC:
            return since
        time.sleep(_BREAK_SEC)
        return time.monotonic()

    def presence(self, kv_keys: Sequence[object], memory_only: bool) -> Sequence[Presence]:
        """``ask_presence`` with this store's own question."""
        return ask_presence(self.ask, self.metrics, kv_keys, memory_only)

    def presence_of(self, entries: Iterable[ChunkEntry]) -> Sequence[Presence]:
        """Whether the KV of chunks is there, asked where it cannot block."""
        return self.presence([self._whole_key(entry.kv_key) for entry in entries], True)

    def file_unusable(self, entry: ChunkEntry, bad: BadChunk) -> None:
        """Quarantine the file of a chunk whose name is busy with the calling job, and forget its layers."""
        quarantined, still_there = self.disk.quarantine(entry.name, bad)
        with self.lock, self.step:
            recovering.file_lost(self.state, entry, quarantined, still_there=still_there)

    def read_header(self, entry: ChunkEntry) -> None:
        """Read the header of a file found at start; a bad one is quarantined. Its name is busy with the caller."""
        try:
            header = self.disk.read_header(entry.name)
        except BadChunk as bad:
            self.file_unusable(entry, bad)
            return
        except OSError as error:
            logger.debug("the header of %s stays unread: %s", entry.name.hex(), error)
            return
        another: BadChunk | None = None
        with self.lock, self.step:
            try:
                recovering.header_read(self.state, entry, header)
            except BadChunk as bad:
                another = bad  # nothing has changed; one that left the transition would say that it was cut short
        if another is not None:
            self.file_unusable(entry, another)
