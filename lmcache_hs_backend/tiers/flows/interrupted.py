"""Calls that were interrupted before they could give back what they hold: somebody else does it for them.

Most interrupted calls end as all others do, in their own ``finally``. This is for those that were interrupted within
it, or a second time: their frames are gone, and what they held is still written down.
"""

from __future__ import annotations

import functools
import logging

from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoThreads
from lmcache_hs_backend.tiers.state.calls import ActiveCall

logger = logging.getLogger(__name__)


class InterruptedCalls:
    """Ends them for one store."""

    def __init__(self, core: Core, io: IoThreads) -> None:
        self._core = core
        self._io = io
        self._settling: set[ActiveCall] = set()

    def end(self) -> None:
        """End those that there are. Called now and then; waits for nothing."""
        core = self._core
        if not core.state.calls:
            return
        with core.lock, core.step:
            found = [call for call in core.state.calls if call.interrupted and not call.lost]
            for call in found:
                if call.writer is None:
                    core.end(call)
        for call in found:
            if call.writer is not None and call not in self._settling:
                self._settling.add(call)
                self._io.call(functools.partial(self._settle, call))

    def _settle(self, call: ActiveCall) -> None:
        """Something may still be writing into the slots of a store. On an I/O thread: waits until it does not."""
        core = self._core
        try:
            call.writer.settle()
        except Exception as error:  # noqa: BLE001 - a source of another process, for one, is gone
            logger.warning("%d slot(s) stay taken: what was to write into them does not say that it has ended (%s)",
                len(call.slots), error)  # fmt: skip
            call.lost = True
        else:
            call.writer = None
            with core.lock, core.step:
                core.end(call)
        finally:
            self._settling.discard(call)
