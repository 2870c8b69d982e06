"""Reading a cold path from outside: no store, no lock, no LMCache.

For command-line tools and data sets. A running engine may write, rename and delete files at the same time; what
vanishes or is not a chunk is reported as such and never stops the reader. Nothing is ever changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lmcache_hs_backend.format.chunk_file import FileLayer, open_regular, read_open_header
from lmcache_hs_backend.format.header import BadChunk, FileLayout, Header
from lmcache_hs_backend.format.layout import RECORD, ChunkPath, FoundFile, chunk_files, chunk_folders
from lmcache_hs_backend.format.namespace import (
    NamespaceDirectory,
    NamespaceRecordError,
    find_namespaces,
    read_record,
)
from lmcache_hs_backend.format.shared_names import VERSION_FOLDER, is_name_of

logger = logging.getLogger(__name__)

STATES = ("cold", "archived")

#: How many files are open ahead; a header has seldom more bytes than are asked for in advance.
_AHEAD = 64
_AHEAD_BYTES = 8192

_FILES = FileLayer()


class NotAColdPath(Exception):
    """There is no namespace under a path, or only ones of a version that this program does not know."""


class ChunkInfo(NamedTuple):
    """One chunk file as a reader found it.

    Attributes:
        file: Path, size, time of last use, and the chunk's name; without size and time when it could not be opened.
        namespace: The namespace that it is in.
        state: One of ``STATES``.
        header: Its checked header, or None when the file could not be read as a chunk.
        problem: Why not: one word (a BadChunk's ``reason``, ``vanished`` or ``unreadable``), perhaps with a detail
            after a colon.
    """

    file: FoundFile
    namespace: NamespaceDirectory
    state: str
    header: Header | None
    problem: str = ""

    @property
    def reason(self) -> str:
        """The word of ``problem``."""
        return self.problem.partition(":")[0]


class Folder(NamedTuple):
    """One of the 256 directories of a namespace, or of its archive."""

    namespace: NamespaceDirectory
    state: str
    path: str


class Place(NamedTuple):
    """Where a chunk file is."""

    namespace: NamespaceDirectory
    state: str
    file: ChunkPath


class ColdTierReader:
    """The chunks of a cold path, namespace by namespace. Takes no lock, imports no torch, changes nothing.

    Attributes:
        cold_path: Its absolute path.
        namespaces: Those that can be read.
        left_out: Directories that look like namespaces and cannot be used, each with the reason.
    """

    def __init__(self, cold_path: str) -> None:
        """Find the namespaces below a path.

        Args:
            cold_path: The directory that ``cold_path`` of the settings names; ``~`` is expanded. Or a ``file://`` URL
                that ``shared_url`` names.

        Raises:
            NotAColdPath: There is no namespace that this version can read; one line says why.
        """
        self.cold_path = os.path.abspath(os.path.expanduser(_directory_of(cold_path)))
        try:
            self.namespaces, self.left_out = find_namespaces(self.cold_path)
        except OSError as error:
            raise NotAColdPath(f"{cold_path} is not a cold path: {error.strerror}") from None
        if not self.namespaces:
            raise NotAColdPath(self._why_not(cold_path))

    def chunks(self) -> Iterator[ChunkInfo]:
        """Every chunk, archived ones included, in the order of the directories, with token ids. Streams.

        A directory that cannot be listed is passed over, with a warning in the log.
        """
        for namespace in self.namespaces:
            for state in STATES:
                try:
                    for folder in folders_of(namespace, state):
                        yield from read_files(folder, chunk_files(folder.path))
                except OSError as error:
                    logger.warning("passed over in %s: %s", namespace.directory, error)

    def _why_not(self, cold_path: str) -> str:
        """The most telling reason: a namespace of another version, if there is one."""
        if os.path.lexists(os.path.join(self.cold_path, RECORD)):
            try:
                read_record(self.cold_path)
            except NamespaceRecordError as error:
                return f"{cold_path} is not a cold path: {error}"
            return f"{cold_path} is one namespace of a cold path; name the directory above it"
        why = self.left_out[0].why if self.left_out else f"no {RECORD} in any directory below it"
        return f"{cold_path} is not a cold path: {why}"


def _directory_of(cold_path: str) -> str:
    """The directory with the namespaces. Raises NotAColdPath for a URL that is none."""
    scheme, separator, path = cold_path.partition("://")
    if not separator:
        return cold_path
    if scheme != "file":
        raise NotAColdPath(
            f"{cold_path} is not a cold path: only file:// URLs are read directly. Copy what is below "
            f"{cold_path.rstrip('/')}/{VERSION_FOLDER} to a directory, and name that"
        )
    return os.path.join(path, VERSION_FOLDER)


def folders_of(namespace: NamespaceDirectory, state: str) -> list[Folder]:
    """The directories of a namespace that hold chunks of a state. Raises OSError."""
    return [Folder(namespace, state, path) for path in chunk_folders(namespace.root(state))]


def read_place(place: Place) -> ChunkInfo:
    """The chunk in one file, token ids included."""
    return _read(place, _open(place), None, brief=False)


def read_files(folder: Folder, files: Iterable[ChunkPath], *, brief: bool = False) -> Iterator[ChunkInfo]:
    """The chunks in some files of a directory, in order, while the kernel already reads what comes next.

    ``brief``: without token ids and digests; the token ids have been checked all the same.
    """
    waiting: deque[tuple[Place, _Opened]] = deque()
    layout: FileLayout | None = None
    try:
        todo = iter(files)
        while True:
            while len(waiting) <= _AHEAD and (file := next(todo, None)) is not None:
                place = Place(folder.namespace, folder.state, file)
                waiting.append((place, _open(place)))
            if not waiting:
                return
            info = _read(*waiting.popleft(), layout, brief=brief)
            if info.header is not None:
                layout = info.header.layout
            yield info
    finally:  # the caller may have seen enough
        for _, opened in waiting:
            if not isinstance(opened, str):
                os.close(opened[0])


#: A file that is open, or why it is not.
_Opened = tuple[int, os.stat_result] | str


def _open(place: Place) -> _Opened:
    try:
        fd, info = open_regular(_FILES, place.file.path)
    except BadChunk as bad:
        return f"{bad.reason}: {bad}"
    except FileNotFoundError:
        return "vanished"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    with contextlib.suppress(OSError):  # advice, no more: not every filesystem takes it
        os.posix_fadvise(fd, 0, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
    return fd, info


def _read(place: Place, opened: _Opened, layout: FileLayout | None, *, brief: bool) -> ChunkInfo:
    namespace, state, (path, name) = place
    if isinstance(opened, str):
        return ChunkInfo(FoundFile(path, 0, 0, name), namespace, state, None, opened)
    fd, info = opened
    file = FoundFile(path, info.st_size, info.st_mtime_ns, name)
    try:
        header = read_open_header(_FILES, fd, info.st_size, expected=layout, brief=brief)
    except BadChunk as bad:
        return ChunkInfo(file, namespace, state, None, f"{bad.reason}: {bad}")
    except OSError as error:
        return ChunkInfo(file, namespace, state, None, f"unreadable: {error.strerror}")
    finally:
        os.close(fd)
    if not is_name_of(header.meta, name):
        return ChunkInfo(file, namespace, state, None, f"key: it holds the chunk {header.meta.key[:200]!r}")
    return ChunkInfo(file, namespace, state, header)
