"""The disk itself: raw O_DIRECT reads and writes of whole files with some threads, and ways to empty the page cache.

The limit that the cold tier is measured against. As little Python as possible: one open, one system call for all the
bytes, one close per file, in memory that was touched before.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch
from xxhash import xxh3_64_hexdigest

from lmcache_hs_backend.format.pages import align
from lmcache_hs_backend.tiers.memory.arena import HUGE_PAGE
from lmcache_hs_backend.tiers.memory.copies import copy_alone, work_alone

_PAGE = 4096
_WAITING = 4  # files that wait to be used, when reading threads begin to help


class RawDisk:
    """Moves files between disk and warm memory, ``depth`` of them at a time."""

    def __init__(self, depths: Sequence[int], file_bytes: int, files: int, *, direct: bool = True) -> None:
        """``file_bytes``: a page, and rows behind it.

        The pages and the rows lie apart, each file's rows in huge pages of their own: one request to the disk takes a
        limited number of pieces of memory, and in small pages a file of 2 MiB would need three.
        """
        self._flag = os.O_DIRECT if direct else 0
        body = file_bytes - _PAGE
        stride = align(body, HUGE_PAGE if body >= HUGE_PAGE else _PAGE)
        self._heads = mmap.mmap(-1, _PAGE * files)
        # Private, because shared memory gets no huge pages.
        self._bodies = mmap.mmap(-1, stride * files + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bodies.madvise(mmap.MADV_HUGEPAGE)
        first = -ctypes.addressof(ctypes.c_char.from_buffer(self._bodies)) % HUGE_PAGE
        heads, bodies = memoryview(self._heads), memoryview(self._bodies)
        self._views = [
            (heads[i * _PAGE : (i + 1) * _PAGE], bodies[first + i * stride : first + i * stride + body])
            for i in range(files)
        ]
        noise = os.urandom(file_bytes)  # nothing to gain for a disk that compresses
        for head, rows in self._views:
            head[:], rows[:] = noise[:_PAGE], noise[_PAGE:]
        self._pools = {depth: ThreadPoolExecutor(depth, thread_name_prefix=f"raw-{depth}") for depth in depths}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()

    def read(self, paths: Sequence[str], depth: int) -> None:
        self._each(depth, len(paths), lambda number: self._read_one(paths[number], self._views[number]))

    def read_and(
        self, paths: Sequence[str], depth: int, use: Callable[[int], None], first: Callable[[], object] | None = None
    ) -> None:
        """Read, do what comes ``first``, and ``use`` each file on the calling thread as soon as it is there.

        When several are waiting, the threads that read use what they have read themselves.
        """
        arrived: SimpleQueue[int | None] = SimpleQueue()

        def work(number: int) -> None:
            left = None
            try:
                self._read_one(paths[number], self._views[number])
                if arrived.qsize() < _WAITING:
                    left = number
                else:
                    use(number)
            finally:
                arrived.put(left)

        done = self._start(depth, len(paths), work)
        if first is not None:
            first()
        for _ in paths:
            number = arrived.get()
            if number is not None:
                use(number)
        for each in done:
            each.result()

    def write(self, paths: Sequence[str], depth: int) -> None:
        """Write new files; no rename, no sync."""
        self._each(depth, len(paths), lambda number: self._write_one(paths[number], self._views[number]))

    def write_and(self, paths: Sequence[str], depth: int, before: Callable[[int], None]) -> None:
        """Write each file under another name after ``before`` was called for it, and rename it."""

        def work(number: int) -> None:
            before(number)
            temporary = f"{paths[number]}.tmp"
            self._write_one(temporary, self._views[number])
            os.rename(temporary, paths[number])

        self._each(depth, len(paths), work)

    def rows_read(self, number: int) -> memoryview:
        """Where the rows of a file are after it was read."""
        return self._views[number][1]

    def check_and_copy(self, number: int, targets: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """What every reader has to do with a file: xxh3 of its layers, and a ``copy_`` of each to its target.

        The layers lie at the end of the file, in the shapes of the targets. On the calling thread only.
        """
        data = self.rows_read(number)
        end = len(data)
        work_alone()
        for target in reversed(targets):
            begin = end - target.numel() * dtype.itemsize
            part = data[begin:end]
            xxh3_64_hexdigest(part)
            copy_alone(target, torch.frombuffer(part, dtype=dtype).view(target.shape))
            end = begin

    def read_here(self, path: str) -> None:
        """One file on the calling thread."""
        self._read_one(path, self._views[0])

    def _read_one(self, path: str, views: Sequence[memoryview]) -> None:
        fd = os.open(path, os.O_RDONLY | self._flag)
        moved = os.preadv(fd, views, 0)
        os.close(fd)
        if moved != sum(map(len, views)):
            raise OSError(f"{path}: {moved} bytes instead of {sum(map(len, views))}")

    def _write_one(self, path: str, views: Sequence[memoryview]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag, 0o600)
        moved = os.pwritev(fd, views, 0)
        os.close(fd)
        if moved != sum(map(len, views)):
            raise OSError(f"{path}: {moved} bytes instead of {sum(map(len, views))}")

    def _each(self, depth: int, count: int, work: Callable[[int], None]) -> None:
        for done in self._start(depth, count, work):
            done.result()

    def _start(self, depth: int, count: int, work: Callable[[int], None]) -> list[Future[None]]:
        numbers = itertools.count()

        def some() -> None:
            while (number := next(numbers)) < count:
                work(number)

        return [self._pools[depth].submit(some) for _ in range(depth)]


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
