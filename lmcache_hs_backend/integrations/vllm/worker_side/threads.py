"""A few daemon threads that run calls one after another, and a chore in between.

Not a ThreadPoolExecutor: one that is stuck in the system would keep the process from ever ending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

_CHORE_SEC = 0.25


class DaemonThreads:
    """``count`` threads over one queue."""

    def __init__(self, count: int, name: str, chore: Callable[[], None] | None = None) -> None:
        """``chore`` is called after every call, and a few times a second when there is none."""
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
        """Run a call soon. What it raises is logged; whoever waits for the result must be told by the call."""
        with self._lock:
            self._unfinished += 1
        self._queue.put(call)

    def close(self, timeout: float) -> bool:
        """Run what was submitted, then end. False when that ready longer than ``timeout`` seconds."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            try:
                call = self._queue.get(timeout=None if self._chore is None else _CHORE_SEC)
            except Empty:
                self._guard(self._chore)
                continue
            if call is None:
                return
            self._guard(call)
            self._guard(self._chore)
            with self._lock:
                self._unfinished -= 1

    @staticmethod
    def _guard(call: Callable[[], None] | None) -> None:
        if call is not None:
            try:
                call()
            except Exception:
                logger.exception("hidden states: a call on thread %s failed", threading.current_thread().name)
