"""How fast the disk takes writes, as measured. The store's lock guards it."""

from __future__ import annotations

import time

_SAMPLE_SEC = 0.05
_LEAST_BYTES = 1 << 16


class RateMeter:
    """Bytes per second over the time in which at least one write was under way, smoothed."""

    def __init__(self) -> None:
        self.bytes_per_sec = 0.0  # 0: not measured yet
        self._active = 0
        self._since = 0.0
        self._bytes = 0

    def start(self) -> None:
        if not self._active:
            self._since = time.monotonic()
            self._bytes = 0
        self._active += 1

    def finish(self, nbytes: int) -> None:
        self._active -= 1
        self._bytes += nbytes
        elapsed = time.monotonic() - self._since
        if not self._bytes:
            return  # a write that failed says nothing about the rate
        if elapsed >= _SAMPLE_SEC or (not self._active and self._bytes >= _LEAST_BYTES):
            sample = self._bytes / max(elapsed, 1e-6)
            self.bytes_per_sec = (self.bytes_per_sec + sample) / 2 if self.bytes_per_sec else sample
            self._since = time.monotonic()
            self._bytes = 0
