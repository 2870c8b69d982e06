"""The options that say which chunks; shared by the sub-commands."""

from __future__ import annotations

import argparse
import fnmatch
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from lmcache_hs_backend.chunk import TOKEN_BYTES
from lmcache_hs_backend.cli.arguments import at_least, moment, not_empty
from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.cli.inspect.stream import ChunkStreams, ReadableChunk
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.reader import STATES, ColdTierReader

ChunkTest = Callable[[ReadableChunk], bool]


def namespaces_of(
    readers: Sequence[ColdTierReader], prefix: str | None, option: str = "--namespace"
) -> list[NamespaceDirectory]:
    """Those that begin as an option says, all without one. Raises CommandError when it is none."""
    every = [namespace for reader in readers for namespace in reader.namespaces]
    found = [namespace for namespace in every if namespace.label.startswith(prefix or "")]
    if not found:
        raise CommandError(
            f"{option} {prefix}: there is none that begins so; there are {', '.join(each.label for each in every[:10])}"
        )
    return found


def add_filter_arguments(parser: argparse.ArgumentParser, states: tuple[str, ...] = STATES) -> None:
    """The options that choose chunks. All that are given must hold."""
    group = parser.add_argument_group("which chunks")
    group.add_argument(
        "--model", metavar="GLOB", type=not_empty, help="of models of this name (with * and ?), or last part of a name"
    )
    group.add_argument(
        "--namespace", metavar="PREFIX", type=not_empty, help="of namespaces whose directory begins with PREFIX"
    )
    group.add_argument("--layer", metavar="IDX", type=int, action="append", help="that have this layer (repeatable)")
    group.add_argument("--state", choices=states, help="in this state")
    group.add_argument(
        "--since", metavar="TIME", type=moment, help="used since: 90s, 12h, 7d ago, or 2026-01-31[T12:00] in UTC"
    )
    group.add_argument("--before", metavar="TIME", type=moment, help="not used since; as for --since")
    group.add_argument("--min-tokens", metavar="N", type=at_least(0), help="of at least N tokens")
    group.add_argument(
        "--prefix-of",
        metavar="TEXT",
        type=not_empty,
        help="that a prompt with this text would use: needs --tokenizer, or give token ids: 1,2,3 or @FILE with them",
    )
    group.add_argument("--tokenizer", metavar="DIR", help="directory with a tokenizer.json")


def choose(readers: Sequence[ColdTierReader], args: argparse.Namespace) -> tuple[ChunkStreams, ChunkTest]:
    """What the options choose: the chunks to look at, and the test they must pass. Raises CommandError."""
    tests: list[ChunkTest] = []
    if args.model is not None:
        tests.append(_by_model(args.model))
    if args.layer is not None:
        wanted = set(args.layer)
        tests.append(lambda chunk: wanted <= {layer.layer_idx for layer in chunk.header.layout.layers})
    if args.since is not None:
        tests.append(lambda chunk: chunk.file.mtime_ns >= args.since)
    if args.before is not None:
        tests.append(lambda chunk: chunk.file.mtime_ns < args.before)
    if args.min_tokens is not None:
        tests.append(lambda chunk: chunk.header.meta.num_tokens >= args.min_tokens)
    if args.prefix_of is not None:
        tests.append(_by_prefix(_token_ids(args.prefix_of, args.tokenizer)))
    states = (args.state,) if args.state else STATES
    streams = ChunkStreams(readers, namespaces_of(readers, args.namespace), states)
    return streams, lambda chunk: all(test(chunk) for test in tests)


def _by_model(pattern: str) -> ChunkTest:
    def test(chunk: ReadableChunk) -> bool:
        model = chunk.header.meta.model
        return fnmatch.fnmatchcase(model, pattern) or fnmatch.fnmatchcase(model.rsplit("/", 1)[-1], pattern)

    return test


def _by_prefix(ids: array[int]) -> ChunkTest:
    """Chunks whose prefix digest is that of as many of these token ids."""
    digests: dict[int, bytes] = {}
    data = memoryview(ids.tobytes())

    def test(chunk: ReadableChunk) -> bool:
        end = chunk.end
        if end > len(ids):
            return False
        if end not in digests:
            digests[end] = xxhash.xxh3_128_digest(data[: TOKEN_BYTES * end])
        return digests[end] == chunk.header.meta.prefix

    return test


def _token_ids(text: str, tokenizer: str | None) -> array[int]:
    if tokenizer is not None:
        return array("q", load_tokenizer(tokenizer).encode(text).ids)
    if text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--prefix-of {text}: {error}") from None
    try:
        return array("q", [int(part) for part in text.strip().strip("[]").replace(",", " ").split()])
    except (ValueError, OverflowError):
        raise CommandError(
            "--prefix-of takes token ids such as 1,2,3, or a text together with --tokenizer DIR"
        ) from None


def load_tokenizer(directory: str) -> Any:
    """The tokenizer of a model's directory. Raises CommandError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CommandError("--tokenizer needs the tokenizers package: pip install tokenizers") from None
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.isfile(path):
        raise CommandError(f"--tokenizer {directory}: there is no tokenizer.json in it")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the package raises plain Exception for whatever is wrong with the file
        raise CommandError(f"--tokenizer {directory}: {error}") from None
