"""``lmcache-hs-inspect show``: everything about one chunk."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from lmcache_hs_backend.cli.chunks import (
    Chunk,
    Chunks,
    Place,
    Where,
    add_path_arguments,
    load_tokenizer,
    look_at,
    namespaces_of,
    open_path,
)
from lmcache_hs_backend.cli.coldpath import Named
from lmcache_hs_backend.cli.console import CommandError, Screen, add_output_options, bytes_text, printable
from lmcache_hs_backend.cli.forest import Forest, Node, grow, largest_first

HELP = "show one chunk: metadata, chain, tokens, and figures of every layer's rows"
EXAMPLE = """\
CHUNK is the beginning of a chunk hash or of a file's name, as long as only one chunk begins so.

example:
  lmcache-hs-inspect show 9132a2d2 /mnt/nvme/hs --tokenizer /models/Qwen3-8B
"""

_SHOWN_BRANCHES = 10
_SHOWN_IDS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chunk", metavar="CHUNK", help="the beginning of a chunk hash or of a file's name")
    add_path_arguments(parser)
    parser.add_argument("--namespace", metavar="PREFIX", help="look only in namespaces that begin with PREFIX")
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with a tokenizer.json, to show tokens as text")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    where = open_path(args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    node, forest = _find(where, args)
    name = bytes.fromhex(os.path.basename(node.path).split(".")[0])
    chunk = look_at(Place(forest.namespace, node.state, Named(node.path, name)))
    if isinstance(chunk, str):
        raise CommandError(f"{node.path} cannot be read any more: {chunk}")
    from lmcache_hs_backend.cli.rows import layer_figures  # takes torch along

    layers = layer_figures(chunk)
    with Screen(args) as screen:
        if screen.json:
            screen.dump(_as_json(chunk, node, layers, tokenizer))
        else:
            _print(screen, chunk, node, layers, tokenizer)
    return 0


def _find(where: Where, args: argparse.Namespace) -> tuple[Node, Forest]:
    """The one chunk that is meant. Raises CommandError when it is none, or more than one."""
    wanted = args.chunk.removesuffix(".safetensors")
    namespaces = namespaces_of(where, args.namespace)
    forests = grow(Chunks(where.cold_path, namespaces).read(), namespaces)
    found = [
        (node, forest)
        for forest in forests
        for node in forest.nodes
        if node.chunk_hash.startswith(wanted) or os.path.basename(node.path).startswith(wanted)
    ]
    if not found:
        raise CommandError(f"no chunk in {where.cold_path.path} begins with {args.chunk}")
    if len(found) > 1:
        some = ", ".join(f"{node.chunk_hash} in {forest.namespace.label}" for node, forest in found[:4])
        raise CommandError(f"{len(found)} chunks begin with {args.chunk}: {some}{' …' if len(found) > 4 else ''}")
    return found[0]


def _chain(node: Node) -> list[Node]:
    """From the first chunk that is here down to the node."""
    chain = [node]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    return chain[::-1]


def _ids(chunk: Chunk) -> list[int]:
    return list(memoryview(chunk.head.token_ids).cast("q"))


def _decoded(chunk: Chunk, tokenizer: Any) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode(_ids(chunk), skip_special_tokens=False))


def _as_json(chunk: Chunk, node: Node, layers: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    chain = _chain(node)
    return {
        **chunk.record(),
        "prefix": chunk.head.prefix.hex(),
        "capture": _capture(chunk),
        "layer_figures": layers,
        "chain": [_step(each) for each in chain],
        "chain_is_complete": chain[0].start == 0,
        "branches": [
            {**_step(child), "sequences": child.sequences, "chunks_below": child.chunks_below}
            for child in largest_first(node.children)
        ],
        "token_ids": _ids(chunk),
        "text": _decoded(chunk, tokenizer),
    }


def _step(node: Node) -> dict[str, Any]:
    return {"chunk_hash": node.chunk_hash, "start": node.start, "num_tokens": node.tokens, "path": node.path}


def _capture(chunk: Chunk) -> Any:
    try:
        return json.loads(chunk.head.capture)
    except ValueError:
        return chunk.head.capture


def _print(screen: Screen, chunk: Chunk, node: Node, layers: list[dict[str, Any]], tokenizer: Any) -> None:
    record = {**chunk.record(), "prefix": chunk.head.prefix.hex(), "capture": chunk.head.capture}
    for name in ("layers", "dtype", "hidden_dim"):
        del record[name]  # the table below has them
    record["bytes"] = f"{record['bytes']:,} ({bytes_text(record['bytes'])})"
    for name, value in record.items():
        screen.show(f"{name:11} {printable(str(value)) or '-'}")
    screen.show("")
    screen.table(
        (">layer", "dtype", "shape", ">mean", ">std", "row norms: min, 5, 50, 95 %, max", ">not finite", "checksum"),
        [
            (
                str(each["layer"]), each["dtype"], "×".join(map(str, each["shape"])), f"{each['mean']:.4g}",
                f"{each['std']:.4g}", ", ".join(f"{norm:.4g}" for norm in each["norm_quantiles"].values()),
                f"{each['non_finite']:,}", "ok" if each["checksum_ok"] else "WRONG",
            )
            for each in layers
        ],
    )  # fmt: skip
    chain = _chain(node)
    screen.show("")
    missing = "" if chain[0].start == 0 else f"; the {chain[0].start:,} tokens in front are not here"
    screen.show(f"chain: {len(chain):,} chunks, {node.chain_tokens:,} tokens up to and with this one{missing}")
    for each in chain[-_SHOWN_BRANCHES:]:
        screen.show(f"  {each.start:>9,}  {each.tokens:>6,} tokens  {printable(each.chunk_hash)}")
    screen.show(f"below: {len(node.children):,} branches, {node.chunks_below - 1:,} chunks")
    for child in largest_first(node.children)[:_SHOWN_BRANCHES]:
        below = f"{child.chunks_below:,} chunks, {child.sequences:,} sequences"
        screen.show(f"  {child.start:>9,}  {child.tokens:>6,} tokens  {printable(child.chunk_hash)}  ({below})")
    text = _decoded(chunk, tokenizer)
    if text is not None:
        screen.show(f"text: {printable(text)}")
    else:
        ids = _ids(chunk)
        dots = " …" if len(ids) > _SHOWN_IDS else ""
        screen.show(f"token ids: {' '.join(map(str, ids[:_SHOWN_IDS]))}{dots}")
