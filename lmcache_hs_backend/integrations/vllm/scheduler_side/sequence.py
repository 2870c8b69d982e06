"""The chunks of one growing sequence. It only cuts and names them, and imports no vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import xxhash

from lmcache_hs_backend.chunk import ChunkRef, chunk_name
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat, chunk_hash


class Image(NamedTuple):
    """A multi-modal input: which one, and the tokens that stand for it."""

    identifier: str
    start: int
    end: int


class ChunkedSequence:
    """Cuts a sequence into chunks as its tokens become known."""

    def __init__(self, key_format: KeyFormat, chunk_size: int, images: Iterable[Image] = ()) -> None:
        self.refs: list[ChunkRef] = []
        self._key_format = key_format
        self._chunk_size = chunk_size
        self.images = sorted(images, key=lambda image: image.start)
        self._digest = xxhash.xxh3_128()
        self._parent = ""

    @property
    def end(self) -> int:
        """Tokens in chunks so far."""
        return self.refs[-1].end if self.refs else 0

    def advance(self, token_ids: Sequence[int], end: int) -> list[tuple[ChunkRef, bytes]]:
        """The full chunks that end at or before token ``end`` and are new, with their token ids."""
        added = []
        while self.end + self._chunk_size <= end:
            added.append(self._add(token_ids, self.end + self._chunk_size))
        return added

    def close(self, token_ids: Sequence[int], end: int) -> list[tuple[ChunkRef, bytes]]:
        """``advance``, and the shorter last chunk, if tokens are left over. Nothing may follow."""
        added = self.advance(token_ids, end)
        if self.end < end:
            added.append(self._add(token_ids, end))
        return added

    def open_chunk(self, token_ids: Sequence[int], end: int) -> tuple[ChunkRef, bytes]:
        """The chunk of the tokens after the last full one, as far as ``end``. The sequence stays as it is."""
        return self._chunk(token_ids, end, self._digest.copy())

    def _add(self, token_ids: Sequence[int], end: int) -> tuple[ChunkRef, bytes]:
        ref, ids = self._chunk(token_ids, end, self._digest)
        self.refs.append(ref)
        self._parent = ref.chunk_hash
        return ref, ids

    def _chunk(self, token_ids: Sequence[int], end: int, digest: xxhash.xxh3_128) -> tuple[ChunkRef, bytes]:
        start = self.end
        ids = array("q", token_ids[start:end]).tobytes()
        digest.update(ids)
        hash_hex = chunk_hash(self._parent, ids, self._extra(start, end))
        key = self._key_format.key(hash_hex)
        return ChunkRef(chunk_name(key), start, end, digest.digest(), key, hash_hex, self._parent, None), ids

    def _extra(self, start: int, end: int) -> str:
        return "".join(f"{i.identifier}@{i.start - start};" for i in self.images if i.start < end and i.end > start)


def images_of(mm_features: Iterable[Any]) -> list[Image]:
    """vLLM's multi-modal features of a request."""
    return [
        Image(feature.identifier, feature.mm_position.offset, feature.mm_position.offset + feature.mm_position.length)
        for feature in mm_features
    ]
