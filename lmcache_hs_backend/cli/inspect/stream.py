"""The chunks of cold paths, one after the other, as all sub-commands go through them.

Streams: names are scanned directory by directory and headers read as they are asked for, so a million chunks take no
more memory than one, and the first comes at once. Batches of files are shared out among processes, because most of the
work is Python's.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.cli.console import time_text
from lmcache_hs_backend.cli.inspect.workers import in_processes
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.chunk_sources import Folder
from lmcache_hs_backend.format.header import Header
from lmcache_hs_backend.format.layout import ChunkPath, FoundFile
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.reader import STATES, ChunkInfo, ColdTierReader, Place, read_files, read_place
from lmcache_hs_backend.format.url_files import UrlFiles

_FILES_AT_A_TIME = 128


class ReadableChunk(NamedTuple):
    """A chunk whose header has been read."""

    file: FoundFile
    namespace: NamespaceDirectory
    state: str
    header: Header

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.header.meta.start + self.header.meta.num_tokens

    @property
    def dtype(self) -> str | list[str]:
        """torch's name; one for each layer where they differ."""
        return _layer_fields(self.header.layout.layers)[1]

    @property
    def hidden_dim(self) -> int | list[int]:
        """Elements of a row; one for each layer where they differ."""
        return _layer_fields(self.header.layout.layers)[2]

    def record(self) -> dict[str, Any]:
        """The chunk as ``list --format json`` shows it."""
        meta = self.header.meta
        layers, dtype, hidden_dim = _layer_fields(self.header.layout.layers)
        return {
            "key": meta.key,
            "chunk_hash": meta.chunk_hash,
            "parent": meta.parent,
            "namespace": self.namespace.label,
            "model": meta.model,
            "worker_id": self.namespace.worker_id,
            "start": meta.start,
            "num_tokens": meta.num_tokens,
            "layers": layers,
            "dtype": dtype,
            "hidden_dim": hidden_dim,
            "bytes": self.file.size,
            "path": self.file.path,
            "created_at": meta.created_at,
            "accessed_at": time_text(self.file.mtime_ns),
            "state": self.state,
        }


@functools.lru_cache(maxsize=64)  # most chunks have the same layers
def _layer_fields(layers: tuple[LayerSpec, ...]) -> tuple[list[int], str | list[str], int | list[int]]:
    """Their numbers, dtypes and widths, as ``ReadableChunk.record`` has them."""
    return (
        [layer.layer_idx for layer in layers],
        _one_or_all([layer.dtype_name for layer in layers]),
        _one_or_all([layer.hidden_dim for layer in layers]),
    )


_V = TypeVar("_V", str, int)


def _one_or_all(values: list[_V]) -> _V | list[_V]:
    return values[0] if len(set(values)) == 1 else values


