"""Deleting files of namespaces that no engine holds, or objects; shared by ``rm`` and ``gc``.

The lock of a namespace is held while its files are deleted, so that no engine starts in between. A
namespace that an engine holds is left alone: the engine counts its own files, and decides which go.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache_hs_backend.cli.console import Output, bytes_text, confirm, printable
from lmcache_hs_backend.format.chunk_sources import ChunkSource, ObjectSource
from lmcache_hs_backend.format.namespace import NamespaceDirectory


class Deletion(NamedTuple):
    """A file to delete, and why."""

    path: str
    size: int
    namespace: NamespaceDirectory
    why: str


@dataclass
class DeletionOutcome:
    """What became of the files."""

    deleted: int = 0
    nbytes: int = 0
    left: list[tuple[str, str]] = field(default_factory=list)  # (path or namespace, why)


def add_removal_arguments(parser: argparse.ArgumentParser) -> None:
    """``--dry-run`` and ``--yes``."""
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, show what would be deleted")
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def remove(
    source: ChunkSource, deletions: list[Deletion], args: argparse.Namespace, output: Output, skipped: dict[str, int]
) -> int:
    """Show, ask, delete, report; the exit status: 1 when something could not be deleted, or was not to be."""
    nbytes = sum(file.size for file in deletions)
    if not output.json and args.dry_run:
        for file in deletions:
            output.write(f"{bytes_text(file.size):>10}  {printable(file.path)}  ({file.why})\n")
    outcome = DeletionOutcome()
    refused = False
    if deletions and not args.dry_run:
        if args.yes or confirm(f"Delete {len(deletions):,} files, {bytes_text(nbytes)}?"):
            with output.progress("deleting", len(deletions)) as advance:
                if isinstance(source, ObjectSource):
                    outcome = _delete_objects(source, deletions, advance)
                else:
                    outcome = _delete(deletions, advance)
        else:
            refused = True
    _report(deletions, nbytes, args, output, outcome, skipped, refused=refused)
    return 1 if outcome.left or refused else 0


def _delete(deletions: Iterable[Deletion], advance: Callable[[int], None]) -> DeletionOutcome:

    from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock  # imports aiofiles

    by_namespace: dict[str, list[Deletion]] = defaultdict(list)
    for file in deletions:
        by_namespace[file.namespace.directory].append(file)
    outcome = DeletionOutcome()
    for directory, files in by_namespace.items():
        label = files[0].namespace.label
        try:
            lock = NamespaceLock.take(directory)
        except OSError as error:
            outcome.left.append((label, f"cannot be locked: {error.strerror}"))
            continue
        if lock is None:
            outcome.left.append((label, "a running engine holds it"))
            continue
        try:
            for file in files:
                _unlink(file, outcome)
                advance(1)
        finally:
            lock.close()
    return outcome


def _delete_objects(
    source: ObjectSource, deletions: Iterable[Deletion], advance: Callable[[int], None]
) -> DeletionOutcome:
    """Without a lock: there is none in a bucket, and an object that is gone is a miss to every node."""
    sizes = {file.path: file.size for file in deletions}
    outcome = DeletionOutcome()
    for urls, why in source.delete(list(sizes)):
        if why:
            outcome.left += [(url, why) for url in urls]
        else:
            outcome.deleted += len(urls)
            outcome.nbytes += sum(sizes[url] for url in urls)
        advance(len(urls))
    return outcome


def _unlink(file: Deletion, outcome: DeletionOutcome) -> None:
    try:
        os.unlink(file.path)
    except FileNotFoundError:
        return
    except OSError as error:
        outcome.left.append((file.path, str(error.strerror)))
        return
    outcome.deleted += 1
    outcome.nbytes += file.size


def _report(
    deletions: list[Deletion],
    nbytes: int,
    args: argparse.Namespace,
    output: Output,
    outcome: DeletionOutcome,
    skipped: dict[str, int],
    *,
    refused: bool,
) -> None:
    if output.json:
        figures: dict[str, Any] = {
            "dry_run": args.dry_run,
            "files": len(deletions),
            "bytes": nbytes,
            "deleted_files": outcome.deleted,
            "deleted_bytes": outcome.nbytes,
            "left": [{"what": what, "why": why} for what, why in outcome.left],
            "skipped": skipped,
        }
        if args.dry_run:
            figures["would_delete"] = [{"path": f.path, "bytes": f.size, "why": f.why} for f in deletions]
        output.dump(figures)
        return
    for what, why in outcome.left:
        output.show(f"left: {printable(what)}: {why}", style="yellow")
    if refused:
        output.show("nothing was deleted")
    elif args.dry_run:
        output.show(f"would delete {len(deletions):,} files, {bytes_text(nbytes)}", style="bold")
    else:
        output.show(f"deleted {outcome.deleted:,} files, {bytes_text(outcome.nbytes)}", style="bold")
