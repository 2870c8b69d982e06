"""How fast the disk takes writes, as measured a moment ago."""

from __future__ import annotations

_SAMPLE_SEC = 0.05
_LEAST_BYTES = 1 << 16


class WriteRate:
    """Bytes per second over the time in which at least one write was under way, smoothed."""

    def __init__(self) -> None:
        self.bytes_per_sec = 0.0  # 0: not measured yet
        self.measured_at = 0.0  # when that was last updated (monotonic)
        self._active = 0
        self._since = 0.0
        self._bytes = 0

    @property
    def active(self) -> int:
        """Writes under way."""
        return self._active

    def mend(self, active: int) -> None:
        """So many writes are under way. See ``mending``."""
        self._active = active

    def start(self, now: float) -> None:
        """A write begins (``now``: monotonic)."""
        if not self._active:
            self._since = now
            self._bytes = 0
        self._active += 1

    def finish(self, nbytes: int, now: float) -> None:
        """A write has ended, with ``nbytes`` on disk; 0 for one that failed, which says nothing about the rate."""
        self._active -= 1
        self._bytes += nbytes
        elapsed = now - self._since
        if not self._bytes:
            return
        if elapsed >= _SAMPLE_SEC or (not self._active and self._bytes >= _LEAST_BYTES):
            sample = self._bytes / max(elapsed, 1e-6)
            self.bytes_per_sec = (self.bytes_per_sec + sample) / 2 if self.bytes_per_sec else sample
            self.measured_at = self._since = now
            self._bytes = 0
