"""Directories of the cold tier: which rows may share one, who owns it, and what lies in it.

A namespace is everything that must be equal for rows to be interchangeable. Its directory is named after
it, describes itself in ``namespace.json``, and belongs to whoever holds ``flock`` on its ``.lock``. The
lock file is never unlinked; readers take no lock. Nothing here writes or reads chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiofiles
import xxhash

from lmcache_hs_backend.chunkfile import SUFFIX, is_temporary, temporary_name
from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.tiers.mover import Executor

logger = logging.getLogger(__name__)

FORMAT = "lmcache-hs-namespace"
VERSION = 1
RECORD = "namespace.json"
LOCK = ".lock"
QUARANTINE = "quarantine"
ARCHIVE = "archive"
SEQUENCES = "sequences"

MAX_RECORD_BYTES = 1 << 16
#: A dying process, or one that evicts from a dead namespace, holds the lock for a moment.
LOCK_PATIENCE_SEC = 1.0

_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_CHUNK_FILE = re.compile(r"([0-9a-f]{32})" + re.escape(SUFFIX))
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SUBDIRECTORY = re.compile(r"p[1-9][0-9]{0,3}")


@dataclass(frozen=True, kw_only=True)
class NamespaceId:
    """Everything that must be equal for rows to be interchangeable."""

    model: str
    model_revision: str = ""
    kv_dtype: str = ""
    chunk_size: int = 256
    world_size: int = 1
    worker_id: int = 0
    hash_algorithm: str = ""
    none_hash: str = ""

    def record(self) -> dict[str, Any]:
        """The contents of ``namespace.json``."""
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}

    @property
    def directory(self) -> str:
        """``<model-slug>-<12 hex>``: readable, unique, and with nothing of the model's name unescaped."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.model.rsplit("/", 1)[-1]).strip("-.")[:48] or "model"
        text = json.dumps(self.record(), sort_keys=True)
        return f"{slug}-{xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'surrogatepass'))[:12]}"


