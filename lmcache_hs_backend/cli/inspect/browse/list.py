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
from lmcache_hs_backend.cli.inspect.opened_paths import Sources, add_path_arguments, open_paths, source_of
from lmcache_hs_backend.cli.inspect.selection import add_filter_arguments, choose
from lmcache_hs_backend.cli.inspect.stream import ChunkStreams, ReadableChunk, skipped_text
from lmcache_hs_backend.dataset.index import model_label

HELP = "list the chunks of a cold path"
EXAMPLE = """\
Lists chunks in the order of the directories, as they are found; with --sort, when all are known. Columns that do not
fit the terminal are hidden: pipe it to see them. Of several cold paths and URLs, every row says which it is from; a
chunk that several of them have is in as many rows, and the last line says how many there are if each counts once.

examples:
  lmcache-hs-inspect list --config lmcache.yaml
  lmcache-hs-inspect list /mnt/nvme/hs --since 12h --sort bytes --reverse --limit 20
  lmcache-hs-inspect list /mnt/nvme/hs --format json | jq '.chunks[].path'
  lmcache-hs-inspect list /mnt/nvme/hs s3://my-bucket/hs --sort accessed --limit 20
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
    add_path_arguments(parser, several=True)
    add_filter_arguments(parser)
    order = parser.add_argument_group("order")
    order.add_argument("--sort", choices=sorted(SORTS), help="sort by this, smallest or oldest first")
    order.add_argument("--reverse", action="store_true", help="with --sort: the other way round")
    order.add_argument("--limit", metavar="N", type=at_least(1), help="stop after N chunks")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """List the chunks that the options choose; the exit status."""
    sources = open_paths(args)
    chunks, test = choose(sources.readers, args)
    with Output(args) as output:
        write = _Json(output, sources) if output.json else _Lines(output, chunks, sources)
        summary = ListSummary(sources)
        flush_at = 0.0
        for text in _ordered(filter(test, chunks.read()), args, write.line, summary):
            write.put(text)
            if time.monotonic() > flush_at:
                output.flush()
                flush_at = time.monotonic() + _FLUSH_SEC
        write.end(summary, chunks)
    return sources.status(exit_status.DONE)


class ListSummary:
    """What was listed, in all."""

    def __init__(self, sources: Sources) -> None:
        self.chunks = self.tokens = self.bytes = 0
        #: Of several sources: rows, tokens and bytes of each.
        self.by_source = {reader.cold_path: [0, 0, 0] for reader in sources.readers} if sources.several else {}
        self._seen: set[int] = set()

    def add(self, chunk: ReadableChunk) -> None:
        """Count a chunk."""
        meta = chunk.header.meta
        self.chunks += 1
        self.tokens += meta.num_tokens
        self.bytes += chunk.file.size
        if self.by_source:
            of = self.by_source[source_of(chunk.namespace)]
            of[:] = of[0] + 1, of[1] + meta.num_tokens, of[2] + chunk.file.size
            # 64 bits of what makes a chunk the same, as there may be millions of them.
            self._seen.add(hash((model_label(chunk.namespace.record), meta.start, meta.num_tokens, meta.prefix)))

    @property
    def different(self) -> int:
        """Of several sources: chunks, each counted once, however many files have it."""
        return len(self._seen)


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

    def __init__(self, output: Output, sources: Sources) -> None:
        self._output = output
        self._sources = sources
        self._first = True
        head = ", ".join(f'"{name}": {json.dumps(value)}' for name, value in sources.head().items())
        output.write(f'{{{head}, "chunks": [')

    def line(self, chunk: ReadableChunk) -> str:
        return json.dumps({**self._sources.row(chunk.namespace), **chunk.record()})

    def put(self, text: str) -> None:
        self._output.write(("\n" if self._first else ",\n") + text)
        self._first = False

    def end(self, summary: ListSummary, chunks: ChunkStreams) -> None:
        config = self._sources.config
        figures: dict[str, Any] = {
            "chunks": summary.chunks,
            "tokens": summary.tokens,
            "bytes": summary.bytes,
            "limit_bytes": config.max_cold_bytes if config else None,
            "skipped": dict(chunks.skipped),
        }
        if self._sources.several:
            figures["different_chunks"] = summary.different
            figures["sources"] = [
                {"source": source, "chunks": rows, "tokens": tokens, "bytes": size,
                 "skipped": dict(chunks.skipped_in(source))}
                for source, (rows, tokens, size) in summary.by_source.items()
            ]  # fmt: skip
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

    def __init__(self, output: Output, chunks: ChunkStreams, sources: Sources) -> None:
        self._output = output
        self._sources = sources
        self._available = [*_COLUMNS]
        if sources.several:
            self._available.insert(1, _source_column(output, sources))
        several = len(chunks.namespaces) > 1
        labels = [namespace.label for namespace in chunks.namespaces] if several else []
        self._columns = _fitting(self._available, output.width, labels)
        titles = (_padded(column.title, column.width) for column in self._columns)
        sources.legend(output)
        output.show("  ".join(titles).rstrip(), style="bold")

    def line(self, chunk: ReadableChunk) -> str:
        return "  ".join(_padded(printable(column.text(chunk)), column.width) for column in self._columns).rstrip()

    def put(self, text: str) -> None:
        self._output.write(text + "\n")

    def end(self, summary: ListSummary, chunks: ChunkStreams) -> None:
        parts = [f"{summary.chunks:,} chunks", f"{summary.tokens:,} tokens", bytes_text(summary.bytes)]
        if self._sources.several:
            parts[0] = f"{summary.chunks:,} chunk files"
            parts.append(f"{summary.different:,} different chunks")
        if self._sources.config is not None:
            limit = self._sources.config.max_cold_bytes
            parts.append(f"{summary.bytes / limit:.1%} of the limit of {bytes_text(limit)}")
        if chunks.skipped:
            parts.append(skipped_text(chunks.skipped))
        parts += self._sources.missing()
        if hidden := len(self._available) - len(self._columns):
            parts.append(f"{hidden} more columns in a pipe")
        self._output.listed(parts, style="bold")


def _source_column(output: Output, sources: Sources) -> _Column:
    """By number on a terminal, in a pipe by address."""
    width = max(len(reader.cold_path) for reader in sources.readers) if output.width is None else -len("SOURCE")
    return _Column("SOURCE", width, lambda chunk: sources.name(source_of(chunk.namespace), output))


def _fitting(available: Sequence[_Column], width: int | None, namespaces: Sequence[str]) -> list[_Column]:
    """As many columns as there is room for. With several namespaces theirs is among them, if need be a narrow one."""
    columns = _first(available, width)
    if not namespaces or any(column.title == "NAMESPACE" for column in columns):
        return columns
    room = min(max(map(len, namespaces)), _NARROW)
    narrow = _Column("NAMESPACE", room, lambda chunk: shortened(chunk.namespace.label, room))
    first = len(available) - len(_COLUMNS) + 1  # behind those that say which chunk it is
    others = [column for column in available[first:] if column.title != "NAMESPACE"]
    return _first([*available[:first], narrow, *others], width)


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
