"""One chunk as one safetensors file: build its header, write it, read it, judge it.

The format is fixed in docs/chunk-file.md. A file is written once, under a temporary name, and renamed;
it is never changed in place and never mapped, so a reader sees a whole file or none. Everything read
from disk is treated as hostile until it has been checked: bounded sizes, exact offsets, matching key,
matching prefix digest, matching checksums. A file that fails is a ``BadChunk``; a disk that fails is an
``OSError``. This module decides neither where files lie nor what happens to a bad one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import xxhash

from lmcache_hs_backend.arena import ALIGN, align
from lmcache_hs_backend.chunk import DTYPE_NAMES, DTYPES, TOKEN_BYTES, ChunkMeta, LayerSpec, chunk_name

FORMAT = "lmcache-hs-chunk"
VERSION = "1"
SUFFIX = ".safetensors"

#: Bounds that no writer of ours comes near; they keep a hostile header from costing memory or time.
MAX_HEADER_BYTES = 1 << 20
MAX_LAYERS = 1000
MAX_TOKENS = 1 << 24

_ANY_TIME: AbstractContextManager[object] = contextlib.nullcontext()
_LENGTH_BYTES = 8
_DIGEST_BYTES = 8  # xxh3_64
_TOKEN_IDS = "token_ids"
_LAYER = re.compile(r"layer\.(-?(?:0|[1-9][0-9]{0,18}))")
_NUMBER = re.compile(r"[0-9]{1,15}")
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9]+\.tmp|\.tmp[A-Za-z0-9]{6}", re.DOTALL)
_HEX16 = re.compile(r"[0-9a-f]{32}")


class BadChunk(Exception):
    """A file is not the chunk that it should be. ``reason`` is one word, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class FileLayout(NamedTuple):
    """Where the layers of a chunk lie in its file. Equal for most chunks, and then shared."""

    num_tokens: int
    head_bytes: int
    layers: tuple[LayerSpec, ...]

    @property
    def size(self) -> int:
        return self.head_bytes + sum(spec.nbytes(self.num_tokens) for spec in self.layers)

    @property
    def direct(self) -> bool:
        """Whether the file can be moved with O_DIRECT."""
        return self.head_bytes % ALIGN == 0 and all(s.nbytes(self.num_tokens) % ALIGN == 0 for s in self.layers)

    def spec(self, layer_idx: int) -> LayerSpec | None:
        for spec in self.layers:
            if spec.layer_idx == layer_idx:
                return spec
        return None


class Header(NamedTuple):
    """The checked header of a chunk file. ``checksums`` are xxh3_64 in hex by tensor name.

    ``seal`` is what a file has to hold, in a few bytes: xxh3_64 of its head, then of each layer in file order.
    """

    meta: ChunkMeta
    layout: FileLayout
    checksums: dict[str, str]
    token_ids: bytes
    seal: bytes = b""


class Description:
    """What a chunk's file says of it, apart from its layers: its metadata and its own token ids."""

    __slots__ = ("_head", "_ids", "_meta")

    def __init__(self, meta: ChunkMeta, token_ids: bytes) -> None:
        self._meta: ChunkMeta | None = meta
        self._ids = token_ids
        self._head: tuple[bytes, int] = b"", 0

    @classmethod
    def of_file(cls, head: bytes, file_size: int) -> Description:
        """From a head that was found good. It is taken apart when somebody asks: for most chunks nobody ever does."""
        self = cls.__new__(cls)
        self._meta, self._ids, self._head = None, b"", (head, file_size)
        return self

    def parts(self) -> tuple[ChunkMeta, bytes]:
        """The metadata, and the token ids as int64 bytes."""
        if self._meta is None:
            header = parse_head(*self._head)
            self._ids, self._meta = header.token_ids, header.meta
        return self._meta, self._ids


class _Heads(threading.local):
    """Page-aligned memory for what stands in front of the rows of a file, one piece per thread."""

    _KEPT = 1 << 16
    _memory: mmap.mmap | None = None

    def get(self, nbytes: int) -> memoryview:
        """``nbytes`` bytes until the thread asks again."""
        memory = self._memory
        if memory is None or len(memory) < nbytes:
            memory = mmap.mmap(-1, align(nbytes))
            if nbytes <= self._KEPT:
                self._memory = memory
        return memoryview(memory)[:nbytes]


_heads = _Heads()


