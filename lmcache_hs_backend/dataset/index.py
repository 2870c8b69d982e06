"""Every chunk of one or more cold paths, each once, with the chunk before it.

What lies on several nodes or ranks is merged: two files are the same chunk when model, revision, KV dtype,
tokens and prefix digest are equal, whatever the keys say. Only headers are read, and token ids are not
kept, so the index costs about a kilobyte a chunk however large the rows are. Read-only; a file that
vanishes or is no chunk is counted, never an error.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import TOKEN_BYTES, prefix_digests
from lmcache_hs_backend.dataset.errors import DatasetError, NothingThere
from lmcache_hs_backend.format.chunk_file import FileLayer, read_header
from lmcache_hs_backend.format.chunk_forest import FIRST, MISSING
from lmcache_hs_backend.format.header import BadChunk, FileLayout, Header
from lmcache_hs_backend.format.layout import ARCHIVE, SEQUENCES, chunk_path
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.reader import ChunkInfo, ColdTierReader, NotAColdPath, ReadHeaders
from lmcache_hs_backend.format.url_files import UrlFiles, UrlOptions, is_url

logger = logging.getLogger(__name__)

_IDS_BYTES = 1 << 30


class ChunkFile(NamedTuple):
    """One file of a chunk. ``root`` is the namespace's directory, or its archive."""

    root: str
    name: bytes
    layout: FileLayout

    @property
    def path(self) -> str:
        """Where the file is."""
        return chunk_path(self.root, self.name)

    @property
    def archived_path(self) -> str:
        """Where a running engine moves it to that archives it."""
        return chunk_path(os.path.join(self.root, ARCHIVE), self.name)


class IndexedChunk(NamedTuple):
    """One chunk, however many files hold it. ``parent`` is the position of the chunk before, in the index."""

    prefix: bytes
    start: int
    num_tokens: int
    parent: int
    files: tuple[ChunkFile, ...]
    capture: str

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens

    def has(self, layer_idx: int) -> bool:
        """Whether one of the files holds the layer."""
        return any(file.layout.spec(layer_idx) for file in self.files)


class _Found:
    """A chunk while files are still being found: its files, and what they call it and its predecessor."""

    __slots__ = ("capture", "files", "links")

    def __init__(self, capture: str) -> None:
        self.capture = capture
        self.files: list[ChunkFile] = []
        self.links: list[tuple[int, str, str]] = []  # hash space, chunk hash, parent's hash


