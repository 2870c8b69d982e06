"""The chunks that training can use, as a forest, and the search for where token sequences lie in it.

A chunk is usable when it has every layer that was asked for and the chunk before it is usable. Sequences
are found by prefix digest, which is what rows depend on; token ids are read from disk only where a
sequence ends inside a chunk. Read-only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from lmcache_hs_backend.chunk import TOKEN_BYTES
from lmcache_hs_backend.dataset.index import ChunkIndex, IndexedChunk
from lmcache_hs_backend.format.chunk_forest import EXCLUDED, FIRST, ChunkForest

#: Prefix digests that are looked for inside the chunks that follow a chunk: by length, counted from its end.
Wanted = Mapping[int, Mapping[int, set[bytes]]]


class UsableForest(ChunkForest[IndexedChunk]):
    """The usable part of an index, for some layers. Chunks that are not usable are EXCLUDED."""

    def __init__(self, index: ChunkIndex, slots: Sequence[int]) -> None:
        self.index = index
        self.unusable: Counter[str] = Counter()  # chunks that are left out, by reason
        self._slots = slots
        self._lengths: dict[int, list[int]] = {}
        super().__init__(index.chunks, self._link)
        self._by_prefix = {
            (parent, index.chunks[position].prefix): position
            for position, parent in enumerate(self.parents)
            if parent != EXCLUDED
        }
        self.size = len(self.parents) - len(self.children(EXCLUDED))

    def _link(self, chunks: Sequence[IndexedChunk]) -> Iterator[int]:
        for chunk in chunks:
            missing = [slot for slot in self._slots if not chunk.has(slot)]
            if missing:
                self.unusable[f"layer {', '.join(map(str, missing))} is not stored"] += 1
                yield EXCLUDED
            elif chunk.parent != FIRST and (chunk.parent < 0 or self.parents[chunk.parent] == EXCLUDED):
                self.unusable["a chunk before it is missing or unusable"] += 1
                yield EXCLUDED
            else:
                yield chunk.parent

    def leaves(self) -> Iterator[int]:
        """Chunks that end a maximal sequence, neighbours together, in an order that depends on contents only.

        A chunk whose tokens another one, that follows the same chunk, begins with and goes beyond, ends none.
        """
        inside = self.find_inside(self._tails())
        stack = sorted(self.children(FIRST), key=self._digest, reverse=True)
        while stack:
            position = stack.pop()
            children = self.children(position)
            if children:
                stack += sorted(children, key=self._digest, reverse=True)
            elif (self.index.chunks[position].parent, self.index.chunks[position].prefix) not in inside:
                yield position

    def _digest(self, position: int) -> bytes:
        return self.index.chunks[position].prefix

    def _tails(self) -> Wanted:
        """The leaves that are shorter than another chunk after the same one: longer ones might begin with them."""
        chunks = self.index.chunks
        tails: dict[int, dict[int, set[bytes]]] = {}
        for parent, children in self._children.items():
            if parent == EXCLUDED:
                continue
            longest = max(chunks[child].num_tokens for child in children)
            for child in children:
                if chunks[child].num_tokens < longest and not self.children(child):
                    tails.setdefault(parent, {}).setdefault(chunks[child].num_tokens, set()).add(chunks[child].prefix)
        return tails

    def find_inside(self, wanted: Wanted) -> dict[tuple[int, bytes], int]:
        """Where sequences end inside a chunk: ``(chunk before, prefix digest)`` → the chunk that goes beyond.

        Reads the token ids of the chunks on the way there, each once.
        """
        found: dict[tuple[int, bytes], int] = {}
        on_the_way = {FIRST}
        for position in wanted:
            while position not in on_the_way:
                on_the_way.add(position)
                position = self.index.chunks[position].parent
        stack = [(FIRST, xxhash.xxh3_128())] if wanted else []
        while stack:
            position, digest = stack.pop()
            lengths = sorted(wanted.get(position, ()))
            for child in self.children(position):
                inside = [length for length in lengths if length < self.index.chunks[child].num_tokens]
                if not inside and child not in on_the_way:
                    continue
                ids = self.index.ids(child)
                if ids is None:
                    continue
                state, done = digest.copy(), 0
                for length in inside:
                    state.update(ids[done : length * TOKEN_BYTES])
                    done = length * TOKEN_BYTES
                    if state.digest() in wanted[position][length]:
                        found.setdefault((position, state.digest()), child)
                if child in on_the_way:
                    state.update(ids[done:])
                    stack.append((child, state))
        return found

    def prefixes(self) -> Iterator[bytes]:
        """The prefix digests of the usable chunks."""
        return (prefix for _, prefix in self._by_prefix)

    def after(self, position: int, prefix: bytes) -> int | None:
        """The usable chunk after ``position`` whose end has this prefix digest."""
        return self._by_prefix.get((position, prefix))

    def walk(self, ids: bytes) -> Walk:
        """Follow the chunks along token ids (int64 bytes) as far as whole chunks go."""
        state, position, start = xxhash.xxh3_128(), FIRST, 0
        while True:
            step = state.copy()
            best, done = None, start * TOKEN_BYTES
            for length in self._child_lengths(position):
                stop = (start + length) * TOKEN_BYTES
                if stop > len(ids):
                    break
                step.update(ids[done:stop])
                done = stop
                child = self.after(position, step.digest())
                if child is not None:
                    best = child, start + length, step.copy()
            if best is None:
                return Walk(position, start, state)
            position, start, state = best

    def _child_lengths(self, position: int) -> list[int]:
        """The different lengths of the chunks after one, ascending."""
        lengths = self._lengths.get(position)
        if lengths is None:
            lengths = sorted({self.index.chunks[child].num_tokens for child in self.children(position)})
            self._lengths[position] = lengths
        return lengths

    def longest_after(self, position: int) -> int:
        """Tokens of the longest chunk after one; 0 when nothing follows."""
        lengths = self._child_lengths(position)
        return lengths[-1] if lengths else 0


class Walk:
    """How far chunks go along a token sequence: the last chunk, the tokens up to its end, their digest state."""

    __slots__ = ("last", "state", "tokens")

    def __init__(self, last: int, tokens: int, state: xxhash.xxh3_128) -> None:
        self.last = last
        self.tokens = tokens
        self.state = state
