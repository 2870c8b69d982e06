"""The end of a store: callers leave, what is dirty is written, threads end, memory and directory are given up.

It happens once, on a thread of its own, and ``close`` only waits for it, for a bounded time. So it may be
called from a signal handler that has interrupted a call of the same store, or a close: the interrupted thread may
hold the store's lock, and waiting for it there would never end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter

from lmcache_hs_backend.metrics import GAUGES
from lmcache_hs_backend.tiers.disk.owned_namespace import OwnedNamespace
from lmcache_hs_backend.tiers.flows.background import Background
from lmcache_hs_backend.tiers.flows.core import Core, all_present
from lmcache_hs_backend.tiers.flows.gauges import publish
from lmcache_hs_backend.tiers.flows.interrupted import InterruptedCalls
from lmcache_hs_backend.tiers.flows.io_threads import IoThreads
from lmcache_hs_backend.tiers.state import leaving
from lmcache_hs_backend.tiers.state.entries import IN_BUCKET

logger = logging.getLogger(__name__)

_STOP_SEC = 0.5  # what idle threads may take to end, however short close_timeout_sec is
_JOIN_SEC = 0.2  # of that time, for the operations that have begun
_PATIENCE_SEC = 0.5  # beyond all of that, for a machine that is busy
_LOOK_AGAIN_SEC = 0.002
_CALLERS_SEC = 0.05


class Closing:
    """Closes one store."""

    def __init__(
        self,
        core: Core,
        io: IoThreads,
        background: Background,
        namespace: OwnedNamespace,
        interrupted: InterruptedCalls,
    ) -> None:
        self._core = core
        self._interrupted = interrupted
        self._io = io
        self._background = background
        self._namespace = namespace
        self._first: queue.SimpleQueue[None] = queue.SimpleQueue()  # one token: taking it is atomic, for a handler too
        self._first.put(None)
        self._begun = False
        self._over = False

    def close(self) -> None:
        """Close, or wait for the close that is under way; ``close_timeout_sec`` and a second at most."""
        wait_until = time.monotonic() + self._core.config.close_timeout_sec + _STOP_SEC + _PATIENCE_SEC
        if not self._begun:  # several may see that; one of their threads closes
            try:
                threading.Thread(target=self._close_once, name="hs-close", daemon=True).start()
            except RuntimeError:  # the interpreter is shutting down, and starts no more threads
                self._close_once()
        # No lock and no event: the frame below may hold either.
        while not self._over and time.monotonic() < wait_until:
            time.sleep(_LOOK_AGAIN_SEC)

    def _close_once(self) -> None:
        try:
            self._first.get_nowait()
        except queue.Empty:
            return
        self._begun = True
        self._close()

    def _close(self) -> None:
        core = self._core
        deadline = time.monotonic() + core.config.close_timeout_sec
        try:
            self._finish(deadline - min(_STOP_SEC, core.config.close_timeout_sec / 4))
        finally:
            self._end(deadline)
            self._over = True

    def _finish(self, deadline: float) -> None:
        """Let callers leave, and have written what can be."""
        core = self._core
        with core.lock, core.step:
            core.closed = True
            core.ask = all_present
        while True:
            ticket = core.space_freed.ticket()
            if not core.callers or time.monotonic() > deadline:
                break
            core.space_freed.wait(ticket, _CALLERS_SEC)
            self._interrupted.end()
        core.flush(max(0.0, deadline - time.monotonic()))
        if core.disk.health.readable:
            with core.lock, core.step:  # so that the next start knows the order: least recently used first
                leaving.submit_save_uses(core.state, core.state.orders.cold, time.time_ns(), deadline)

    def _end(self, deadline: float) -> None:
        core, directory = self._core, self._namespace.directory
        with core.lock, core.step:
            left = core.state.orders.dirty_chunks
            losses = Counter(entry.drop_reason for entry in core.state.orders.clean.values() if entry.drop_reason)
            losses["close"] = len(core.state.orders.aging)
        for reason, chunks in losses.items():
            if chunks and reason != IN_BUCKET:
                core.metrics.loss(reason, chunks)
        ended = end_threads(core, self._io, self._background, max(deadline, time.monotonic() + _STOP_SEC))
        publish(core)
        core.metrics.publish(dict.fromkeys(GAUGES, 0))  # a store that is closed holds nothing
        if ended and not core.callers:
            core.arena.release()
            self._namespace.close()
        else:  # what is still at work there keeps the memory and the directory, until the process ends
            logger.warning("%s: an operation does not return; it is left running", directory)
        logger.info("closed %s: %d chunk(s) not written", directory, left)


def end_threads(core: Core, io: IoThreads, background: Background, deadline: float) -> bool:
    """End the threads. Whether all of them have ended by the deadline (monotonic)."""
    background.stop(deadline)
    io.stop(deadline - _JOIN_SEC)
    ended = io.join(deadline)
    core.pool.close()
    return ended
