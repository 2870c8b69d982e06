"""Strict mode, which checks every invariant whenever a transition of the state ends.

``HS_STRICT=1`` turns it on. What it finds is logged and kept in ``violations``, for a test to fail on: raising there
would hide in an I/O thread. For a large index the check costs more than what it guards, so then only every so-many-th
transition is checked.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable

from lmcache_hs_backend.tiers.flows.transition import Transition
from lmcache_hs_backend.tiers.state.checking import check
from lmcache_hs_backend.tiers.state.tier_state import TierState

logger = logging.getLogger(__name__)

#: Chunks that may be checked per transition, on average.
_CHUNKS_PER_TRANSITION = 64

#: What was found so far in this process: the violated invariants, and where the transition ended.
violations: list[tuple[list[str], str]] = []


def strict() -> bool:
    """Whether strict mode is on: ``HS_STRICT`` in the environment is neither empty nor 0."""
    return os.environ.get("HS_STRICT", "") not in ("", "0")


class StrictTransition(Transition):
    """Runs ``check`` at the end of each transition."""

    def __init__(self, state: TierState, mended: Callable[[], None]) -> None:
        """See Transition."""
        super().__init__(state, mended)
        self._due = 0

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        """See Transition. One that was cut short breaks invariants; it is mended, and checked at the next end."""
        if kind is None:
            self._check()
            self.under_way = False

    def _check(self) -> None:
        self._due -= 1
        if self._due > 0:
            return
        self._due = len(self._state.entries) // _CHUNKS_PER_TRANSITION
        problems = check(self._state)
        if problems and len(violations) < 100:
            where = "".join(traceback.format_stack(limit=6)[:-2])
            violations.append((problems, where))
            logger.error("invariants of the tiers are violated: %s\n%s", "; ".join(problems), where)


def transition(state: TierState, mended: Callable[[], None]) -> Transition:
    """What a store's transitions run in, strict if the environment says so."""
    return StrictTransition(state, mended) if strict() else Transition(state, mended)
