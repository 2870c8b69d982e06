"""Reading a cold path from outside: no store, no lock, no LMCache.

For command-line tools and data sets. A running engine may write, rename and delete files at the same time; what
vanishes or is not a chunk is reported as such and never stops the reader. Nothing is ever changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from lmcache_hs_backend.format.chunk_file import FileLayer, read_header
from lmcache_hs_backend.format.header import BadChunk, Header
from lmcache_hs_backend.format.layout import ARCHIVE, RECORD, FoundFile, scan_chunks
from lmcache_hs_backend.format.namespace import NamespaceRecordError, namespaces, read_record


class NotAColdPath(Exception):
    """There is no namespace under a path, or only ones of a version that this program does not know."""


class ChunkInfo(NamedTuple):
    """One chunk file.

    Attributes:
        file: Its path, name, size in bytes and mtime.
        directory: Of its namespace.
        namespace: What ``namespace.json`` says: model, revision, KV dtype, chunk size and so on.
        state: ``cold``, or ``archived`` (kept for extraction, never served).
        header: Its metadata, token ids (bytes of int64) and layers, or None when it could not be read as a chunk.
        problem: Why ``header`` is None.
    """

    file: FoundFile
    directory: str
    namespace: dict[str, Any]
    state: str  # "cold" or "archived"
    header: Header | None
    problem: str = ""


class ColdTierReader:
    """The chunks of a cold path, namespace by namespace. Takes no lock, imports no torch, changes nothing.

    Attributes:
        cold_path: The absolute path.
        namespaces: ``(directory, record)`` of each namespace, record being what ``namespace.json`` says.
    """

    def __init__(self, cold_path: str) -> None:
        """Find the namespaces below a path.

        Args:
            cold_path: The directory that ``cold_path`` of the settings names; ``~`` is expanded.

        Raises:
            NotAColdPath: There is no namespace that this version can read; one line says why.
        """
        self.cold_path = os.path.abspath(os.path.expanduser(cold_path))
        self._files = FileLayer()
        try:
            self.namespaces = list(namespaces(self.cold_path))
        except OSError as error:
            raise NotAColdPath(f"{cold_path} cannot be read: {error.strerror}") from None
        if not self.namespaces:
            raise NotAColdPath(f"{cold_path} is not a cold path: {self._why_not()}")

    def chunks(self) -> Iterator[ChunkInfo]:
        """Every chunk, archived ones included, in the order of the directories. Streams, and reads headers only."""
        for directory, record in self.namespaces:
            for state, root in (("cold", directory), ("archived", os.path.join(directory, ARCHIVE))):
                for file in scan_chunks(root):
                    if file.name:
                        yield self._look(file, directory, record, state)

    def _look(self, file: FoundFile, directory: str, record: dict[str, Any], state: str) -> ChunkInfo:
        try:
            header = read_header(self._files, file.path)
        except BadChunk as bad:
            return ChunkInfo(file, directory, record, state, None, f"{bad.reason}: {bad}")
        except OSError as error:
            return ChunkInfo(file, directory, record, state, None, str(error.strerror))
        return ChunkInfo(file, directory, record, state, header)

    def _why_not(self) -> str:
        """The most telling reason: a namespace of another version, if there is one."""
        with os.scandir(self.cold_path) as entries:
            directories = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
        for directory in [self.cold_path, *sorted(directories)]:
            if os.path.exists(os.path.join(directory, RECORD)):
                try:
                    read_record(directory)
                except NamespaceRecordError as error:
                    return str(error)
                return f"{directory} is one namespace; name the directory above it"
        return "no namespace.json in any directory below it"
