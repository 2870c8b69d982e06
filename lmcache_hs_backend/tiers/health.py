"""The health of the disk under the cold tier: online, paused, offline, and how it comes back.

A disk that has no room is *paused*: it is read, not written. A disk that fails or hangs is *offline*: it is
left alone, but for one thread at a time that tries whether it is back. Whoever does I/O reports here what
went wrong; everybody else only asks ``readable`` and ``writable``. Each trouble is one WARNING when it
begins and one INFO when it is over, however often it is tried meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from enum import Enum

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.layout import temporary_name
from lmcache_hs_backend.metrics import Metrics

logger = logging.getLogger(__name__)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PAUSE_SEC = (5.0, 60.0)  # first and longest pause
PROBE_SEC = (1.0, 30.0)  # first and longest time between two attempts to reach a disk that has failed


class ColdState(Enum):
    """``online``: reads and writes. ``paused``: reads only, no room. ``offline``: neither, the disk fails."""

    ONLINE = "online"
    PAUSED = "paused"
    OFFLINE = "offline"


class DiskHealth:
    """The state of one disk. The store's lock guards it; it takes the lock itself."""

    def __init__(
        self,
        directory: str,
        files: FileLayer,
        lock: threading.Lock,
        metrics: Metrics,
        on_change: Callable[[], None],
        check_ours: Callable[[], None],
    ) -> None:
        """``on_change`` is told of every change of ``state``, under the lock; ``check_ours`` raises OSError when the
        directory is no longer ours, which no answer of the disk makes good.
        """
        self.state = ColdState.ONLINE
        self._directory = directory
        self._files = files
        self._lock = lock
        self._metrics = metrics
        self._on_change = on_change
        self._check_ours = check_ours
        self._troubled = False  # from the first report of a trouble until a write has succeeded again
        self._resume_at = 0.0
        self._pause_sec, self._probe_sec = PAUSE_SEC[0], PROBE_SEC[0]
        self._probe: threading.Thread | None = None

    @property
    def readable(self) -> bool:
        return self.state is not ColdState.OFFLINE

    @property
    def writable(self) -> bool:
        return self.state is ColdState.ONLINE

    def failed(self, what: str, error: OSError) -> None:
        """A read or a write (``what``) was refused by the system: offline."""
        self._metrics.add(f"errors_{what}")
        self._go_offline(f"cannot {what}: {error}")

    def pause(self, why: str) -> None:
        """There is no room: no writes for a while, longer each time until one succeeds."""
        with self._lock:
            if self.state is not ColdState.ONLINE:
                return
            self._resume_at = time.monotonic() + self._pause_sec
            self._pause_sec = min(2 * self._pause_sec, PAUSE_SEC[1])
            self._change(ColdState.PAUSED)
        self._warn("cold tier %s takes no writes for now: %s", why)

    def wrote(self) -> None:
        """A write has succeeded: whatever was wrong is over."""
        self._pause_sec, self._probe_sec = PAUSE_SEC[0], PROBE_SEC[0]
        if self._troubled:
            self._troubled = False
            logger.info("cold tier %s takes writes again", self._directory)

    def check(self, stuck: int) -> None:
        """Called every moment, with the number of operations that do not return."""
        now = time.monotonic()
        if stuck and self.readable:
            self._go_offline(f"{stuck} file operation(s) have not returned in read_timeout_sec")
        if self.state is ColdState.ONLINE or now < self._resume_at:
            return
        if self.state is ColdState.PAUSED:
            with self._lock:
                self._change(ColdState.ONLINE)
        elif not stuck and (self._probe is None or not self._probe.is_alive()):
            # A thread of its own, one at a time: the I/O threads may all be stuck in the same disk.
            self._probe = threading.Thread(target=self._try_disk, name="hs-probe", daemon=True)
            self._probe.start()

    def _go_offline(self, why: str) -> None:
        with self._lock:
            if self.state is ColdState.OFFLINE:
                return
            self._try_again_later()
            self._change(ColdState.OFFLINE)
        self._warn("cold tier %s is offline: %s. Hidden states stay in RAM only until it answers again.", why)

    def _warn(self, text: str, why: str) -> None:
        logger.log(logging.DEBUG if self._troubled else logging.WARNING, text, self._directory, why)
        self._troubled = True

    def _change(self, state: ColdState) -> None:
        self.state = state
        self._on_change()

    def _try_again_later(self) -> None:
        self._resume_at = time.monotonic() + self._probe_sec
        self._probe_sec = min(2 * self._probe_sec, PROBE_SEC[1])

    def _try_disk(self) -> None:
        path = os.path.join(self._directory, temporary_name("probe"))
        try:
            self._check_ours()
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self._files.pwritev(fd, [b"hs"], 0)
                self._files.fdatasync(fd)
                self._files.preadv(fd, [bytearray(2)], 0)
            finally:
                self._files.close(fd)
                self._files.unlink(path)
        except OSError as error:
            if error.errno in NO_SPACE:  # it answers: what it holds can be read, and evicted
                with self._lock:
                    self._resume_at = time.monotonic() + self._pause_sec
                    self._change(ColdState.PAUSED)
                return
            logger.debug("the disk is not back: %s", error)
            self._try_again_later()
            return
        with self._lock:
            self._change(ColdState.ONLINE)
