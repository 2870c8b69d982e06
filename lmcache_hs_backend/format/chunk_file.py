"""One chunk as one safetensors file: write it, read it, judge it.

A file is written once, under a temporary name, and renamed; it is never changed in place and never mapped, so
a reader sees a whole file or none. Everything read from disk is treated as hostile until it has been checked:
a regular file of the right size, a good preamble (see ``header``), matching key, matching prefix digest,
matching checksums. A file that fails is a ``BadChunk``; a disk that fails is an ``OSError``. This module decides
neither where files lie nor what happens to a bad one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import xxhash

from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec, chunk_name
from lmcache_hs_backend.format.header import (
    DIGEST_BYTES,
    LENGTH_BYTES,
    TOKEN_IDS,
    BadChunk,
    FileLayout,
    Header,
    build_preamble,
    checked_token_ids,
    file_order,
    header_length,
    layer_tensor,
    parse_header,
    parse_preamble,
    verify_tensor,
    with_token_ids,
)
from lmcache_hs_backend.format.layout import temporary_name
from lmcache_hs_backend.format.pages import ALIGN, align
from lmcache_hs_backend.format.shared_names import is_name_of

_GAP = 1 << 20  # bytes of layers not wanted that are read along, as another request would take longer
_PIECE = 4 << 20  # bytes that are read at a time where a whole layer need not be in memory
_ANY_TIME: AbstractContextManager[object] = contextlib.nullcontext()


class _Preambles(threading.local):
    """Page-aligned memory for what stands in front of the rows of a file, one piece per thread."""

    _KEPT = 1 << 16
    _memory: mmap.mmap | None = None

    def get(self, nbytes: int) -> memoryview:
        """``nbytes`` bytes until the thread asks again."""
        memory = self._memory
        if memory is None or len(memory) < nbytes:
            # Private: a forked process, such as a DataLoader's worker, must not read into its parent's memory.
            memory = mmap.mmap(-1, align(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if nbytes <= self._KEPT:
                self._memory = memory
        return memoryview(memory)[:nbytes]


_preambles = _Preambles()


class FileLayer:
    """The system calls of the cold tier, in one object, so that tests can make disks fail for real.

    ``UrlFiles`` reads objects by the same calls.
    """

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

    def will_read(self, path: str, nbytes: int = 0, size: int | None = None, *, again: bool = False) -> None:
        """A file is opened and read soon. Files need no such notice; where a read is a request, it begins now.

        Args:
            path: The file.
            nbytes: How much of its beginning is read; 0: its header.
            size: Of the whole file, where it is known.
            again: Whether it is likely to be read again, so that it is worth a copy nearby.
        """

    def release(self) -> None:
        """Nothing more is to be read for now: give up threads, connections and what ``will_read`` has begun.

        What is opened later starts anew. System calls keep nothing in between.
        """


def direct_refusal(files: FileLayer, directory: str) -> OSError | None:
    """Why a filesystem does not take O_DIRECT, found out by writing one page in ``directory``; None where it does."""
    path = os.path.join(directory, temporary_name("probe"))
    page = mmap.mmap(-1, ALIGN)  # aligned, as O_DIRECT wants it
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT | os.O_CLOEXEC
    try:
        fd = files.open(path, flags, 0o600)
        try:
            files.pwritev(fd, [page], 0)
        finally:
            files.close(fd)
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            files.unlink(path)
    return None


# -- writing -----------------------------------------------------------------------------------------


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
    io_slots: AbstractContextManager[object] = _ANY_TIME,
) -> tuple[str, FileLayout, bytes]:
    """Write a chunk to a temporary file in ``directory``; the caller renames or unlinks it.

    ``rows`` gives the bytes of each layer (4096-aligned memory when ``direct``); they are moved within ``io_slots``.
    Returns the temporary path, the layout and the digests. Raises OSError, having removed the temporary file.
    """
    specs = file_order(list(rows))
    of_rows = [xxhash.xxh3_64_digest(rows[spec]) for spec in specs]
    checksums = {TOKEN_IDS: xxhash.xxh3_64_hexdigest(ids)}
    checksums |= {layer_tensor(spec.layer_idx): digest.hex() for spec, digest in zip(specs, of_rows, strict=True)}
    text = build_preamble(meta, specs, checksums, ids)
    digests = b"".join([xxhash.xxh3_64_digest(text), *of_rows])
    layout = FileLayout(meta.num_tokens, len(text), tuple(specs))
    preamble = _preambles.get(len(text))
    preamble[:] = text
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    path = os.path.join(directory, temporary_name(chunk_name(meta.key).hex()))
    fd = files.open(path, flags | (os.O_DIRECT if direct and layout.direct else 0), 0o666)
    try:
        try:
            with io_slots:
                taken = _transfer(files.pwritev, fd, [preamble, *(rows[spec] for spec in specs)], 0)
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
    return path, layout, digests


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


def open_regular(files: FileLayer, path: str, *, direct: bool = False) -> tuple[int, os.stat_result]:
    """Open a chunk file for reading, and look at it. Raises BadChunk for anything but a regular file.

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
    return fd, info


