"""The chunks of one namespace, or of one model in several places, as a forest, with what is in each branch.

Links are taken as the headers give them, without comparing digests: ``verify`` does that. Keeps a few numbers per
chunk, so that 100,000 chunks take some tens of megabytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.cli.inspect.stream import ReadableChunk
from lmcache_hs_backend.dataset.index import model_label
from lmcache_hs_backend.format.chunk_forest import FIRST, MISSING, ChunkForest, by_hash
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.url_files import is_url


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
    prefix: bytes = b""  # only where chunks of several places are put together
    sources: tuple[int, ...] = ()  # those that have it, each once, where there are several

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.start + self.tokens


def node_of(chunk: ReadableChunk, source: int = 0) -> Node:
    """A chunk without its header. ``source``: the number of the place that it is in, to be put together with others."""
    meta, file = chunk.header.meta, chunk.file
    node = Node(
        meta.chunk_hash, meta.parent, meta.start, meta.num_tokens, file.size, file.path, file.mtime_ns, chunk.state
    )
    return node._replace(prefix=meta.prefix, sources=(source,)) if source else node


class PrefixForest(ChunkForest[Node]):
    """Chunks, linked.

    Attributes:
        sequences: For each chunk how many sequences it is part of: the ends of chains below it.
        chunks_below, tokens_below, bytes_below: What a branch holds, its first chunk included.
        chain_tokens: From the first chunk of the chain that is here to the end of this one.
    """

    def __init__(self, nodes: Sequence[Node], link: Callable[[Sequence[Node]], Iterable[int]]) -> None:
        """``nodes``: by their start."""
        super().__init__(nodes, link)
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


class NamespaceForest(PrefixForest):
    """The chunks of a namespace."""

    def __init__(self, namespace: NamespaceDirectory, nodes: Iterable[Node]) -> None:
        super().__init__(sorted(nodes, key=lambda node: node.start), by_hash)
        self.namespace = namespace


def grow(chunks: Iterable[ReadableChunk], namespaces: Iterable[NamespaceDirectory]) -> list[NamespaceForest]:
    """The forests of all namespaces that have chunks."""
    nodes: dict[str, list[Node]] = defaultdict(list)
    for chunk in chunks:
        nodes[chunk.namespace.directory].append(node_of(chunk))
    return [NamespaceForest(each, nodes[each.directory]) for each in namespaces if each.directory in nodes]


# -- several places ---------------------------------------------------------------------------------------


class MergedForest(PrefixForest):
    """The chunks of one model in all places, each once, as an extraction puts them together.

    Two files are the same chunk when tokens and prefix digest are equal, whatever the keys say. A node is then that of
    the nearest file, with the bytes of all files.

    Attributes:
        model: Its name.
        label: The model with what else must be equal for rows to go together.
        files: How many there are.
    """

    def __init__(self, label: str, model: str, found: Iterable[tuple[NamespaceDirectory, Iterable[Node]]]) -> None:
        self.model = model
        self.label = label
        self.files = 0
        spaces: dict[tuple[Any, ...], int] = {}
        same: dict[tuple[int, bytes, int], list[tuple[int, Node]]] = defaultdict(list)
        for namespace, nodes in found:
            space = spaces.setdefault(_hash_space(namespace), len(spaces))
            for node in nodes:
                same[node.start, node.prefix, node.tokens].append((space, node))
                self.files += 1
        order = sorted(same)
        super().__init__(
            [_merged([node for _, node in same[identity]]) for identity in order],
            lambda nodes: _by_any_hash(nodes, [same[identity] for identity in order]),
        )


def merge(namespaces: Iterable[NamespaceDirectory], nodes: dict[str, list[Node]]) -> list[MergedForest]:
    """The forests of all models that have chunks, in the order of their first namespaces.

    Args:
        namespaces: Those of all places.
        nodes: By the directory of the namespace; with prefix and source.
    """
    groups: dict[tuple[str, Any], list[NamespaceDirectory]] = defaultdict(list)
    for namespace in namespaces:
        if nodes.get(namespace.directory):
            groups[model_label(namespace.record), namespace.record.get("chunk_size")].append(namespace)
    sizes = Counter(label for label, _ in groups)
    return [
        MergedForest(
            f"{label}, chunks of {size} tokens" if sizes[label] > 1 else label,
            group[0].model,
            ((each, nodes[each.directory]) for each in group),
        )
        for (label, size), group in groups.items()
    ]


def _merged(nodes: list[Node]) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    nearest = min(nodes, key=lambda node: is_url(node.path))
    return nearest._replace(
        nbytes=sum(node.nbytes for node in nodes),
        used_ns=max(node.used_ns for node in nodes),
        sources=tuple(sorted({source for node in nodes for source in node.sources})),
    )


def _by_any_hash(nodes: Sequence[Node], files: Sequence[Sequence[tuple[int, Node]]]) -> Iterator[int]:
    """Parents as one of the files of a chunk names them, by hashes of the place that the file is from."""
    ends: dict[tuple[int, str, int], int] = {}
    for position, node in enumerate(nodes):
        if node.start == 0:
            yield FIRST
        else:
            named = (ends.get((space, file.parent_hash, node.start)) for space, file in files[position])
            yield next((parent for parent in named if parent is not None), MISSING)
        for space, file in files[position]:
            ends.setdefault((space, file.chunk_hash, node.end), position)


def _hash_space(namespace: NamespaceDirectory) -> tuple[Any, ...]:
    """What must be equal for hashes to mean the same; ranks hash alike."""
    return tuple(sorted((k, str(v)) for k, v in namespace.record.items() if k not in ("worker_id", "world_size")))
