"""Disks that fail: the cold tier's system calls with faults put in front of the real ones."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_hs_backend.format.chunk_file import FileLayer

INJECTED: Counter[str] = Counter()  # faults by kind, over the whole test run


@contextlib.contextmanager
def tmpfs(path: Path, options: str, *, may_be_open: bool = True) -> Iterator[None]:
    """A filesystem in memory at ``path``, a directory that is made where it is missing.

    ``may_be_open`` False: at the end nobody may have a file there open.
    """
    import pytest  # not where a program of a test imports this module

    path.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", *(["-l"] if may_be_open else []), str(path)], check=True)


class FaultyDisk(FileLayer):
    """Real files, with errors, slowness, hanging and short transfers on demand."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}  # system call → errno
        self.fail_once: dict[str, int] = {}
        self.bad_paths: dict[str, int] = {}  # path → errno with which it cannot be opened
        self.bytes_per_sec = 0.0  # 0: as fast as the disk is
        self.flips = 0  # so many of the next reads bring a wrong byte
        self.unlink_sec = 0.0  # how long a deletion takes
        self.short = 0  # most bytes that one transfer moves; 0: all
        self.calls: Counter[str] = Counter()
        self.hanging = 0  # calls that are stuck at the moment
        self._go = threading.Event()
        self._go.set()
        self._turn = threading.Lock()  # one head, whatever the number of threads

    def hang(self) -> None:
        """From now on, no read or write returns."""
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def _before(self, call: str) -> None:
        self.calls[call] += 1
        code = self.fail_once.pop(call, 0) or self.errors.get(call, 0)
        if code:
            INJECTED[errno.errorcode[code]] += 1
            raise OSError(code, os.strerror(code))

    def _transfer(self, call: str, real: Any, fd: int, views: Any, offset: int) -> int:
        self._before(call)
        if not self._go.is_set():
            INJECTED["hang"] += 1
            self.hanging += 1
            try:
                self._go.wait()
            finally:
                self.hanging -= 1
            self._before(call)
        if self.short:
            INJECTED["short"] += 1
            first = next(view for view in views if len(view))
            views = [first[: self.short]]
        if self.bytes_per_sec:
            INJECTED["slow"] += 1
            with self._turn:
                rate = self.bytes_per_sec
                time.sleep(sum(len(view) for view in views) / rate if rate else 0)
        return int(real(fd, views, offset))

    def preadv(self, fd: int, views: Any, offset: int) -> int:
        moved = self._transfer("preadv", os.preadv, fd, views, offset)
        if self.flips:
            self.flips -= 1
            INJECTED["a byte flipped on its way"] += 1
            views[-1][-1] ^= 1
        return moved

    def pwritev(self, fd: int, views: Any, offset: int) -> int:
        return self._transfer("pwritev", os.pwritev, fd, views, offset)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._before("open")
        if path in self.bad_paths:
            INJECTED["one bad file"] += 1
            raise OSError(self.bad_paths[path], os.strerror(self.bad_paths[path]), path)
        return os.open(path, flags, mode)

    def rename(self, source: str, target: str) -> None:
        self._before("rename")
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        self._before("unlink")
        if self.unlink_sec:
            INJECTED["slow deletion"] += 1
            time.sleep(self.unlink_sec)
        os.unlink(path)

    def statvfs(self, path: str) -> Any:
        self._before("statvfs")
        return os.statvfs(path)
