"""``lmcache-hs-inspect gc``: delete what nobody needs any more."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterator

from lmcache_hs_backend.cli.chunks import Chunks, add_path_arguments, moment, namespaces_of, open_path
from lmcache_hs_backend.cli.coldpath import QUARANTINE, Namespace, files_in, in_use, strays
from lmcache_hs_backend.cli.console import CommandError, Screen, add_output_options
from lmcache_hs_backend.cli.removal import Doomed, add_removal_arguments, remove
from lmcache_hs_backend.config import GIB
from lmcache_hs_backend.format.eviction_order import FileClass, over_limit
from lmcache_hs_backend.format.layout import FoundFile

HELP = "delete left-overs, other namespaces, expired chunks, and what is over the limit"
EXAMPLE = """\
Always deletes what unfinished writes have left over. The rest by option. Goes by names, sizes and times, and opens no
file. Asks before it deletes; namespaces that a running engine holds are left alone, and not counted against --max-size.
What is over the limit leaves in the store's own order: quarantine, archive, then the least recently used.

examples:
  lmcache-hs-inspect gc /mnt/nvme/hs --keep Qwen3-8B- --dry-run
  lmcache-hs-inspect gc /mnt/nvme/hs --expired 30d --max-size 50 --yes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path_arguments(parser)
    parser.add_argument(
        "--keep", metavar="PREFIX", action="append", help="delete namespaces that do not begin so (repeatable)"
    )
    parser.add_argument("--expired", metavar="TIME", help="delete what has not been used for so long: 12h, 30d")
    parser.add_argument(
        "--max-size", metavar="GB", type=float,
        help="delete until no more than this is left (default: max_cold_size of --config, without it no limit)",
    )  # fmt: skip
    add_removal_arguments(parser)
    add_output_options(parser)


#: A file, what it is to us (every namespace here is held by no process), and where it is.
_File = tuple[FileClass, FoundFile, Namespace]


def execute(args: argparse.Namespace) -> int:
    if args.max_size is not None and not args.max_size >= 0:
        raise CommandError(f"--max-size is {args.max_size:g}, but must be at least 0")
    expired = moment("--expired", args.expired) if args.expired else None
    where = open_path(args)
    namespaces = where.cold_path.namespaces
    for prefix in args.keep or ():
        namespaces_of(where, prefix, "--keep")  # a slip of the pen shall not delete everything
    free = [namespace for namespace in namespaces if not in_use(namespace)]
    doomed: list[Doomed] = []
    for namespace in free:
        for stray in strays(namespace):
            if stray.kind == "temporary":
                doomed.append(Doomed(stray.path, stray.size, namespace, "left over"))
    kept: list[_File] = []
    chunks = Chunks(where.cold_path, free)
    for item in _files(chunks):
        _, file, namespace = item
        why = ""
        if args.keep and not any(namespace.label.startswith(prefix) for prefix in args.keep):
            why = "other namespace"
        elif expired is not None and file.mtime_ns < expired:
            why = "expired"
        if why:
            doomed.append(Doomed(file.path, file.size, namespace, why))
        else:
            kept.append(item)
    limit = int(args.max_size * GIB) if args.max_size is not None else None
    if limit is None and where.config is not None:
        limit = where.config.max_cold_bytes
    if limit is not None:
        doomed += [Doomed(file.path, file.size, owner, "over the limit") for file, owner in over_limit(kept, limit)]
    with Screen(args) as screen:
        if not screen.json:
            for namespace in namespaces:
                if namespace not in free:
                    screen.show(f"in use, left alone: {namespace.label}", style="yellow")
        return remove(doomed, args, screen, dict(chunks.skipped))


def _files(chunks: Chunks) -> Iterator[_File]:
    for namespace in chunks.namespaces:
        for path, size, mtime_ns in files_in(os.path.join(namespace.directory, QUARANTINE)):
            yield FileClass.QUARANTINED, FoundFile(path, size, mtime_ns, b""), namespace
    for place in chunks.places():
        try:
            info = os.lstat(place.file.path)
        except FileNotFoundError:
            chunks.skipped["vanished"] += 1
            continue
        if stat.S_ISREG(info.st_mode):
            file_class = FileClass.ARCHIVED if place.state == "archived" else FileClass.OWN
            yield (
                file_class,
                FoundFile(place.file.path, info.st_size, info.st_mtime_ns, place.file.name),
                place.namespace,
            )
