"""Chunks that leave because a caller says so: from RAM, or from both tiers.

Only a drop that somebody asks for lasts when the call returns, and reaches files that are not known yet: while it is
not known what is on disk (at the start, or while the cold path cannot be used), what has a dropped chunk's name is
deleted when it is found, and so is what a process of the same namespace has left that has ended: it would be adopted.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from lmcache_hs_backend.tiers.flows.bell import Latch
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoThreads
from lmcache_hs_backend.tiers.flows.neighbours import Neighbours
from lmcache_hs_backend.tiers.state import leaving, making_room
from lmcache_hs_backend.tiers.state.entries import ChunkEntry

logger = logging.getLogger(__name__)

#: A ring may be lost with the thread that was to give it, so who waits for a deletion looks again this often.
_LOOK_AGAIN_SEC = 0.05
_SAY_AGAIN_SEC = 10.0


class DropChunks:
    """Drops chunks of one store by their names, of which the store need not know all."""

    def __init__(self, core: Core, io: IoThreads, neighbours: Neighbours) -> None:
        self._core = core
        self._io = io
        self._neighbours = neighbours
        self._said_at = -_SAY_AGAIN_SEC

    def demote(self, names: Iterable[bytes]) -> int:
        """Evict chunks from RAM that are on disk and not in use, and return how many."""
        demoted = 0
        for piece in self._core.pieces(list(names)):
            with self._core.lock, self._core.step:
                demoted += making_room.demote(self._core.state, piece)
        return demoted

    def kv_gone(self, names: Iterable[bytes]) -> int:
        """Their KV was deleted: they leave both tiers, or go to the archive. Returns how many were here."""
        state, writable = self._core.state, self._core.disk.health.writable
        return self._each(list(names), lambda entry: state.kv_gone(entry, writable=writable))

    def drop(self, names: Iterable[bytes], *, durable: bool) -> int:
        """Delete chunks from both tiers, and return how many were here.

        ``durable``: wait until their files are deleted, for ``read_timeout_sec`` at most; an ERROR says so if not.
        """
        names = list(names)
        core, deadline = self._core, time.monotonic() + self._core.config.read_timeout_sec
        left = 0
        if durable and core.recovered and core.disk.health.readable and not core.closed:
            done, failed = Latch(), list[int]()  # first: what is adopted at this moment is in the index after it
            self._io.call(functools.partial(self._delete_elsewhere, names, done, failed))
            left = sum(failed) if done.wait(deadline - time.monotonic()) else len(names)
        dropped = self._each(names, core.state.drop, unseen=durable)
        if durable:
            left += self._await_deletion(names, deadline)
        if left and not core.closed:
            self._say(left)
        return dropped

    def _delete_elsewhere(self, names: Sequence[bytes], done: Latch, failed: list[int]) -> None:
        try:
            failed.append(self._neighbours.delete(names))
        finally:
            done.set()

    def _each(self, names: Sequence[bytes], how: Callable[[ChunkEntry], None], *, unseen: bool = False) -> int:
        """``unseen``: also files that are not known yet."""
        core, dropped = self._core, 0
        for piece in core.pieces(names):
            with core.lock, core.step:
                if core.closed:
                    break
                for name in piece:
                    entry = core.state.entries.get(name)
                    if entry is not None:
                        how(entry)
                        dropped += 1
                    if unseen and not core.recovered:
                        leaving.delete_unseen(core.state, name)
                if core.state.jobs.ready:
                    core.wake()
        return dropped

    def _await_deletion(self, names: Sequence[bytes], deadline: float) -> int:
        """Wait until the files of dropped chunks are deleted. Returns how many are not."""
        core, state = self._core, self._core.state
        waiting, left = list(names), 0
        while waiting and not core.closed:
            with core.lock, core.step:
                while waiting and not state.jobs.is_busy(waiting[-1]):
                    left += waiting.pop() in state.undeletable
                rest = deadline - time.monotonic()
                if not waiting or rest <= 0:
                    left += sum(name in state.accounts.leftover for name in waiting)
                    break
                ticket = core.space_freed.ticket()
            core.space_freed.wait(ticket, min(_LOOK_AGAIN_SEC, rest))
        return left

    def _say(self, left: int) -> None:
        now = time.monotonic()
        recent, self._said_at = now - self._said_at < _SAY_AGAIN_SEC, now
        logger.log(
            logging.DEBUG if recent else logging.ERROR,
            "%d chunk(s) were dropped, but their files in %s cannot be deleted yet. That is tried again until it "
            "works. If the process ends before, delete the files by hand, or what was dropped is found again.",
            left, self._core.disk.directory,
        )  # fmt: skip
