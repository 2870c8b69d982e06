"""The namespace directory that this process owns: made, locked and described.

It belongs to the process that holds ``flock`` on its ``.lock``. The lock file is never unlinked; readers take no lock.
What a namespace is, and how it describes itself, is in ``format.namespace``. Nothing here writes or reads chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import time
import weakref
from concurrent.futures import Executor
from typing import Any

import aiofiles

from lmcache_hs_backend.config import ConfigError, TieredConfig
from lmcache_hs_backend.format.layout import LOCK, RECORD, SUBDIRECTORY, subdirectories, temporary_name
from lmcache_hs_backend.format.namespace import NamespaceId, NamespaceRecordError, read_record
from lmcache_hs_backend.tiers.disk.optional_calls import REFUSALS

logger = logging.getLogger(__name__)

#: A dying process, or one that evicts from a dead namespace, holds the lock for a moment.
_LOCK_TIMEOUT_SEC = 1.0
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def make_directories(path: str, mode: int) -> None:
    """Create a directory and what is missing above it, each with ``mode``."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_directories(parent, mode)
    with contextlib.suppress(FileExistsError):  # another process has just made it
        os.mkdir(path, mode)
        try:
            os.chmod(path, mode)  # whatever the umask: the setting is about these directories alone
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            logger.warning("%s keeps the permissions that the umask gives it, not cold_dir_mode: %s", path, error)


def _is_described(directory: str, record: dict[str, Any]) -> bool:
    try:
        return read_record(directory) == record
    except NamespaceRecordError:  # none yet, or torn by a crash: its name says what it is, so write it again
        return False


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


class UnusableColdPath(ConfigError):
    """The settings may be right, but the cold path cannot be used now: it is missing, read-only, a file, or locked."""


class NotOurs(OSError):
    """A namespace directory is no longer the one that was locked: moved away, mounted over, or its lock removed."""


class NamespaceLock:
    """The exclusive lock on a namespace directory. Released by ``close`` or when the process ends."""

    def __init__(self, fd: int, directory: str) -> None:
        self._fd = fd
        self._path = os.path.join(directory, LOCK)
        locked = os.fstat(fd)
        self._locked = locked.st_dev, locked.st_ino
        _held.add(self)

    def verify(self) -> None:
        """Raise NotOurs unless this lock still protects the directory, OSError when that cannot be found out."""
        try:
            there = os.lstat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != self._locked:
            raise NotOurs(errno.ESTALE, "this is no longer the directory that was locked", os.path.dirname(self._path))

    @classmethod
    def take(cls, directory: str) -> NamespaceLock | None:
        """Lock a directory, or None when another process holds it. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(os.path.join(directory, LOCK), flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            if error.errno in _NO_FLOCK:
                raise OSError(
                    error.errno,
                    "the filesystem does not offer flock, which keeps two processes from writing one directory: use a "
                    "local disk, or mount it with locks (NFS: local_lock=flock; Lustre: flock)",
                    directory,
                ) from None
            raise
        return cls(fd, directory)

    def close(self) -> None:
        """Give the lock up. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close  # also one that was taken after the call that wanted it had given up


# A forked child shares the lock's open file; it must not keep the lock after its parent is gone.
_held: weakref.WeakSet[NamespaceLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_release_in_child)


class OwnedNamespace:
    """The directory that this process owns, locked and described, or that it is to own when ``open`` succeeds.

    Attributes:
        directory: Its path. ``open`` may find that another process holds it, and take a subdirectory.
    """

    def __init__(self, config: TieredConfig, ident: NamespaceId, label: str) -> None:
        """Touches nothing. ``label``: what the user calls the setting ``cold_path``."""
        self._config = config
        self._ident = ident
        self._label = label
        self._root = os.path.join(config.cold_path, ident.directory)
        self._lock: NamespaceLock | None = None
        self.directory = self._root

    @property
    def is_open(self) -> bool:
        """Whether this process owns it."""
        return self._lock is not None

    def siblings(self) -> list[str]:
        """The directories of other processes with the same namespace, whether they run or not. Raises OSError."""
        below = [path for path in subdirectories(self._root) if SUBDIRECTORY.fullmatch(os.path.basename(path))]
        return [path for path in (self._root, *below) if path != self.directory]

    def verify_lock(self) -> None:
        """Raise NotOurs unless this process owns the directory, OSError when that cannot be found out."""
        lock = self._lock
        if lock is None:
            raise NotOurs(errno.ENODEV, "this directory is not open", self.directory)
        lock.verify()

    async def open(self, executor: Executor) -> None:
        """Create what is missing, lock, and describe, on the threads of ``executor``. May be tried again.

        A namespace that another process holds: ``on_locked`` ``subdir`` takes the first free ``p1``, ``p2``, …
        inside it, ``error`` is an error.

        Raises:
            UnusableColdPath: The path cannot be used now.
            ConfigError: The namespace is held, and ``on_locked`` is ``error``.
        """
        try:
            self.directory, self._lock = await self._take(executor)
        except OSError as error:
            raise UnusableColdPath(
                f"{self._label} is {self._config.cold_path!r}, but must be a directory that user {os.geteuid()} can "
                f"create and write in: {error}"
            ) from None
        if self.directory != self._root:
            logger.warning(
                "%s is held by another process; this one uses %s. What it writes is found by the next start, or by the "
                "other process, when this one has ended.", self._root, self.directory,
            )  # fmt: skip

    async def _take(self, executor: Executor) -> tuple[str, NamespaceLock]:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + _LOCK_TIMEOUT_SEC
        for number in range(10_000):
            directory = os.path.join(self._root, f"p{number}") if number else self._root
            await loop.run_in_executor(executor, make_directories, directory, self._config.cold_dir_mode)
            if await loop.run_in_executor(executor, os.path.islink, directory):
                raise NotADirectoryError(f"{directory} is a symbolic link")
            while (lock := await loop.run_in_executor(executor, NamespaceLock.take, directory)) is None:
                if number or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
            if lock is not None:
                try:
                    await self._describe(directory, executor)
                except BaseException:
                    lock.close()
                    raise
                return directory, lock
            if self._config.on_locked == "error":
                raise ConfigError(
                    f"{self._label} is {self._config.cold_path!r}, but another process holds {self._root}; give each "
                    f"process its own cold_path, or set on_locked to 'subdir'"
                )
        raise BlockingIOError(errno.EWOULDBLOCK, "held by too many processes", self._root)

    async def _describe(self, directory: str, executor: Executor) -> None:
        """Write ``namespace.json`` whole or not at all."""
        loop = asyncio.get_running_loop()
        path = os.path.join(directory, RECORD)
        record = self._ident.record()
        if await loop.run_in_executor(executor, _is_described, directory, record):
            return
        temporary = os.path.join(directory, temporary_name(RECORD))
        text = json.dumps(record, indent=2) + "\n"
        try:
            async with aiofiles.open(temporary, "x", executor=executor) as file:
                await file.write(text)
            await loop.run_in_executor(executor, os.replace, temporary, path)
        except OSError:  # a full disk, say; it is tried again and again, and each time would leave a file
            await loop.run_in_executor(executor, _remove, temporary)
            raise

    def close(self) -> None:
        """Give the directory up. May be called again."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def refuse_links(path: str, directory: str) -> None:
    """Raise OSError when a directory between ``directory`` and ``path`` is a link: it may lead out of the cold path."""
    folder = os.path.dirname(path)
    while folder != directory:
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, "a symbolic link in the place of a directory of ours", folder)
        folder = os.path.dirname(folder)
