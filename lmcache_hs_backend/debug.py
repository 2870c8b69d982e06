"""Looking into a running store, and making things happen in it: for tests, benchmarks and support sessions.

Not for serving: the interface may change with any release, and much of it stops or empties what it touches. It
says what a store holds in the words of the documentation, whatever the tiers look like inside, so that no file
outside this package depends on that. Reach it as ``TieredStore.debug`` or ``TieredHiddenStateStore.debug``.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from lmcache_hs_backend.chunk import LayerSpec, Presence
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.header import FileLayout
from lmcache_hs_backend.tiers.flows.gauges import publish
from lmcache_hs_backend.tiers.memory.runs import Move
from lmcache_hs_backend.tiers.state import leaving, making_room
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.entries import KNOWN, ChunkEntry

if TYPE_CHECKING:
    from lmcache_hs_backend.tiered import TieredStore


@dataclass(frozen=True)
class ChunkView:
    """One chunk at one moment.

    Attributes:
        file: ``absent``; ``unread``: a file found at start, whose header has not been read; ``known``;
            ``leaving``: it is being deleted to make room.
        kv: ``confirmed`` when its KV has been seen present in this process, else ``unconfirmed``.
        hot: the layers that are in RAM.
        on_file: the layers that its file is known to hold.
        hot_bytes: bytes of the hot tier that its slots take.
        size: bytes of its file that count against ``max_cold_size``; of an ``unread`` one perhaps not known yet.
        pins: readers and writers that use its slots at this moment.
        busy: an operation on its file is queued or running.
        evictable: it leaves RAM without a write when room is needed.
        used_ns: its last use, in nanoseconds since the epoch.
    """

    file: str
    kv: str
    hot: frozenset[int]
    on_file: frozenset[int]
    hot_bytes: int
    size: int
    pins: int
    busy: bool
    evictable: bool
    used_ns: int

    @property
    def dirty(self) -> bool:
        """Whether RAM has a layer that the file does not have."""
        return not self.hot <= self.on_file


@dataclass(frozen=True)
class DiskUsage:
    """Bytes on disk as they count against ``max_cold_size``."""

    own: int
    archive: int
    quarantine: int
    dead: int  # of namespaces that no process uses
    reserved: int  # of files that are being written


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the hot tier's memory, and of what is recycled beside it."""

    mapped: int  # address space of the hot tier; 0 after close
    used: int
    ready: int  # free, or of chunks that are evictable
    reach: int  # the end of the last slot in use
    idle_buffers: int
    touched: int  # of mapped, provided by the kernel ahead of its use


class Question(NamedTuple):
    """One call of the store to the KV cache: for how many chunks, and whether backends in memory only."""

    chunks: int
    memory_only: bool


