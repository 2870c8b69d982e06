"""What happens a few times a second, whether a call comes or not.

The disk's health, threads that should look again, deletions and clears that have failed, last uses to be saved, and a
look at the next few chunks in turn for such as have lost their KV. Runs on the background thread; never touches the
disk itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lmcache_hs_backend.tiers.flows.clear import Clear
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.interrupted import InterruptedCalls
from lmcache_hs_backend.tiers.state import leaving, writing
from lmcache_hs_backend.tiers.state.entries import CONFIRMED, ChunkEntry

TICK_SEC = 0.25
_DELETE_AGAIN_SEC = 5.0
_SAVE_USE_SEC = 600
_VISITED_PER_TICK = 64


class Chores:
    """The periodic work of one store."""

    def __init__(self, core: Core, clear: Clear, interrupted: InterruptedCalls) -> None:
        self._core = core
        self._interrupted = interrupted
        self._clear = clear
        self._delete_again_at = 0.0
        self._health_changes = 0

    def tick(self) -> None:
        """See the module's text. Called every TICK_SEC."""
        core, state, health = self._core, self._core.state, self._core.disk.health
        now = time.monotonic()
        health.check(state.jobs.stuck(now - core.config.read_timeout_sec))
        self._clear.retry()
        self._interrupted.end()
        with core.lock, core.step:
            if health.changes != self._health_changes:
                self._health_changes = health.changes
                if health.writable:
                    writing.disk_has_room_again(state)
                core.space_freed.ring()
                core.all_written.ring()
                core.work.notify_all()
            core.wake()
            if not health.writable:
                return
            if now > self._delete_again_at:
                self._delete_again_at = now + _DELETE_AGAIN_SEC
                leaving.delete_again(state)
            batch = state.next_batch(_VISITED_PER_TICK)
            leaving.submit_save_uses(state, batch, time.time_ns() - _SAVE_USE_SEC * 10**9, math.inf)
        self._drop_orphans(batch)

    def _drop_orphans(self, batch: Sequence[ChunkEntry]) -> None:
        """Chunks that are not retrieved any more, because their KV is gone."""
        core = self._core
        suspects = [entry for entry in batch if entry.kv is CONFIRMED]
        if not suspects:
            return
        asked_ns = time.monotonic_ns()
        answers = core.presence_of(suspects)
        writable = core.disk.health.writable
        with core.lock, core.step:
            for entry, answer in zip(suspects, answers, strict=True):
                core.state.kv_answered(entry, answer, asked_ns, writable=writable)
