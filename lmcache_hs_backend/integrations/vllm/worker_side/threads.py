"""Daemon threads that run calls in order, with a chore in between.

Not a ThreadPoolExecutor: one whose thread is stuck in the system keeps the process from ever ending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

_IDLE_CHORE_SEC = 0.25


class DaemonThreads:
    """``count`` threads over one queue."""

    def __init__(self, count: int, name: str, chore: Callable[[bool], None] | None = None) -> None:
        """Start the threads.

        Args:
            count: How many.
            name: What their names begin with.
            chore: Called after every call with False, so it must be short, and a few times a second with True while
                no call waits.
        """
        self._chore = chore
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(count)]
        self._lock = threading.Lock()  # guards the count
        self._unfinished = 0
        for thread in self._threads:
            thread.start()

    @property
    def idle(self) -> bool:
        """Whether every call that was submitted has returned."""
        return not self._unfinished

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call soon. What it raises is logged; a result that someone waits for is the call's to deliver."""
        with self._lock:
            self._unfinished += 1
            self._queue.put(call)

    def close(self, timeout: float) -> bool:
        """Run what was submitted, then end. False when that takes longer than ``timeout`` seconds."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            try:
                call = self._queue.get(timeout=None if self._chore is None else _IDLE_CHORE_SEC)
            except Empty:
                self._do_chore(True)
                continue
            if call is None:
                return
            self._guard(call)
            self._do_chore(False)
            with self._lock:
                self._unfinished -= 1

    def _do_chore(self, idle: bool) -> None:
        chore = self._chore
        if chore is not None:
            self._guard(lambda: chore(idle))

    @staticmethod
    def _guard(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("hidden states: a call on thread %s failed", threading.current_thread().name)
