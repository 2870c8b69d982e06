"""Namespaces: the rows that may share one directory, and how a directory says which those are.

A namespace is everything that must be equal for rows to be interchangeable. Its directory is named after it and
describes itself in ``namespace.json``. Here such records are made and read; who may write in the directory (its lock)
is not decided here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from lmcache_hs_backend.format.layout import ARCHIVE, LOCK, RECORD, SUBDIRECTORY, chunk_folders, subdirectories

FORMAT = "lmcache-hs-namespace"
VERSION = 1
MAX_RECORD_BYTES = 1 << 16

_DIRECTORY = re.compile(r".+-[0-9a-f]{12}")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


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


class NamespaceRecordError(Exception):
    """A directory is not a namespace of ours, or one of a version that this program does not know."""


def read_record(directory: str) -> dict[str, Any]:
    """``namespace.json`` of a directory. Raises NamespaceRecordError."""
    path = os.path.join(directory, RECORD)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(fd, MAX_RECORD_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise NamespaceRecordError(f"{path}: {error}") from None
    return parse_record(text, path)


def parse_record(text: bytes, path: str) -> dict[str, Any]:
    """The contents of a ``namespace.json``; ``path`` is for the error. Raises NamespaceRecordError."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NamespaceRecordError(f"{path}: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise NamespaceRecordError(f"{path} does not describe a namespace of hidden states")
    if record.get("version") != VERSION:
        raise NamespaceRecordError(
            f"{path} is of format version {record.get('version')!r}; this program knows version {VERSION}"
        )
    return record


@dataclass(frozen=True)
class NamespaceDirectory:
    """A directory of interchangeable chunks, as it describes itself.

    Attributes:
        directory: Its path.
        label: Its path below the cold path; what users call it.
        record: The contents of its ``namespace.json``.
    """

    directory: str
    label: str
    record: dict[str, Any]

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.record.get("model", ""))

    @property
    def worker_id(self) -> Any:
        """Rank of the process that wrote it."""
        return self.record.get("worker_id")

    def root(self, state: str) -> str:
        """The directory above the fan-out of a state ("cold" or "archived")."""
        return os.path.join(self.directory, ARCHIVE) if state == "archived" else self.directory


class LeftOut(NamedTuple):
    """A directory that looks like a namespace and cannot be used as one. ``why`` names it."""

    directory: str
    why: str


def find_namespaces(cold_path: str) -> tuple[list[NamespaceDirectory], list[LeftOut]]:
    """The namespaces of a cold path, those of further processes included, and what looks like one but is none.

    Raises OSError when the cold path itself cannot be listed.
    """
    found: list[NamespaceDirectory] = []
    left_out: list[LeftOut] = []

    def add(directory: str) -> None:
        try:
            found.append(NamespaceDirectory(directory, os.path.relpath(directory, cold_path), read_record(directory)))
        except NamespaceRecordError as error:
            left_out.append(LeftOut(directory, str(error)))

    for directory in subdirectories(cold_path):
        named_like_one = _DIRECTORY.fullmatch(os.path.basename(directory)) is not None
        try:
            if os.path.lexists(os.path.join(directory, RECORD)):
                add(directory)
                nested = subdirectories(directory) if found and found[-1].directory == directory else []
                for path in nested:
                    if SUBDIRECTORY.fullmatch(os.path.basename(path)):
                        add(path)
            elif named_like_one and chunk_folders(directory):
                left_out.append(LeftOut(directory, f"{directory}: chunk files, but no {RECORD}"))
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError as error:
            if named_like_one:  # else it is foreign
                left_out.append(LeftOut(directory, f"{directory}: {error.strerror}"))
    return found, left_out


def namespaces(cold_path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(directory, record)`` of every namespace under a cold path. Raises OSError when it cannot be listed."""
    for each in find_namespaces(cold_path)[0]:
        yield each.directory, each.record


def in_use(directory: str) -> bool:
    """Whether a process is seen to hold a namespace. Takes no lock: looks at the kernel's list of locks.

    Processes of other containers are not in that list, so no is not certain.
    """
    try:
        inode = os.lstat(os.path.join(directory, LOCK)).st_ino
        with open("/proc/locks") as file:
            return any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in file)
    except (OSError, IndexError):
        return False
