"""The health of the disk under the cold tier: online, paused, offline, and how it comes back.

A disk that has no room is *paused*: it is read, not written. A disk that fails or hangs is *offline*: it is left
alone, but for one thread at a time that tries whether it is back. Code that does I/O reports here what went wrong;
all other code only asks ``readable`` and ``writable``, which need no lock. Each failure is one WARNING when it begins
and one INFO when it is over, however often it is tried in between.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from enum import Enum

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.layout import temporary_name
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.disk.owned_namespace import OwnedNamespace

logger = logging.getLogger(__name__)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PAUSE_SEC = (5.0, 60.0)  # first and longest pause
#: So many retrieves that wait in vain within so long take a slow disk offline, and a probe that is answered in less
#: than this brings it back.
_SLOW_CALLS = 3
_SLOW_WITHIN_SEC = 60.0
_QUICK_PROBE_SEC = 0.5
PROBE_SEC = (1.0, 30.0)  # first and longest time between two attempts to reach a disk that has failed


class ColdState(Enum):
    """``online``: reads and writes. ``paused``: reads only, no room. ``offline``: neither, the disk fails."""

    ONLINE = "online"
    PAUSED = "paused"
    OFFLINE = "offline"


class DiskHealth:
    """The state of one disk."""

    def __init__(self, namespace: OwnedNamespace, files: FileLayer, metrics: Metrics) -> None:
        """Start online.

        Args:
            namespace: Probes write in its directory. While that is not ours the disk is not back, whatever else it
                answers.
            files: The system calls.
            metrics: Where failures are counted.
        """
        self.state = ColdState.ONLINE
        self.readable = True  # reads are tried; every call looks at this, so it is a plain field
        self.writable = True  # writes are tried
        self.changes = 0  # how often the state has changed: a waiter that sees another number looks again
        self._namespace = namespace
        self.files = files
        self._metrics = metrics
        self._changing = threading.Lock()  # guards the fields below and every change of state; held for nothing else
        self._failing = False  # from the first report of a failure until a write has succeeded again
        self._resume_at = 0.0
        self._pause_sec, self._probe_sec = PAUSE_SEC[0], PROBE_SEC[0]
        self._probe: threading.Thread | None = None
        self._timeouts: list[float] = []  # when retrieves last waited in vain
        self._slow = False  # offline for that

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have had it."""
        self._changing = threading.Lock()

    def failed(self, what: str, error: OSError) -> None:
        """A read or a write (``what``) was refused by the system: offline."""
        self._metrics.add(f"errors_{what}")
        self.go_offline(f"cannot {what}: {error}")

    def call_timed_out(self) -> None:
        """A retrieve did not get its chunks in ``read_timeout_sec``. A disk that costs that again and again is offline.

        It comes back when a probe is answered quickly.
        """
        now = time.monotonic()
        with self._changing:
            self._timeouts = [at for at in self._timeouts if at > now - _SLOW_WITHIN_SEC] + [now]
            self._slow = len(self._timeouts) >= _SLOW_CALLS
        if self._slow:
            self.go_offline(f"{_SLOW_CALLS} retrieves in {_SLOW_WITHIN_SEC:g} s have waited read_timeout_sec for it")

    def pause(self, why: str) -> None:
        """There is no room: no writes for a while, longer each time until one succeeds."""
        with self._changing:
            if self.state is not ColdState.ONLINE:
                return
            self._resume_at = time.monotonic() + self._pause_sec
            self._pause_sec = min(2 * self._pause_sec, PAUSE_SEC[1])
            self._change(ColdState.PAUSED)
        self._warn("cold tier %s takes no writes for now: %s", why)

    def wrote(self) -> None:
        """A write has succeeded: whatever was wrong is over."""
        self._pause_sec, self._probe_sec = PAUSE_SEC[0], PROBE_SEC[0]
        if self._failing:
            self._failing = False
            logger.info("cold tier %s takes writes again", self._namespace.directory)

    def resume_now(self) -> None:
        """End a pause, or probe an offline disk, at the next ``check`` and not when its time has come."""
        with self._changing:
            self._resume_at = 0.0

    def check(self, stuck: int) -> None:
        """Called a few times a second, with the number of operations that do not return."""
        now = time.monotonic()
        if stuck and self.readable:
            self.go_offline(f"{stuck} file operation(s) have not returned in read_timeout_sec")
        if self.state is ColdState.ONLINE or now < self._resume_at:
            return
        if self.state is ColdState.PAUSED:
            with self._changing:
                self._change(ColdState.ONLINE)
        elif not stuck and (self._probe is None or not self._probe.is_alive()):
            # A thread of its own, one at a time: the I/O threads may all be stuck in the same disk.
            self._probe = threading.Thread(target=self._try_disk, name="hs-probe", daemon=True)
            self._probe.start()

    def go_offline(self, why: str) -> None:
        """The disk fails: neither reads nor writes until a probe succeeds."""
        with self._changing:
            if self.state is ColdState.OFFLINE:
                return
            self._try_again_later()
            self._change(ColdState.OFFLINE)
        self._warn("cold tier %s is offline: %s. Hidden states stay in RAM only until it answers again.", why)

    def _warn(self, text: str, why: str) -> None:
        logger.log(logging.DEBUG if self._failing else logging.WARNING, text, self._namespace.directory, why)
        self._failing = True

    def _change(self, state: ColdState) -> None:
        self.state = state
        self.readable, self.writable = state is not ColdState.OFFLINE, state is ColdState.ONLINE
        self.changes += 1

    def _try_again_later(self) -> None:
        self._resume_at = time.monotonic() + self._probe_sec
        self._probe_sec = min(2 * self._probe_sec, PROBE_SEC[1])

    def _try_disk(self) -> None:
        path = os.path.join(self._namespace.directory, temporary_name("probe"))
        started = time.monotonic()
        try:
            self._namespace.verify_lock()
            fd = self.files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self.files.pwritev(fd, [b"hs"], 0)
                self.files.fdatasync(fd)
                self.files.preadv(fd, [bytearray(2)], 0)
            finally:
                self.files.close(fd)
                self.files.unlink(path)
        except OSError as error:
            if error.errno in NO_SPACE:  # it answers: what it holds can be read, and evicted
                with self._changing:
                    self._resume_at = time.monotonic() + self._pause_sec
                    self._change(ColdState.PAUSED)
                return
            logger.debug("the disk is not back: %s", error)
            self._try_again_later()
            return
        if self._slow and time.monotonic() - started > _QUICK_PROBE_SEC:
            logger.debug("the disk answers, but slowly")
            self._try_again_later()
            return
        self.back_online()

    def back_online(self) -> None:
        """The disk answers again, as it should."""
        with self._changing:
            self._slow, self._timeouts = False, []
            if self.state is not ColdState.ONLINE:
                self._change(ColdState.ONLINE)