class ChunkIndex:
    """The chunks of cold paths that belong to one model, parents before children. To be closed."""

    def __init__(
        self,
        cold_paths: Sequence[str],
        model: str | None = None,
        looked_at: Callable[[int], None] = lambda count: None,
        *,
        chunk_size: int | None = None,
        urls: UrlOptions | None = None,
        known: ReadHeaders | None = None,
        later: bool = False,
    ) -> None:
        """Read every header.

        Args:
            cold_paths: As in the setting ``cold_path``.
            model: Which rows, where there are several models: ``NAME``, ``NAME@REVISION`` or
                ``NAME@REVISION/KV_DTYPE``.
            looked_at: Called with 1 for every chunk, for a progress bar.
            chunk_size: Which chunks, where there are several sizes, which would give every sequence once for each.
            urls: How URLs among the cold paths are read.
            known: Headers of objects from an earlier reading, which are not read again; takes in those of this one.
            later: Whether a cold path may have nothing in it yet, or not be there, as long as another has chunks.

        Raises:
            DatasetError: A path is no cold path, the rows of several models or chunks of several sizes would be
                mixed, or there is no chunk.
        """
        self.urls = tuple(path.rstrip("/") for path in cold_paths if is_url(path))
        self.files: FileLayer = UrlFiles(urls) if self.urls else FileLayer()
        self.problems: Counter[str] = Counter()  # files that could not be read as chunks, by reason
        self.num_files = 0
        self.model = ""  # the label of the model, see above
        self.namespaces: list[dict[str, Any]] = []  # records of the namespaces that have chunks of the model
        self._records: list[str] = []  # files of request records of this model
        self._unlisted = ""  # why there may be more
        # Token ids from URLs, where reading them again is a request each; of so many bytes.
        self._ids: dict[tuple[bytes, int], bytes] = {}
        self._ids_room = _IDS_BYTES
        self._layouts: dict[FileLayout, FileLayout] = {}
        self._spaces: dict[tuple[Any, ...], int] = {}
        self._captures: dict[str, str] = {}
        try:
            self.chunks = self._link(self._look_through(cold_paths, model, looked_at, chunk_size, known, later))
        except BaseException:
            self.close()
            raise

    def _look_through(
        self,
        cold_paths: Sequence[str],
        model: str | None,
        looked_at: Callable[[int], None],
        chunk_size: int | None,
        known_headers: ReadHeaders | None,
        later: bool,
    ) -> dict[tuple[int, bytes, int], _Found]:
        """Read every header. Raises DatasetError."""
        found: dict[tuple[int, bytes, int], _Found] = {}
        seen: set[str] = set()
        known: set[str] = set()
        directories: set[str] = set()
        for cold_path in cold_paths:
            try:
                reader = self._opened(cold_path)
            except NothingThere as error:
                if later and len(cold_paths) > 1:
                    logger.info("%s; it is looked at again when rows come", error)
                    continue
                raise
            if reader.place in seen:
                continue
            seen.add(reader.place)
            for info in self._chunks_of(reader, known_headers):
                label = model_label(info.namespace.record)
                known.add(label)
                if model is not None and not _chosen(model, label):
                    continue
                if self.model and label != self.model:
                    raise DatasetError(
                        f"the cold paths hold rows of several models ({self.model}, {label}), which do not belong "
                        f"in one dataset; choose one with --model"
                    )
                self.model = label
                its_size = info.namespace.record.get("chunk_size")
                if chunk_size is not None and its_size != chunk_size:
                    continue
                size = self.namespaces[0].get("chunk_size") if self.namespaces else its_size
                if its_size != size:
                    raise DatasetError(
                        f"the cold paths hold chunks of {size} and of {its_size} tokens, which do not continue each "
                        f"other; choose with --chunk-size"
                    )
                self._add(info, found)
                if info.header is not None and info.namespace.directory not in directories:
                    directories.add(info.namespace.directory)
                    self.namespaces.append(info.namespace.record)
                    self._find_records(reader, info.namespace)
                looked_at(1)
        if not found:
            which = "" if model is None else f" of {model!r}; there are: {', '.join(sorted(known)) or 'none'}"
            which += "" if chunk_size is None else f" (of {chunk_size} tokens, as --chunk-size says)"
            raise NothingThere(f"there is no readable chunk{which} in {', '.join(cold_paths)}")
        return found

    def _opened(self, cold_path: str) -> ColdTierReader:
        """Raises NothingThere."""
        if "://" not in cold_path and not os.path.isdir(os.path.expanduser(cold_path)):
            raise NothingThere(f"{cold_path} is not a directory; name a cold path, as in the setting cold_path")
        try:
            return ColdTierReader(cold_path, files=self.files)
        except NotAColdPath as error:
            raise NothingThere(str(error)) from None

    @classmethod
    def from_plan(
        cls,
        chunks: list[IndexedChunk],
        *,
        model: str,
        namespaces: list[dict[str, Any]],
        num_files: int,
        problems: dict[str, int],
        captures: list[str],
        roots: Sequence[str],
        urls: UrlOptions | None,
    ) -> ChunkIndex:
        """The index that another process has built, with the chunks that are wanted only. ``roots``: its URLs."""
        self = cls.__new__(cls)
        self.urls = tuple(roots)
        self.files = UrlFiles(urls, roots) if roots else FileLayer()
        self.problems, self.num_files, self.model = Counter(problems), num_files, model
        self.namespaces, self.chunks = namespaces, chunks
        self._captures = {text: text for text in captures}
        self._records, self._unlisted, self._ids = [], "", {}
        return self

    def check_urls(self) -> None:
        """Raise DatasetError when the client for the index's URLs cannot be made here."""
        if isinstance(self.files, UrlFiles):
            for url in self.urls:
                try:
                    self.files.objects(url)
                except ValueError as error:
                    raise DatasetError(f"{url} cannot be read; it must be {error}") from None

    def close(self) -> None:
        """Give up the threads and connections of URLs, without waiting. What is read after that starts new ones."""
        self.files.release()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": {}}  # they are wanted while samples are planned

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def captures(self) -> list[str]:
        """What the writers of the chunks knew about them, each text once."""
        return list(self._captures)

    def record_files(self) -> list[str]:
        """The files of request records beside the chunks, in a fixed order. Raises DatasetError."""
        if self._unlisted:
            raise DatasetError(self._unlisted)
        return self._records

    def chain(self, position: int) -> list[int]:
        """The chunks from a sequence's first to this one."""
        chain = []
        while position >= 0:
            chain.append(position)
            position = self.chunks[position].parent
        chain.reverse()
        return chain

    def ids(self, position: int) -> bytes | None:
        """The token ids of a chunk (int64 bytes), or None when no file of it can be read any more."""
        chunk = self.chunks[position]
        kept = self._ids.get((chunk.prefix, chunk.num_tokens))
        if kept is not None:
            return kept
        for file in chunk.files:
            header = self.header(file)
            if header is not None:
                return header.token_ids
        return None

    def header(self, file: ChunkFile) -> Header | None:
        """The header of a file as it is now, or None."""
        for path in (file.path, file.archived_path):
            try:
                return read_header(self.files, path)
            except FileNotFoundError:
                continue
            except (BadChunk, OSError):  # replaced since it was indexed: the caller goes without
                return None
        return None

    # -- building --------------------------------------------------------------------------------------

    def _chunks_of(self, reader: ColdTierReader, known: ReadHeaders | None) -> Iterator[ChunkInfo]:
        try:
            yield from reader.chunks(known)
        except OSError as error:
            raise DatasetError(f"{reader.cold_path} cannot be listed to its end: {error.strerror}") from None

    def _find_records(self, reader: ColdTierReader, namespace: NamespaceDirectory) -> None:
        try:
            self._records += reader.source.records(namespace)
        except OSError as error:
            self._unlisted = f"{namespace.directory}/{SEQUENCES} cannot be listed: {error.strerror}"

    def _add(self, info: ChunkInfo, found: dict[tuple[int, bytes, int], _Found]) -> None:
        header = info.header
        if header is None:
            if is_url(info.file.path) and info.reason == "unreadable":  # a set without it would be cut for no reason
                raise DatasetError(f"{info.file.path}: {info.problem}")
            self.problems[info.reason] += 1
            return
        record = info.namespace.record
        meta = header.meta
        capture = self._captures.setdefault(meta.capture, meta.capture)
        chunk = found.get((meta.start, meta.prefix, meta.num_tokens))
        if chunk is None:
            chunk = found[meta.start, meta.prefix, meta.num_tokens] = _Found(capture)
        space = tuple(sorted((k, v) for k, v in record.items() if k not in ("worker_id", "world_size")))
        number = self._spaces.setdefault(space, len(self._spaces))
        layout = self._layouts.setdefault(header.layout, header.layout)
        wanted = is_url(info.file.path) and header.token_ids and self._ids_room > 0
        if wanted and (meta.prefix, meta.num_tokens) not in self._ids:
            self._ids[meta.prefix, meta.num_tokens] = header.token_ids
            self._ids_room -= len(header.token_ids)
        chunk.files.append(ChunkFile(info.namespace.root(info.state), info.file.name, layout))
        chunk.links.append((number, meta.chunk_hash, meta.parent))
        self.num_files += 1

    def _link(self, found: dict[tuple[int, bytes, int], _Found]) -> list[IndexedChunk]:
        """Chunks by start, so that a parent comes before its children, each with its parent's position."""
        order = sorted(found)
        by_hash: dict[tuple[int, str], list[int]] = {}
        for position, identity in enumerate(order):
            for space, chunk_hash, _ in found[identity].links:
                holders = by_hash.setdefault((space, chunk_hash), [])
                if position not in holders:
                    holders.append(position)
        chunks: list[IndexedChunk] = []
        for start, prefix, num_tokens in order:
            chunk = found[start, prefix, num_tokens]
            parent = FIRST if start == 0 else MISSING
            if start > 0:
                for space, _, parent_hash in chunk.links:
                    # Of chunks whose 64-bit hashes collide, the digest picks the right one when rows are read.
                    fits = [p for p in by_hash.get((space, parent_hash), ()) if order[p][0] + order[p][2] == start]
                    if fits:
                        parent = fits[0] if len(fits) == 1 else self._true_parent(chunks, fits, chunk.files[0], prefix)
                        break
            files = tuple(sorted(chunk.files, key=lambda file: is_url(file.root)))  # what is near is read first
            chunks.append(IndexedChunk(prefix, start, num_tokens, parent, files, chunk.capture))
        return chunks

    def _true_parent(self, chunks: list[IndexedChunk], candidates: list[int], file: ChunkFile, prefix: bytes) -> int:
        """The candidate whose tokens, followed by those of ``file``, have the prefix digest."""
        own = self.header(file)
        for candidate in candidates:
            parts, position = [], candidate
            while position >= 0:
                header = self.header(chunks[position].files[0])
                parts.append(b"" if header is None else header.token_ids)
                position = chunks[position].parent
            ids = b"".join(reversed(parts)) + (b"" if own is None else own.token_ids)
            if list(prefix_digests(ids, [len(ids) // TOKEN_BYTES])) == [prefix]:
                return candidate
        return MISSING


def model_label(record: dict[str, Any]) -> str:
    """What must be equal for rows to go together: ``MODEL[@REVISION][/KV_DTYPE]`` of a namespace record."""
    revision, kv_dtype = record.get("model_revision"), record.get("kv_dtype")
    return f"{record.get('model', '')}{f'@{revision}' if revision else ''}{f'/{kv_dtype}' if kv_dtype else ''}"


def _chosen(model: str, label: str) -> bool:
    return label == model or (label.startswith(model) and label[len(model)] in "@/")
