"""Where chunks are, for readers from outside: a directory, or what is below a URL. Listing here, reading by ``files``.

A source lists namespaces, then the chunks of each in one or more folders; its file layer opens what it has listed. Both
kinds have the same layout (see ``layout`` and ``shared_names``), so paths and URLs are put together alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.layout import (
    ARCHIVE,
    CHUNK_FILE,
    FAN_OUT,
    QUARANTINE,
    RECORD,
    SEQUENCES,
    TRASH,
    ChunkPath,
    Stray,
    chunk_files,
    chunk_folders,
    strays,
    strays_beside,
)
from lmcache_hs_backend.format.namespace import (
    MAX_RECORD_BYTES,
    LeftOut,
    NamespaceDirectory,
    NamespaceRecordError,
    find_namespaces,
    parse_record,
)
from lmcache_hs_backend.format.request_log import SUFFIX as RECORDS
from lmcache_hs_backend.format.request_log import record_files
from lmcache_hs_backend.format.shared_names import VERSION_FOLDER
from lmcache_hs_backend.format.url_files import UrlFiles, is_url

_MOST_DELETED = 1000  # objects in one request


class NotAColdPath(Exception):
    """There is no namespace under a path, or only ones of a version that this program does not know."""


class Folder(NamedTuple):
    """Chunks that are listed together: one of a namespace's 256 directories, or all its objects."""

    namespace: NamespaceDirectory
    state: str
    path: str


class ChunkSource(Protocol):
    """Where chunks are."""

    @property
    def address(self) -> str:
        """Absolute path or URL, without a slash at its end."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether it is a directory: forked processes can read it, and locks and free space mean something."""
        ...

    @property
    def files(self) -> FileLayer:
        """Opens what the source has listed."""
        ...

    def namespaces(self) -> tuple[list[NamespaceDirectory], list[LeftOut]]:
        """The namespaces, and what looks like one but cannot be used. Raises OSError."""
        ...

    def folders(self, namespace: NamespaceDirectory, state: str) -> list[Folder]:
        """Where chunks of a state are. Raises OSError."""
        ...

    def chunks(self, folder: Folder) -> Iterable[ChunkPath]:
        """What is named like a chunk, with sizes and times where the listing has them. Raises OSError."""
        ...

    def records(self, namespace: NamespaceDirectory) -> list[str]:
        """Its files of request records, in a fixed order. Raises OSError."""
        ...

    def strays(self, namespace: NamespaceDirectory) -> Iterator[Stray]:
        """What does not belong in a namespace."""
        ...

    def strays_beside(self, known: Iterable[str]) -> Iterator[Stray]:
        """What is beside the directories of namespaces."""
        ...


class DirectorySource:
    """The directory of a cold tier, or of a shared tier at ``file://``."""

    is_local = True

    def __init__(self, path: str, files: FileLayer) -> None:
        """``path``: as the user names it; ``~`` is expanded."""
        self.address = os.path.abspath(os.path.expanduser(path))
        self.files = files

    def namespaces(self) -> tuple[list[NamespaceDirectory], list[LeftOut]]:
        """See ChunkSource."""
        return find_namespaces(self.address)

    def folders(self, namespace: NamespaceDirectory, state: str) -> list[Folder]:
        """The fan-out directories."""
        return [Folder(namespace, state, path) for path in chunk_folders(namespace.root(state))]

    def chunks(self, folder: Folder) -> list[ChunkPath]:
        """In the order of the files on disk."""
        return chunk_files(folder.path)

    def records(self, namespace: NamespaceDirectory) -> list[str]:
        """See ChunkSource."""
        return record_files(namespace.directory)

    def strays(self, namespace: NamespaceDirectory) -> Iterator[Stray]:
        """See ChunkSource."""
        return strays(namespace.directory)

    def strays_beside(self, known: Iterable[str]) -> Iterator[Stray]:
        """See ChunkSource."""
        return strays_beside(self.address, set(known))


