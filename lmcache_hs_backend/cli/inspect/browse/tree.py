"""``lmcache-hs-inspect tree``: which prefixes the sequences share."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.arguments import at_least
from lmcache_hs_backend.cli.console import Output, add_output_options, bytes_text, printable
from lmcache_hs_backend.cli.inspect.nodes import (
    MergedForest,
    NamespaceForest,
    Node,
    PrefixForest,
    grow,
    merge,
    node_of,
)
from lmcache_hs_backend.cli.inspect.opened_paths import Sources, add_path_arguments, open_paths
from lmcache_hs_backend.cli.inspect.selection import load_tokenizer, namespaces_of
from lmcache_hs_backend.cli.inspect.stream import ChunkStreams, skipped_text
from lmcache_hs_backend.format.chunk_file import read_header
from lmcache_hs_backend.format.header import BadChunk

HELP = "show prefixes as a tree, with tokens and bytes of each branch"
EXAMPLE = """\
A branch is a run of chunks that all the sequences below it share; the largest come first. Of several cold paths and
URLs, the chunks of a model make one tree, each once; a branch says which of them have it, and its bytes are those of
all its files.

examples:
  lmcache-hs-inspect tree /mnt/nvme/hs
  lmcache-hs-inspect tree /mnt/nvme/hs /data/node7/hs s3://my-bucket/hs
  lmcache-hs-inspect tree --config lmcache.yaml --depth 3 --width 5 --tokenizer /models/Qwen3-8B
