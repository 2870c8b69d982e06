"""``lmcache-hs-inspect tree``: which prefixes the sequences share."""

from __future__ import annotations

import argparse
from typing import Any

from lmcache_hs_backend.cli.chunks import (
    Chunks,
    add_path_arguments,
    load_tokenizer,
    namespaces_of,
    open_path,
    skipped_text,
)
from lmcache_hs_backend.cli.coldpath import Unreadable, read_head
from lmcache_hs_backend.cli.console import CommandError, Screen, add_output_options, bytes_text, printable
from lmcache_hs_backend.cli.forest import Forest, Node, grow, largest_first

HELP = "show prefixes as a tree, with tokens and bytes of each branch"
EXAMPLE = """\
A branch is a run of chunks that all the sequences below it share; the largest come first.

examples:
  lmcache-hs-inspect tree /mnt/nvme/hs
  lmcache-hs-inspect tree --config lmcache.yaml --depth 3 --width 5 --tokenizer /models/Qwen3-8B
"""

_SHOWN_TOKENS = 8
_SHOWN_TEXT = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path_arguments(parser)
    parser.add_argument("--namespace", metavar="PREFIX", help="only namespaces whose directory begins with PREFIX")
    parser.add_argument("--depth", metavar="N", type=int, default=4, help="branches below each other (default: 4)")
    parser.add_argument("--width", metavar="N", type=int, default=8, help="branches beside each other (default: 8)")
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with a tokenizer.json: show text, not token ids")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    for option in ("depth", "width"):
        if getattr(args, option) < 1:
            raise CommandError(f"--{option} is {getattr(args, option)}, but must be at least 1")
    where = open_path(args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    namespaces = namespaces_of(where, args.namespace)
    chunks = Chunks(where.cold_path, namespaces)
    view = _View(args.depth, args.width, tokenizer)
    forests = grow(chunks.read(), namespaces)
    with Screen(args) as screen:
        if screen.json:
            trees = [{"namespace": f.namespace.label, **view.branches(f.roots, 1)} for f in forests]
            screen.dump({"cold_path": where.cold_path.path, "trees": trees, "skipped": dict(chunks.skipped)})
            return 0
        for forest in forests:
            screen.show(_title(forest), style="bold")
            _print(screen, view.branches(forest.roots, 1), "")
        if chunks.skipped:
            screen.show(skipped_text(chunks.skipped), style="yellow")
    return 0


class _View:
    """Turns the forest into what is shown of it."""

    def __init__(self, depth: int, width: int, tokenizer: Any) -> None:
        self._depth = depth
        self._width = width
        self._tokenizer = tokenizer

    def branches(self, nodes: list[Node], depth: int) -> dict[str, Any]:
        """The largest of sibling nodes, and a summary of the rest."""
        shown, rest = nodes[: self._width], nodes[self._width :]
        result: dict[str, Any] = {"branches": [self._branch(node, depth) for node in shown]}
        if rest:
            result["more"] = _figures(rest, len(rest))
        return result

    def _branch(self, first: Node, depth: int) -> dict[str, Any]:
        run = [first]
        while len(run[-1].children) == 1:
            run.append(run[-1].children[0])
        last = run[-1]
        branch: dict[str, Any] = {
            "chunk_hash": first.chunk_hash,
            "start": first.start,
            "end": last.end,
            "chunks": len(run),
            "bytes": sum(node.nbytes for node in run),
            "sequences": first.sequences,
            "text": self._text(first),
        }
        if first.start and first.parent is None:
            branch["orphan"] = True
        if last.children and depth < self._depth:
            branch |= self.branches(largest_first(last.children), depth + 1)
        elif last.children:
            branch["more"] = _figures(last.children, len(last.children))
        return branch

    def _text(self, node: Node) -> str:
        """How the branch begins: read now, because few branches are shown."""
        try:
            head, _ = read_head(node.path)
        except (OSError, Unreadable):
            return ""
        ids = list(memoryview(head.token_ids).cast("q")[: _SHOWN_TEXT if self._tokenizer else _SHOWN_TOKENS])
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))[:_SHOWN_TEXT]


def _figures(nodes: list[Node], count: int) -> dict[str, int]:
    return {
        "branches": count,
        "chunks": sum(node.chunks_below for node in nodes),
        "tokens": sum(node.tokens_below for node in nodes),
        "bytes": sum(node.bytes_below for node in nodes),
        "sequences": sum(node.sequences for node in nodes),
    }


def _title(forest: Forest) -> str:
    stored, whole = forest.stored_tokens, forest.sequence_tokens
    name = f"{printable(forest.namespace.label)} ({printable(forest.namespace.model)})"
    return f"{name}: {stored:,} tokens for sequences of {whole:,}, dedup factor {whole / stored:.2f}"


def _print(screen: Screen, level: dict[str, Any], indent: str) -> None:
    entries = level.get("branches", [])
    more = level.get("more")
    for number, branch in enumerate(entries):
        is_last = number == len(entries) - 1 and not more
        shared = f", shared by {branch['sequences']:,} sequences" if branch["sequences"] > 1 else ""
        orphan = ", parent not here" if branch.get("orphan") else ""
        line = (
            f"tokens {branch['start']:,} to {branch['end']:,} ({branch['chunks']:,} chunks, "
            f"{bytes_text(branch['bytes'])}{shared}{orphan})  {branch['chunk_hash'][:12]}  "
            f"{printable(branch['text'])!r}"
        )
        screen.show(indent + ("└─ " if is_last else "├─ ") + line)
        _print(screen, branch, indent + ("   " if is_last else "│  "))
    if more:
        screen.show(
            f"{indent}└─ {more['branches']:,} more: {more['sequences']:,} sequences, {more['tokens']:,} tokens, "
            f"{bytes_text(more['bytes'])}"
        )
