"""Operations on chunk files: at most one per name at a time, the others wait in the order they were submitted.

So a file that is being written cannot be unlinked before it exists, and a chunk that is stored again cannot be
written before its former file is gone; no operation has to check for another. A name is *busy* from the moment an
operation is submitted for it until its last one is finished; that is the only notion of busy there is.

Reads go before everything else, and those of several calls take turns. Writes are not queued: an idle thread takes the
best one at the moment it can start it (see ``writing``). Neither reads nor deletions can starve what comes after them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lmcache_hs_backend.tiers.state.entries import ChunkEntry, Slot

#: Reads go first, but one in so many operations is something else, or a stream of reads would end all writing.
_READS_IN_A_ROW = 8
#: Deletions come in bursts: one in so many operations is a write, if there is anything to write.
_OTHERS_IN_A_ROW = 4


class FileJob:
    """One piece of work for an I/O thread on the file of chunk ``name``, or on none (``b""``)."""

    name: bytes = b""
    is_read: bool = False
    turn: object = None  # of a read: the call that waits for it
    started: bool = False  # a thread has it in hand, or has had

    @property
    def pinned_entry(self) -> ChunkEntry | None:
        """The chunk on which it has a pin, from its submission to its end."""
        return None

    @property
    def loan(self) -> dict[int, Slot] | None:
        """Slots that are its own until it ends: layer_idx → slot."""
        return None


class Turns:
    """Jobs that wait for a thread, one of each ``turn`` after the other.

    So a call that waits for one chunk does not wait for the thousands of another call.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, deque[FileJob]] = OrderedDict()  # by turn, the next one first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[FileJob]:
        for jobs in self._waiting.values():
            yield from jobs

    def mend(self, jobs: Iterable[FileJob]) -> None:
        """Hold just these. See ``mending``."""
        self._waiting.clear()
        self._count = 0
        for job in jobs:
            self.append(job)

    def append(self, job: FileJob) -> None:
        """Behind those of the same turn."""
        jobs = self._waiting.get(job.turn)
        if jobs is None:
            jobs = self._waiting[job.turn] = deque()
        jobs.append(job)
        self._count += 1

    def popleft(self) -> FileJob:
        """The next one. There must be one."""
        turn, jobs = next(iter(self._waiting.items()))
        job = jobs.popleft()
        self._count -= 1
        if jobs:
            self._waiting.move_to_end(turn)
        else:
            del self._waiting[turn]
        return job


@dataclass(eq=False)
class CallJob(FileJob):
    """A plain function call on an I/O thread."""

    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(eq=False)
class DeleteJob(FileJob):
    """Delete the file that a dropped chunk has left (``accounts.leftover``)."""

    name: bytes


@dataclass(eq=False)
class ArchiveJob(FileJob):
    """Move the file of a dropped chunk to the archive, with all its layers.

    ``pinned``: it has rows that only RAM holds, and is pinned until they are written.
    """

    entry: ChunkEntry
    pinned: bool

    def __post_init__(self) -> None:
        self.name = self.entry.name

    @property
    def pinned_entry(self) -> ChunkEntry | None:
        """See FileJob."""
        return self.entry if self.pinned else None


@dataclass(eq=False)
class WriteJob(FileJob):
    """Write a chunk's file: what RAM holds, merged with what the file had. The chunk is pinned meanwhile."""

    entry: ChunkEntry
    slot_bytes: int  # of its slots, which will be clean when it is done

    def __post_init__(self) -> None:
        self.name = self.entry.name


@dataclass(eq=False)
class SaveUseJob(FileJob):
    """Store a chunk's last use in its file's mtime, unless it is later than ``until`` (monotonic) by then."""

    entry: ChunkEntry
    until: float

    def __post_init__(self) -> None:
        self.name = self.entry.name


