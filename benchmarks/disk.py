"""The disk itself: raw O_DIRECT reads and writes of whole files with some threads, and ways to empty the page cache.

The limit that the cold tier is measured against. As little Python as possible: one open, one system call for all the
bytes, one close per file, in memory that was touched before.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lmcache_hs_backend.arena import align


class RawDisk:
    """Moves files between disk and warm memory, ``depth`` of them at a time."""

    def __init__(self, depths: Sequence[int], file_bytes: int, files: int, *, direct: bool = True) -> None:
        self._flag = os.O_DIRECT if direct else 0
        stride = align(file_bytes)
        self._memory = mmap.mmap(-1, stride * files)
        # A request to the disk takes a limited number of pages: with small ones, a file of 2 MiB needs three requests.
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._views = [memoryview(self._memory)[i * stride : i * stride + file_bytes] for i in range(files)]
        for view in self._views:
            view[:] = os.urandom(4096) * (file_bytes // 4096) + bytes(file_bytes % 4096)
        self._pools = {depth: ThreadPoolExecutor(depth, thread_name_prefix=f"raw-{depth}") for depth in depths}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()

    def read(self, paths: Sequence[str], depth: int) -> None:
        self._each(depth, len(paths), lambda number: self._read_one(paths[number], self._views[number]))

    def write(self, paths: Sequence[str], depth: int) -> None:
        """Write new files; no rename, no sync."""
        self._each(depth, len(paths), lambda number: self._write_one(paths[number], self._views[number]))

    def read_here(self, path: str) -> None:
        """One file on the calling thread."""
        self._read_one(path, self._views[0])

    def _read_one(self, path: str, view: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY | self._flag)
        moved = os.preadv(fd, [view], 0)
        os.close(fd)
        if moved != len(view):
            raise OSError(f"{path}: {moved} bytes instead of {len(view)}")

    def _write_one(self, path: str, view: memoryview) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag, 0o600)
        moved = os.pwritev(fd, [view], 0)
        os.close(fd)
        if moved != len(view):
            raise OSError(f"{path}: {moved} bytes instead of {len(view)}")

    def _each(self, depth: int, count: int, work: Callable[[int], None]) -> None:
        numbers = itertools.count()

        def some() -> None:
            while (number := next(numbers)) < count:
                work(number)

        for done in [self._pools[depth].submit(some) for _ in range(depth)]:
            done.result()


def takes_direct(directory: str) -> bool:
    """Whether the filesystem of a directory takes O_DIRECT."""
    path = os.path.join(directory, "probe")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.pwritev(fd, [mmap.mmap(-1, 4096)], 0)
        os.close(fd)
    except OSError:
        return False
    finally:
        remove([path])
    return True


def remove(paths: Iterable[str]) -> None:
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


def sync(paths: Iterable[str]) -> None:
    """Have the bytes of files reach the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)


def leave_page_cache(paths: Iterable[str]) -> None:
    """Have the pages of files leave the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def drop_caches() -> bool:
    """Empty the kernel's caches, directories and inodes included. False where that is not allowed."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3\n")
    except OSError:
        return False
    return True
