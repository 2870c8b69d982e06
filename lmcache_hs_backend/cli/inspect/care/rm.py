"""``lmcache-hs-inspect rm``: delete chunks."""

from __future__ import annotations

import argparse
import os

from lmcache_hs_backend.cli.console import CommandError, Output, add_output_options, printable
from lmcache_hs_backend.cli.inspect.care.removal import Deletion, add_removal_arguments, remove
from lmcache_hs_backend.cli.inspect.opened_paths import add_path_arguments, open_path
from lmcache_hs_backend.cli.inspect.selection import add_filter_arguments, choose
from lmcache_hs_backend.cli.inspect.stream import ChunkStreams, file_size

HELP = "delete the chunks that match"
EXAMPLE = """\
Asks before it deletes. Needs at least one option that chooses, or --all. Namespaces that a running engine holds are
left alone, with exit status 1: there, engine.hidden_state_store.clear() deletes.

examples:
  lmcache-hs-inspect rm /mnt/nvme/hs --model 'org/old-*' --dry-run
  lmcache-hs-inspect rm /mnt/nvme/hs 9132a2d2 --yes
  lmcache-hs-inspect rm /mnt/nvme/hs --state archived --before 30d --yes
"""

_FILTERS = ("model", "namespace", "layer", "state", "since", "before", "min_tokens", "prefix_of")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rm``."""
    add_path_arguments(parser)
    parser.add_argument(
        "chunk",
        metavar="CHUNK",
        nargs="*",
        help="the beginnings of these chunks' hashes or file names",
    )
    add_filter_arguments(parser)
    parser.add_argument("--all", action="store_true", help="delete every chunk, damaged files included")
    add_removal_arguments(parser)
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Delete chunks, those named or those that the options choose; the exit status."""
    chooses = any(getattr(args, name) is not None for name in _FILTERS)
    if args.chunk and (chooses or args.all):
        raise CommandError("name chunks, or choose them with options, not both")
    if args.chunk:
        return _remove_named(args)
    if chooses and args.all:
        raise CommandError("say which chunks, or --all, not both")
    if not chooses and not args.all:
        raise CommandError("say which chunks, with --model, --before, … (see --help), or --all")
    opened = open_path(args)
    if args.all:
        chunks = ChunkStreams([opened.reader], opened.reader.namespaces)
        deletions = [Deletion(place.file.path, file_size(place), place.namespace, "all") for place in chunks.places()]
    else:
        chunks, test = choose([opened.reader], args)
        deletions = [
            Deletion(chunk.file.path, chunk.file.size, chunk.namespace, "matches")
            for chunk in chunks.read()
            if test(chunk)
        ]
    with Output(args) as output:
        if not deletions and not output.json:
            models = ", ".join(sorted({printable(each.model) for each in chunks.namespaces}))
            output.show(f"nothing matches; models here: {models}", style="yellow")
        return remove(deletions, args, output, chunks)


def _remove_named(args: argparse.Namespace) -> int:
    """Each name must be that of one chunk. Damaged files, which have no hash any more, go by the names of the files."""
    opened = open_path(args)
    chunks = ChunkStreams([opened.reader], opened.reader.namespaces)
    found: dict[str, dict[str, Deletion]] = {name.removesuffix(".safetensors"): {} for name in args.chunk}
    if "" in found:
        raise CommandError("CHUNK is empty")
    for place in chunks.places():
        for name, matches in found.items():
            if os.path.basename(place.file.path).startswith(name):
                matches[place.file.path] = Deletion(place.file.path, file_size(place), place.namespace, "named")
    if not all(found.values()):
        for chunk in chunks.read():
            for name, matches in found.items():
                if chunk.header.meta.chunk_hash.startswith(name):
                    matches[chunk.file.path] = Deletion(chunk.file.path, chunk.file.size, chunk.namespace, "named")
    for name, matches in found.items():
        if len(matches) != 1:
            raise CommandError(f"{len(matches) or 'no'} chunks in {opened.reader.cold_path} begin with {name}")
    with Output(args) as output:
        named = [file for matches in found.values() for file in matches.values()]
        return remove(named, args, output, chunks)