def read_header(files: FileLayer, path: str) -> Header:
    """The header and token ids of a file, without its rows. Raises BadChunk or OSError."""
    fd, info = open_regular(files, path)
    try:
        return read_open_header(files, fd, info.st_size)
    finally:
        files.close(fd)


def read_open_header(
    files: FileLayer, fd: int, size: int, *, expected: FileLayout | None = None, brief: bool = False
) -> Header:
    """``read_header`` of a file of ``size`` bytes that is open.

    Args:
        files: The system calls.
        fd: The open file.
        size: Its bytes.
        expected: A layout that the file probably has; see ``parse_header``.
        brief: Check the token ids, and leave them and the digests out.
    """
    preamble = _grow(files, fd, b"", min(size, ALIGN))  # most headers are one page
    end = LENGTH_BYTES + header_length(preamble, size)
    if end > len(preamble):
        preamble = _grow(files, fd, preamble, end)
    header = parse_header(preamble[LENGTH_BYTES:end], size, expected)
    if header.layout.preamble_bytes > len(preamble):
        preamble = _grow(files, fd, preamble, header.layout.preamble_bytes)
    if brief:
        checked_token_ids(header, preamble)
        return header
    return with_token_ids(header, preamble)


def _grow(files: FileLayer, fd: int, preamble: bytes, size: int) -> bytes:
    """``preamble``, read on until it has at least ``size`` bytes."""
    if size <= len(preamble):
        return preamble
    more = bytearray(size - len(preamble))
    read_exactly(files, fd, [memoryview(more)], len(preamble))
    return preamble + more if preamble else bytes(more)


def read_layers(files: FileLayer, fd: int, layout: FileLayout) -> list[tuple[LayerSpec, bytearray]]:
    """The rows of all layers of an open chunk file, in the order of the file, into memory of their own.

    Checksums are not compared. Raises BadChunk or OSError.
    """
    rows = [(spec, bytearray(spec.nbytes(layout.num_tokens))) for spec in layout.layers]
    read_exactly(files, fd, [memoryview(data) for _, data in rows], layout.preamble_bytes)
    return rows


