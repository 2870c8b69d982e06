"""``lmcache-hs-inspect list``: the chunks of a cold path, one a line."""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.arguments import at_least
from lmcache_hs_backend.cli.console import Output, add_output_options, bytes_text, printable, shortened, time_text
from lmcache_hs_backend.cli.inspect.selection import (
    OpenedColdPath,
    add_filter_arguments,
    add_path_arguments,
    choose,
    open_path,
)
from lmcache_hs_backend.cli.inspect.stream import ChunkStream, ReadableChunk, skipped_text

HELP = "list the chunks of a cold path"
EXAMPLE = """\
Lists chunks in the order of the directories, as they are found; with --sort, when all are known. Columns that do not
fit the terminal are hidden: pipe it to see them.

examples:
  lmcache-hs-inspect list --config lmcache.yaml
  lmcache-hs-inspect list /mnt/nvme/hs --since 12h --sort bytes --reverse --limit 20
  lmcache-hs-inspect list /mnt/nvme/hs --format json | jq '.chunks[].path'
"""

SORTS: dict[str, Callable[[ReadableChunk], Any]] = {
    "accessed": lambda chunk: chunk.file.mtime_ns,
    "created": lambda chunk: chunk.header.meta.created_at,
    "bytes": lambda chunk: chunk.file.size,
    "tokens": lambda chunk: chunk.header.meta.num_tokens,
    "start": lambda chunk: chunk.header.meta.start,
    "model": lambda chunk: chunk.header.meta.model,
    "key": lambda chunk: chunk.header.meta.key,
}

