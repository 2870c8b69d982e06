"""The chunks of one namespace as a forest: which continues which, and what lies below each.

Links are taken as the headers tell them (chunk hash and parent), without comparing digests: ``verify``
does that. Keeps a few numbers per chunk, so that 100,000 chunks take some tens of megabytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_hs_backend.cli.chunks import Chunk
from lmcache_hs_backend.cli.coldpath import Namespace


@dataclass(slots=True)
class Node:
    """One chunk. The ``below`` figures include the node itself; ``sequences`` counts the ends of chains."""

    chunk_hash: str
    parent_hash: str
    start: int
    tokens: int
    nbytes: int
    path: str
    used_ns: int
    state: str
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    chain_tokens: int = 0  # from the first chunk of the chain that is here to the end of this one
    sequences: int = 0
    tokens_below: int = 0
    bytes_below: int = 0
    chunks_below: int = 0

    @property
    def end(self) -> int:
        return self.start + self.tokens


class Forest:
    """The chunks of a namespace, linked."""

    def __init__(self, namespace: Namespace, nodes: list[Node]) -> None:
        self.namespace = namespace
        self.nodes = sorted(nodes, key=lambda node: node.start)
        ends: dict[tuple[str, int], Node] = {}
        for node in self.nodes:  # a parent starts before its children, so it is linked by now
            node.parent = ends.get((node.parent_hash, node.start)) if node.parent_hash else None
            node.chain_tokens = node.tokens
            if node.parent is not None:
                node.parent.children.append(node)
                node.chain_tokens += node.parent.chain_tokens
            ends.setdefault((node.chunk_hash, node.end), node)
        for node in reversed(self.nodes):
            node.sequences = sum(child.sequences for child in node.children) or 1
            node.tokens_below = node.tokens + sum(child.tokens_below for child in node.children)
            node.bytes_below = node.nbytes + sum(child.bytes_below for child in node.children)
            node.chunks_below = 1 + sum(child.chunks_below for child in node.children)

    @property
    def roots(self) -> list[Node]:
        """First chunks, and chunks whose parent is not here, largest branch first."""
        return largest_first(node for node in self.nodes if node.parent is None)

    @property
    def stored_tokens(self) -> int:
        return sum(node.tokens for node in self.nodes)

    @property
    def sequence_tokens(self) -> int:
        """Tokens that the sequences would take if each had its own copy."""
        return sum(node.chain_tokens for node in self.nodes if not node.children)


def largest_first(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (-node.bytes_below, node.chunk_hash))


def node_of(chunk: Chunk) -> Node:
    """What the forest keeps of a chunk."""
    head, file = chunk.head, chunk.file
    return Node(
        head.chunk_hash, head.parent, head.start, head.num_tokens, file.size, file.path, file.mtime_ns, chunk.state
    )


def grow(chunks: Iterable[Chunk], namespaces: Iterable[Namespace]) -> list[Forest]:
    """The forests of all namespaces that have chunks."""
    nodes: dict[str, list[Node]] = defaultdict(list)
    for chunk in chunks:
        nodes[chunk.namespace.directory].append(node_of(chunk))
    return [Forest(each, nodes[each.directory]) for each in namespaces if each.directory in nodes]
