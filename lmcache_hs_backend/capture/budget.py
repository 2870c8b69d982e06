"""The room that a capture may use, so that it never evicts what it has captured.

The tiers evict when a chunk is written that would exceed ``max_cold_size``, or leave less than ``min_free_disk``. So a
row is started only when what is on disk, all rows that are under way, and its own at their largest still fit. What is
on disk is measured again whenever that sum says full: rows share chunks, and are mostly smaller than their bound.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field

from lmcache_hs_backend.format.layout import SEQUENCES

_MEASURE_SEC = 0.5  # between two looks at the disk while it is full


def used_bytes(directory: str) -> int:
    """Bytes of all files below a cold path that count against ``max_cold_size``: all but the request records."""
    total, stack = 0, [directory]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name != SEQUENCES:
                            stack.append(entry.path)
                    elif entry.name.endswith((".safetensors", ".tmp")):
                        total += entry.stat(follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):  # the tiers replace and delete files meanwhile
            continue
    return total


@dataclass
class DiskBudget:
    """Which rows may start. Sizes in bytes."""

    cold_path: str
    limit: int
    min_free: int
    on_disk: int = 0
    _under_way: dict[str, int] = field(default_factory=dict)  # rows whose record is not there yet: their largest size
    _settled: int = 0  # of rows that have settled since the last measurement
    _measured: float = 0.0

    def __post_init__(self) -> None:
        self.measure()

    def measure(self) -> None:
        """Look at the disk."""
        self._measured = time.monotonic()
        self._settled = 0  # before, so that what settles meanwhile counts twice rather than not at all
        self.on_disk = used_bytes(self.cold_path)

    def admits(self, nbytes: int) -> bool:
        """Whether a row of at most so many bytes may start now."""
        if self._fits(nbytes):
            return True
        if time.monotonic() > self._measured + _MEASURE_SEC:
            self.measure()
        return self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        coming = sum(self._under_way.values()) + self._settled + nbytes
        return self.on_disk + coming <= self.limit and self.free() - coming >= self.min_free

    def free(self) -> int:
        """Bytes free on the disk of the cold path, which may not exist yet."""
        path = self.cold_path
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        return shutil.disk_usage(path).free

    def start(self, row_id: str, nbytes: int) -> None:
        """A row has been given to the model."""
        self._under_way[row_id] = nbytes

    def settle(self, row_id: str) -> None:
        """A row's record is there, or never will be: its chunks are on disk as far as they ever come."""
        self._settled += self._under_way.pop(row_id, 0)

    @property
    def under_way(self) -> int:
        """Rows that have been started and have not settled."""
        return len(self._under_way)

    def settle_all(self) -> None:
        """No record will come any more."""
        for row_id in list(self._under_way):
            self.settle(row_id)