_FLUSH_SEC = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``list``."""
    add_path_arguments(parser)
    add_filter_arguments(parser)
    order = parser.add_argument_group("order")
    order.add_argument("--sort", choices=sorted(SORTS), help="sort by this, smallest or oldest first")
    order.add_argument("--reverse", action="store_true", help="with --sort: the other way round")
    order.add_argument("--limit", metavar="N", type=at_least(1), help="stop after N chunks")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """List the chunks that the options choose; the exit status."""
    opened = open_path(args)
    chunks, test = choose(opened, args)
    with Output(args) as output:
        write = _Json(output, opened) if output.json else _Lines(output, chunks)
        summary = ListSummary()
        flush_at = 0.0
        for text in _ordered(filter(test, chunks.read()), args, write.line, summary):
            write.put(text)
            if time.monotonic() > flush_at:
                output.flush()
                flush_at = time.monotonic() + _FLUSH_SEC
        write.end(summary, opened, chunks)
    return exit_status.DONE


class ListSummary:
    """What was listed, in all."""

    def __init__(self) -> None:
        self.chunks = self.tokens = self.bytes = 0

    def add(self, chunk: ReadableChunk) -> None:
        """Count a chunk."""
        self.chunks += 1
        self.tokens += chunk.header.meta.num_tokens
        self.bytes += chunk.file.size


def _ordered(
    chunks: Iterator[ReadableChunk],
    args: argparse.Namespace,
    line: Callable[[ReadableChunk], str],
    summary: ListSummary,
) -> Iterator[str]:
    """The lines to print. Sorting keeps lines, not chunks: they are a third of the size."""

    def counted(chunk: ReadableChunk) -> str:
        summary.add(chunk)
        return line(chunk)

    if not args.sort:
        yield from map(counted, itertools.islice(chunks, args.limit))
        return
    rank = SORTS[args.sort]
    if args.limit is not None:
        pick = heapq.nlargest if args.reverse else heapq.nsmallest
        yield from map(counted, pick(args.limit, chunks, key=rank))
        return
    lines = [(rank(chunk), counted(chunk)) for chunk in chunks]
    lines.sort(key=lambda item: item[0], reverse=args.reverse)
    yield from (text for _, text in lines)


class _Json:
    """One JSON object, with one chunk a line in it."""

    def __init__(self, output: Output, opened: OpenedColdPath) -> None:
        self._output = output
        self._first = True
        output.write(f'{{"cold_path": {json.dumps(opened.reader.cold_path)}, "chunks": [')

    def line(self, chunk: ReadableChunk) -> str:
        return json.dumps(chunk.record())

    def put(self, text: str) -> None:
        self._output.write(("\n" if self._first else ",\n") + text)
        self._first = False

    def end(self, summary: ListSummary, opened: OpenedColdPath, chunks: ChunkStream) -> None:
        config = opened.config
        figures = {
            "chunks": summary.chunks,
            "tokens": summary.tokens,
            "bytes": summary.bytes,
            "limit_bytes": config.max_cold_bytes if config else None,
            "skipped": dict(chunks.skipped),
        }
        self._output.write(f'\n], "summary": {json.dumps(figures)}}}\n')


class _Column(NamedTuple):
    title: str
    width: int  # left-aligned; negative: right-aligned
    text: Callable[[ReadableChunk], str]


_COLUMNS = (
    _Column("CHUNK", 17, lambda chunk: chunk.header.meta.chunk_hash[:17]),
    _Column("START", -8, lambda chunk: str(chunk.header.meta.start)),
    _Column("TOKENS", -6, lambda chunk: str(chunk.header.meta.num_tokens)),
    _Column("LAYERS", 10, lambda chunk: ",".join(str(layer.layer_idx) for layer in chunk.header.layout.layers)),
    _Column("BYTES", -9, lambda chunk: bytes_text(chunk.file.size)),
    _Column("ACCESSED", 20, lambda chunk: time_text(chunk.file.mtime_ns)),
    _Column("STATE", 8, lambda chunk: chunk.state),
    _Column("DTYPE", 8, lambda chunk: _joined(chunk.dtype)),
    _Column("HIDDEN", -6, lambda chunk: _joined(chunk.hidden_dim)),
    _Column("PARENT", 17, lambda chunk: chunk.header.meta.parent[:17] or "-"),
    _Column("RANK", -4, lambda chunk: str(chunk.namespace.worker_id)),
    _Column("NAMESPACE", 26, lambda chunk: chunk.namespace.label),
    _Column("CREATED", 20, lambda chunk: chunk.header.meta.created_at),
    _Column("MODEL", 1, lambda chunk: chunk.header.meta.model),
)


#: Columns of a namespace on a narrow terminal: what is cut is in the middle, before the digest at its end.
_NARROW = 22


def _joined(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


class _Lines:
    """Columns of fixed width, as many of them as the terminal has room for."""

    def __init__(self, output: Output, chunks: ChunkStream) -> None:
        self._output = output
        self._columns = _fitting(output.width, [namespace.label for namespace in chunks.namespaces])
        titles = (_padded(column.title, column.width) for column in self._columns)
        output.show("  ".join(titles).rstrip(), style="bold")

    def line(self, chunk: ReadableChunk) -> str:
        return "  ".join(_padded(printable(column.text(chunk)), column.width) for column in self._columns).rstrip()

    def put(self, text: str) -> None:
        self._output.write(text + "\n")

    def end(self, summary: ListSummary, opened: OpenedColdPath, chunks: ChunkStream) -> None:
        parts = [f"{summary.chunks:,} chunks", f"{summary.tokens:,} tokens", bytes_text(summary.bytes)]
        if opened.config is not None:
            limit = opened.config.max_cold_bytes
            parts.append(f"{summary.bytes / limit:.1%} of the limit of {bytes_text(limit)}")
        if chunks.skipped:
            parts.append(skipped_text(chunks.skipped))
        if hidden := len(_COLUMNS) - len(self._columns):
            parts.append(f"{hidden} more columns in a pipe")
        self._output.listed(parts, style="bold")


def _fitting(width: int | None, namespaces: Sequence[str]) -> list[_Column]:
    """As many columns as there is room for. With several namespaces theirs is among them, if need be a narrow one."""
    columns = _first(_COLUMNS, width)
    if len(namespaces) < 2 or any(column.title == "NAMESPACE" for column in columns):
        return columns
    room = min(max(map(len, namespaces)), _NARROW)
    narrow = _Column("NAMESPACE", room, lambda chunk: shortened(chunk.namespace.label, room))
    others = [column for column in _COLUMNS[1:] if column.title != "NAMESPACE"]
    return _first([_COLUMNS[0], narrow, *others], width)


def _first(available: Sequence[_Column], width: int | None) -> list[_Column]:
    columns: list[_Column] = []
    used = 0
    for column in available:
        used += abs(column.width) + 2
        if width is not None and used > width + 2:
            break
        columns.append(column)
    return columns


def _padded(text: str, width: int) -> str:
    return text.rjust(-width) if width < 0 else text.ljust(width)