def local_model_revision(model: str) -> str:
    """For a local model directory, a digest of its config.json and of its weight files' names, sizes and times.

    Empty for a name that is no directory.
    """
    if not os.path.isdir(model):
        return ""
    digest = hashlib.sha256()
    try:
        with open(os.path.join(model, "config.json"), "rb") as file:
            digest.update(file.read())
    except OSError:
        digest.update(b"no config.json")
    for entry in sorted(os.scandir(model), key=lambda entry: entry.name):
        if entry.name.endswith(_WEIGHTS):
            info = entry.stat()
            digest.update(f"{entry.name}\0{info.st_size}\0{info.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def make_directories(path: str, mode: int) -> None:
    """Create a directory and what is missing above it, each with ``mode``."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_directories(parent, mode)
    with contextlib.suppress(FileExistsError):  # another process made it meanwhile
        os.mkdir(path, mode)
        os.chmod(path, mode)  # whatever the umask: the setting is about these directories alone


class NamespaceRecordError(Exception):
    """A directory is not a namespace of ours, or one of a version that this program does not know."""


def read_record(directory: str) -> dict[str, Any]:
    """``namespace.json`` of a directory. Raises NamespaceRecordError."""
    path = os.path.join(directory, RECORD)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            record = json.loads(os.read(fd, MAX_RECORD_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError) as error:
        raise NamespaceRecordError(f"{path}: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise NamespaceRecordError(f"{path} does not describe a namespace of hidden states")
    if record.get("version") != VERSION:
        raise NamespaceRecordError(
            f"{path} is of format version {record.get('version')!r}; this program knows version {VERSION}"
        )
    return record


def namespaces(cold_path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(directory, record)`` of every namespace under a cold path, those of second processes included.

    What is not ours is passed over. Raises OSError when the cold path itself cannot be listed.
    """
    with os.scandir(cold_path) as entries:
        directories = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    for directory in directories:
        try:
            yield directory, read_record(directory)
            with os.scandir(directory) as entries:
                nested = sorted(
                    entry.path
                    for entry in entries
                    if _SUBDIRECTORY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                )
        except (NamespaceRecordError, OSError):
            continue
        for path in nested:
            with contextlib.suppress(NamespaceRecordError):
                yield path, read_record(path)


def _is_described(directory: str, record: dict[str, Any]) -> bool:
    try:
        return read_record(directory) == record
    except NamespaceRecordError:  # none yet, or torn by a crash: its name says what it is, so write it again
        return False


class FoundFile(NamedTuple):
    """A file of a namespace. ``name`` is the chunk's (16 bytes), or empty for one that is no chunk."""

    path: str
    size: int
    mtime_ns: int
    name: bytes


def _listed(directory: str) -> Iterator[os.DirEntry[str]]:
    """The entries of a directory; none of one that is not there, or that cannot be listed, which the log says."""
    try:
        if os.path.islink(directory):
            raise NotADirectoryError("a symbolic link may lead anywhere")
        with os.scandir(directory) as entries:
            yield from entries
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s is passed over: %s", directory, error)


def _found(entry: os.DirEntry[str], name: bytes = b"") -> FoundFile | None:
    """What a file counts for; None for one that vanishes meanwhile, or that may not be looked at."""
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError as error:
        logger.debug("%s is passed over: %s", entry.path, error)
        return None
    return FoundFile(entry.path, info.st_size, info.st_mtime_ns, name)


def scan_chunks(directory: str) -> Iterator[FoundFile]:
    """The chunk files of ``<directory>/<hh>/`` and, nameless, left-over temporaries beside them.

    Names and sizes only; anything else that lies there (foreign files) is passed over, and whatever kind of
    thing is named like a chunk is reported as one: the reader looks before it opens.
    """
    for folder in fan_out_folders(directory):
        yield from scan_folder(folder)


def fan_out_folders(directory: str) -> list[str]:
    """The fan-out directories of a namespace (or archive) directory."""
    found = []
    for entry in _listed(directory):
        with contextlib.suppress(OSError):  # some filesystems have to look at it to say what it is
            if _FAN_OUT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.append(entry.path)
    return sorted(found)


def chunk_names(folder: str) -> list[bytes]:
    """The chunks in one fan-out directory, by name alone: that costs no look at the files themselves."""
    first = os.path.basename(folder)
    matches = [_CHUNK_FILE.fullmatch(entry.name) for entry in _listed(folder) if entry.name.startswith(first)]
    return [bytes.fromhex(match[1]) for match in matches if match is not None]


def scan_folder(folder: str) -> Iterator[FoundFile]:
    """One fan-out directory; see scan_chunks. A folder or file that vanishes meanwhile is passed over."""
    first = os.path.basename(folder)
    for entry in _listed(folder):
        match = _CHUNK_FILE.fullmatch(entry.name)
        name = bytes.fromhex(match[1]) if match is not None and entry.name.startswith(first) else b""
        if (name or is_temporary(entry.name)) and (file := _found(entry, name)) is not None:
            yield file


def scan_flat(directory: str) -> Iterator[FoundFile]:
    """Every file directly in a directory (quarantine), nameless."""
    return filter(None, map(_found, _listed(directory)))


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

    def check(self) -> None:
        """Raise NotOurs unless it is still this lock that protects the directory; OSError where nobody can say."""
        try:
            there = os.lstat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != self._locked:
            raise NotOurs(errno.ESTALE, "this is no longer the directory that was locked", os.path.dirname(self._path))

    @classmethod
    def take(cls, directory: str) -> NamespaceLock | None:
        """Lock a directory, or None when somebody holds it. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(os.path.join(directory, LOCK), flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return cls(fd, directory)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close  # one that is taken after its taker has lost patience belongs to nobody


# A forked child shares the lock's open file; it must not keep the lock after its parent is gone.
_held: weakref.WeakSet[NamespaceLock] = weakref.WeakSet()


def _let_go() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)


class Namespace:
    """The directory that this process owns, locked and described."""

    def __init__(self, directory: str, lock: NamespaceLock) -> None:
        self.directory = directory
        self._lock = lock
        self.check = lock.check

    @classmethod
    async def open(
        cls, cold_path: str, ident: NamespaceId, *, on_locked: str, mode: int, label: str, executor: Executor
    ) -> Namespace:
        """Create what is missing, lock, and describe. Raises ConfigError naming the setting and the path.

        A namespace held by another process: ``on_locked`` ``subdir`` takes the first free ``p1``, ``p2``, …
        inside it, ``error`` is an error.
        """
        loop = asyncio.get_running_loop()
        root = os.path.join(cold_path, ident.directory)
        deadline = time.monotonic() + LOCK_PATIENCE_SEC
        try:
            for number in range(10_000):
                directory = root if number == 0 else os.path.join(root, f"p{number}")
                await loop.run_in_executor(executor, functools.partial(make_directories, directory, mode))
                if await loop.run_in_executor(executor, os.path.islink, directory):
                    raise NotADirectoryError(f"{directory} is a symbolic link")
                while (lock := await loop.run_in_executor(executor, NamespaceLock.take, directory)) is None:
                    if number or time.monotonic() > deadline:
                        break
                    await asyncio.sleep(0.05)
                if lock is not None:
                    try:
                        await cls._describe(directory, ident, executor)
                    except BaseException:
                        lock.close()
                        raise
                    return cls(directory, lock)
                if on_locked == "error":
                    raise ConfigError(
                        f"{label} is {cold_path!r}, but another process holds {root}; give each process its own "
                        f"cold_path, or set on_locked to 'subdir'"
                    )
        except OSError as error:
            raise ConfigError(
                f"{label} is {cold_path!r}, but must be a directory that user {os.geteuid()} can create and "
                f"write in: {error}"
            ) from None
        raise ConfigError(f"{label} is {cold_path!r}, but {root} is held by too many processes")

    @staticmethod
    async def _describe(directory: str, ident: NamespaceId, executor: Executor) -> None:
        """Write ``namespace.json`` whole or not at all."""
        loop = asyncio.get_running_loop()
        path = os.path.join(directory, RECORD)
        record = ident.record()
        if await loop.run_in_executor(executor, _is_described, directory, record):
            return
        temporary = os.path.join(directory, temporary_name(RECORD))
        text = json.dumps(record, indent=2) + "\n"
        async with aiofiles.open(temporary, "x", executor=executor) as file:
            await file.write(text)
        await loop.run_in_executor(executor, os.replace, temporary, path)

    def close(self) -> None:
        self._lock.close()


def refuse_links(path: str, directory: str) -> None:
    """Raise OSError when a directory between ``directory`` and ``path`` is a link: it may lead out of the cold path."""
    folder = os.path.dirname(path)
    while folder != directory:
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, "a symbolic link in the place of a directory of ours", folder)
        folder = os.path.dirname(folder)


def fan_out(directory: str, name: bytes) -> str:
    """The directory of a chunk's file: one of 256, by the first byte of its name."""
    return f"{directory}/{name[0]:02x}"


def chunk_path(directory: str, name: bytes) -> str:
    """The path of a chunk's file below a namespace (or archive) directory."""
    return f"{fan_out(directory, name)}/{name.hex()}{SUFFIX}"
