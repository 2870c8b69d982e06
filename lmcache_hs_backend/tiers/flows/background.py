"""One daemon thread with an asyncio loop, for everything slow that no call waits for.

Opening, recovery and periodic chores are coroutines here. They touch the disk only on the I/O threads, so a
disk that hangs stalls a coroutine and not this thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hs-background", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine and wait for it. Raises TimeoutError, and leaves it behind, when it takes longer."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            if not future.done():
                future.cancel()
                raise TimeoutError from None
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine that no call waits for."""
        asyncio.run_coroutine_threadsafe(self._logged(coroutine), self._loop)

    def every(self, seconds: float, chore: Callable[[], None]) -> None:
        """Call ``chore`` again and again. It must not block; what it raises is logged, once a minute."""
        self.start(self._repeat(seconds, chore))

    def stop(self, deadline: float) -> None:
        """Drop all coroutines and end the thread, waiting until ``deadline`` (monotonic) at most."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive() and not self._loop.is_running():  # a forked child has the loop, not the thread
            self._loop.close()

    async def _logged(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            await coroutine
        except Exception:
            logger.exception("a background task failed")

    async def _repeat(self, seconds: float, chore: Callable[[], None]) -> None:
        logged = 0.0
        while True:
            await asyncio.sleep(seconds)
            try:
                chore()
            except Exception:  # one bad round must not end the chores of a process that runs for months
                if time.monotonic() - logged > 60 or not logged:
                    logged = time.monotonic()
                    logger.exception("a periodic chore failed")

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()
