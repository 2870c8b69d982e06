"""How chunks are named without LMCache: the chunk hash, and the key made of it.

A chunk's hash is xxh3_128 over its parent's hash and its token ids (int64), so it depends on every token before it,
and equal prefixes get equal names in any process, at any time. It imports no vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

HASH_ALGORITHM = "xxh3_128 of the parent's hash and int64 token ids"


def chunk_hash(parent: str, ids: bytes, extra: str = "") -> str:
    """The hash of a chunk in hex.

    Args:
        parent: The hash of its predecessor in hex, empty for the first chunk of a sequence.
        ids: Its token ids, int64.
        extra: What the rows depend on beside token ids: the images under the placeholders.
    """
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(parent) + ids + extra.encode())


class KeyFormat(NamedTuple):
    """How a chunk hash becomes a full key, in the form of LMCache's."""

    model: str
    dtype: str

    def key(self, hash_hex: str) -> str:
        return f"{self.model}@1@0@{hash_hex}@{self.dtype}"
