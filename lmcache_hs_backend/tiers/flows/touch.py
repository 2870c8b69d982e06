"""The hot tier's memory is touched ahead of its first use, in the background.

Rows that are put into memory for the first time wait for the kernel to provide it: 340 ms for a prompt that takes 20 in
warm memory. So a first part is touched when the store opens, and the rest a little at a time by a thread of its own,
which leaves the memory bus to others for most of the time. Memory that is pinned has been touched by that.
"""

from __future__ import annotations

import threading
import time

from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.memory.arena import HUGE_PAGE

#: Touched before the store is open: what one long prompt of a small model takes, 20 ms.
_AT_ONCE = 64 << 20
#: At most so many bytes at a time, and then a pause: about 1 GB/s.
_STEP = 2 * HUGE_PAGE
_PAUSE_SEC = 0.003


def touch_first(core: Core) -> None:
    """Touch the first part, within the opening."""
    if core.config.touch_memory:
        core.arena.touch(_AT_ONCE)


def touch_rest(core: Core) -> None:
    """Touch the rest in the background, until the store is closed."""
    if core.config.touch_memory and not core.arena.pinned:
        threading.Thread(target=_touch, args=(core,), name="hs-touch", daemon=True).start()


def _touch(core: Core) -> None:
    while not core.closed and core.arena.touch(_STEP):
        time.sleep(_PAUSE_SEC)