class FileLayer:
    """The system calls of the cold tier, in one object, so that tests can make disks fail for real."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    fstat = staticmethod(os.fstat)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    fdatasync = staticmethod(os.fdatasync)
    utime = staticmethod(os.utime)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    fsync = staticmethod(os.fsync)
    statvfs = staticmethod(os.statvfs)


def layer_tensor(layer_idx: int) -> str:
    """The tensor name of a layer in a chunk file."""
    return f"layer.{layer_idx}"


def file_order(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Layers in the order of the file: by descending item size, so that each tensor is aligned."""
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.layer_idx))


# -- header ------------------------------------------------------------------------------------------


def build_head(meta: ChunkMeta, specs: Sequence[LayerSpec], checksums: Mapping[str, str], ids: bytes) -> bytes:
    """Everything in front of the first layer's rows, padded so that those start at a multiple of 4096.

    ``specs`` must be in file order; ``ids`` are the chunk's own token ids (int64 bytes). Raises ValueError for
    what a reader would refuse.
    """
    info = {
        "format": FORMAT,
        "version": VERSION,
        "key": meta.key,
        "chunk_hash": meta.chunk_hash,
        "parent": meta.parent,
        "prefix": meta.prefix.hex(),
        "start": str(meta.start),
        "num_tokens": str(meta.num_tokens),
        "model": meta.model,
        "created_at": meta.created_at,
        "xxh3": _json(dict(checksums)),
        "capture": meta.capture,
    }
    text = f'{{"__metadata__":{_json(info)},{_tensors_text(meta.num_tokens, tuple(specs))[1:]}'.encode()
    if len(text) + ALIGN > MAX_HEADER_BYTES or len(specs) > MAX_LAYERS:
        raise ValueError(f"a header of {len(text)} bytes for {len(specs)} layers is more than a reader accepts")
    total = align(_LENGTH_BYTES + len(text) + len(ids))
    length = total - _LENGTH_BYTES - len(ids)
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length) + ids


_json = json.JSONEncoder(separators=(",", ":")).encode


@functools.lru_cache(maxsize=256)
def _tensors_text(num_tokens: int, specs: tuple[LayerSpec, ...]) -> str:
    return _json(_tensors(num_tokens, specs))


@functools.lru_cache(maxsize=256)
def _tensors(num_tokens: int, specs: tuple[LayerSpec, ...]) -> dict[str, Any]:
    """How a header describes its tensors. Equal for most chunks; not to be changed by whoever gets it."""
    end = num_tokens * TOKEN_BYTES
    tensors: dict[str, Any] = {_TOKEN_IDS: {"dtype": "I64", "shape": [num_tokens], "data_offsets": [0, end]}}
    for spec in specs:
        begin, end = end, end + spec.nbytes(num_tokens)
        tensors[layer_tensor(spec.layer_idx)] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": [num_tokens, spec.hidden_dim],
            "data_offsets": [begin, end],
        }
    return tensors


def header_length(first: bytes | memoryview, file_size: int) -> int:
    """Length of the JSON header, from the first 8 bytes of a file. Raises BadChunk when absurd."""
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if len(first) < _LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, file_size - _LENGTH_BYTES):
        raise BadChunk("header", f"a header of {length} bytes in a file of {file_size}")
    return length


