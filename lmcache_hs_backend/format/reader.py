"""Reading a cold path, or a shared tier by its URL, from outside: no store, no lock, no LMCache.

For command-line tools and data sets. A running engine may write, rename and delete files at the same time; what
vanishes or is not a chunk is reported as such and never stops the reader. Nothing is ever changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lmcache_hs_backend.format.chunk_file import FileLayer, open_regular, read_open_header
from lmcache_hs_backend.format.chunk_sources import ChunkSource, Folder, NotAColdPath, source_of
from lmcache_hs_backend.format.header import BadChunk, FileLayout, Header
from lmcache_hs_backend.format.layout import RECORD, ChunkPath, FoundFile
from lmcache_hs_backend.format.namespace import NamespaceDirectory, NamespaceRecordError, read_record
from lmcache_hs_backend.format.shared_names import is_name_of
from lmcache_hs_backend.format.url_files import UrlFiles, UrlOptions, is_url

__all__ = [
    "STATES",
    "ChunkInfo",
    "ColdTierReader",
    "NotAColdPath",
    "Place",
    "ReadHeaders",
    "read_files",
    "read_place",
]

logger = logging.getLogger(__name__)

STATES = ("cold", "archived")

#: How many files are open ahead; a header has seldom more bytes than are asked for in advance.
_AHEAD = 64
_AHEAD_BYTES = 8192


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


class Place(NamedTuple):
    """Where a chunk file is."""

    namespace: NamespaceDirectory
    state: str
    file: ChunkPath


class ReadHeaders:
    """Headers of objects from an earlier reading, by which objects that are still the same are not fetched again.

    They are kept without checksums. Files are not kept: to read them again costs little. In another process it is
    empty, as it may be large.
    """

    def __init__(self, before: ReadHeaders | None = None, ids_bytes: int = 1 << 30) -> None:
        """What this reading does not meet is forgotten at its ``end``.

        Args:
            before: Those of the reading before.
            ids_bytes: Token ids are kept as well, up to so many bytes.
        """
        self._before = {} if before is None else before._kept
        self._kept: dict[str, tuple[int, int, ChunkInfo]] = {}
        self._ids_room = ids_bytes

    def __reduce__(self) -> tuple[type[ReadHeaders], tuple[()]]:
        return ReadHeaders, ()

    def find(self, file: ChunkPath) -> ChunkInfo | None:
        """What was read of an object that has the same size and time in the listing."""
        size, mtime_ns, info = self._before.get(file.path, (-1, 0, None))
        if info is None or (size, mtime_ns) != (file.size, file.mtime_ns):
            return None
        self.keep(file, info)
        return info

    def keep(self, file: ChunkPath, info: ChunkInfo) -> None:
        """Remember what was read of an object, if it is a chunk."""
        if file.size < 0 or info.header is None:
            return
        token_ids = info.header.token_ids if len(info.header.token_ids) <= self._ids_room else b""
        self._ids_room -= len(token_ids)
        header = info.header._replace(token_ids=token_ids, checksums={}, digests=b"")
        self._kept[file.path] = file.size, file.mtime_ns, info._replace(header=header)

    def end(self, *, whole: bool) -> None:
        """The reading has ended. What it has not met is forgotten, unless it has broken off."""
        self._kept = self._kept if whole else {**self._before, **self._kept}
        self._before = {}


class ColdTierReader:
    """The chunks of a cold path or URL, namespace by namespace. Takes no lock, imports no torch, changes nothing.

    A context manager, or to be closed: one of a URL has threads and connections.

    Attributes:
        cold_path: Its absolute path; the URL of objects.
        source: Lists it.
        files: Opens what is listed.
        namespaces: Those that can be read.
        left_out: Directories that look like namespaces and cannot be used, each with the reason.
    """

    def __init__(
        self, cold_path: str, *, shared_options: Mapping[str, Any] | None = None, files: FileLayer | None = None
    ) -> None:
        """Find the namespaces below a path or URL.

        Args:
            cold_path: The directory that ``cold_path`` of the settings names; ``~`` is expanded. Or the URL that
                ``shared_url`` names: ``file:///directory``, ``s3://``, ``gs://`` or ``az://``, read as it is.
            shared_options: obstore's options for a URL, as the setting of that name. Keys, regions and endpoints also
                come from the usual environment variables (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``).
            files: Opens the files, in place of a layer of its own; its owner releases it.

        Raises:
            NotAColdPath: There is no namespace that this version can read; one line says why.
        """
        self._owns_files = files is None
        files = files or (UrlFiles(UrlOptions(shared_options or {})) if is_url(cold_path) else FileLayer())
        self.source: ChunkSource = source_of(cold_path, files)
        self.cold_path, self.files = self.source.address, self.source.files
        try:
            self.namespaces, self.left_out = self.source.namespaces()
        except OSError as error:
            raise NotAColdPath(f"{cold_path} is not a cold path: {error.strerror}") from None
        if not self.namespaces:
            raise NotAColdPath(self._why_not(cold_path))

    @property
    def place(self) -> str:
        """The same for two readers of one cold path, however it was named: the directory without links, or the URL."""
        return os.path.realpath(self.cold_path) if self.source.is_local else self.cold_path

    def chunks(self, known: ReadHeaders | None = None) -> Iterator[ChunkInfo]:
        """Every chunk, archived ones included, in the order of the directories, with token ids. Streams.

        ``known``: objects in there are not read again, and may come without token ids; others are added.

        A directory that cannot be listed is passed over, with a warning in the log. Raises OSError when a bucket breaks
        off its listing.
        """
        for namespace in self.namespaces:
            for state in STATES:
                try:
                    for folder in self.source.folders(namespace, state):
                        yield from read_files(self.files, folder, self.source.chunks(folder), known=known)
                except OSError as error:
                    if not self.source.is_local:
                        raise
                    logger.warning("passed over in %s: %s", namespace.directory, error)

    def close(self) -> None:
        """Give up threads and connections, without waiting for them. What is read after that starts new ones."""
        if self._owns_files:
            self.files.release()

    def __enter__(self) -> ColdTierReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _why_not(self, cold_path: str) -> str:
        """The most telling reason: a namespace of another version, if there is one."""
        if self.source.is_local and os.path.lexists(os.path.join(self.cold_path, RECORD)):
            try:
                read_record(self.cold_path)
            except NamespaceRecordError as error:
                return f"{cold_path} is not a cold path: {error}"
            return f"{cold_path} is one namespace of a cold path; name the directory above it"
        why = self.left_out[0].why if self.left_out else f"no {RECORD} in any directory below it"
        return f"{cold_path} is not a cold path: {why}"


def read_place(files: FileLayer, place: Place) -> ChunkInfo:
    """The chunk in one file, token ids included."""
    return _read(files, place, _open(files, place), None, brief=False)


def read_files(
    layer: FileLayer,
    folder: Folder,
    files: Iterable[ChunkPath],
    *,
    brief: bool = False,
    known: ReadHeaders | None = None,
) -> Iterator[ChunkInfo]:
    """The chunks in some files of a folder, in order, while what comes next is already being read.

    Args:
        layer: Opens the files.
        folder: Where they are.
        files: Their names.
        brief: Without token ids and digests; the token ids have been checked all the same.
        known: See ``ColdTierReader.chunks``.
    """
    waiting: deque[tuple[Place, _Opened | ChunkInfo | None]] = deque()
    layout: FileLayout | None = None
    try:
        todo = iter(files)
        while True:
            while len(waiting) <= _AHEAD and (file := next(todo, None)) is not None:
                place = Place(folder.namespace, folder.state, file)
                seen = None if known is None else known.find(file)
                waiting.append(_begin(layer, place) if seen is None else (place, seen))
            if not waiting:
                return
            place, opened = waiting.popleft()
            if isinstance(opened, ChunkInfo):
                yield opened
                continue
            info = _read(layer, place, _open(layer, place) if opened is None else opened, layout, brief=brief)
            if info.header is not None:
                layout = info.header.layout
            if known is not None:
                known.keep(place.file, info)
            yield info
    finally:  # the caller may have seen enough
        for _, opened in waiting:
            if isinstance(opened, tuple) and not isinstance(opened, ChunkInfo):
                layer.close(opened[0])


#: A file that is open, or why it is not.
_Opened = tuple[int, os.stat_result] | str


def _begin(layer: FileLayer, place: Place) -> tuple[Place, _Opened | None]:
    """Open a file, and have the kernel read its header ahead; of an object, only begin the request (None)."""
    path = place.file.path
    if is_url(path):
        with contextlib.suppress(OSError):  # the opening says why
            layer.will_read(path)
        return place, None
    opened = _open(layer, place)
    if not isinstance(opened, str):
        with contextlib.suppress(OSError):  # advice, no more: not every filesystem takes it
            os.posix_fadvise(opened[0], 0, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
    return place, opened


def _open(layer: FileLayer, place: Place) -> _Opened:
    try:
        return open_regular(layer, place.file.path)
    except BadChunk as bad:
        return f"{bad.reason}: {bad}"
    except FileNotFoundError:
        return "vanished"
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _read(layer: FileLayer, place: Place, opened: _Opened, layout: FileLayout | None, *, brief: bool) -> ChunkInfo:
    namespace, state, (path, name, *_) = place
    if isinstance(opened, str):
        return ChunkInfo(FoundFile(path, 0, 0, name), namespace, state, None, opened)
    fd, info = opened
    file = FoundFile(path, info.st_size, info.st_mtime_ns, name)
    try:
        header = read_open_header(layer, fd, info.st_size, expected=layout, brief=brief)
    except BadChunk as bad:
        return ChunkInfo(file, namespace, state, None, f"{bad.reason}: {bad}")
    except OSError as error:
        return ChunkInfo(file, namespace, state, None, f"unreadable: {error.strerror}")
    finally:
        layer.close(fd)
    if not is_name_of(header.meta, name):
        return ChunkInfo(file, namespace, state, None, f"key: it holds the chunk {header.meta.key[:200]!r}")
    return ChunkInfo(file, namespace, state, header)
