"""One change of the state under the lock, and how it is found out that one was cut short.

An exception from outside may end a transition anywhere in the middle. That cannot be prevented, so it is mended: a flag
stands for as long as a transition runs, and whoever takes the lock next and finds it puts the state in order first (see
``state.mending``). It is always ``with core.lock, core.step``: the lock is one of Python's own, which the interpreter
takes and gives up in one step with entering and leaving the block, so that no exception leaves it taken. A lock whose
``__enter__`` or ``__exit__`` were Python code could be left taken.
"""

from __future__ import annotations

from collections.abc import Callable

from lmcache_hs_backend.tiers.state.mending import mend
from lmcache_hs_backend.tiers.state.tier_state import TierState


class Transition:
    """For ``with``, under the lock, around everything that looks at the state or changes it."""

    __slots__ = ("_mended", "_state", "under_way")

    def __init__(self, state: TierState, mended: Callable[[], None]) -> None:
        """``mended``: called under the lock when the state was put in order: wake-ups may have been lost, too."""
        self.under_way = False
        self._state = state
        self._mended = mended

    def __enter__(self) -> None:
        """Begin. If the last one did not end, mend the state first."""
        if self.under_way:
            mend(self._state)
            self._mended()
        self.under_way = True

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        """End. After an exception it counts as cut short."""
        if kind is None:
            self.under_way = False
