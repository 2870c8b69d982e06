"""How chunks are named without LMCache: the chunk hash, and the key made of it.

A chunk's hash is xxh3_128 over its parent's hash and its token ids (int64), so it depends on every token before it,
and equal prefixes get equal names in any process, at any time. It imports no vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

from lmcache_hs_backend.chunk import HASH_ALGORITHM as HASH_ALGORITHM
from lmcache_hs_backend.chunk import chunk_hash as chunk_hash


class KeyFormat(NamedTuple):
    """How a chunk hash becomes a full key, in the form of LMCache's."""

    model: str
    dtype: str

    def key(self, hash_hex: str) -> str:
        """The full key of the chunk with this hash."""
        return f"{self.model}@1@0@{hash_hex}@{self.dtype}"
