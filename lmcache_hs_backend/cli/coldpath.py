"""A cold path as the inspector sees it: namespaces, the names in them, and the headers of chunk files.

It does again, in a few lines, what ``format`` does for the store, because those
need torch for their rows, and torch alone takes 1.5 s and 230 MB: a listing of 100,000 chunks has less.
A test holds both against each other. Whatever is read is treated as hostile. Nothing here locks, changes
or deletes anything, and a file that vanishes meanwhile is passed over or reported, never an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

CHUNK_FORMAT = "lmcache-hs-chunk"
CHUNK_VERSION = "1"
NAMESPACE_FORMAT = "lmcache-hs-namespace"
NAMESPACE_VERSION = 1
RECORD = "namespace.json"
LOCK = ".lock"
QUARANTINE = "quarantine"
ARCHIVE = "archive"
SEQUENCES = "sequences"

#: Bytes of one element and torch's name, by safetensors' name of the types that rows have.
DTYPES = {"F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16")}

MAX_HEADER_BYTES = 1 << 20
MAX_LAYERS = 1000
MAX_TOKENS = 1 << 24
MAX_RECORD_BYTES = 1 << 16

_PAGE = 4096
_CHUNK_FILE = re.compile(r"([0-9a-f]{32})\.safetensors")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_NAMESPACE = re.compile(r".+-[0-9a-f]{12}")
_SUBDIRECTORY = re.compile(r"p[1-9][0-9]{0,3}")
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9]+\.tmp|\.tmp[A-Za-z0-9]{6}", re.DOTALL)
_LAYER = re.compile(r"layer\.(-?(?:0|[1-9][0-9]{0,18}))")
_NUMBER = re.compile(r"[0-9]{1,15}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FIELDS = (
    "format", "version", "key", "chunk_hash", "parent", "prefix", "start", "num_tokens", "model",
    "created_at", "xxh3", "capture",
)  # fmt: skip
_ALL_TEXT = {str}


class NotAColdPath(Exception):
    """There is no namespace under a path, or only ones of a version that this program does not know."""


class Unreadable(Exception):
    """A file is not a chunk file. ``reason`` is one word: the one that the store counts such files by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Layer(NamedTuple):
    """One layer of a chunk: rows ``[num_tokens, hidden_dim]`` of ``dtype`` (safetensors' name)."""

    layer_idx: int
    dtype: str
    hidden_dim: int

    @property
    def dtype_name(self) -> str:
        """torch's name of the dtype."""
        return DTYPES[self.dtype][1]

    @property
    def row_bytes(self) -> int:
        return self.hidden_dim * DTYPES[self.dtype][0]


class Head(NamedTuple):
    """The header of a chunk file; ``layers`` in the order of the file, ``token_ids`` as int64 bytes."""

    key: str
    chunk_hash: str
    parent: str
    prefix: bytes
    start: int
    num_tokens: int
    model: str
    created_at: str
    capture: str
    layers: tuple[Layer, ...]
    checksums: dict[str, str]
    head_bytes: int
    token_ids: bytes

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


# -- headers -----------------------------------------------------------------------------------------


def chunk_name(key: str) -> bytes:
    """What a chunk's file is named after: xxh3_128 of its full key."""
    return xxhash.xxh3_128_digest(key.encode("utf-8", "surrogatepass"))


