"""The threads that do file operations, and the order in which they do them.

Operations on one chunk name are serial: at most one is in flight, the others wait behind it in the
order they were submitted. So a file that is being written cannot be unlinked before it exists, and a
chunk that is stored again cannot be written before its former file is gone; no operation has to check
for another. Reads go before everything else; writes are not queued at all, but pulled by an idle thread
at the moment it can start one, so that the choice is always the present best.

The threads are daemons of our own: a stuck ``ThreadPoolExecutor`` would never let the process exit.
The store's lock guards the queues; no operation runs under it.
"""

from __future__ import annotations

import abc
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

IDLE_SEC = 3600.0
#: Reads go first, but one in so many operations is something else, or a stream of reads would end all writing.
_READS_IN_A_ROW = 8
#: What comes in a stream has shorter breaks.
_A_MOMENT_SEC = 0.05

T = TypeVar("T")


class FileOp(abc.ABC):
    """One piece of work on the file of one chunk (``name``), or on none (``b""``)."""

    name: bytes = b""
    is_read = False
    #: Somebody else goes on with it: the name stays busy until they call ``Mover.release``.
    handed_over = False

    @abc.abstractmethod
    def run(self) -> None:
        """Do it, without the store's lock. Handles its own errors and frees what it holds on every path."""


class _Call(FileOp):
    """A plain function call on one of our threads, for asyncio and aiofiles."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                result = self._call()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                self.future.set_exception(error)
            else:
                self.future.set_result(result)


class Mover:
    """A fixed set of I/O threads over one queue."""

    def __init__(
        self, lock: threading.Lock, threads: int, on_crash: Callable[[], None], on_start: Callable[[], None]
    ) -> None:
        """``on_start`` is called first on each thread, ``on_crash`` where an operation has failed unexpectedly."""
        self._lock = lock
        self._work = threading.Condition(lock)
        #: Asked under the lock by an idle thread: for a write to start, or for how many seconds to wait.
        self.next_write: Callable[[], FileOp | float] = lambda: IDLE_SEC
        self._on_crash = on_crash
        self._on_start = on_start
        self._reads: deque[FileOp] = deque()
        self._others: deque[FileOp] = deque()
        self._busy: dict[bytes, deque[FileOp]] = {}
        self._claims: dict[bytes, float] = {}  # names that were taken, and since when
        self._running: dict[int, tuple[FileOp, float]] = {}
        self._over_at = -_A_MOMENT_SEC  # when an operation was last over
        self._idle = 0  # threads that wait for something to do
        self._stopping = False
        self._reads_in_a_row = 0
        self._threads = [
            threading.Thread(target=self._loop, args=(number,), name=f"hs-io-{number}", daemon=True)
            for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop()
            raise

    # -- under the store's lock ------------------------------------------------------------------------

    def submit(self, op: FileOp) -> None:
        """Queue an operation behind those that its name already has."""
        if op.name:
            behind = self._busy.get(op.name)
            if behind is not None:
                behind.append(op)
                return
            self._busy[op.name] = deque()
        self._enqueue(op)

    def claim(self, name: bytes) -> None:
        """Take a name that is not busy for the calling thread itself; ``release`` it afterwards."""
        self._busy[name] = deque()
        self._claims[name] = time.monotonic()

    def release(self, name: bytes) -> None:
        """The operation on ``name`` is over: the next one that waits for it may start."""
        behind = self._busy[name]
        self._claims.pop(name, None)
        if behind:
            self._enqueue(behind.popleft())
        else:
            del self._busy[name]

    def is_busy(self, name: bytes) -> bool:
        return name in self._busy

    def wake(self) -> None:
        """There may be something to write now, or sooner than a thread has planned to look.

        One idle thread looks, and has the next one look if it found something: all of them at once would get into the
        way of the caller. It may be called away to a read before its time has come, so this is called now and then.
        """
        self._work.notify()

    @property
    def working(self) -> bool:
        """Whether a thread has something to do, or had a moment ago. Without the lock, so it may be over by now."""
        return bool(self._running) or time.monotonic() < self._over_at + _A_MOMENT_SEC

    @property
    def queued_reads(self) -> int:
        return len(self._reads)

    def stuck(self, seconds: float) -> int:
        """How many operations on a chunk's file have been in flight for longer than ``seconds``."""
        oldest = time.monotonic() - seconds
        names = {op.name for op, started in self._running.values() if op.name and started < oldest}
        names |= {name for name, started in self._claims.items() if started < oldest}
        return len(names)

    def _enqueue(self, op: FileOp) -> None:
        (self._reads if op.is_read else self._others).append(op)
        self._work.notify()

    # -- without it ------------------------------------------------------------------------------------

    def enlist(self, ops: Sequence[FileOp], *, only_idle: bool) -> None:
        """Have threads do these that are idle at this moment, or that will be when the reads before it are over.

        ``only_idle``: when there are fewer of them, the rest is not done, so nothing piles up behind a disk that hangs.
        """
        with self._lock:
            idle = max(0, self._idle - len(self._reads) - len(self._others))
            for op in ops[:idle] if only_idle else ops:
                self._enqueue(op)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on an I/O thread."""
        op = _Call(function)
        with self._lock:
            self._enqueue(op)
        return op.future

    def stop(self) -> None:
        """Finish what is queued, start no further write, then end the threads."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (monotonic). False when one is stuck."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self, number: int) -> None:
        self._on_start()
        while (op := self._next(number)) is not None:
            try:
                op.run()
            except Exception:
                # An operation handles the disk's errors itself; this is a bug, and must not end the thread.
                logger.exception("an operation on a chunk file failed unexpectedly")
                self._on_crash()
            del op  # it may hold buffers and leases on memory

    def _next(self, number: int) -> FileOp | None:
        """The thread's operation, if it has one, is over; the next one, or None when the thread shall end."""
        with self._lock:
            over = self._running.pop(number, None)
            if over is not None:
                self._over_at = time.monotonic()
            name = b"" if over is None or over[0].handed_over else over[0].name
            del over  # what it holds shall not wait for the next one
            if name:
                self.release(name)
            op = self._take()
            if op is not None:
                self._running[number] = (op, time.monotonic())
            return op

    def _take(self) -> FileOp | None:
        while True:
            if self._reads and self._reads_in_a_row < _READS_IN_A_ROW:
                self._reads_in_a_row += 1
                return self._reads.popleft()
            self._reads_in_a_row = 0
            if self._others:
                return self._others.popleft()
            write = IDLE_SEC if self._stopping else self.next_write()
            if isinstance(write, FileOp):
                self.claim(write.name)
                self._work.notify()  # there may be one more for the next thread
                return write
            if self._reads:
                continue
            if self._stopping:
                return None
            self._idle += 1
            self._work.wait(write)
            self._idle -= 1


class Executor(concurrent.futures.Executor):
    """The mover's threads as the ``executor`` of asyncio and aiofiles."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._mover.call(lambda: function(*args, **kwargs))
