"""The threads that do file operations.

They take jobs from ``state.jobs``, and a write of ``state.writing`` when there is nothing else, and give each to the
flow that is registered for its type. That flow ends the job (``jobs.finish``) on every path. The threads are daemons
of our own: a stuck ``ThreadPoolExecutor`` would never let the process exit.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.memory.copies import work_alone
from lmcache_hs_backend.tiers.state.jobs import CallJob, FileJob, WriteJob
from lmcache_hs_backend.tiers.state.writing import IDLE_SEC, is_pressed, next_write

logger = logging.getLogger(__name__)

#: What comes in a stream has shorter breaks.
_RECENT_SEC = 0.05

#: A caller is left alone for so long after a call: the next layer of the same prompt is probably on its way.
QUIET_SEC = 0.004
#: Where memory was short in the last second it soon will be again: one thread looks so often, and no store wakes one.
_WATCH_SEC = 0.02
_WATCHED_SEC = 1.0

T = TypeVar("T")


class IoThreads:
    """A fixed set of daemon threads over the queue of jobs."""

    def __init__(self, core: Core, threads: int) -> None:
        """Raises RuntimeError when the system starts no more threads."""
        self._core = core
        self._flows: dict[type[FileJob], Callable[[Any], None]] = {CallJob: _call}
        self._active = 0  # threads with a job; the store's lock guards it
        self._idle = 0  # threads that wait for one
        self._last_end = -_RECENT_SEC  # when a job last ended
        self._pressed_at = -_WATCHED_SEC  # when memory was last found short
        self._stop_by: float | None = None  # when the threads end, whatever is queued (monotonic)
        self._threads = [
            threading.Thread(target=self._loop, name=f"hs-io-{number}", daemon=True) for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop()
            raise

    @property
    def count(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def register(self, kind: type[FileJob], flow: Callable[[Any], None]) -> None:
        """``flow`` does the jobs of this type, from now on."""
        self._flows[kind] = flow

    @property
    def working(self) -> bool:
        """Whether a thread has something to do, or had a moment ago. Without the lock, so it may be over by now."""
        return self._active > 0 or time.monotonic() < self._last_end + _RECENT_SEC

    def submit_if_idle(self, jobs: Sequence[FileJob], *, only_idle: bool) -> None:
        """Have threads do these that are idle at this moment, or will be when the reads before it are over.

        ``only_idle``: when there are fewer of them, the rest is not done, so nothing piles up behind a disk that hangs.
        """
        core = self._core
        with core.lock, core.step:
            idle = max(0, self._idle - core.state.jobs.ready)
            for job in jobs[:idle] if only_idle else jobs:
                core.state.jobs.submit(job)
                core.work.notify()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on an I/O thread."""
        job = CallJob(function)
        with self._core.lock, self._core.step:
            self._core.state.jobs.submit(job)
            self._core.work.notify()
        return job.future

    def stop(self, deadline: float = 0.0) -> None:
        """Finish what is queued, but begin nothing after ``deadline`` (monotonic) and no further write; then end."""
        with self._core.lock, self._core.step:
            self._stop_by = deadline
            self._core.work.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (monotonic). False when one is stuck."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        work_alone()
        job = self._next(had_job=False)
        while job is not None:
            try:
                self._flows[type(job)](job)
            except Exception:
                # A flow handles the disk's errors itself; this is a bug, and must not end the thread.
                logger.exception("an operation on a chunk file failed unexpectedly")
                self._core.metrics.add("errors_internal")
            job = None  # it may hold memory of a caller's result, and the next one may be long in coming
            job = self._next(had_job=True)

    def _next(self, *, had_job: bool) -> FileJob | None:
        """The thread's next job; None when the thread shall end."""
        core = self._core
        with core.lock, core.step:
            if had_job:
                self._active -= 1
                self._last_end = time.monotonic()
            job = self._take()
            self._active += job is not None
            return job

    def _take(self) -> FileJob | None:
        core, jobs = self._core, self._core.state.jobs
        while True:
            now = time.monotonic()
            if self._stop_by is not None and now > self._stop_by:
                return None
            job = jobs.start(now, write_first=True)
            if job is not None:
                return job
            write: WriteJob | float = IDLE_SEC
            if self._stop_by is None and core.may_write:
                write = next_write(core.state, core.policy, now, core.called_at + QUIET_SEC)
                if is_pressed(core.state, core.policy):
                    self._pressed_at = now
            if isinstance(write, WriteJob):
                core.work.notify()  # there may be one more for the next thread
                return write
            job = jobs.start(now)
            if job is not None:
                return job
            if self._stop_by is not None:
                return None
            self._idle += 1
            if not core.watched and now < self._pressed_at + _WATCHED_SEC:
                core.watched = True
                core.wait_for_work(min(write, _WATCH_SEC))
                core.watched = False
            else:
                core.wait_for_work(write)
            self._idle -= 1


def _call(job: CallJob) -> None:
    if job.future.set_running_or_notify_cancel():
        try:
            result = job.function()
        except BaseException as error:  # noqa: BLE001 - it belongs to whatever waits for the future
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


class IoExecutor(concurrent.futures.Executor):
    """The I/O threads as the ``executor`` of asyncio and aiofiles."""

    def __init__(self, io: IoThreads) -> None:
        self._io = io

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call a function on an I/O thread."""
        return self._io.call(lambda: function(*args, **kwargs))
