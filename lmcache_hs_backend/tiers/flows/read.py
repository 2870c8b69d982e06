"""A cold hit: its file is read on an I/O thread, checked and copied by the call that waits for it.

``ReadJob`` is one chunk's part of the work, ``Reads`` does it, in two halves. The I/O threads only move bytes, so the
disk never waits for a checksum; the caller, who has nothing else to do, checks and converts what has arrived. Without
a caller, or when the caller has fallen behind, the I/O thread does the second half too. ``PendingReads`` is where a
call and its reads meet. A read that was handed over is the caller's to finish, and written down in its call.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from lmcache_hs_backend.chunk import ChunkRef
from lmcache_hs_backend.format.header import BadChunk, Description
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.memory.copies import CopyRows, copy_alone
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES
from lmcache_hs_backend.tiers.state import reading
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.entries import UNREAD, ChunkEntry, Slot
from lmcache_hs_backend.tiers.state.jobs import FileJob
from lmcache_hs_backend.tiers.state.reading import ReadPlan

logger = logging.getLogger(__name__)

#: Reads that may wait for their caller, for each I/O thread.
_BACKLOG = 2


@dataclass(eq=False)
class ReadJob(FileJob):
    """Bring layers of a cold chunk into RAM: into slots, which promotes them, else into scratch memory.

    For a caller that waits, the rows then go on into its result, while the other reads go on. The name stays busy
    until the read is finished, so the next reader of the same chunk finds it in RAM. The chunk is pinned meanwhile.
    """

    entry: ChunkEntry
    layer_idxs: Sequence[int]
    position: int = 0  # in the call's prompt
    pending: PendingReads | None = None  # of the call that waits; without one it is a prefetch, which may wait longer
    #: What was read before did not add up. It may have been damaged on its way; if it still does not, the file is bad.
    is_retry: bool = False
    miss: str | None = "bad_file"  # a reason of metrics.MISSES, or None when the rows are there
    plan: ReadPlan = field(default_factory=ReadPlan)
    into: dict[int, memoryview] = field(default_factory=dict)  # the memory that the file has to fill
    scratch: dict[int, torch.Tensor] = field(default_factory=dict)  # rows of the layers for which there is no slot
    preamble: bytes | None = None  # of the file, once it has been read
    ended: bool = False

    def __post_init__(self) -> None:
        self.name = self.entry.name
        self.is_read, self.turn = self.pending is not None, self.pending

    @property
    def pinned_entry(self) -> ChunkEntry | None:
        """See FileJob."""
        return self.entry

    @property
    def loan(self) -> dict[int, Slot] | None:
        """See FileJob."""
        return self.plan.slots


class PendingReads:
    """A call that waits for the reads of some of its chunks.

    ``result``: layer_idx → memory for the rows of all ``refs``, as soon as there is some.
    """

    def __init__(self, refs: Sequence[ChunkRef], call: ActiveCall) -> None:
        self.refs = refs
        self.call = call
        #: The call's: slots by position, until its read takes them, and reads by name, until they are finished.
        self.reserved: dict[int, dict[int, Slot]] = {}
        self.handed_over: dict[bytes, FileJob] = {}
        call.reserved, call.handed_over = self.reserved, self.handed_over
        self.result: Mapping[int, torch.Tensor] = {}
        self.namespace_checked = False  # one of its reads has checked the namespace's lock: others skip that
        self._arrived: SimpleQueue[ReadJob] = SimpleQueue()

    def has(self, count: int) -> bool:
        """Whether so many have arrived and wait for the caller to go on with them."""
        return bool(self.result) and self._arrived.qsize() >= count

    def put(self, read: ReadJob) -> None:
        """A read has arrived: one that was handed over, or one that has ended."""
        self._arrived.put(read)
        if self.call.over:  # it has come too late for the caller to see
            self._forget_arrived()

    def get(self, deadline: float) -> ReadJob:
        """The next read, for the caller to finish. Raises queue.Empty at the deadline (monotonic)."""
        return self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))

    def cancel(self) -> None:
        """The caller wants nothing any more; what was handed over to it ends with its call."""
        self.call.over = True
        self._forget_arrived()

    def _forget_arrived(self) -> None:
        """They are in a circle with us, and the result would stay until a garbage collection."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()


