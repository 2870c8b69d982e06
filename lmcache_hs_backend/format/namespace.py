"""Namespaces: the rows that may share one directory, and how a directory says which those are.

A namespace is everything that must be equal for rows to be interchangeable. Its directory is named after it and
describes itself in ``namespace.json``. Here such records are made and read; who may write in the directory (its lock)
is not decided here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from lmcache_hs_backend.format.layout import RECORD, SUBDIRECTORY

FORMAT = "lmcache-hs-namespace"
VERSION = 1
MAX_RECORD_BYTES = 1 << 16

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
                    if SUBDIRECTORY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                )
        except (NamespaceRecordError, OSError):
            continue
        for path in nested:
            with contextlib.suppress(NamespaceRecordError):
                yield path, read_record(path)
