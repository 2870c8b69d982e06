"""Whether a bucket is worth asking: one breaker for reads and one for writes.

A breaker is open from the first request that got no answer (the client has tried it again by then). While it is open,
no call asks: probes in the background find out when it may close, so no call is used up for that. ABSENT and EXISTS
are answers. Each outage is one WARNING when it begins and one INFO when it is over.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from lmcache_hs_backend.format.objects import Answer, Reply

logger = logging.getLogger(__name__)

PROBE_SEC = (0.5, 30.0)  # first and longest time between two probes


class Breaker:
    """The health of one kind of request. Thread-safe; ``closed`` needs no lock."""

    def __init__(self, what: str, url: str) -> None:
        """``what``: the kind, for the log."""
        self.closed = True
        self.why = ""
        self._what = what
        self._url = url
        self._changing = threading.Lock()
        self._wait_sec = PROBE_SEC[0]
        self._probe_at = 0.0

    def saw(self, reply: Reply) -> None:
        """A request is over."""
        if reply.answer in (Answer.FAILED, Answer.DENIED, Answer.OFFLINE):
            self.open(reply.why or reply.answer.value)

    def open(self, why: str) -> None:
        """There was no answer, or a refusal."""
        with self._changing:
            was_closed, self.closed, self.why = self.closed, False, why
            if was_closed:
                self._later()
        if was_closed:
            logger.warning("%s: no %s for now: %s. Local tiers go on as ever.", self._url, self._what, why)

    def close(self) -> None:
        """It answers."""
        with self._changing:
            was_closed, self.closed = self.closed, True
            self._wait_sec = PROBE_SEC[0]
        if not was_closed:
            logger.info("%s: %s work again", self._url, self._what)

    def probe_due(self, now: float) -> bool:
        """Whether it is open and time to try. The next time is set, so one thread must ask."""
        with self._changing:
            if self.closed or now < self._probe_at:
                return False
            self._later()
            return True

    def _later(self) -> None:
        self._probe_at = time.monotonic() + self._wait_sec * random.uniform(0.8, 1.2)
        self._wait_sec = min(2 * self._wait_sec, PROBE_SEC[1])