class Reads:
    """Does the reads of one store."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def submit(
        self,
        entry: ChunkEntry,
        layer_idxs: Sequence[int],
        position: int = 0,
        pending: PendingReads | None = None,
        *,
        is_retry: bool = False,
    ) -> None:
        """Lock held. Queue a read; it pins the chunk."""
        state = self._core.state
        state.pin([entry])
        state.jobs.submit(ReadJob(entry, layer_idxs, position, pending, is_retry))
        self._core.work.notify()

    # -- the I/O thread's half -----------------------------------------------------------------------------

    def run(self, read: ReadJob) -> None:
        """Do a read's I/O, and what its caller does not."""
        pending, over = read.pending, True
        try:
            try:
                read.miss = self._reserve(read) or self._fetch(read)
            finally:
                if not (self._is_for_caller(read) and self._hand_over(read)):
                    over = self.finish(read)
        finally:
            if pending is not None and over:
                pending.put(read)

    def _is_for_caller(self, read: ReadJob) -> bool:
        """Whether the caller does the rest, rather than this thread.

        A copy on a second thread costs both of them time, so that is worth it only when the caller is far behind, or
        nothing is left to read.
        """
        pending = read.pending
        if pending is None or read.miss is not None or read.is_retry:
            return False
        queued = self._core.state.jobs.queued_reads
        return not pending.has(_BACKLOG * self._core.config.io_threads if queued else 1)

    def _hand_over(self, read: ReadJob) -> bool:
        """Leave the rest to the caller, if it still wants the read."""
        core, pending = self._core, read.pending
        with core.lock, core.step:
            if pending is None or pending.call.over:
                return False
            pending.handed_over[read.name] = read
            core.state.jobs.hand_over(read.name)
            return True

    def _reserve(self, read: ReadJob) -> str | None:
        """Find out what has to be read, and memory for it. Returns why that is in vain, or None."""
        core, entry, pending = self._core, read.entry, read.pending
        with core.lock, core.step:
            reserved = {} if pending is None else pending.reserved.pop(read.position, {})
            if pending is not None and pending.call.over:
                core.state.return_slots(reserved.values())
                return "timeout"
            promote = core.config.promote or pending is None
            plan = read.plan = reading.prepare_read(core.state, entry, read.layer_idxs, reserved, promote=promote)
        if plan.miss is not None or plan.layout is None:
            return plan.miss
        if pending is None and not plan.slots:
            plan.layout = None  # a prefetch has no use for what it cannot keep
            return None
        for spec in plan.specs:
            layer_idx, nbytes = spec.layer_idx, spec.nbytes(entry.num_tokens)
            slot = plan.slots.get(layer_idx)
            if slot is not None:
                read.into[layer_idx] = core.arena.bytes_at(slot.offset, nbytes)
                continue
            try:
                buffer = core.pool.get(nbytes)
            except (OSError, MemoryError) as error:
                logger.warning("no memory to read %d bytes into: %s", nbytes, error)
                return "memory"
            read.into[layer_idx] = buffer.bytes()
            read.scratch[layer_idx] = buffer.rows(entry.num_tokens, spec.hidden_dim, TORCH_DTYPES[spec.dtype])
        return None

    def _fetch(self, read: ReadJob) -> str | None:
        """Move the file's bytes to where they belong, as they are. Returns why that fails, or None."""
        core, entry, pending, layout = self._core, read.entry, read.pending, read.plan.layout
        if layout is None:
            return None
        checked = pending is not None and pending.namespace_checked and not read.is_retry
        try:
            read.preamble = core.disk.fetch(entry.name, layout, read.into, skip_lock_check=checked)
        except BadChunk as bad:
            core.file_unusable(entry, bad)
            return "bad_file"
        except OSError as error:
            logger.debug("chunk %s is not read: %s", entry.name.hex(), error)
            return "offline"
        if pending is not None:
            pending.namespace_checked = True
        return None

    # -- the other half, on whichever thread has the read in hand ------------------------------------------

    def finish(self, read: ReadJob, copy: CopyRows = copy_alone) -> bool:
        """Check what was read, copy it to its place in the result, and give it to the chunk.

        Returns False when it did not add up, and the chunk is read once more, for the same caller.
        """
        if read.ended:
            return True
        core, plan = self._core, read.plan
        miss, read.miss = read.miss, "bad_file"
        again = False
        good: tuple[bytes, Description] | None = None
        try:
            if read.preamble is not None and plan.layout is not None:
                entry = read.entry
                digests = core.disk.check(
                    entry.name, entry.prefix, plan.layout, read.into, read.preamble, entry.digests
                )
                good = digests, Description.of_file(read.preamble, plan.layout)
            if miss is None and read.pending is not None and not read.pending.call.over:
                self._copy(read, read.pending, copy)
            read.miss = miss
        except BadChunk as bad:
            again = not read.is_retry
            if not again:
                core.file_unusable(read.entry, bad)
        finally:
            self._end(read, good, again)
        return not again

    def _copy(self, read: ReadJob, pending: PendingReads, copy: CopyRows) -> None:
        entry, arena, ref = read.entry, self._core.arena, pending.refs[read.position]
        for layer_idx in read.layer_idxs:
            rows = read.scratch.get(layer_idx)
            if rows is None:
                slot = read.plan.slots.get(layer_idx) or entry.hot[layer_idx]
                rows = arena.rows_at(slot.offset, entry.num_tokens, slot.spec.hidden_dim, slot.spec.dtype)
            copy(pending.result[layer_idx][ref.start : ref.end], rows)

    def _end(self, read: ReadJob, good: tuple[bytes, Description] | None, again: bool) -> None:
        """What was read becomes the chunk's, its pin ends, and its name is free for the next job."""
        core, entry, slots = self._core, read.entry, read.plan.slots
        with core.lock, core.step:
            state = core.state
            if state.jobs.current(read.name) is not read:
                return  # its caller was interrupted: it was ended for it
            if good is None:
                reading.abort_read(state, slots)
            else:
                reading.commit_read(state, entry, slots, *good)
            if again:
                self.submit(entry, read.layer_idxs, read.position, read.pending, is_retry=True)
            state.unpin([entry])
            state.jobs.finish(read.name)  # the last step but those that say so
            read.ended = True
            if read.pending is not None:
                read.pending.handed_over.pop(read.name, None)
            if state.jobs.ready:
                core.work.notify()
        read.scratch, read.into = {}, {}


