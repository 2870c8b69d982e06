"""Bytes of objects on the local disk, so that the next epoch, or the next sample of a shared prefix, asks no bucket.

An entry is the beginning of one version of one object. Entries are files of a directory that several processes may
share. Together they take about ``max_bytes`` at most: each process counts what it writes and, whenever that is a
sixteenth of the limit, looks at the whole directory and deletes the least recently used. What is read is compared with
the checksum at its end, so a damaged entry is no entry. A disk that refuses is a cache without entries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

import xxhash

from lmcache_hs_backend.format.layout import temporary_name

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
_KEEP = 0.9  # of the limit, when entries are deleted
_TOUCH_SEC = 600.0


class ObjectCache:
    """Beginnings of objects by address. Thread-safe, picklable; never raises."""

    def __init__(self, directory: str, max_bytes: int) -> None:
        """Nothing is created before the first entry.

        Args:
            directory: Where the entries are. It must not be a cold path: everything in it may be deleted.
            max_bytes: Of all entries together.
        """
        self.directory = os.path.abspath(os.path.expanduser(directory))
        self.max_bytes = max_bytes
        self._unseen = max_bytes  # bytes written since the last look at the directory: the first put looks
        self._lock = threading.Lock()
        self._refused = False

    def __reduce__(self) -> tuple[type[ObjectCache], tuple[str, int]]:
        return ObjectCache, (self.directory, self.max_bytes)

    def get(self, address: str, object_size: int, nbytes: int) -> memoryview | None:
        """The first ``nbytes`` bytes of an object that has ``object_size``, or None."""
        path = self._path(address, object_size, nbytes)
        try:
            with open(path, "rb") as file:
                data = memoryview(file.read())
                age = time.time() - os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if len(body) != nbytes or xxhash.xxh3_64_digest(body) != checksum:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        if age > _TOUCH_SEC:  # the time of last use decides which entries go
            with contextlib.suppress(OSError):
                os.utime(path)
        return body

    def put(self, address: str, object_size: int, body: memoryview) -> None:
        """Keep the beginning of an object."""
        if self._refused or len(body) > self.max_bytes // 16:
            return
        path = self._path(address, object_size, len(body))
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, temporary_name(name))
        try:
            self._make_room(len(body))
            os.makedirs(folder, 0o700, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(body)
                    file.write(xxhash.xxh3_64_digest(body))
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._refused = True
            logger.warning("objects are not cached from here on: %s: %s", self.directory, error.strerror)

    def _path(self, address: str, object_size: int, nbytes: int) -> str:
        name = xxhash.xxh3_128_hexdigest(f"{address}\0{object_size}\0{nbytes}".encode("utf-8", "surrogatepass"))
        return os.path.join(self.directory, name[:2], name)

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            self._unseen += nbytes
            if self._unseen <= self.max_bytes // 16:
                return
            self._unseen = 0
            entries = sorted(self._entries())
            excess = sum(size for _, size, _ in entries) - self.max_bytes + self.max_bytes // 16
            if excess > 0:
                excess += int((1 - _KEEP) * self.max_bytes)
            for _, size, path in entries:
                if excess <= 0:
                    return
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    excess -= size

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as folders:
            for folder in folders:
                if not folder.is_dir(follow_symlinks=False):
                    continue
                with os.scandir(folder.path) as files:
                    for file in files:
                        with contextlib.suppress(FileNotFoundError):
                            info = file.stat(follow_symlinks=False)
                            yield info.st_mtime, info.st_size, file.path