"""

_SHOWN_TOKENS = 8
_SHOWN_TEXT = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``tree``."""
    add_path_arguments(parser, several=True)
    parser.add_argument("--namespace", metavar="PREFIX", help="only namespaces whose directory begins with PREFIX")
    parser.add_argument(
        "--depth", metavar="N", type=at_least(1), default=4, help="branches below each other (default: 4)"
    )
    parser.add_argument(
        "--width", metavar="N", type=at_least(1), default=8, help="branches beside each other (default: 8)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with a tokenizer.json: show text, not token ids")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Show the chunks of each namespace as a tree, or of each model in several cold paths; the exit status."""
    sources = open_paths(args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    namespaces = namespaces_of(sources.readers, args.namespace)
    chunks = ChunkStreams(sources.readers, namespaces)
    forests: Sequence[NamespaceForest | MergedForest]
    if sources.several:
        nodes: dict[str, list[Node]] = defaultdict(list)
        for chunk in chunks.read():
            nodes[chunk.namespace.directory].append(node_of(chunk, sources.number(chunk.namespace)))
        forests = merge(namespaces, nodes)
    else:
        forests = grow(chunks.read(), namespaces)
    with Output(args) as output:
        if output.json:
            trees = [{**_name(each), **_TreeView(each, sources, args, tokenizer).whole()} for each in forests]
            output.dump({**sources.head(), "trees": trees, "skipped": dict(chunks.skipped)})
            return sources.status(exit_status.DONE)
        sources.legend(output)
        for forest in forests:
            view = _TreeView(forest, sources, args, tokenizer)
            output.show(_title(forest), style="bold")
            _print(output, view.whole(), "", lambda held, chunks: _held_text(sources, output, held, chunks))
        if chunks.skipped:
            output.show(skipped_text(chunks.skipped), style="yellow")
        for text in sources.missing():
            output.show(text, style="yellow")
    return sources.status(exit_status.DONE)


class _TreeView:
    """Turns a forest into what is shown of it."""

    def __init__(self, forest: PrefixForest, sources: Sources, args: argparse.Namespace, tokenizer: Any) -> None:
        self.forest = forest
        self._sources = sources
        self._depth = args.depth
        self._width = args.width
        self._tokenizer = tokenizer

    def whole(self) -> dict[str, Any]:
        """From the roots on."""
        return self._branches(self.forest.roots, 1)

    def _branches(self, positions: Sequence[int], depth: int) -> dict[str, Any]:
        """The largest of sibling branches, and a summary of the rest."""
        shown, rest = positions[: self._width], positions[self._width :]
        result: dict[str, Any] = {"branches": [self._branch(position, depth) for position in shown]}
        if rest:
            result["more"] = self._figures(rest)
        return result

    def _branch(self, first: int, depth: int) -> dict[str, Any]:
        forest = self.forest
        run = [first]
        while len(children := forest.children(run[-1])) == 1:
            run.append(children[0])
        node = forest.chunks[first]
        branch: dict[str, Any] = {
            "chunk_hash": node.chunk_hash,
            "start": node.start,
            "end": forest.chunks[run[-1]].end,
            "chunks": len(run),
            "bytes": sum(forest.chunks[position].nbytes for position in run),
            "sequences": forest.sequences[first],
            "text": self._text(node.path),
        }
        if self._sources.several:
            held = Counter(number for position in run for number in forest.chunks[position].sources)
            branch["sources"] = {self._sources.readers[number - 1].cold_path: held[number] for number in sorted(held)}
        if node.start and forest.parents[first] < 0:
            branch["orphan"] = True
        if children and depth < self._depth:
            branch |= self._branches(forest.largest_first(children), depth + 1)
        elif children:
            branch["more"] = self._figures(children)
        return branch

    def _text(self, path: str) -> str:
        """How the branch begins: read now, because few branches are shown."""
        try:
            header = read_header(self._sources.files, path)
        except (OSError, BadChunk):
            return ""
        ids = list(memoryview(header.token_ids).cast("q")[: _SHOWN_TEXT if self._tokenizer else _SHOWN_TOKENS])
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))[:_SHOWN_TEXT]

    def _figures(self, positions: Sequence[int]) -> dict[str, int]:
        forest = self.forest
        return {
            "branches": len(positions),
            "chunks": sum(forest.chunks_below[at] for at in positions),
            "tokens": sum(forest.tokens_below[at] for at in positions),
            "bytes": sum(forest.bytes_below[at] for at in positions),
            "sequences": sum(forest.sequences[at] for at in positions),
        }


def _name(forest: NamespaceForest | MergedForest) -> dict[str, Any]:
    if isinstance(forest, NamespaceForest):
        return {"namespace": forest.namespace.label}
    return {"model": forest.label, "chunks": len(forest.chunks), "files": forest.files}


def _title(forest: NamespaceForest | MergedForest) -> str:
    stored, whole = forest.stored_tokens, forest.sequence_tokens
    if isinstance(forest, NamespaceForest):
        name = f"{printable(forest.namespace.label)} ({printable(forest.namespace.model)})"
    else:
        name = f"{printable(forest.label)} ({len(forest.chunks):,} chunks in {forest.files:,} files)"
    return f"{name}: {stored:,} tokens for sequences of {whole:,}, dedup factor {whole / stored:.2f}"


def _held_text(sources: Sources, output: Output, held: dict[str, int], chunks: int) -> str:
    """Which sources have a branch: ``  in 1, 2``, or how much of it: ``  in 1, 2 (3 of 5)``."""
    names = [
        sources.name(source, output) + ("" if count == chunks else f" ({count:,} of {chunks:,})")
        for source, count in held.items()
    ]
    return f"  in {', '.join(names)}"


def _print(output: Output, level: dict[str, Any], indent: str, held_text: Callable[[dict[str, int], int], str]) -> None:
    entries = level.get("branches", [])
    more = level.get("more")
    for number, branch in enumerate(entries):
        is_last = number == len(entries) - 1 and not more
        held = held_text(branch["sources"], branch["chunks"]) if "sources" in branch else ""
        shared = f", shared by {branch['sequences']:,} sequences" if branch["sequences"] > 1 else ""
        orphan = ", parent not here" if branch.get("orphan") else ""
        what = f"{branch['chunks']:,} chunks, {bytes_text(branch['bytes'])}{shared}{orphan}"
        line = f"{branch['chunk_hash'][:12]}{held}  tokens {branch['start']:,} to {branch['end']:,} ({what})"
        output.line(f"{indent}{'└─ ' if is_last else '├─ '}{line}  {printable(branch['text'])!r}")
        _print(output, branch, indent + ("   " if is_last else "│  "), held_text)
    if more:
        output.line(
            f"{indent}└─ {more['branches']:,} more: {more['sequences']:,} sequences, {more['tokens']:,} tokens, "
            f"{bytes_text(more['bytes'])}"
        )