# -- headers ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HeaderJob(FileJob):
    """Read the header of a file found at start, because a call asks for its chunk now."""

    entry: ChunkEntry
    done: SimpleQueue[None]

    def __post_init__(self) -> None:
        self.name = self.entry.name
        self.is_read, self.turn = True, self.done


class Headers:
    """Headers of files found at start, when a call asks for their chunks before recovery has read them."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def ensure_read(self, refs: Sequence[ChunkRef], seconds: float) -> None:
        """Have the headers of these chunks read, on the I/O threads, and wait for them, but not for longer.

        Where there is no file whose header was not read, callers need not ask.
        """
        core = self._core
        done: SimpleQueue[None] = SimpleQueue()
        with core.lock, core.step:
            if not core.disk.health.readable:
                return
            entries = [core.state.entries.get(ref.name) for ref in refs]
            unread = [entry for entry in entries if entry is not None and entry.file is UNREAD]
            for entry in unread:
                core.state.jobs.submit(HeaderJob(entry, done))
                core.work.notify()
        deadline = time.monotonic() + seconds
        try:
            for _ in unread:
                done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return

    def run(self, job: HeaderJob) -> None:
        """Do it, on an I/O thread."""
        try:
            if job.entry.file is UNREAD:
                self._core.read_header(job.entry)
        finally:
            with self._core.lock, self._core.step:
                self._core.state.jobs.finish(job.name)
                if self._core.state.jobs.ready:
                    self._core.work.notify()
            job.done.put(None)
