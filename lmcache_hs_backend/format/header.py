"""The preamble of a chunk file, which is everything in front of its rows: made for a writer, checked for a reader.

A preamble is the length of the header (8 bytes), the header (JSON, padded with spaces) and the token ids. This is the
only parser of it. The format is fixed in docs/reference/chunk-file.md. Everything that comes from a disk is treated as
hostile until it has been checked: bounded sizes, exact offsets, matching checksums. What fails is a ``BadChunk``.
This module does no I/O.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkMeta, LayerSpec
from lmcache_hs_backend.format.pages import ALIGN, align

FORMAT = "lmcache-hs-chunk"
VERSION = "1"

#: Bounds that no writer of ours comes near; they keep a hostile header from costing memory or time.
MAX_HEADER_BYTES = 1 << 20
MAX_LAYERS = 1000
MAX_TOKENS = 1 << 24

TOKEN_IDS = "token_ids"
LENGTH_BYTES = 8  # in front of the JSON
DIGEST_BYTES = 8  # xxh3_64

_LAYER = re.compile(r"layer\.(-?(?:0|[1-9][0-9]{0,18}))")
_NUMBER = re.compile(r"[0-9]{1,15}")
_HEX8 = re.compile(r"[0-9a-f]{16}")
_HEX16 = re.compile(r"[0-9a-f]{32}")


class BadChunk(Exception):
    """A file is not the chunk that it should be. ``reason`` is one word, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class FileLayout(NamedTuple):
    """Where the layers of a chunk lie in its file. Equal for most chunks, and then shared."""

    num_tokens: int
    preamble_bytes: int
    layers: tuple[LayerSpec, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        size = self.preamble_bytes
        for spec in self.layers:
            size += spec.nbytes(self.num_tokens)
        return size

    @property
    def direct(self) -> bool:
        """Whether the file can be moved with O_DIRECT."""
        return self.preamble_bytes % ALIGN == 0 and all(s.nbytes(self.num_tokens) % ALIGN == 0 for s in self.layers)

    def spec(self, layer_idx: int) -> LayerSpec | None:
        """How a layer is laid out; None when it is not in the file."""
        for spec in self.layers:
            if spec.layer_idx == layer_idx:
                return spec
        return None


class Header(NamedTuple):
    """The checked header of a chunk file. ``checksums`` are xxh3_64 in hex by tensor name.

    ``digests`` is what a file has to hold, in a few bytes: xxh3_64 of its preamble, then of each layer in file order.
    """

    meta: ChunkMeta
    layout: FileLayout
    checksums: dict[str, str]
    token_ids: bytes
    digests: bytes = b""


class Description:
    """What a chunk's file says of it, apart from its layers: its metadata and its own token ids."""

    __slots__ = ("_file", "_parts")
    _parts: tuple[ChunkMeta, bytes] | None
    _file: tuple[bytes, FileLayout]

    def __init__(self, meta: ChunkMeta, token_ids: bytes) -> None:
        self._parts = meta, token_ids

    @classmethod
    def of_file(cls, preamble: bytes, layout: FileLayout) -> Description:
        """From a preamble that was found good. It is parsed when it is asked for, which for most chunks it never is."""
        self = cls.__new__(cls)
        self._parts, self._file = None, (preamble, layout)
        return self

    def parts(self) -> tuple[ChunkMeta, bytes]:
        """The metadata, and the token ids as int64 bytes."""
        parts = self._parts
        if parts is None:
            preamble, layout = self._file
            header = parse_preamble(preamble, layout.size, layout)
            parts = self._parts = header.meta, header.token_ids
        return parts


def layer_tensor(layer_idx: int) -> str:
    """The tensor name of a layer in a chunk file."""
    return f"layer.{layer_idx}"


def file_order(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Layers in the order of the file: by descending item size, so that each tensor is aligned."""
    return sorted(specs, key=lambda spec: (-spec.itemsize, spec.layer_idx))


def build_preamble(meta: ChunkMeta, specs: Sequence[LayerSpec], checksums: Mapping[str, str], ids: bytes) -> bytes:
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
    total = align(LENGTH_BYTES + len(text) + len(ids))
    length = total - LENGTH_BYTES - len(ids)
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length) + ids


_parse = json.JSONDecoder().decode
_json = json.JSONEncoder(separators=(",", ":")).encode


@functools.lru_cache(maxsize=256)
def _tensors_text(num_tokens: int, specs: tuple[LayerSpec, ...]) -> str:
    return _json(_tensors(num_tokens, specs))


@functools.lru_cache(maxsize=256)
def _tensors(num_tokens: int, specs: tuple[LayerSpec, ...]) -> dict[str, Any]:
    """How a header describes its tensors. Equal for most chunks; shared, so not to be changed."""
    end = num_tokens * TOKEN_BYTES
    tensors: dict[str, Any] = {TOKEN_IDS: {"dtype": "I64", "shape": [num_tokens], "data_offsets": [0, end]}}
    for spec in specs:
        begin, end = end, end + spec.nbytes(num_tokens)
        tensors[layer_tensor(spec.layer_idx)] = {
            "dtype": spec.dtype,
            "shape": [num_tokens, spec.hidden_dim],
            "data_offsets": [begin, end],
        }
    return tensors


def header_length(first: bytes | memoryview, file_size: int) -> int:
    """Length of the JSON header, from the first 8 bytes of a file. Raises BadChunk when absurd."""
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, file_size - LENGTH_BYTES):
        raise BadChunk("header", f"a header of {length} bytes in a file of {file_size}")
    return length


def parse_header(text: bytes | memoryview, file_size: int, expected: FileLayout | None = None) -> Header:
    """Check and take apart the JSON of a header (without the length in front, and without token ids).

    Tensors that are described as ``expected`` are not looked at one by one. Raises BadChunk for anything that does not
    describe exactly a chunk file of ``file_size`` bytes.
    """
    try:
        tensors = _parse(_without_padding(bytes(text)).decode("utf-8", "surrogatepass"))
        info = tensors.pop("__metadata__")
        fields = _fields(info)
        if set(map(type, fields)) != _ALL_STR:
            raise TypeError("a metadata field is not a string")
        format_, version, key, chunk_hash, parent, prefix, start, tokens, model, created_at, sums, capture = fields
        checksums = _parse(sums)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadChunk("header", f"not a chunk's header: {_in_short(error)}") from None
    if format_ != FORMAT or version != VERSION:
        raise BadChunk("version", f"format {format_!r} version {version!r}")
    if not isinstance(checksums, dict) or not set(map(type, checksums.values())) <= _ALL_STR:
        raise BadChunk("header", "xxh3 is not a table of checksums")
    if not _HEX16.fullmatch(prefix):
        raise BadChunk("header", "the prefix digest is not 32 hex digits")
    num_tokens = _bounded("num_tokens", tokens, 1, MAX_TOKENS)
    first = _bounded("start", start, 0, 10**15)
    meta = ChunkMeta(key, chunk_hash, parent, bytes.fromhex(prefix), first, num_tokens, model, created_at, capture)
    preamble_bytes = LENGTH_BYTES + len(text) + num_tokens * TOKEN_BYTES
    if expected is not None and tensors == _tensors(num_tokens, expected.layers):
        layers = expected.layers
    else:
        layers = _layers(tensors, num_tokens)
    layout = FileLayout(num_tokens, preamble_bytes, layers)
    if layout == expected:
        layout = expected  # one object for many chunks
    size = layout.size
    if size != file_size:
        raise BadChunk("size", f"the header describes {size} bytes, the file has {file_size}")
    return Header(meta, layout, checksums, b"")


def parse_preamble(preamble: bytes | memoryview, file_size: int, expected: FileLayout | None = None) -> Header:
    """Check everything in front of the rows: what ``build_preamble`` made, token ids included. See parse_header."""
    end = LENGTH_BYTES + header_length(preamble, file_size)
    header = parse_header(preamble[LENGTH_BYTES:end], file_size, expected)
    return with_token_ids(header, preamble)


def _without_padding(text: bytes) -> bytes:
    """The JSON without the spaces after it. ``rstrip`` takes as long for them as the parser for the JSON."""
    end = text.rfind(b"}") + 1
    return text[:end] if text[end:] == b" " * (len(text) - end) else text


def _in_short(error: Exception) -> str:
    """What is wrong with a header, without the header itself."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    return str(error)[:200] or type(error).__name__


def checked_token_ids(header: Header, preamble: bytes | memoryview) -> bytes:
    """The token ids behind a header, compared with their checksum. Raises BadChunk."""
    end = header.layout.preamble_bytes
    token_ids = bytes(preamble[end - header.meta.num_tokens * TOKEN_BYTES : end])
    verify_tensor(TOKEN_IDS, token_ids, header.checksums)
    return token_ids


def with_token_ids(header: Header, preamble: bytes | memoryview) -> Header:
    """A header together with what only the whole preamble tells: token ids and digests. Raises BadChunk."""
    end = header.layout.preamble_bytes
    token_ids = checked_token_ids(header, preamble)
    digests = xxhash.xxh3_64_digest(preamble[:end])
    for spec in header.layout.layers:
        checksum = header.checksums.get(layer_tensor(spec.layer_idx), "")
        if not _HEX8.fullmatch(checksum):
            digests = b""  # a read of that layer finds it out
            break
        digests += bytes.fromhex(checksum)
    return header._replace(token_ids=token_ids, digests=digests)


_FIELDS = (
    "format", "version", "key", "chunk_hash", "parent", "prefix", "start", "num_tokens", "model",
    "created_at", "xxh3", "capture",
)  # fmt: skip
_fields = operator.itemgetter(*_FIELDS)
_ALL_STR = {str}


def _bounded(field: str, text: str, low: int, high: int) -> int:
    number = int(text) if _NUMBER.fullmatch(text) else low - 1
    if not low <= number <= high:
        raise BadChunk("header", f"{field} is {text[:40]!r}")
    return number


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
            if name == TOKEN_IDS:
                nbytes = num_tokens * TOKEN_BYTES
                good = begin == 0 and dtype == "I64" and shape == [num_tokens]
            else:
                match = _LAYER.fullmatch(name)
                rows, hidden_dim = shape
                good = match is not None and rows == num_tokens and type(hidden_dim) is int and hidden_dim > 0
                if match is None or not good:
                    raise BadChunk("header", f"tensor {name[:40]!r} is not a layer of this chunk")
                spec = LayerSpec(int(match[1]), dtype, hidden_dim)
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


def verify_tensor(tensor: str, data: bytes | memoryview, checksums: Mapping[str, str]) -> None:
    """Compare the bytes of a tensor with the checksum in the header. Raises BadChunk."""
    if xxhash.xxh3_64_hexdigest(data) != checksums.get(tensor):
        raise BadChunk("checksum", f"the bytes of {tensor} do not match their checksum")