def digest_layers(files: FileLayer, fd: int, layout: FileLayout) -> Iterator[tuple[LayerSpec, str]]:
    """The checksum (xxh3_64, hex) of each layer of an open chunk file, in the order of the file, read piece by piece.

    Raises BadChunk or OSError.
    """
    position = layout.preamble_bytes
    buffer = memoryview(bytearray(min(_PIECE, max(spec.nbytes(layout.num_tokens) for spec in layout.layers))))
    for spec in layout.layers:
        digest, end = xxhash.xxh3_64(), position + spec.nbytes(layout.num_tokens)
        while position < end:
            piece = buffer[: end - position]
            read_exactly(files, fd, [piece], position)
            digest.update(piece)
            position += len(piece)
        yield spec, digest.hexdigest()


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
    announce(files, path, layout, into, again=not direct)
    preamble = fetch(files, path, layout, into, direct=direct)
    header = _parse_known(preamble, name, prefix, layout)
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
    io_slots: AbstractContextManager[object] = _ANY_TIME,
) -> bytes:
    """The I/O of ``read``: the layers go to ``into``, the preamble is returned; ``check`` says whether it is the chunk.

    The preamble comes along in the same system call where it can. All bytes are moved within ``io_slots``.
    """
    fd, info = open_regular(files, path, direct=direct and layout.direct)
    try:
        if info.st_size != layout.size:
            raise BadChunk("size", f"{path} has {info.st_size} bytes instead of {layout.size}")
        preamble = _preambles.get(layout.preamble_bytes)
        with io_slots:
            position = 0
            batch: list[memoryview] = [preamble]
            reached = layout.preamble_bytes
            for spec in layout.layers:  # neighbours in the file go into one call
                view = into.get(spec.layer_idx)
                if view is not None:
                    if not batch:
                        position = reached
                    batch.append(view)
                elif batch:
                    read_exactly(files, fd, batch, position)
                    batch = []
                reached += spec.nbytes(layout.num_tokens)
            if batch:
                read_exactly(files, fd, batch, position)
    finally:
        files.close(fd)
    return bytes(preamble)


def announce(
    files: FileLayer, path: str, layout: FileLayout, layer_idxs: Collection[int], *, again: bool = True
) -> None:
    """Say that some layers of a file are read soon: the beginning up to the last one that no large gap precedes."""
    end = reached = layout.preamble_bytes
    for spec in layout.layers:
        reached += spec.nbytes(layout.num_tokens)
        if spec.layer_idx in layer_idxs and reached - spec.nbytes(layout.num_tokens) - end <= _GAP:
            end = reached
    files.will_read(path, end, layout.size, again=again)


def check(
    preamble: bytes,
    name: bytes,
    prefix: bytes,
    layout: FileLayout,
    into: Mapping[int, memoryview],
    *,
    verify: bool,
    digests: bytes = b"",
) -> bytes:
    """The rest of ``read``, without I/O. Returns the file's digests; empty: one of its checksums is none.

    ``digests``: those of the file when it was last written or read. A preamble that fits them is not parsed again.
    """
    if not digests or xxhash.xxh3_64_digest(preamble) != digests[:DIGEST_BYTES]:
        header = _parse_known(preamble, name, prefix, layout)
        if verify:
            _verify_rows(header, into)
        return header.digests
    if verify:
        end = DIGEST_BYTES
        for spec in layout.layers:
            begin, end = end, end + DIGEST_BYTES
            view = into.get(spec.layer_idx)
            if view is not None and xxhash.xxh3_64_digest(view) != digests[begin:end]:
                raise BadChunk("checksum", f"the bytes of {layer_tensor(spec.layer_idx)} do not match their checksum")
    return digests


def _parse_known(preamble: bytes, name: bytes, prefix: bytes, layout: FileLayout) -> Header:
    """The header of a file that is to be this chunk with this layout. Raises BadChunk when it is not."""
    header = parse_preamble(preamble, layout.size, layout)
    if not is_name_of(header.meta, name):
        raise BadChunk("key", f"the file holds the chunk {header.meta.key[:200]!r}")
    if header.meta.prefix != prefix or header.layout != layout:
        raise BadChunk("replaced", "it is not the file that the index knows")
    return header


def _verify_rows(header: Header, rows: Mapping[int, memoryview]) -> None:
    for layer_idx, view in rows.items():
        verify_tensor(layer_tensor(layer_idx), view, header.checksums)


def read_exactly(files: FileLayer, fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill all of ``views`` from ``offset`` on, also where a disk moves less at a time. Raises BadChunk or OSError."""
    if not _transfer(files.preadv, fd, views, offset):
        raise BadChunk("short", "the file ends before its rows do")
