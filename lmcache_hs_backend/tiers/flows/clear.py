"""Everything of a namespace is deleted, durably when the call returns.

The index forgets all chunks at once. One step on disk then makes that last: the directories of all chunks are renamed
into the trash, so no later start finds them, also when the process is killed at any moment after that. Their bytes
are deleted in the background, a few files at a time. No file is written before that step has succeeded; on a disk that
fails it is tried again until it has.

What a process that has ended has left of the same namespace goes the same way: the next start would adopt it. One that
still runs has to be cleared by itself.
"""

from __future__ import annotations

import functools
import logging
import threading

from lmcache_hs_backend.tiers.flows.bell import Latch
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoThreads
from lmcache_hs_backend.tiers.flows.neighbours import Neighbours
from lmcache_hs_backend.tiers.state.tier_state import ChunkTable

logger = logging.getLogger(__name__)

#: Entries that are let go of in one go: to free one takes a microsecond, and other threads wait for it.
_ENTRIES_PER_HOP = 2000


class Clear:
    """Clears one store."""

    def __init__(self, core: Core, io: IoThreads, neighbours: Neighbours) -> None:
        self._core = core
        self._io = io
        self._neighbours = neighbours
        self._purging = threading.Lock()  # held by the I/O thread that moves directories to the trash

    def clear(self) -> int:
        """Every chunk leaves both tiers; the archive stays. Returns how many there were.

        Waits up to ``read_timeout_sec`` until that is durable. When the disk does not allow it in that time, an ERROR
        says so, and it is done as soon as the disk does.
        """
        core = self._core
        with core.lock, core.step:
            if core.closed:
                return 0
            dropped, tables = core.state.clear()
            core.space_freed.ring()
        done, errors = Latch(), list[OSError]()
        self._io.call(functools.partial(self._purge_now, done, errors))
        if not done.wait(core.config.read_timeout_sec) or errors:
            core.metrics.add("errors_clear")
            logger.error(
                "%s was cleared in memory, but its files cannot be moved away yet (%s). That is tried again until it "
                "works, and nothing is written before. If the process ends before, delete the directory by hand, or "
                "what was cleared is found again.",
                core.disk.directory, errors[0] if errors else "the disk does not answer",
            )  # fmt: skip
        self._io.call(functools.partial(self._let_go, tables))
        return dropped

    def _purge_now(self, done: Latch, errors: list[OSError]) -> None:
        try:
            self.purge()
        except OSError as error:
            errors.append(error)
        finally:
            done.set()

    def purge(self) -> None:
        """Move what was cleared to the trash, if that is still to be done. On an I/O thread. Raises OSError."""
        core = self._core
        with self._purging:
            if not core.state.purge_pending:
                return
            epoch = core.state.epoch
            self._neighbours.purge()
            with core.lock, core.step:
                if core.state.epoch == epoch:
                    core.state.purged()
                core.wake()

    def retry(self) -> None:
        """Try again what a clear could not do. Called now and then; does not wait."""
        if self._core.state.purge_pending and not self._purging.locked() and self._core.disk.health.readable:
            self._io.call(self.purge)

    def _let_go(self, tables: list[ChunkTable]) -> None:
        for _ in range(_ENTRIES_PER_HOP):
            while not tables[-1]:
                tables.pop()
                if not tables:
                    return
            tables[-1].popitem()
        self._io.call(functools.partial(self._let_go, tables))