def open_chunk(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, nothing else. Raises Unreadable or OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise Unreadable("type", "not a regular file") from None
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise Unreadable("type", "not a regular file")
    return fd, info


def read_head(path: str) -> tuple[Head, os.stat_result]:
    """The header of a chunk file, token ids included and checked. Raises Unreadable or OSError."""
    fd, info = open_chunk(path)
    try:
        return read_head_of(fd, info.st_size), info
    finally:
        os.close(fd)


def read_head_of(fd: int, size: int) -> Head:
    """The header of an open chunk file of ``size`` bytes."""
    head, token_ids = read_parts_of(fd, size)
    return head._replace(token_ids=token_ids)


def read_parts_of(fd: int, size: int) -> tuple[Head, bytes]:
    """``read_head_of`` with the token ids apart: those who do not need them save making a second Head."""
    data = os.pread(fd, min(size, _PAGE), 0)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise Unreadable("header", f"a header of {length} bytes in a file of {size}")
    if len(data) < 8 + length:
        data = _read_on(fd, data, 8 + length)
    head = parse_head(data[8 : 8 + length], size)
    if len(data) < head.head_bytes:
        data = _read_on(fd, data, head.head_bytes)
    token_ids = data[8 + length : head.head_bytes]
    if xxhash.xxh3_64_hexdigest(token_ids) != head.checksums.get("token_ids"):
        raise Unreadable("checksum", "the bytes of token_ids do not match their checksum")
    return head, token_ids


def _read_on(fd: int, data: bytes, size: int) -> bytes:
    while len(data) < size:
        more = os.pread(fd, size - len(data), len(data))
        if not more:
            raise Unreadable("short", "the file ends before its rows do")
        data += more
    return data


def parse_head(text: bytes, size: int) -> Head:
    """The JSON of a header, which must describe exactly a chunk file of ``size`` bytes. Raises Unreadable."""
    try:
        tensors = json.loads(_without_padding(text))
        info = tensors.pop("__metadata__")
        if {type(info[field]) for field in _FIELDS} != _ALL_TEXT:
            raise TypeError("a metadata field is not a string")
        checksums = json.loads(info["xxh3"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Unreadable("header", f"not a chunk's header: {error!r}") from None
    if info["format"] != CHUNK_FORMAT or info["version"] != CHUNK_VERSION:
        raise Unreadable("version", f"format {info['format']!r} version {info['version']!r}")
    if not isinstance(checksums, dict) or not {*map(type, checksums.values())} <= _ALL_TEXT:
        raise Unreadable("header", "xxh3 is not a table of checksums")
    if not _DIGEST.fullmatch(info["prefix"]):
        raise Unreadable("header", "the prefix digest is not 32 hex digits")
    num_tokens = _number("num_tokens", info["num_tokens"], 1, MAX_TOKENS)
    start = _number("start", info["start"], 0, 10**15)
    layers, end = _layers(tensors, num_tokens)
    if 8 + len(text) + end != size:
        raise Unreadable("size", f"the header describes {8 + len(text) + end} bytes, the file has {size}")
    return Head(
        info["key"], info["chunk_hash"], info["parent"], bytes.fromhex(info["prefix"]), start, num_tokens,
        info["model"], info["created_at"], info["capture"], layers, checksums, 8 + len(text) + 8 * num_tokens, b"",
    )  # fmt: skip


def _without_padding(text: bytes) -> bytes:
    """The JSON without the spaces behind it. (``rstrip`` takes as long for them as the parser for the JSON.)"""
    end = text.rfind(b"}") + 1
    return text[:end] if text[end:] == b" " * (len(text) - end) else text


def _number(field: str, text: str, low: int, high: int) -> int:
    if not _NUMBER.fullmatch(text) or not low <= int(text) <= high:
        raise Unreadable("header", f"{field} is {text[:40]!r}")
    return int(text)


def _layers(tensors: dict[str, Any], num_tokens: int) -> tuple[tuple[Layer, ...], int]:
    """The layers in file order, and the bytes of all tensors, which must follow each other without a gap."""
    if not isinstance(tensors, dict) or not 2 <= len(tensors) <= MAX_LAYERS + 1:
        raise Unreadable("header", "no layer, or too many tensors")
    layers = []
    end = 0
    try:
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = tensor["data_offsets"]
            shape, dtype = tensor["shape"], tensor["dtype"]
            if name == "token_ids":
                good = begin == 0 and dtype == "I64" and shape == [num_tokens]
                nbytes = 8 * num_tokens
            else:
                match = _LAYER.fullmatch(name)
                rows, hidden_dim = shape
                if match is None or rows != num_tokens or type(hidden_dim) is not int or hidden_dim <= 0:
                    raise Unreadable("header", f"tensor {name[:40]!r} is not a layer of this chunk")
                good = True
                layers.append(Layer(int(match[1]), dtype, hidden_dim))
                nbytes = num_tokens * hidden_dim * DTYPES[dtype][0]
            if not good or type(begin) is not int or begin != end or stop != begin + nbytes:
                raise Unreadable("header", f"tensor {name[:40]!r} does not lie where it should")
            end = stop
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable("header", f"not a tensor of a chunk: {error!r}") from None
    if len(layers) != len(tensors) - 1:
        raise Unreadable("header", "no token_ids")
    return tuple(layers), end


# -- names -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Namespace:
    """A directory of chunks that are interchangeable, and what its ``namespace.json`` says."""

    directory: str
    label: str  # the directory below the cold path: what users call it
    record: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.record.get("model", ""))

    @property
    def worker_id(self) -> Any:
        return self.record.get("worker_id")

    def root(self, state: str) -> str:
        """Where the chunks of a state ("cold" or "archived") lie."""
        return os.path.join(self.directory, ARCHIVE) if state == "archived" else self.directory


class Named(NamedTuple):
    """A chunk's file, by its name: not even looked at."""

    path: str
    name: bytes


class Found(NamedTuple):
    """A chunk's file, and what the filesystem says of it."""

    path: str
    size: int
    mtime_ns: int
    name: bytes


def is_temporary(name: str) -> bool:
    """Whether a file is a left-over of ours, or of safetensors' own ``save_file``."""
    return _TEMPORARY.fullmatch(name) is not None


def read_record(directory: str) -> dict[str, Any]:
    """``namespace.json`` of a directory. Raises NotAColdPath."""
    path = os.path.join(directory, RECORD)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            record = json.loads(os.read(fd, MAX_RECORD_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError) as error:
        raise NotAColdPath(f"{path}: {error}") from None
    if not isinstance(record, dict) or record.get("format") != NAMESPACE_FORMAT:
        raise NotAColdPath(f"{path} does not describe a namespace of hidden states")
    if record.get("version") != NAMESPACE_VERSION:
        raise NotAColdPath(
            f"{path} is of format version {record.get('version')!r}; this program knows version {NAMESPACE_VERSION}"
        )
    return record


class ColdPath:
    """The namespaces of a cold path. Raises NotAColdPath, in one line, when there is nothing of ours."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.passed_over: list[str] = []  # why directories that look like namespaces are none, a line each
        try:
            self.namespaces = list(self._find())
        except OSError as error:
            raise NotAColdPath(f"{path} is not a cold path: {error.strerror}") from None
        if self.namespaces:
            return
        if os.path.lexists(os.path.join(self.path, RECORD)):
            try:
                read_record(self.path)
            except NotAColdPath as why:
                raise NotAColdPath(f"{path} is not a cold path: {why}") from None
            raise NotAColdPath(f"{path} is one namespace of a cold path; name the directory above it")
        why_not = self.passed_over[0] if self.passed_over else "no namespace.json in any directory below it"
        raise NotAColdPath(f"{path} is not a cold path: {why_not}")

    def _find(self) -> Iterator[Namespace]:
        for directory in _directories(self.path):
            try:
                if not self._has_record(directory):
                    continue
                yield self._namespace(directory)
                nested = [path for path in _directories(directory) if _SUBDIRECTORY.fullmatch(os.path.basename(path))]
            except NotAColdPath as why:
                self.passed_over.append(str(why))
                continue
            except FileNotFoundError:
                continue
            except OSError as error:
                if _NAMESPACE.fullmatch(os.path.basename(directory)):  # else it is none of our business
                    self.passed_over.append(f"{directory}: {error.strerror}")
                continue
            for path in nested:
                try:
                    yield self._namespace(path)
                except NotAColdPath as why:
                    self.passed_over.append(str(why))

    def _has_record(self, directory: str) -> bool:
        """Whether a directory says that it is a namespace. Raises OSError where it may not be looked into."""
        try:
            os.lstat(os.path.join(directory, RECORD))
        except FileNotFoundError:
            if _NAMESPACE.fullmatch(os.path.basename(directory)) and folders(directory):
                raise NotAColdPath(f"{directory}: chunk files, but no {RECORD}") from None
            return False
        return True

    def _namespace(self, directory: str) -> Namespace:
        return Namespace(directory, os.path.relpath(directory, self.path), read_record(directory))


def _directories(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def folders(root: str) -> list[str]:
    """The directories ``<root>/<hh>`` that hold chunk files."""
    try:
        return [path for path in _directories(root) if _FAN_OUT.fullmatch(os.path.basename(path))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def scan(folder: str) -> Iterator[Named]:
    """The chunk files of a directory ``<hh>``, in the order of the files on disk.

    Whatever is named like a chunk is reported as one; temporaries and foreign files are passed over.
    """
    first = os.path.basename(folder)
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _CHUNK_FILE.fullmatch(entry.name)
            if match is not None and match[1].startswith(first):
                found.append((entry.inode(), entry.path, bytes.fromhex(match[1])))
    found.sort(key=lambda item: item[0])
    for _, path, name in found:
        yield Named(path, name)


class Stray(NamedTuple):
    """Something in a namespace that is no chunk file in its place."""

    kind: str  # "temporary", "misplaced" or "foreign"
    path: str
    size: int
    mtime_ns: int


def strays(namespace: Namespace) -> Iterator[Stray]:
    """Everything in a namespace that does not belong there."""
    ours = {RECORD, LOCK, QUARANTINE, ARCHIVE, SEQUENCES}
    yield from _strays_in(namespace.directory, lambda name: name in ours or _SUBDIRECTORY.fullmatch(name) is not None)
    yield from _strays_in(namespace.root("archived"), lambda name: False)


def _strays_in(root: str, belongs: Any) -> Iterator[Stray]:
    folders = []
    for entry in _entries(root):
        if _FAN_OUT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
        elif not belongs(entry.name):
            yield from _stray("temporary" if is_temporary(entry.name) else "foreign", entry)
    for folder in sorted(folders):
        first = os.path.basename(folder)
        for entry in _entries(folder):
            match = _CHUNK_FILE.fullmatch(entry.name)
            if match is None:
                yield from _stray("temporary" if is_temporary(entry.name) else "foreign", entry)
            elif not match[1].startswith(first):
                yield from _stray("misplaced", entry)


def _entries(path: str) -> Sequence[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # who looks for chunks there says so
        return []


def _stray(kind: str, entry: os.DirEntry[str]) -> Iterator[Stray]:
    with contextlib.suppress(FileNotFoundError):
        info = entry.stat(follow_symlinks=False)
        yield Stray(kind, entry.path, info.st_size, info.st_mtime_ns)


def in_use(namespace: Namespace) -> bool:
    """Whether a process is seen to hold the namespace. Takes no lock: looks at the kernel's list of locks.

    Processes of other containers are not in that list, so no is not certain.
    """
    try:
        inode = os.lstat(os.path.join(namespace.directory, LOCK)).st_ino
        with open("/proc/locks") as file:
            return any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in file)
    except (OSError, IndexError):
        return False


def files_in(directory: str) -> Iterator[tuple[str, int, int]]:
    """``(path, bytes, mtime_ns)`` of everything directly in a directory; nothing when it is not there."""
    for entry in _entries(directory):
        with contextlib.suppress(FileNotFoundError):
            info = entry.stat(follow_symlinks=False)
            yield entry.path, info.st_size, info.st_mtime_ns
