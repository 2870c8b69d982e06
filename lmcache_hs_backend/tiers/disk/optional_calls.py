"""System calls that a filesystem may refuse without losing a chunk: each refusal costs what the call is for, no more.

Some network and overlay filesystems do not set times, permissions or flush to order. One WARNING says what is lost;
the file itself is read and written as ever. Any other answer, such as EIO, is the disk's and goes on as it is.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

from lmcache_hs_backend.format.chunk_file import FileLayer

logger = logging.getLogger(__name__)

#: Answers that refuse a call, and do not say that the disk fails.
REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LOST = {
    "utime": "after a restart, chunks leave the disk in the order in which they were written",
    "fdatasync": "fsync: true does not make chunk files durable there",
    "chmod": "directories keep the permissions that the umask gives them, not cold_dir_mode",
    "statvfs": "min_free_disk is not kept, and the limits are not compared with the filesystem's size",
    "odirect": "chunk files are read through the page cache",
}


class OptionalCalls:
    """The system calls of a cold tier, some of which may be refused."""

    def __init__(self, files: FileLayer, cold_path: str) -> None:
        self._files = files
        self._cold_path = cold_path
        self._refused: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def refused(self, call: str, error: OSError) -> None:
        """Say once what is lost."""
        if call not in self._refused:
            self._refused.add(call)
            logger.warning("the filesystem of %s refuses %s (%s): %s", self._cold_path, call, error, _LOST[call])

    def utime(self, *args: Any, **options: Any) -> None:
        """Set times, where that is allowed. Raises OSError when the disk fails."""
        self._try("utime", self._files.utime, *args, **options)

    def fdatasync(self, fd: int) -> None:
        """Flush a file, where that is possible. Raises OSError when the disk fails."""
        self._try("fdatasync", self._files.fdatasync, fd)

    def chmod(self, path: str, mode: int) -> None:
        """Set permissions, where that is allowed. Raises OSError when the disk fails."""
        self._try("chmod", os.chmod, path, mode)

    def free_bytes(self, path: str) -> int | None:
        """Bytes that are free for us; None where the filesystem does not say."""
        try:
            disk = self._files.statvfs(path)
        except OSError as error:
            self.refused("statvfs", error)
            return None
        return disk.f_bavail * disk.f_frsize

    def total_bytes(self, path: str) -> int | None:
        """The size of the filesystem; None where it does not say."""
        try:
            disk = self._files.statvfs(path)
        except OSError as error:
            self.refused("statvfs", error)
            return None
        if not disk.f_blocks:
            self.refused("statvfs", OSError(errno.ENODATA, "it reports a size of 0"))
            return None
        return disk.f_blocks * disk.f_frsize

    def _try(self, name: str, call: Any, *args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self.refused(name, error)