class JobQueue:
    """Which jobs may start, which names are busy, and which jobs wait for their name."""

    def __init__(self) -> None:
        self._reads = Turns()
        self._others: deque[FileJob] = deque()
        self._busy: dict[bytes, deque[FileJob]] = {}  # of each busy name: its current job, and those that wait for it
        self._running: dict[bytes, float] = {}  # names whose job a thread has in hand, and since when (monotonic)
        self._reads_in_a_row = 0
        self._others_in_a_row = 0

    def submit(self, job: FileJob) -> None:
        """Queue a job behind those that its name already has."""
        if job.name:
            waiting = self._busy.get(job.name)
            if waiting is not None:
                waiting.append(job)
                return
            self._busy[job.name] = deque([job])
        self._enqueue(job)

    def claim(self, name: bytes, now: float) -> None:
        """Make an idle name busy for the calling thread itself; ``finish`` it afterwards."""
        assert name not in self._busy, "a name that is busy cannot be claimed"
        claim = FileJob()
        claim.started = True
        self._busy[name] = deque([claim])
        self._running[name] = now

    def start(self, now: float, *, write_first: bool = False) -> FileJob | None:
        """The next job to run, of those that wait for no other; None when there is none, or a write is due.

        ``write_first``: whether a write may be taken instead when deletions have had their share.
        """
        if self._reads and self._reads_in_a_row < _READS_IN_A_ROW:
            self._reads_in_a_row += 1
            return self._started(self._reads.popleft(), now)
        self._reads_in_a_row = 0
        if self._others and (self._others_in_a_row < _OTHERS_IN_A_ROW or not write_first):
            self._others_in_a_row += 1
            return self._started(self._others.popleft(), now)
        self._others_in_a_row = 0
        if self._reads and not write_first:
            return self._started(self._reads.popleft(), now)
        return None

    def finish(self, name: bytes) -> None:
        """The operation on ``name`` is over: the next one that waits for it may start."""
        jobs = self._busy[name]
        self._running.pop(name, None)
        jobs.popleft()
        if jobs:
            self._enqueue(jobs[0])
        else:
            del self._busy[name]

    def hand_over(self, name: bytes) -> None:
        """The I/O part of an operation is over; its caller does the rest, and then calls ``finish``."""
        self._running.pop(name, None)

    def current(self, name: bytes) -> FileJob | None:
        """The operation on this name that is queued or running, before all others; None when it is not busy."""
        jobs = self._busy.get(name)
        return jobs[0] if jobs else None

    def of(self, name: bytes) -> Sequence[FileJob]:
        """All operations on this name, the current one first."""
        return self._busy.get(name, ())

    def named(self) -> Iterator[FileJob]:
        """Every operation on a name that has not ended."""
        for jobs in self._busy.values():
            yield from jobs

    def mend(self) -> None:
        """Derive the queues from the table of busy names, which is changed in single steps. See ``mending``."""
        for name in [name for name, jobs in self._busy.items() if not jobs]:
            del self._busy[name]
        for name in self._running.keys() - self._busy.keys():
            del self._running[name]
        waiting = [jobs[0] for jobs in self._busy.values() if not jobs[0].started]
        queued = dict.fromkeys(itertools.chain(self._reads, self._others))  # in their order, and only then the others
        jobs = [*(job for job in queued if not job.started), *(job for job in waiting if job not in queued)]
        self._reads.mend(job for job in jobs if job.is_read)
        self._others = deque(job for job in jobs if not job.is_read)

    def is_busy(self, name: bytes) -> bool:
        """Whether an operation on this name is queued or running."""
        return name in self._busy

    @property
    def busy_names(self) -> frozenset[bytes]:
        """Names with an operation that is queued or running."""
        return frozenset(self._busy)

    @property
    def running_names(self) -> frozenset[bytes]:
        """Names with an operation that is running."""
        return frozenset(self._running)

    @property
    def ready(self) -> int:
        """How many jobs could start now."""
        return len(self._reads) + len(self._others)

    @property
    def queued_reads(self) -> int:
        """Reads that wait for a thread."""
        return len(self._reads)

    def stuck(self, since: float) -> int:
        """How many operations on a chunk's file were started before ``since`` and have not returned."""
        return sum(started < since for started in list(self._running.values()))

    def _enqueue(self, job: FileJob) -> None:
        if job.is_read:
            self._reads.append(job)
        else:
            self._others.append(job)

    def _started(self, job: FileJob, now: float) -> FileJob:
        job.started = True
        if job.name:
            self._running[job.name] = now
        return job
