"""Chunks that leave because a caller says so: from RAM, or from both tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.state import making_room
from lmcache_hs_backend.tiers.state.entries import ChunkEntry

#: A ring may be lost with the thread that was to give it, so who waits for a deletion looks again this often.
_LOOK_AGAIN_SEC = 0.05


class DropChunks:
    """Drops chunks of one store by their names, of which the store need not know all."""

    def __init__(self, core: Core) -> None:
        self._core = core

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

        ``durable``: wait until their files are deleted, for ``read_timeout_sec`` at most.
        """
        names = list(names)
        dropped = self._each(names, self._core.state.drop)
        if dropped and durable:
            self._await_deletion(names)
        return dropped

    def _each(self, names: list[bytes], how: Callable[[ChunkEntry], None]) -> int:
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
                if core.state.jobs.ready:
                    core.wake()
        return dropped

    def _await_deletion(self, names: list[bytes]) -> None:
        core, jobs = self._core, self._core.state.jobs
        deadline = time.monotonic() + core.config.read_timeout_sec
        while names:
            with core.lock, core.step:
                while names and not jobs.is_busy(names[-1]):
                    names.pop()
                rest = deadline - time.monotonic()
                if not names or rest <= 0:
                    return
                ticket = core.space_freed.ticket()
            core.space_freed.wait(ticket, min(_LOOK_AGAIN_SEC, rest))
