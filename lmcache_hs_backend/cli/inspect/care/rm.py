"""``lmcache-hs-inspect rm``: delete chunks."""

from __future__ import annotations

import argparse

from lmcache_hs_backend.cli.console import CommandError, Output, add_output_options
from lmcache_hs_backend.cli.inspect.care.removal import Deletion, add_removal_arguments, remove
from lmcache_hs_backend.cli.inspect.selection import add_filter_arguments, add_path_arguments, choose, open_path

HELP = "delete the chunks that match"
EXAMPLE = """\
Asks before it deletes. Needs at least one option that chooses, or --all. Namespaces that a running engine holds are
left alone, with exit status 1: there, engine.hidden_state_store.clear() deletes.

examples:
  lmcache-hs-inspect rm /mnt/nvme/hs --model 'org/old-*' --dry-run
  lmcache-hs-inspect rm /mnt/nvme/hs --state archived --before 30d --yes
"""

_FILTERS = ("model", "namespace", "layer", "state", "since", "before", "min_tokens", "prefix_of")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path_arguments(parser)
    add_filter_arguments(parser)
    parser.add_argument("--all", action="store_true", help="delete every chunk")
    add_removal_arguments(parser)
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    chooses = any(getattr(args, name) is not None for name in _FILTERS)
    if chooses and args.all:
        raise CommandError("say which chunks, or --all, not both")
    if not chooses and not args.all:
        raise CommandError("say which chunks, with --model, --before, … (see --help), or --all")
    opened = open_path(args)
    chunks, test = choose(opened, args)
    deletions = [
        Deletion(chunk.file.path, chunk.file.size, chunk.namespace, "matches") for chunk in chunks.read() if test(chunk)
    ]
    with Output(args) as output:
        return remove(deletions, args, output, dict(chunks.skipped))
