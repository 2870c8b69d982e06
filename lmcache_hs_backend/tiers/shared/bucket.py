"""Chunks as objects of one shared namespace: put one from its file, get one and judge it, list them all.

What comes back is treated as a hostile file is: sizes are bounded, the header is checked, the object must be the very
chunk that was asked for (model, revision, prefix digest, name) and every tensor must match its checksum. It knows no
chunk's state: names, paths and bytes go in, answers come out.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec
from lmcache_hs_backend.format.chunk_file import FileLayer, open_regular, read_exactly, read_header
from lmcache_hs_backend.format.header import (
    TOKEN_IDS,
    BadChunk,
    FileLayout,
    Header,
    build_preamble,
    file_order,
    layer_tensor,
    parse_preamble,
    verify_tensor,
)
from lmcache_hs_backend.format.layout import RECORD, SEQUENCES
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.format.objects import Answer, Objects, Reply
from lmcache_hs_backend.format.shared_names import (
    content_name,
    namespace_folder,
    object_name,
    object_path,
    revision,
    shared_meta,
    shared_namespace,
    tags,
)
from lmcache_hs_backend.tiers.shared.breakers import Breaker

logger = logging.getLogger(__name__)

_MORE_HEADER = 8192  # an object's header may be longer than the file's
_TRIES = 3  # of a conditional replace that others come before


class Fetched(NamedTuple):
    """A chunk that came from the bucket, found good. ``rows``: bytes of each layer."""

    header: Header
    rows: dict[LayerSpec, memoryview]


class LocalChunk(NamedTuple):
    """A chunk from a local file, found good. ``name``: of its object. ``rows``: bytes of each layer."""

    name: bytes
    header: Header
    rows: dict[LayerSpec, memoryview]


class Bucket:
    """The objects of one shared namespace."""

    def __init__(self, objects: Objects, uploads: Objects, ident: NamespaceId, most_bytes: int) -> None:
        """``objects`` and ``uploads``: the same URL, with a short timeout for reads and a long one for uploads.

        ``most_bytes``: of an object; larger ones are not read.
        """
        self.objects = objects
        self._uploads = uploads
        self.ident = shared_namespace(ident)
        self.folder = namespace_folder(self.ident)
        self.reads = Breaker("reads", objects.url)
        self.writes = Breaker("writes", objects.url)
        self.looks_first = False  # before it creates, in a bucket that would let one creation overwrite another
        self._most_bytes = most_bytes
        self._layout: FileLayout | None = None  # of the last chunk: most have the same
        self._files = FileLayer()

    # -- down --------------------------------------------------------------------------------------------

    def get(self, name: bytes, prefix: bytes) -> tuple[Answer, Fetched | None]:
        """A chunk with this prefix digest. Raises BadChunk when the object is another one, or damaged."""
        if not self.reads.closed:
            return Answer.OFFLINE, None
        reply = self.objects.get(object_path(self.folder, name), self._most_bytes)
        self.reads.saw(reply)
        if reply.answer is Answer.TOO_LARGE:
            raise BadChunk("size", f"an object of {reply.why}")
        if reply.answer is not Answer.OK:
            return reply.answer, None
        return Answer.OK, self.judge(reply.body, name, prefix)

    def judge(self, body: memoryview, name: bytes, prefix: bytes) -> Fetched:
        """Raises BadChunk unless ``body`` is this very chunk, whole."""
        header = self._identified(body, len(body), name)
        if header.meta.prefix != prefix:
            raise BadChunk("collision", "the object has another prefix digest")
        rows, at = {}, header.layout.preamble_bytes
        for spec in header.layout.layers:
            end = at + spec.nbytes(header.layout.num_tokens)
            rows[spec] = body[at:end]
            verify_tensor(layer_tensor(spec.layer_idx), rows[spec], header.checksums)
            at = end
        return Fetched(header, rows)

    def _identified(self, start: memoryview, size: int, name: bytes) -> Header:
        header = parse_preamble(start, size, self._layout)
        self._layout = header.layout
        meta = header.meta
        if meta.model != self.ident.model or revision(meta) != self.ident.model_revision:
            raise BadChunk("model", f"the object is of {meta.model[:100]!r}, revision {revision(meta)[:100]!r}")
        if self.name_of(meta) != name:
            raise BadChunk("key", f"the object holds the chunk {meta.key[:200]!r}")
        return header

    # -- up ----------------------------------------------------------------------------------------------

    def read_header(self, path: str, layout: FileLayout | None = None) -> Header:
        """The header of a local file.

        Raises FileNotFoundError when it is gone or no longer has this layout (None: any), BadChunk, or OSError.
        """
        header = read_header(self._files, path)
        if layout is not None and header.layout != layout:
            raise FileNotFoundError(path)  # it has been replaced, and is offered again
        return header

    def read_file(self, path: str, header: Header) -> LocalChunk:
        """A whole local file, each checksum compared: a damaged one must not spread. Raises BadChunk or OSError."""
        fd, _ = open_regular(self._files, path)
        rows = {}
        try:
            at = header.layout.preamble_bytes
            for spec in header.layout.layers:
                nbytes = spec.nbytes(header.layout.num_tokens)
                rows[spec] = memoryview(bytearray(nbytes))
                read_exactly(self._files, fd, [rows[spec]], at)
                verify_tensor(layer_tensor(spec.layer_idx), rows[spec], header.checksums)
                at += nbytes
        finally:
            os.close(fd)
        return LocalChunk(self.name_of(header.meta), header, rows)

    def name_of(self, meta: ChunkMeta) -> bytes:
        """The name of a chunk's object."""
        return content_name(meta.prefix, meta.num_tokens, tags(meta.key, self.ident.model))

    def holds(self, name: bytes, header: Header) -> bool:
        """Whether the bucket has a chunk with every layer of this file. Reads the first bytes of its object."""
        start = self._start_of(object_path(self.folder, name), header)
        if start.answer is not Answer.OK:
            return False
        try:
            return self._layers(start.body, name) >= {spec.layer_idx for spec in header.layout.layers}
        except BadChunk:
            return False

    def put(self, chunk: LocalChunk, parent: bytes) -> tuple[Answer, int]:
        """Put a chunk, unless the bucket has it with all its layers.

        ``parent``: prefix digest of the chunk before it. Returns the answer and the bytes that were put. OK: put;
        EXISTS: the bucket has every layer of it.
        """
        target = object_path(self.folder, chunk.name)
        body = self._body(chunk.header, chunk.rows, parent)
        if self.looks_first and self._start_of(target, chunk.header).answer is Answer.OK:
            return self._add_layers(target, body, chunk, parent)
        reply = self._create(target, body)
        if reply.answer is not Answer.EXISTS:
            return reply.answer, len(body) if reply.answer is Answer.OK else 0
        return self._add_layers(target, body, chunk, parent)

    def _start_of(self, target: str, header: Header) -> Reply:
        return self._uploads.get_range(target, 0, header.layout.preamble_bytes + _MORE_HEADER)

    def _create(self, target: str, body: bytes) -> Reply:
        reply = self._uploads.create(target, body)
        self.writes.saw(reply)
        return reply

    def _add_layers(self, target: str, body: bytes, chunk: LocalChunk, parent: bytes) -> tuple[Answer, int]:
        """There is an object. It is replaced if it lacks a layer that the file has, or is not the chunk."""
        ours = {spec.layer_idx for spec in chunk.rows}
        for _ in range(_TRIES):
            start = self._start_of(target, chunk.header)
            if start.answer is Answer.ABSENT:  # it was deleted meanwhile, or a conflict read as one that exists
                reply = self._create(target, body)
                if reply.answer is not Answer.EXISTS:
                    return reply.answer, len(body) if reply.answer is Answer.OK else 0
                continue
            self.writes.saw(start)
            if start.answer is not Answer.OK:
                return start.answer, 0
            try:
                if self._layers(start.body, chunk.name) >= ours:
                    return Answer.EXISTS, 0
            except BadChunk as bad:
                logger.warning("%s/%s is not a good chunk (%s) and is looked at whole", self.objects.url, target, bad)
            whole = self._uploads.get(target, self._most_bytes)
            if whole.answer not in (Answer.OK, Answer.TOO_LARGE):
                continue
            union = dict(chunk.rows)
            try:
                other = self.judge(whole.body, chunk.name, chunk.header.meta.prefix)
                union |= {spec: view for spec, view in other.rows.items() if spec.layer_idx not in ours}
            except BadChunk as bad:
                logger.warning("%s/%s is not a good chunk (%s), and is replaced", self.objects.url, target, bad)
            merged = self._body(chunk.header, union, parent)
            reply = self._uploads.replace(target, merged, whole.e_tag)
            self.writes.saw(reply)
            if reply.answer is not Answer.EXISTS:
                return reply.answer, len(merged) if reply.answer is Answer.OK else 0
        return Answer.FAILED, 0

    def _layers(self, start: memoryview, name: bytes) -> frozenset[int]:
        """The layers of an object, from its first bytes. Raises BadChunk."""
        size = _described_size(start)
        return frozenset(spec.layer_idx for spec in self._identified(start, size, name).layout.layers)

    def _body(self, header: Header, rows: dict[LayerSpec, memoryview], parent: bytes) -> bytes:
        specs = file_order(list(rows))
        checksums = {TOKEN_IDS: xxhash.xxh3_64_hexdigest(header.token_ids)}
        checksums |= {layer_tensor(spec.layer_idx): xxhash.xxh3_64_hexdigest(rows[spec]) for spec in specs}
        meta = shared_meta(header.meta, self.ident, parent)
        return b"".join([build_preamble(meta, specs, checksums, header.token_ids), *[rows[spec] for spec in specs]])

    # -- the namespace -----------------------------------------------------------------------------------

    def listing(self) -> Iterator[bytes]:
        """The names of the chunks that are there. Raises OSError."""
        for found in self._uploads.list(self.folder):
            name = object_name(found.path)
            if name is not None:
                yield name

    def introduce(self) -> Reply:
        """Write ``namespace.json``, which a reader needs, unless it is there."""
        text = json.dumps(self.ident.record(), indent=2).encode()
        return self._create(f"{self.folder}/{RECORD}", text)

    def put_records(self, name: str, body: bytes) -> Answer:
        """Put request records where readers look for them, unless there is an object of this name."""
        return self._create(f"{self.folder}/{SEQUENCES}/{name}", body).answer

    def respects_conditions(self) -> bool | None:
        """Whether the second of two creations is refused. None: it could not be tried."""
        path = f"{self.folder}/.probe-{os.getpid()}-{threading.get_ident():x}-{time.time_ns():x}"
        if self.objects.create(path, b"hs").answer is not Answer.OK:
            return None
        second = self.objects.create(path, b"HS").answer
        self.objects.delete([path])
        return second is Answer.EXISTS

    def probe_reads(self) -> None:
        """Close the breaker of reads if the bucket answers."""
        reply = self.objects.get(f"{self.folder}/{RECORD}", 1 << 16)
        if reply.answer in (Answer.OK, Answer.ABSENT, Answer.TOO_LARGE):
            self.reads.close()

    def probe_writes(self) -> None:
        """Close the breaker of writes if the bucket takes an object."""
        path = f"{self.folder}/.probe-{os.getpid()}"
        if self.objects.replace(path, b"hs", None).answer is Answer.OK:
            self.objects.delete([path])
            self.writes.close()


def _described_size(start: memoryview) -> int:
    """The size that an object's own header describes, for a look at its first bytes. Raises BadChunk."""
    length = int.from_bytes(start[:8], "little")
    try:
        tensors = json.loads(bytes(start[8 : 8 + length]))
        ends = [tensors[name]["data_offsets"][1] for name in tensors if name != "__metadata__"]
        return int(8 + length + max(ends))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadChunk("header", f"not a chunk's header: {error!r}") from None
