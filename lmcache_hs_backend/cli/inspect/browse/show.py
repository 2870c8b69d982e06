"""``lmcache-hs-inspect show``: everything about one chunk."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.console import CommandError, Output, add_output_options, bytes_text, printable
from lmcache_hs_backend.cli.inspect.nodes import NamespaceForest, grow
from lmcache_hs_backend.cli.inspect.opened_paths import OpenedColdPath, add_path_arguments, open_path
from lmcache_hs_backend.cli.inspect.selection import load_tokenizer, namespaces_of
from lmcache_hs_backend.cli.inspect.stream import ChunkStream, ReadableChunk, look_at
from lmcache_hs_backend.format.layout import ChunkPath
from lmcache_hs_backend.format.reader import Place

HELP = "show one chunk: metadata, chain, tokens, and figures of every layer's rows"
EXAMPLE = """\
CHUNK is the beginning of a chunk hash or of a file's name, as long as only one chunk begins so. Exit status 1 when a
layer's rows do not match their checksum, as with verify.

example:
  lmcache-hs-inspect show 9132a2d2 /mnt/nvme/hs --tokenizer /models/Qwen3-8B
"""

_SHOWN_BRANCHES = 10
_SHOWN_IDS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``show``."""
    parser.add_argument("chunk", metavar="CHUNK", help="the beginning of a chunk hash or of a file's name")
    add_path_arguments(parser)
    parser.add_argument("--namespace", metavar="PREFIX", help="look only in namespaces that begin with PREFIX")
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with a tokenizer.json, to show tokens as text")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Show one chunk; the exit status."""
    if args.cold_path is not None and _is_place(args.chunk) and not _is_place(args.cold_path):
        args.chunk, args.cold_path = args.cold_path, args.chunk  # the order of every other command
    opened = open_path(args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    forest, position = _find(opened, args)
    node = forest.chunks[position]
    name = bytes.fromhex(os.path.basename(node.path).split(".")[0])
    chunk = look_at(opened.reader.files, Place(forest.namespace, node.state, ChunkPath(node.path, name)))
    if isinstance(chunk, str):
        raise CommandError(f"{node.path} cannot be read any more: {chunk}")
    from lmcache_hs_backend.cli.inspect.row_figures import layer_figures  # imports torch

    layers = layer_figures(opened.reader.files, chunk)
    with Output(args) as output:
        if output.json:
            output.dump(_as_json(chunk, forest, position, layers, tokenizer))
        else:
            _print(output, chunk, forest, position, layers, tokenizer)
    return exit_status.DONE if all(layer["checksum_ok"] for layer in layers) else exit_status.FINDING


def _is_place(text: str) -> bool:
    return "://" in text or os.path.isdir(text)


def _find(opened: OpenedColdPath, args: argparse.Namespace) -> tuple[NamespaceForest, int]:
    """The one chunk that is meant. Raises CommandError when it is none, or more than one."""
    wanted = args.chunk.removesuffix(".safetensors")
    namespaces = namespaces_of([opened.reader], args.namespace)
    found = [
        (forest, position)
        for forest in grow(ChunkStream(opened.reader, namespaces).read(), namespaces)
        for position, node in enumerate(forest.chunks)
        if node.chunk_hash.startswith(wanted) or os.path.basename(node.path).startswith(wanted)
    ]
    if not found:
        raise CommandError(f"no chunk in {opened.reader.cold_path} begins with {args.chunk}")
    if len(found) > 1:
        some = ", ".join(f"{forest.chunks[at].chunk_hash} in {forest.namespace.label}" for forest, at in found[:4])
        raise CommandError(f"{len(found)} chunks begin with {args.chunk}: {some}{' …' if len(found) > 4 else ''}")
    return found[0]


def _ids(chunk: ReadableChunk) -> list[int]:
    return list(memoryview(chunk.header.token_ids).cast("q"))


def _decoded(chunk: ReadableChunk, tokenizer: Any) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode(_ids(chunk), skip_special_tokens=False))


def _as_json(
    chunk: ReadableChunk, forest: NamespaceForest, position: int, layers: list[dict[str, Any]], tokenizer: Any
) -> dict[str, Any]:
    chain = forest.chain(position)
    return {
        **chunk.record(),
        "prefix": chunk.header.meta.prefix.hex(),
        "capture": _capture(chunk),
        "layer_figures": layers,
        "chain": [_step(forest, at) for at in chain],
        "chain_is_complete": forest.chunks[chain[0]].start == 0,
        "branches": [
            {**_step(forest, at), "sequences": forest.sequences[at], "chunks_below": forest.chunks_below[at]}
            for at in forest.largest_first(forest.children(position))
        ],
        "token_ids": _ids(chunk),
        "text": _decoded(chunk, tokenizer),
    }


def _step(forest: NamespaceForest, position: int) -> dict[str, Any]:
    node = forest.chunks[position]
    return {"chunk_hash": node.chunk_hash, "start": node.start, "num_tokens": node.tokens, "path": node.path}


def _capture(chunk: ReadableChunk) -> Any:
    try:
        return json.loads(chunk.header.meta.capture)
    except ValueError:
        return chunk.header.meta.capture


def _print(
    output: Output,
    chunk: ReadableChunk,
    forest: NamespaceForest,
    position: int,
    layers: list[dict[str, Any]],
    tokenizer: Any,
) -> None:
    meta = chunk.header.meta
    record = {**chunk.record(), "prefix": meta.prefix.hex(), "capture": meta.capture}
    for name in ("layers", "dtype", "hidden_dim"):
        del record[name]  # the table below has them
    record["bytes"] = f"{record['bytes']:,} ({bytes_text(record['bytes'])})"
    for name, value in record.items():
        output.show(f"{name:11} {printable(str(value)) or '-'}")
    output.show("")
    output.table(
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
    chain = forest.chain(position)
    first = forest.chunks[chain[0]].start
    output.show("")
    missing = f"; the {first:,} tokens in front are not here" if first else ""
    tokens = forest.chain_tokens[position]
    output.show(f"chain: {len(chain):,} chunks, {tokens:,} tokens up to and with this one{missing}")
    for node in (forest.chunks[at] for at in chain[-_SHOWN_BRANCHES:]):
        output.show(f"  {node.start:>9,}  {node.tokens:>6,} tokens  {printable(node.chunk_hash)}")
    children = forest.children(position)
    output.show(f"below: {len(children):,} branches, {forest.chunks_below[position] - 1:,} chunks")
    for at in forest.largest_first(children)[:_SHOWN_BRANCHES]:
        child = forest.chunks[at]
        below = f"{forest.chunks_below[at]:,} chunks, {forest.sequences[at]:,} sequences"
        output.show(f"  {child.start:>9,}  {child.tokens:>6,} tokens  {printable(child.chunk_hash)}  ({below})")
    text = _decoded(chunk, tokenizer)
    if text is not None:
        output.show(f"text: {printable(text)}")
    else:
        ids = _ids(chunk)
        dots = " …" if len(ids) > _SHOWN_IDS else ""
        output.show(f"token ids: {' '.join(map(str, ids[:_SHOWN_IDS]))}{dots}")