def parse_header(text: bytes | memoryview, file_size: int, expected: FileLayout | None = None) -> Header:
    """Check and take apart the JSON of a header (without the length in front, and without token ids).

    Tensors that are described as ``expected`` are not looked at one by one. Raises BadChunk for anything that does not
    describe exactly a chunk file of ``file_size`` bytes.
    """
    try:
        tensors = json.loads(bytes(text))
        info = tensors.pop("__metadata__")
        if not all(isinstance(info[field], str) for field in _FIELDS):
            raise TypeError("a metadata field is not a string")
        checksums = json.loads(info["xxh3"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadChunk("header", f"not a chunk's header: {error!r}") from None
    if info["format"] != FORMAT or info["version"] != VERSION:
        raise BadChunk("version", f"format {info['format']!r} version {info['version']!r}")
    if not isinstance(checksums, dict) or not all(isinstance(value, str) for value in checksums.values()):
        raise BadChunk("header", "xxh3 is not a table of checksums")
    if not _HEX16.fullmatch(info["prefix"]):
        raise BadChunk("header", "the prefix digest is not 32 hex digits")
    num_tokens = _bounded("num_tokens", info["num_tokens"], 1, MAX_TOKENS)
    meta = ChunkMeta(
        key=info["key"],
        chunk_hash=info["chunk_hash"],
        parent=info["parent"],
        prefix=bytes.fromhex(info["prefix"]),
        start=_bounded("start", info["start"], 0, 10**15),
        num_tokens=num_tokens,
        model=info["model"],
        created_at=info["created_at"],
        capture=info["capture"],
    )
    head_bytes = _LENGTH_BYTES + len(text) + num_tokens * TOKEN_BYTES
    if expected is not None and tensors == _tensors(num_tokens, expected.layers):
        layers = expected.layers
    else:
        layers = _layers(tensors, num_tokens)
    layout = FileLayout(num_tokens, head_bytes, layers)
    if layout.size != file_size:
        raise BadChunk("size", f"the header describes {layout.size} bytes, the file has {file_size}")
    return Header(meta, layout, checksums, b"")


def parse_head(head: bytes | memoryview, file_size: int, expected: FileLayout | None = None) -> Header:
    """Check everything in front of the rows: what ``build_head`` made, token ids included. See parse_header."""
    end = _LENGTH_BYTES + header_length(head, file_size)
    header = parse_header(head[_LENGTH_BYTES:end], file_size, expected)
    return _whole(header, head)


def _whole(header: Header, head: bytes | memoryview) -> Header:
    """A header with what only its whole head tells, up to the rows. Raises BadChunk."""
    head = head[: header.layout.head_bytes]
    token_ids = bytes(head[len(head) - header.meta.num_tokens * TOKEN_BYTES :])
    _verify(_TOKEN_IDS, token_ids, header.checksums)
    try:
        digests = [bytes.fromhex(header.checksums[layer_tensor(spec.layer_idx)]) for spec in header.layout.layers]
    except (KeyError, ValueError):  # whoever wants the rows of such a layer will find out
        digests = [b""]
    sealed = all(len(digest) == _DIGEST_BYTES for digest in digests)
    seal = b"".join([xxhash.xxh3_64_digest(head), *digests]) if sealed else b""
    return header._replace(token_ids=token_ids, seal=seal)


_FIELDS = (
    "format", "version", "key", "chunk_hash", "parent", "prefix", "start", "num_tokens", "model",
    "created_at", "xxh3", "capture",
)  # fmt: skip


def _bounded(field: str, text: str, low: int, high: int) -> int:
    if not _NUMBER.fullmatch(text) or not low <= int(text) <= high:
        raise BadChunk("header", f"{field} is {text[:40]!r}")
    return int(text)


def _layers(tensors: dict[str, Any], num_tokens: int) -> tuple[LayerSpec, ...]:
    """The layers of a header in file order; every tensor must follow the one before without a gap."""
    if not isinstance(tensors, dict) or not 2 <= len(tensors) <= MAX_LAYERS + 1:
        raise BadChunk("header", "no layer, or too many tensors")
    specs = []
    end = 0
    try:
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = tensor["data_offsets"]
            shape, dtype = tensor["shape"], tensor["dtype"]
            if name == _TOKEN_IDS:
                nbytes = num_tokens * TOKEN_BYTES
                good = begin == 0 and dtype == "I64" and shape == [num_tokens]
            else:
                match = _LAYER.fullmatch(name)
                rows, hidden_dim = shape
                good = match is not None and rows == num_tokens and type(hidden_dim) is int and hidden_dim > 0
                if match is None or not good:
                    raise BadChunk("header", f"tensor {name[:40]!r} is not a layer of this chunk")
                spec = LayerSpec(int(match[1]), DTYPES[dtype], hidden_dim)
                nbytes = spec.nbytes(num_tokens)
                specs.append(spec)
            if not good or type(begin) is not int or begin != end or stop != begin + nbytes:
                raise BadChunk("header", f"tensor {name[:40]!r} does not lie where it should")
            end = stop
    except (KeyError, TypeError, ValueError) as error:
        raise BadChunk("header", f"not a tensor of a chunk: {error!r}") from None
    if len(specs) != len(tensors) - 1:
        raise BadChunk("header", "no token_ids")
    return tuple(specs)


def _verify(tensor: str, data: bytes | memoryview, checksums: Mapping[str, str]) -> None:
    if xxhash.xxh3_64_hexdigest(data) != checksums.get(tensor):
        raise BadChunk("checksum", f"the bytes of {tensor} do not match their checksum")


# -- writing -----------------------------------------------------------------------------------------

_sequence = itertools.count(time.time_ns())  # in a container every run may have the same pid


def temporary_name(name: str) -> str:
    """A fresh name beside the file ``name``, which a later start recognises as left over."""
    return f".{name}.{os.getpid()}.{next(_sequence)}.tmp"


def is_temporary(name: str) -> bool:
    """Whether a file is a left-over of ours, or of safetensors' own ``save_file``."""
    return _TEMPORARY.fullmatch(name) is not None


def write(
    files: FileLayer,
    directory: str,
    meta: ChunkMeta,
    ids: bytes,
    rows: Mapping[LayerSpec, memoryview],
    *,
    direct: bool,
    fsync: bool,
    mtime_ns: int,
    turn: AbstractContextManager[object] = _ANY_TIME,
) -> tuple[str, FileLayout, bytes]:
    """Write a chunk to a temporary file in ``directory``; the caller renames or unlinks it.

    ``rows`` gives the bytes of each layer (4096-aligned memory when ``direct``); they are moved within ``turn``.
    Returns the temporary path, the layout and the seal. Raises OSError, having removed the temporary file.
    """
    specs = file_order(list(rows))
    digests = [xxhash.xxh3_64_digest(rows[spec]) for spec in specs]
    checksums = {_TOKEN_IDS: xxhash.xxh3_64_hexdigest(ids)}
    checksums |= {layer_tensor(spec.layer_idx): digest.hex() for spec, digest in zip(specs, digests, strict=True)}
    text = build_head(meta, specs, checksums, ids)
    seal = b"".join([xxhash.xxh3_64_digest(text), *digests])
    layout = FileLayout(meta.num_tokens, len(text), tuple(specs))
    head = _heads.get(len(text))
    head[:] = text
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    path = os.path.join(directory, temporary_name(chunk_name(meta.key).hex()))
    fd = files.open(path, flags | (os.O_DIRECT if direct and layout.direct else 0), 0o666)
    try:
        try:
            with turn:
                taken = _transfer(files.pwritev, fd, [head, *(rows[spec] for spec in specs)], 0)
            if not taken:
                raise OSError(errno.EIO, "the disk took no bytes", path)
            files.utime(fd, ns=(mtime_ns, mtime_ns))
            if fsync:
                files.fdatasync(fd)
        finally:
            files.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):  # what counts is what went wrong before
            files.unlink(path)
        raise
    return path, layout, seal


def _transfer(call: Any, fd: int, views: Sequence[memoryview], offset: int) -> bool:
    """Move all of ``views`` with ``preadv`` or ``pwritev``, also when the kernel moves less at a time.

    False when it moves nothing at all: the end of the file.
    """
    rest = list(views)
    while rest:
        moved = call(fd, rest, offset)
        if moved <= 0:
            return False
        offset += moved
        while rest and moved >= len(rest[0]):
            moved -= len(rest.pop(0))
        if rest and moved:
            rest[0] = rest[0][moved:]
    return True


# -- reading -----------------------------------------------------------------------------------------


def open_regular(files: FileLayer, path: str, *, direct: bool = False) -> tuple[int, int]:
    """Open a chunk file for reading: ``(fd, size)``. Raises BadChunk for anything but a regular file.

    Symbolic links are not followed, and O_NONBLOCK keeps a FIFO of that name from blocking the thread.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            fd = files.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            fd = files.open(path, flags)  # O_DIRECT is refused for what is not a regular file: look first
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise BadChunk("type", f"{path} is not a regular file") from None
        raise
    try:
        info = files.fstat(fd)
    except BaseException:
        files.close(fd)
        raise
    if not stat.S_ISREG(info.st_mode):
        files.close(fd)
        raise BadChunk("type", f"{path} is not a regular file")
    return fd, info.st_size


def read_header(files: FileLayer, path: str) -> Header:
    """The header and token ids of a file, without its rows. Raises BadChunk or OSError."""
    fd, size = open_regular(files, path)
    try:
        head = _grow(files, fd, b"", min(size, ALIGN))
        head = _grow(files, fd, head, _LENGTH_BYTES + header_length(head, size))
        end = _LENGTH_BYTES + header_length(head, size)
        header = parse_header(head[_LENGTH_BYTES:end], size)
        head = _grow(files, fd, head, header.layout.head_bytes)
    finally:
        files.close(fd)
    return _whole(header, head)


def _grow(files: FileLayer, fd: int, head: bytes, size: int) -> bytes:
    """``head``, read on until it has at least ``size`` bytes."""
    if size <= len(head):
        return head
    more = bytearray(size - len(head))
    _read_exactly(files, fd, [memoryview(more)], len(head))
    return head + more


def read(
    files: FileLayer,
    path: str,
    name: bytes,
    prefix: bytes,
    layout: FileLayout,
    into: Mapping[int, memoryview],
    *,
    direct: bool,
    verify: bool,
) -> Header:
    """Read layers of a chunk whose layout is known straight into ``into`` (layer_idx → bytes).

    The file must still be the chunk ``name`` with that prefix digest and layout. Raises BadChunk (whatever ``into``
    then holds) or OSError.
    """
    head = fetch(files, path, layout, into, direct=direct)
    header = _parse_known(head, name, prefix, layout)
    if verify:
        _verify_rows(header, into)
    return header


def fetch(
    files: FileLayer,
    path: str,
    layout: FileLayout,
    into: Mapping[int, memoryview],
    *,
    direct: bool,
    turn: AbstractContextManager[object] = _ANY_TIME,
) -> bytes:
    """The I/O of ``read``: the layers go to ``into``, the head is returned; ``check`` says whether that is the chunk.

    The head comes along in the same system call where it can. All bytes are moved within ``turn``.
    """
    fd, size = open_regular(files, path, direct=direct and layout.direct)
    try:
        if size != layout.size:
            raise BadChunk("size", f"{path} has {size} bytes instead of {layout.size}")
        head = _heads.get(layout.head_bytes)
        with turn:
            position = 0
            batch: list[memoryview] = [head]
            reached = layout.head_bytes
            for spec in layout.layers:  # neighbours in the file go into one call
                view = into.get(spec.layer_idx)
                if view is not None:
                    if not batch:
                        position = reached
                    batch.append(view)
                elif batch:
                    _read_exactly(files, fd, batch, position)
                    batch = []
                reached += spec.nbytes(layout.num_tokens)
            if batch:
                _read_exactly(files, fd, batch, position)
    finally:
        files.close(fd)
    return bytes(head)


def check(
    head: bytes,
    name: bytes,
    prefix: bytes,
    layout: FileLayout,
    into: Mapping[int, memoryview],
    *,
    verify: bool,
    seal: bytes = b"",
) -> bytes:
    """The rest of ``read``, without I/O. Returns the file's seal; empty: one of its checksums is none.

    ``seal``: that of the file when it was last written or read. A head that it fits is not taken apart again.
    """
    if not seal or xxhash.xxh3_64_digest(head) != seal[:_DIGEST_BYTES]:
        header = _parse_known(head, name, prefix, layout)
        if verify:
            _verify_rows(header, into)
        return header.seal
    if verify:
        end = _DIGEST_BYTES
        for spec in layout.layers:
            begin, end = end, end + _DIGEST_BYTES
            view = into.get(spec.layer_idx)
            if view is not None and xxhash.xxh3_64_digest(view) != seal[begin:end]:
                raise BadChunk("checksum", f"the bytes of {layer_tensor(spec.layer_idx)} do not match their checksum")
    return seal


def _parse_known(head: bytes, name: bytes, prefix: bytes, layout: FileLayout) -> Header:
    """The header of a file that is to be this chunk with this layout. Raises BadChunk when it is not."""
    header = parse_head(head, layout.size, layout)
    if chunk_name(header.meta.key) != name:
        raise BadChunk("key", f"the file holds the chunk {header.meta.key[:200]!r}")
    if header.meta.prefix != prefix or header.layout != layout:
        raise BadChunk("replaced", "it is not the file that the index knows")
    return header


def _verify_rows(header: Header, rows: Mapping[int, memoryview]) -> None:
    for layer_idx, view in rows.items():
        _verify(layer_tensor(layer_idx), view, header.checksums)


def _read_exactly(files: FileLayer, fd: int, views: Sequence[memoryview], offset: int) -> None:
    if not _transfer(files.preadv, fd, views, offset):
        raise BadChunk("short", "the file ends before its rows do")
