"""The store's lock, and its strict form, which checks every invariant whenever it is given up.

``HS_STRICT=1`` turns the strict form on. What it finds is logged and kept in ``violations``, for a test to fail on:
raising there would leave the lock held, or hide in an I/O thread. For a large index the check costs more than what it
guards, so then only every so-many-th release is checked.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback

from lmcache_hs_backend.tiers.state.checking import check
from lmcache_hs_backend.tiers.state.tier_state import TierState

logger = logging.getLogger(__name__)

#: Chunks that may be checked per release, on average.
_CHUNKS_PER_RELEASE = 64

#: What was found so far in this process: the violated invariants, and where the lock was given up.
violations: list[tuple[list[str], str]] = []


def strict() -> bool:
    """Whether strict mode is on: ``HS_STRICT`` in the environment is neither empty nor 0."""
    return os.environ.get("HS_STRICT", "") not in ("", "0")


class StrictLock:
    """A lock with the interface of threading.Lock that runs ``check`` before each release."""

    def __init__(self, state: TierState) -> None:
        self._lock = threading.Lock()
        self._state = state
        self._due = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As ``threading.Lock.acquire``."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Check, then release. The lock is released also when the check fails."""
        try:
            self._check()
        finally:
            self._lock.release()

    def locked(self) -> bool:
        """As ``threading.Lock.locked``."""
        return self._lock.locked()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check(self) -> None:
        self._due -= 1
        if self._due > 0:
            return
        self._due = len(self._state.entries) // _CHUNKS_PER_RELEASE
        problems = check(self._state)
        if problems and len(violations) < 100:
            where = "".join(traceback.format_stack(limit=6)[:-2])
            violations.append((problems, where))
            logger.error("invariants of the tiers are violated: %s\n%s", "; ".join(problems), where)


def store_lock(state: TierState) -> threading.Lock:
    """The lock of a store, strict if the environment says so."""
    return StrictLock(state) if strict() else threading.Lock()  # type: ignore[return-value]
