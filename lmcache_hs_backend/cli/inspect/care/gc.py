"""``lmcache-hs-inspect gc``: delete what is not needed any more."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterator

from lmcache_hs_backend.cli import arguments
from lmcache_hs_backend.cli.console import Output, add_output_options
from lmcache_hs_backend.cli.inspect.care.removal import Deletion, add_removal_arguments, remove
from lmcache_hs_backend.cli.inspect.opened_paths import add_path_arguments, open_paths
from lmcache_hs_backend.cli.inspect.selection import namespaces_of
from lmcache_hs_backend.cli.inspect.stream import ChunkStream, ChunkStreams
from lmcache_hs_backend.format.eviction_order import FileClass, over_limit
from lmcache_hs_backend.format.layout import QUARANTINE, FoundFile, files_in
from lmcache_hs_backend.format.namespace import NamespaceDirectory, in_use
from lmcache_hs_backend.format.reader import Place

HELP = "delete left-overs, other namespaces, expired chunks, and what is over the limit"
EXAMPLE = """\
Always deletes what unfinished writes have left over. The rest by option. Goes by names, sizes and times, and opens no
file. Asks before it deletes; namespaces that a running engine holds are left alone (exit status 1, as rm), and not
counted against --max-size.
What is over the limit leaves in the store's own order: quarantine, archive, then the least recently used.

Below a URL (s3://, gs://, az://) it deletes objects, and their age is the time since they were written: nothing there
knows when one was last read. Nodes that still use a deleted object count a miss.

Several cold paths and URLs are each gone through as if they were named alone, and the question is asked once:
--max-size is the limit of each, and --keep must fit a namespace of each.

examples:
  lmcache-hs-inspect gc /mnt/nvme/hs --keep Qwen3-8B- --dry-run
  lmcache-hs-inspect gc /mnt/nvme/hs --expired 30d --max-size 50 --yes
  lmcache-hs-inspect gc s3://my-bucket/hs --expired 14d --max-size 2TB --dry-run
  lmcache-hs-inspect gc /mnt/nvme/hs /data/node7/hs --expired 30d --dry-run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gc``."""
    add_path_arguments(parser, several=True)
    parser.add_argument(
        "--keep", metavar="PREFIX", action="append", help="delete namespaces that do not begin so (repeatable)"
    )
    parser.add_argument(
        "--expired", metavar="TIME", type=arguments.moment, help="delete what has not been used for so long: 12h, 30d"
    )
    parser.add_argument(
        "--max-size", metavar="SIZE", type=arguments.size,
        help="delete until no more than this is left: GB, or with a unit such as 500MB (default: max_cold_size of "
        "--config, without it no limit)",
    )  # fmt: skip
    parser.add_argument("--quarantine", action="store_true", help="delete what is in quarantine")
    add_removal_arguments(parser)
    add_output_options(parser)


#: A file, what it is to us (every namespace here is held by no process), and where it is.
_File = tuple[FileClass, FoundFile, NamespaceDirectory]


def execute(args: argparse.Namespace) -> int:
    """Delete what the options choose by names, sizes and times; the exit status."""
    sources = open_paths(args)
    for reader in sources.readers:
        for prefix in args.keep or ():
            namespaces_of([reader], prefix, "--keep")  # a misspelt prefix must not delete everything
    free = [namespace for namespace in sources.namespaces if not in_use(namespace.directory)]
    chunks = ChunkStreams(sources.readers, free)
    limit = args.max_size
    if limit is None and sources.config is not None:
        limit = sources.config.max_cold_bytes
    deletions = [deletion for stream in chunks.each for deletion in _in_one(stream, args, limit)]
    busy = [each for each in sources.namespaces if each not in free]
    with Output(args) as output:
        return sources.status(remove(deletions, args, output, chunks, busy, sources))


def _in_one(chunks: ChunkStream, args: argparse.Namespace, limit: int | None) -> Iterator[Deletion]:
    """What the options choose in one cold path."""
    for namespace in chunks.namespaces:
        for stray in chunks.reader.source.strays(namespace):
            if stray.kind == "temporary":
                yield Deletion(stray.path, stray.size, namespace, "left over")
    kept: list[_File] = []
    for item in _files(chunks):
        kind, file, namespace = item
        why = "quarantined" if args.quarantine and kind is FileClass.QUARANTINED else ""
        if args.keep and not any(namespace.label.startswith(prefix) for prefix in args.keep):
            why = "other namespace"
        elif not why and args.expired is not None and file.mtime_ns < args.expired:
            why = "expired"
        if why:
            yield Deletion(file.path, file.size, namespace, why)
        else:
            kept.append(item)
    if limit is not None:
        for file, owner in over_limit(kept, limit):
            yield Deletion(file.path, file.size, owner, "over the limit")


def _files(chunks: ChunkStream) -> Iterator[_File]:
    for namespace in chunks.namespaces:
        for file in files_in(os.path.join(namespace.directory, QUARANTINE)):
            yield FileClass.QUARANTINED, file, namespace
    for place in chunks.places():
        found = _found(place, chunks)
        if found is not None:
            yield FileClass.ARCHIVED if place.state == "archived" else FileClass.OWN, found, place.namespace


def _found(place: Place, chunks: ChunkStream) -> FoundFile | None:
    path, name, size, mtime_ns = place.file
    if size >= 0:
        return FoundFile(path, size, mtime_ns, name)
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        chunks.skipped["vanished"] += 1
        return None
    return FoundFile(path, info.st_size, info.st_mtime_ns, name) if stat.S_ISREG(info.st_mode) else None