class StoreDebug:
    """See the module's text. Chunks go by their names (16 bytes). Thread-safe."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._core = store._core

    # -- looking -----------------------------------------------------------------------------------------

    def path(self, name: bytes) -> str:
        """Where the file of a chunk is, or would be."""
        return self._core.disk.path(name)

    def chunk(self, name: bytes) -> ChunkView | None:
        """A chunk as it is now, or None."""
        with self._core.lock, self._core.step:
            entry = self._core.state.entries.get(name)
            return None if entry is None else self._view(entry)

    def chunks(self) -> dict[bytes, ChunkView]:
        """All chunks, of one moment."""
        with self._core.lock, self._core.step:
            return {name: self._view(entry) for name, entry in self._core.state.entries.items()}

    def cold_order(self) -> list[bytes]:
        """The chunks that have a file, as they leave the disk: the least recently used first."""
        with self._core.lock, self._core.step:
            return [entry.name for entry in self._core.state.orders.cold]

    def busy(self) -> set[bytes]:
        """Names on whose files an operation is queued or running; also of chunks that are dropped already."""
        with self._core.lock, self._core.step:
            return set(self._core.state.jobs.busy_names)

    def active_calls(self) -> int:
        """Calls that have not given everything back yet."""
        with self._core.lock, self._core.step:
            return len(self._core.state.calls)

    def clearing(self) -> bool:
        """Whether everything was cleared, and the files are not in the trash yet."""
        with self._core.lock, self._core.step:
            return self._core.state.purge_pending

    def undeleted(self) -> set[bytes]:
        """Names of dropped chunks whose files could not be deleted so far."""
        with self._core.lock, self._core.step:
            return set(self._core.state.undeletable)

    def disk(self) -> DiskUsage:
        """What is on disk, by kind."""
        with self._core.lock, self._core.step:
            usage = self._core.state.accounts
            return DiskUsage(usage.own, usage.archive, usage.quarantine, usage.dead, usage.reserved)

    def memory(self) -> MemoryUse:
        """The hot tier's memory."""
        core, state = self._core, self._core.state
        with core.lock, core.step:
            slots = [slot for entry in state.entries.values() for slot in entry.hot.values()]
            reach = max((slot.offset + slot.nbytes for slot in slots), default=0)
            return MemoryUse(
                core.arena.mapped_bytes,
                state.free_list.used_bytes,
                state.ready_bytes,
                reach,
                core.pool.idle_bytes,
                core.arena.touched_bytes,
            )

    @contextlib.contextmanager
    def questions(self) -> Iterator[list[Question]]:
        """What the store asks the KV cache for in this block, whichever thread asks; asked before answered."""
        ask, asked = self._core.ask, list[Question]()

        def asking(kv_keys: Sequence[object], memory_only: bool) -> Sequence[Presence]:
            asked.append(Question(len(kv_keys), memory_only))
            return ask(kv_keys, memory_only)

        self._core.ask = asking
        try:
            yield asked
        finally:
            self._core.ask = ask

    # -- making things happen ----------------------------------------------------------------------------

    def evict_clean(self) -> int:
        """Have every evictable chunk leave RAM, as when room is needed. How many did."""
        evicted = 0
        with self._core.lock, self._core.step:
            while making_room.evict_oldest(self._core.state):
                evicted += 1
        return evicted

    def evict_files(self, nbytes: int) -> bool:
        """Delete files of at least ``nbytes``, as when the limit is reached. False when not so many may go."""
        return self._store._room.evict(nbytes)

    def run_chores(self) -> None:
        """Do once, now, what a store does by itself every so often.

        It deletes what could not be deleted before, looks at the next chunks for uses to save and for KV that is gone,
        looks whether namespaces counted as dead still are, and publishes its gauges.
        """
        with self._core.lock, self._core.step:
            leaving.delete_again(self._core.state)
        self._store._chores.tick()
        self._store._neighbours.look()
        publish(self._core)

    def go_offline(self, why: str) -> None:
        """Treat the disk as one that has just failed. It comes back by itself when it answers."""
        self._core.disk.health.go_offline(why)

    def resume_now(self) -> None:
        """A pause of writes, or the time until a failed disk is tried again, is over within a quarter of a second."""
        self._core.disk.health.resume_now()

    @contextlib.contextmanager
    def pinned(self, *names: bytes) -> Iterator[None]:
        """Pin chunks as a reader does. Their slots and files stay meanwhile."""
        core, call = self._core, ActiveCall()
        call.uses_slots = False
        with call.running:
            with core.lock, core.step:
                core.state.calls.add(call)
                call.entries += [core.state.entries[name] for name in names]
                core.state.pin(call.entries)
            try:
                yield
            finally:
                with core.lock, core.step:
                    core.end(call)

    @contextlib.contextmanager
    def holding_files(self, names: Iterable[bytes]) -> Iterator[None]:
        """Operations on these files wait for the end of the block. None may be busy before it."""
        core, names = self._core, list(names)
        with core.lock, core.step:
            for name in names:
                core.state.jobs.claim(name, time.monotonic())
        try:
            yield
        finally:
            with core.lock, core.step:
                for name in names:
                    core.state.jobs.finish(name)
                core.work.notify_all()

    @contextlib.contextmanager
    def between_copy_and_publication(self, hook: Callable[[], None]) -> Iterator[None]:
        """Call ``hook`` in every store of this block when rows are in RAM and no index says so yet."""
        copier = self._store._copier
        copy_in = copier.copy_in

        def copy(rows: torch.Tensor, moves: Sequence[Move]) -> None:
            copy_in(rows, moves)
            hook()

        copier.copy_in = copy  # type: ignore[method-assign]
        try:
            yield
        finally:
            copier.copy_in = copy_in  # type: ignore[method-assign]

    def use_files(self, files: FileLayer) -> None:
        """Send the system calls of this store's disk through ``files`` from now on."""
        self._core.disk.use_files(files)
        self._store._room.use_files(files)

    def add_cold_chunks(self, count: int, kv_key: Callable[[], object] = lambda: None) -> None:
        """Add invented chunks that are on disk only, as far as the index knows; there are no files.

        They are unconfirmed: of a confirmed one the store would soon find out that its KV is gone.
        """
        state = self._core.state
        layout = state.share(FileLayout(256, 4096, (LayerSpec(0, "BF16", 4096),)))
        for start in range(0, count, 1000):
            entries = [
                ChunkEntry(random.randbytes(16), random.randbytes(16), 256, state.keep_key(kv_key()), file=KNOWN)
                for _ in range(min(1000, count - start))
            ]
            with self._core.lock, self._core.step:
                for entry in entries:
                    entry.layout, entry.digests = layout, random.randbytes(32)
                    state.set_size(entry, layout.size)
                    state.add(entry)
                    entry.saved_ns = entry.used_ns  # or the store would touch files that do not exist

    def _view(self, entry: ChunkEntry) -> ChunkView:
        """Lock held."""
        return ChunkView(
            file=entry.file.value,
            kv=entry.kv.value,
            hot=frozenset(entry.hot),
            on_file=frozenset(spec.layer_idx for spec in entry.layout.layers) if entry.layout else frozenset(),
            hot_bytes=entry.hot_bytes,
            size=entry.size,
            pins=entry.pins,
            busy=self._core.state.jobs.is_busy(entry.name),
            evictable=entry.name in self._core.state.orders.clean,
            used_ns=entry.used_ns,
        )