class ObjectSource:
    """The objects below a URL: of a shared tier, or of a cold path that was copied there."""

    is_local = False

    def __init__(self, url: str, files: UrlFiles) -> None:
        """``url``: as ``shared_url`` has it. Raises NotAColdPath when it cannot be used."""
        from lmcache_hs_backend.format.objects import ObjectsError

        self.address = url.rstrip("/")
        self.files: UrlFiles = files
        files.mount(self.address)
        try:
            self._objects, _ = files.objects(self.address)
        except ObjectsError as error:
            raise NotAColdPath(f"{url} cannot be read; it must be {error}") from None

    def namespaces(self) -> tuple[list[NamespaceDirectory], list[LeftOut]]:
        """Those of the shared tier, or else those directly below the URL."""
        found: list[NamespaceDirectory] = []
        left_out: list[LeftOut] = []
        for folder in self._objects.subfolders(VERSION_FOLDER) or self._objects.subfolders():
            self._look_at(folder, found, left_out)
        return found, left_out

    def _look_at(self, folder: str, found: list[NamespaceDirectory], left_out: list[LeftOut]) -> None:
        from lmcache_hs_backend.format.objects import Answer

        url = f"{self.address}/{folder}"
        reply = self._objects.get(f"{folder}/{RECORD}", MAX_RECORD_BYTES)
        if reply.answer is Answer.ABSENT:
            if any(FAN_OUT.fullmatch(each.rsplit("/", 1)[-1]) for each in self._objects.subfolders(folder)):
                left_out.append(LeftOut(url, f"{url}: chunks, but no {RECORD}"))
            return
        try:
            if reply.answer is not Answer.OK:
                raise NamespaceRecordError(f"{url}/{RECORD}: {reply.why or reply.answer.value}")
            found.append(NamespaceDirectory(url, folder, parse_record(bytes(reply.body), f"{url}/{RECORD}")))
        except NamespaceRecordError as error:
            left_out.append(LeftOut(url, str(error)))

    def folders(self, namespace: NamespaceDirectory, state: str) -> list[Folder]:
        """One for all: a request lists a thousand objects, of whatever folder."""
        return [Folder(namespace, state, namespace.root(state))]

    def chunks(self, folder: Folder) -> Iterator[ChunkPath]:
        """In the order of their names, while they are listed."""
        depth = self._below(folder.path).count("/")
        for found in self._objects.list(self._below(folder.path)):
            *_, directory, name = found.path.split("/")
            match = CHUNK_FILE.fullmatch(name)
            if match is not None and name.startswith(directory) and found.path.count("/") == depth + 2:
                url = f"{self.address}/{found.path}"
                yield ChunkPath(url, bytes.fromhex(match[1]), found.size, int(found.modified * 1e9))

    def records(self, namespace: NamespaceDirectory) -> list[str]:
        """All ``….jsonl`` below ``sequences``, in whatever folder: each node may have one of its own."""
        below = f"{self._below(namespace.directory)}/{SEQUENCES}"
        return sorted(
            f"{self.address}/{each.path}" for each in self._objects.list(below) if each.path.endswith(RECORDS)
        )

    def strays(self, namespace: NamespaceDirectory) -> Iterator[Stray]:
        """Objects of a namespace that are no chunks."""
        below = self._below(namespace.directory)
        for found in self._objects.list(below):
            parts = found.path[len(below) + 1 :].split("/")
            if parts[0] in (RECORD, QUARANTINE, SEQUENCES, TRASH):
                continue
            if parts[0] == ARCHIVE:
                del parts[0]
            kind = "foreign"
            if len(parts) == 2 and FAN_OUT.fullmatch(parts[0]) and CHUNK_FILE.fullmatch(parts[1]):
                if parts[1].startswith(parts[0]):
                    continue
                kind = "misplaced"
            yield Stray(kind, f"{self.address}/{found.path}", found.size, int(found.modified * 1e9))

    def strays_beside(self, known: Iterable[str]) -> Iterator[Stray]:
        """Not looked for: the bucket may be used for much else."""
        return iter(())

    def delete(self, urls: list[str]) -> Iterator[tuple[list[str], str]]:
        """Delete objects, some at a time; which, and why they could not be (empty: they are gone)."""
        from lmcache_hs_backend.format.objects import Answer

        for first in range(0, len(urls), _MOST_DELETED):
            some = urls[first : first + _MOST_DELETED]
            reply = self._objects.delete([self._below(url) for url in some])
            yield some, "" if reply.answer in (Answer.OK, Answer.ABSENT) else reply.why or reply.answer.value

    def _below(self, url: str) -> str:
        return url[len(self.address) + 1 :]


def address_of(where: str) -> str:
    """What the source that a path or URL names is called, whether it can be read or not: its ``address``."""
    scheme, separator, path = where.partition("://")
    if separator and scheme != "file":
        return where.rstrip("/")
    return os.path.abspath(os.path.expanduser(os.path.join(path, VERSION_FOLDER) if separator else where))


def source_of(where: str, files: FileLayer) -> DirectorySource | ObjectSource:
    """The source that a path or URL names. Raises NotAColdPath for a URL that cannot be used.

    ``files``: a UrlFiles where the path may be a URL of objects.
    """
    scheme, separator, path = where.partition("://")
    if not separator:
        return DirectorySource(where, files)
    if scheme == "file":
        return DirectorySource(os.path.join(path, VERSION_FOLDER), files)
    if not is_url(where):
        raise NotAColdPath(f"{where} is not a cold path: URLs begin with s3://, gs://, az:// or file:///")
    assert isinstance(files, UrlFiles)
    return ObjectSource(where, files)
