"""Which tail chunks a longer chunk has made superfluous.

A tail is a chunk shorter than ``chunk_size``: the end of a request. When the conversation goes on, a
longer chunk with the same parent begins with the same tokens, and the tail holds nothing of its own. This
module remembers what is needed to name such tails; it neither stores nor deletes anything.

A chunk's name follows from its parent and its token ids. So of a tail only its parent and its length have to
be remembered: from a longer chunk follows what a tail of that length would be called.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict

from lmcache_hs_backend.chunk import TOKEN_BYTES, chunk_name
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat, chunk_hash

#: Parents of tails remembered, about 300 bytes each. A tail that is forgotten stays, and is merely not needed.
MOST_PARENTS = 1 << 17
#: Chunks whose token ids are remembered, 2 KiB each at 256 tokens.
MOST_RECENT = 1 << 13

_OURS = re.compile(r"(?:[0-9a-f]{32})?")


class Tails:
    """The tails and the most recent chunks, by their parent. Not thread-safe."""

    def __init__(self, key_format: KeyFormat, chunk_size: int) -> None:
        self._key_format = key_format
        self._chunk_size = chunk_size
        self._lengths: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # parent → tokens of its tails
        self._recent: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # parent and token ids of a chunk
        self._children: dict[str, list[bytes]] = {}  # the same: parent → token ids, sorted

    def add(self, hash_hex: str, parent: str, ids: bytes) -> None:
        """Remember a chunk that is stored. One that depends on more than token ids is left out."""
        if (parent, ids) in self._recent or not _tokens_only(hash_hex, parent, ids):
            return
        num_tokens = len(ids) // TOKEN_BYTES
        if num_tokens < self._chunk_size:
            lengths = self._lengths.pop(parent, ())
            self._lengths[parent] = lengths if num_tokens in lengths else (*lengths, num_tokens)
            if len(self._lengths) > MOST_PARENTS:
                self._lengths.popitem(last=False)
        self._recent[parent, ids] = None
        insort(self._children.setdefault(parent, []), ids)
        if len(self._recent) > MOST_RECENT:
            self.forget(*next(iter(self._recent)))

    def forget(self, parent: str, ids: bytes) -> None:
        """A chunk is no longer stored."""
        if self._recent.pop((parent, ids), self) is self:
            return
        children = self._children[parent]
        del children[bisect_left(children, ids)]
        if not children:
            del self._children[parent]

    def longer(self, hash_hex: str, parent: str, ids: bytes) -> str | None:
        """The hash of a recent chunk that begins with all of ``ids`` and goes on, or None."""
        children = self._children.get(parent, ())
        after = bisect_right(children, ids)  # whatever begins with ``ids`` is sorted right behind it
        if after == len(children) or not children[after].startswith(ids) or not _tokens_only(hash_hex, parent, ids):
            return None
        return chunk_hash(parent, children[after])

    def lengths(self, parent: str) -> tuple[int, ...]:
        """The lengths, in tokens, that tails of a parent have had."""
        return self._lengths.get(parent, ())

    def name(self, hash_hex: str) -> bytes:
        """The name of a chunk's file."""
        return chunk_name(self._key_format.key(hash_hex))


def shorter(hash_hex: str, parent: str, ids: bytes, lengths: tuple[int, ...]) -> dict[bytes, str]:
    """What tails of these ``lengths`` would be that a chunk begins with: token ids → hash."""
    stops = [length * TOKEN_BYTES for length in lengths if length * TOKEN_BYTES < len(ids)]
    if not stops or not _tokens_only(hash_hex, parent, ids):
        return {}
    return {ids[:stop]: chunk_hash(parent, ids[:stop]) for stop in stops}


def _tokens_only(hash_hex: str, parent: str, ids: bytes) -> bool:
    """Whether a chunk is named by our hash, after nothing but its tokens: no image, and not by LMCache."""
    return _OURS.fullmatch(parent) is not None and chunk_hash(parent, ids) == hash_hex