class ChunkStream:
    """Goes through a cold path.

    Attributes:
        skipped: How much could not be read, by reason; a directory counts as one.
        refused: The directories among them: namespace, path, why.
    """

    def __init__(
        self,
        reader: ColdTierReader,
        namespaces: Sequence[NamespaceDirectory],
        states: Sequence[str] = STATES,
        *,
        by_name: bool = False,
    ) -> None:
        """``by_name``: in the order of the names within each directory, rather than as the files lie on disk."""
        self.reader = reader
        self.namespaces = namespaces
        self.skipped: Counter[str] = Counter()
        self.refused: list[tuple[NamespaceDirectory, str, str]] = []
        self._states = states
        self._by_name = by_name

    def places(self) -> Iterator[Place]:
        """Where there are chunk files, by their names alone."""
        for folder, files in self._listed():
            for file in files:
                yield Place(folder.namespace, folder.state, file)

    def read(self) -> Iterator[ReadableChunk]:
        """Every chunk that can be read, in the order of the directories, without its token ids."""
        forks = not isinstance(self.reader.files, UrlFiles)  # it may have threads, and a client that survives no fork
        for chunk in in_processes(_read_batch, self._batches()) if forks else self._read_here():
            if isinstance(chunk, ReadableChunk):
                yield chunk
            else:
                self.skipped[chunk] += 1

    def _read_here(self) -> Iterator[ReadableChunk | str]:
        """In this process, which waits for the network more than it computes; requests for objects run side by side."""
        for folder, files in self._listed():
            yield from map(_readable, read_files(self.reader.files, folder, files, brief=True))

    def _batches(self) -> Iterator[tuple[Folder, list[ChunkPath]]]:
        for folder, files in self._listed():
            listed = iter(files)
            while batch := list(itertools.islice(listed, _FILES_AT_A_TIME)):
                yield folder, batch

    def _listed(self) -> Iterator[tuple[Folder, Iterable[ChunkPath]]]:
        source = self.reader.source
        for namespace in self.namespaces:
            for state in self._states:
                try:
                    folders = source.folders(namespace, state)
                except OSError as error:
                    self._refuse(namespace, namespace.root(state), error)
                    continue
                for folder in folders:
                    try:
                        files = source.chunks(folder)
                    except OSError as error:
                        self._refuse(namespace, folder.path, error)
                        continue
                    if source.is_local:
                        yield folder, sorted(files, key=lambda file: file.name) if self._by_name else files
                    else:  # objects are listed by name
                        yield folder, self._going_on(folder, files)

    def _going_on(self, folder: Folder, files: Iterable[ChunkPath]) -> Iterator[ChunkPath]:
        """A listing that goes on while it is used, and may break off."""
        try:
            yield from files
        except OSError as error:
            self._refuse(folder.namespace, folder.path, error)

    def _refuse(self, namespace: NamespaceDirectory, path: str, error: OSError) -> None:
        self.refused.append((namespace, path, str(error.strerror)))
        self.skipped["unreadable"] += 1


class ChunkStreams:
    """The chunks of one or several cold paths, one cold path after the other.

    Attributes:
        namespaces: Those that are gone through.
        each: A stream for each cold path that has any of them.
    """

    def __init__(
        self,
        readers: Sequence[ColdTierReader],
        namespaces: Sequence[NamespaceDirectory],
        states: Sequence[str] = STATES,
    ) -> None:
        self.namespaces = namespaces
        self.each: list[ChunkStream] = []
        for reader in readers:
            its_own = {namespace.directory for namespace in reader.namespaces}
            if its := [namespace for namespace in namespaces if namespace.directory in its_own]:
                self.each.append(ChunkStream(reader, its, states))

    @property
    def skipped(self) -> Counter[str]:
        """How much could not be read, by reason."""
        return sum((stream.skipped for stream in self.each), Counter())

    def skipped_in(self, source: str) -> Counter[str]:
        """How much of one cold path could not be read, by reason."""
        return sum((stream.skipped for stream in self.each if stream.reader.cold_path == source), Counter())

    def places(self) -> Iterator[Place]:
        """Where there are chunk files, by their names alone."""
        return itertools.chain.from_iterable(stream.places() for stream in self.each)

    def read(self) -> Iterator[ReadableChunk]:
        """Every chunk that can be read, without its token ids."""
        return itertools.chain.from_iterable(stream.read() for stream in self.each)


_FILES = FileLayer()


def _read_batch(batch: tuple[Folder, list[ChunkPath]]) -> list[ReadableChunk | str]:
    return [_readable(info) for info in read_files(_FILES, *batch, brief=True)]


def look_at(files: FileLayer, place: Place) -> ReadableChunk | str:
    """The chunk in a file, token ids included, or why there is none, in one word."""
    return _readable(read_place(files, place))


def _readable(info: ChunkInfo) -> ReadableChunk | str:
    if info.header is None:
        return info.reason
    return ReadableChunk(info.file, info.namespace, info.state, info.header)


def file_size(place: Place) -> int:
    """Bytes of a chunk's file; 0 where it has vanished or may not be looked at."""
    if place.file.size >= 0:
        return place.file.size
    try:
        return os.lstat(place.file.path).st_size
    except OSError:
        return 0


def skipped_text(skipped: Mapping[str, int]) -> str:
    """``2 skipped (size 1, vanished 1)``."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(skipped.items()))
    return f"{sum(skipped.values()):,} skipped ({reasons})"
