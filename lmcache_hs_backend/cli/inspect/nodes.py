"""The chunks of one namespace as a forest, with what is in each branch.

Links are taken as the headers give them, without comparing digests: ``verify`` does that. Keeps a few numbers per
chunk, so that 100,000 chunks take some tens of megabytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from lmcache_hs_backend.cli.inspect.stream import ReadableChunk
from lmcache_hs_backend.format.chunk_forest import ChunkForest, by_hash
from lmcache_hs_backend.format.namespace import NamespaceDirectory


class Node(NamedTuple):
    """What the forest keeps of a chunk."""

    chunk_hash: str
    parent_hash: str
    start: int
    tokens: int
    nbytes: int
    path: str
    used_ns: int
    state: str

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.start + self.tokens


def node_of(chunk: ReadableChunk) -> Node:
    """A chunk without its header."""
    meta, file = chunk.header.meta, chunk.file
    return Node(
        meta.chunk_hash, meta.parent, meta.start, meta.num_tokens, file.size, file.path, file.mtime_ns, chunk.state
    )


class NamespaceForest(ChunkForest[Node]):
    """The chunks of a namespace, linked.

    Attributes:
        sequences: For each chunk how many sequences it is part of: the ends of chains below it.
        chunks_below, tokens_below, bytes_below: What a branch holds, its first chunk included.
        chain_tokens: From the first chunk of the chain that is here to the end of this one.
    """

    def __init__(self, namespace: NamespaceDirectory, nodes: Iterable[Node]) -> None:
        super().__init__(sorted(nodes, key=lambda node: node.start), by_hash)
        self.namespace = namespace
        self.sequences = self.below(int(self.is_end(position)) for position in range(len(self.chunks)))
        self.chunks_below = self.below(1 for _ in self.chunks)
        self.tokens_below = self.below(node.tokens for node in self.chunks)
        self.bytes_below = self.below(node.nbytes for node in self.chunks)
        self.chain_tokens = self.above(node.tokens for node in self.chunks)

    @property
    def roots(self) -> list[int]:
        """First chunks, and chunks whose parent is not here, largest branch first."""
        return self.largest_first(position for position, parent in enumerate(self.parents) if parent < 0)

    @property
    def stored_tokens(self) -> int:
        """Tokens of all chunks, each counted once."""
        return sum(node.tokens for node in self.chunks)

    @property
    def sequence_tokens(self) -> int:
        """Tokens that the sequences would take if each had its own copy."""
        return sum(self.chain_tokens[position] for position in self.ends())

    def largest_first(self, positions: Iterable[int]) -> list[int]:
        """Branches by their bytes."""
        return sorted(positions, key=lambda at: (-self.bytes_below[at], self.chunks[at].chunk_hash))


def grow(chunks: Iterable[ReadableChunk], namespaces: Iterable[NamespaceDirectory]) -> list[NamespaceForest]:
    """The forests of all namespaces that have chunks."""
    nodes: dict[str, list[Node]] = defaultdict(list)
    for chunk in chunks:
        nodes[chunk.namespace.directory].append(node_of(chunk))
    return [NamespaceForest(each, nodes[each.directory]) for each in namespaces if each.directory in nodes]
