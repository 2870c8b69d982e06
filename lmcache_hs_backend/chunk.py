"""The vocabulary of chunks: keys, layers, metadata, prefix digests.

Everything else in the package talks in these types. This module does no I/O, takes no lock, and
knows neither LMCache nor files.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
import xxhash

#: Float types that rows keep, by their safetensors names. Everything else is converted or refused.
DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

TOKEN_BYTES = 8  # a token id is an int64


def chunk_name(key: str) -> bytes:
    """16 bytes that stand for a full key string: xxh3_128. In hex, the name of the chunk's file."""
    return xxhash.xxh3_128_digest(key.encode("utf-8", "surrogatepass"))


class Presence(Enum):
    """The three answers to "does LMCache still hold the KV of this chunk?"

    GONE means that every place that could hold it was asked and does not; whoever gets it still has to
    know that the KV was there before.
    """

    PRESENT = "present"
    GONE = "gone"
    UNKNOWN = "unknown"


#: Asks for the KV of chunks, by their ``kv_key``, in one go. The flag: only where asking cannot block.
AskPresence = Callable[[Sequence[Any], bool], Sequence[Presence]]


class LayerSpec(NamedTuple):
    """How the rows of one layer of a chunk are laid out: ``[num_tokens, hidden_dim]`` of ``dtype``."""

    layer_idx: int
    dtype: torch.dtype
    hidden_dim: int

    def nbytes(self, num_tokens: int) -> int:
        return num_tokens * self.hidden_dim * self.dtype.itemsize


class ChunkMeta(NamedTuple):
    """What a chunk is, apart from its rows: the part of a file's header that the writer knew.

    ``prefix`` is the prefix digest, ``chunk_hash`` and ``parent`` are LMCache's hashes in hex
    (``parent`` is empty for the first chunk of a sequence), ``capture`` is JSON.
    """

    key: str
    chunk_hash: str
    parent: str
    prefix: bytes
    start: int
    num_tokens: int
    model: str
    created_at: str
    capture: str = "{}"


class ChunkRef(NamedTuple):
    """One chunk of a call: where its rows lie in the sequence, and what they depend on.

    ``kv_key`` is whatever the KV presence check wants to be asked with (LMCache's own key object);
    the tiers never look inside.
    """

    name: bytes
    start: int
    end: int
    prefix: bytes
    key: str
    chunk_hash: str
    parent: str
    kv_key: Any

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class KeyedChunk(NamedTuple):
    """A chunk as a token database names it, before its prefix digest is known."""

    start: int
    end: int
    key: str
    chunk_hash: str
    kv_key: Any


def token_bytes(token_ids: Sequence[int] | torch.Tensor) -> bytes:
    """Token ids as little-endian int64, the form that is digested and filed.

    Raises ValueError for anything that is not a flat sequence of ids which fit int64.
    """
    if isinstance(token_ids, torch.Tensor):
        if token_ids.dim() != 1 or token_ids.dtype.is_floating_point or token_ids.dtype.is_complex:
            raise ValueError(
                f"token_ids must be a 1-D integer tensor or a list of ints, got {token_ids.dtype} "
                f"of shape {tuple(token_ids.shape)}"
            )
        ids = token_ids.to("cpu", torch.int64).contiguous()
        return ctypes.string_at(ids.data_ptr(), ids.nbytes)
    try:
        return struct.pack(f"<{len(token_ids)}q", *token_ids)
    except (struct.error, TypeError) as error:
        raise ValueError(f"token_ids must be integers that fit int64: {error}") from None


def prefix_digests(ids: bytes, ends: Iterable[int]) -> Iterator[bytes]:
    """The prefix digest at each of the ascending token positions ``ends``, in one pass over ``ids``."""
    digest, done, view = xxhash.xxh3_128(), 0, memoryview(ids)
    for end in ends:
        stop = end * TOKEN_BYTES
        digest.update(view[done:stop])
        done = stop
        yield digest.digest()


def chunk_refs(chunks: Iterable[tuple[int, int, str, str, Any]], ids: bytes) -> list[ChunkRef]:
    """Join consecutive chunks, from the first of a sequence on (KeyedChunk or its bare fields), with prefix digests."""
    refs = []
    parent = ""
    digest, done, view = xxhash.xxh3_128(), 0, memoryview(ids)
    for start, end, key, chunk_hash, kv_key in chunks:
        stop = end * TOKEN_BYTES
        digest.update(view[done:stop])
        done = stop
        refs.append(ChunkRef(chunk_name(key), start, end, digest.digest(), key, chunk_hash, parent, kv_key))
        parent = chunk_hash
    return refs
