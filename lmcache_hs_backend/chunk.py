"""The vocabulary of chunks: keys, layers, metadata, prefix digests.

Everything else in the package talks in these types. This module does no I/O, takes no lock, and
knows neither LMCache nor files, nor torch: a tensor appears here in a type only.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import xxhash

if TYPE_CHECKING:
    import torch

#: The float types that rows keep, by their safetensors names: bytes of one element. Others are converted or refused.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

TOKEN_BYTES = 8  # a token id is an int64


def chunk_name(key: str) -> bytes:
    """16 bytes that stand for a full key string: xxh3_128. In hex, the name of the chunk's file."""
    return xxhash.xxh3_128_digest(key.encode("utf-8", "surrogatepass"))


class Presence(Enum):
    """The three answers to the question whether LMCache still holds the KV of a chunk.

    GONE means that every place that could hold it was asked and does not hold it. Whether the KV was ever there
    is for the caller to know.
    """

    PRESENT = "present"
    GONE = "gone"
    UNKNOWN = "unknown"


#: Asks for the KV of chunks, by their ``kv_key``, in one go. The flag: only where asking cannot block.
AskPresence = Callable[[Sequence[Any], bool], Sequence[Presence]]


class KeyForm(NamedTuple):
    """The form in which the tiers keep a ``kv_key`` for each chunk, of which there may be ten million.

    Attributes:
        keep: From a key to what is kept of it.
        whole: From what is kept to a key that AskPresence takes.
    """

    keep: Callable[[Any], Any]
    whole: Callable[[Any], Any]


def _same(kv_key: Any) -> Any:
    return kv_key


#: Keys are kept as they come.
WHOLE_KEYS = KeyForm(_same, _same)


class LayerSpec(NamedTuple):
    """How the rows of one layer of a chunk are laid out: ``[num_tokens, hidden_dim]`` of ``dtype``.

    ``dtype`` is a safetensors name, one of ``ITEM_BYTES``; ``tiers.memory.dtypes`` maps it to torch's.
    """

    layer_idx: int
    dtype: str
    hidden_dim: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def dtype_name(self) -> str:
        """What torch calls the dtype, for people."""
        return _TORCH_NAMES[self.dtype]

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of the rows of ``num_tokens`` tokens."""
        return num_tokens * self.hidden_dim * ITEM_BYTES[self.dtype]


class ChunkMeta(NamedTuple):
    """What a chunk is, apart from its rows: the part of a file's header that the writer knew.

    Attributes:
        key: The full key, ``model@world_size@worker_id@chunk_hash@dtype`` with tags, as LMCache writes it.
        chunk_hash: The chunk's hash in hex.
        parent: The hash of the chunk before it, empty for the first one of a sequence.
        prefix: The prefix digest, 16 bytes.
        start: Position of the first row in the sequence, in tokens.
        num_tokens: Number of rows.
        model: Name of the model.
        created_at: UTC, ``YYYY-MM-DDTHH:MM:SSZ``.
        capture: JSON object: what the writer knew of the rows, such as the meaning of the layer numbers.
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
    """One chunk of a call: where its rows are in the sequence, and what they depend on.

    Attributes:
        name: 16 bytes that stand for ``key`` (see ``chunk_name``); in hex, the name of the chunk's file.
        start: Position of the first row in the sequence, in tokens.
        end: Position after the last row.
        prefix: The prefix digest, 16 bytes: xxh3_128 of all token ids (int64) from position 0 to ``end``.
        key: The full key, as in ChunkMeta.
        chunk_hash: The chunk's hash in hex.
        parent: The hash of the chunk before it, empty for the first one of a sequence.
        kv_key: What the KV presence check is asked with (LMCache's own key object, or None where there is no
            KV cache). The tiers never look inside.
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
        """Number of rows."""
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

    Args:
        token_ids: A list or another flat sequence of ints, or a 1-D integer tensor on any device.

    Returns:
        Eight bytes for each id.

    Raises:
        ValueError: This is not a flat sequence of ints that fit int64.
    """
    if hasattr(token_ids, "data_ptr"):  # lists and arrays have none
        tensor = cast("torch.Tensor", token_ids)
        if tensor.dim() != 1 or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            raise ValueError(
                f"token_ids must be a 1-D integer tensor or a list of ints, got {tensor.dtype} "
                f"of shape {tuple(tensor.shape)}"
            )
        ids = tensor.cpu().long().contiguous()
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


# -- prompts, for callers without LMCache or vLLM ------------------------------------------------------------

#: How chunk hashes are made where no LMCache makes them; part of the namespace.
HASH_ALGORITHM = "xxh3_128 of the parent's hash and int64 token ids"


def chunk_hash(parent: str, ids: bytes, extra: str = "") -> str:
    """The hash of a chunk in hex, from its token ids and its predecessor's hash, so from every token before it.

    Args:
        parent: The predecessor's hash, empty for the first chunk of a sequence.
        ids: The chunk's own token ids, as ``token_bytes`` gives them.
        extra: What the rows depend on beside token ids, such as the images under the placeholders.
    """
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(parent) + ids + extra.encode())


class Prompt(NamedTuple):
    """A sequence of tokens cut into chunks: the first two arguments of ``TieredStore.store``.

    Attributes:
        refs: Its chunks, in order.
        ids: All its token ids, as ``token_bytes`` gives them.
    """

    refs: list[ChunkRef]
    ids: bytes


def cut(
    token_ids: Sequence[int] | torch.Tensor, *, model: str, kv_dtype: str, chunk_size: int, tail: bool = True
) -> Prompt:
    """Cut a sequence into chunks and name them, without LMCache or vLLM. ``TieredStore.prompt`` calls this.

    Equal prefixes get equal names in any process and at any time. What the rows depend on beside token ids and
    model (images, adapters) has to be part of ``model``.

    Args:
        token_ids: The whole sequence from position 0: ints, or a 1-D integer tensor.
        model: Name of the model that the rows are of.
        kv_dtype: The last part of a key. Use the model's own, such as ``bfloat16``, to name chunks as the vLLM
            connector does.
        chunk_size: Tokens of a chunk.
        tail: Whether what is left over makes a shorter last chunk.

    Raises:
        ValueError: ``token_ids`` is not a flat sequence of ints that fit int64.
    """
    ids = token_bytes(token_ids)
    num_tokens = len(ids) // TOKEN_BYTES
    chunks, parent = [], ""
    for start in range(0, num_tokens if tail else num_tokens // chunk_size * chunk_size, chunk_size):
        end = min(start + chunk_size, num_tokens)
        parent = chunk_hash(parent, ids[start * TOKEN_BYTES : end * TOKEN_BYTES])
        chunks.append(KeyedChunk(start, end, f"{model}@1@0@{parent}@{kv_dtype}", parent, None))
    return Prompt(chunk_refs(chunks, ids), ids)
