"""Which tail chunks a longer chunk has made superfluous.

A tail is a chunk shorter than ``chunk_size``: the end of a request. When the conversation goes on, a
longer chunk with the same parent begins with the same tokens, and the tail holds nothing of its own. This
module remembers the token ids of recent chunks to say so; it neither stores nor deletes anything.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator

from lmcache_hs_backend.chunk import chunk_name
from lmcache_hs_backend.integrations.vllm.sequence import Keying, chunk_hash

#: Chunks remembered; at 256 tokens a chunk this is 32 MiB. A tail forgotten stays, and is merely not needed.
LIMIT = 1 << 14

_OURS = re.compile(r"(?:[0-9a-f]{32})?")


class Tails:
    """The most recent chunks by their parent. Not thread-safe."""

    def __init__(self, keying: Keying, chunk_size: int) -> None:
        self._keying = keying
        self._full = chunk_size * 8
        self._known: OrderedDict[str, tuple[str, bytes]] = OrderedDict()  # chunk hash → parent, ids
        self._children: dict[str, dict[str, None]] = {}  # parent → chunk hashes, in order of arrival

    def add(self, hash_hex: str, parent: str, ids: bytes) -> None:
        """Remember a chunk that is stored. One that depends on more than token ids is left out."""
        if hash_hex in self._known or not _tokens_only(hash_hex, parent, ids):
            return
        self._known[hash_hex] = parent, ids
        self._children.setdefault(parent, {})[hash_hex] = None
        if len(self._known) > LIMIT:
            self.forget(next(iter(self._known)))

    def forget(self, hash_hex: str) -> None:
        """A chunk is no longer stored."""
        parent, _ = self._known.pop(hash_hex, ("", b""))
        siblings = self._children.get(parent, {})
        siblings.pop(hash_hex, None)
        if not siblings:
            self._children.pop(parent, None)

    def longer(self, hash_hex: str, parent: str, ids: bytes) -> str | None:
        """The hash of a stored chunk that begins with all of ``ids`` and goes on, or None."""
        if len(ids) == self._full or not _tokens_only(hash_hex, parent, ids):
            return None
        for sibling in self._children.get(parent, {}):
            other = self._known[sibling][1]
            if len(other) > len(ids) and other.startswith(ids):
                return sibling
        return None

    def shorter(self, parent: str, ids: bytes) -> Iterator[str]:
        """The hashes of stored tails that ``ids`` begins with and goes beyond."""
        for sibling in list(self._children.get(parent, {})):
            other = self._known[sibling][1]
            if len(other) < len(ids) and ids.startswith(other):
                yield sibling

    def name(self, hash_hex: str) -> bytes:
        """The name of a chunk's file."""
        return chunk_name(self._keying.key(hash_hex))


def _tokens_only(hash_hex: str, parent: str, ids: bytes) -> bool:
    """Whether a chunk is named by our hash, after nothing but its tokens: no image, and not by LMCache."""
    return _OURS.fullmatch(parent) is not None and chunk_hash(parent, ids) == hash_hex
