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

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.console import Output, bytes_text, confirm, path_text, printable
from lmcache_hs_backend.cli.inspect.opened_paths import Sources, source_of
from lmcache_hs_backend.cli.inspect.stream import ChunkStreams, skipped_text
from lmcache_hs_backend.format.chunk_sources import ChunkSource, ObjectSource
from lmcache_hs_backend.format.namespace import NamespaceDirectory, in_use


class Deletion(NamedTuple):
    """A file to delete, and why."""

    path: str
    size: int
    namespace: NamespaceDirectory
    why: str


#: Why files of a namespace are left.
_IN_USE = "a running engine holds it"


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
    deletions: list[Deletion],
    args: argparse.Namespace,
    output: Output,
    chunks: ChunkStreams,
    busy: Iterable[NamespaceDirectory] = (),
    sources: Sources | None = None,
) -> int:
    """Show, ask, delete, report.

    Args:
        deletions: The files to delete. Those of namespaces that are in use are left alone.
        args: With ``dry_run`` and ``yes``.
        output: Where to report.
        chunks: How the files were found, for what was skipped on the way.
        busy: Namespaces in use of which nothing is among ``deletions``, and would be if they were not.
        sources: What the files are from, where that may be several: then paths are shown whole, and what could not be
            read is part of the report.

    Returns:
        The exit status, the same for a dry run: LEFT when anything was left that was to be deleted.
    """
    held = {each.directory: each for each in busy}
    held |= {each.namespace.directory: each.namespace for each in deletions if in_use(each.namespace.directory)}
    deletions = [file for file in deletions if file.namespace.directory not in held]
    nbytes = sum(file.size for file in deletions)
    outcome = DeletionOutcome()
    several = sources is not None and sources.several
    outcome.left += [
        (name, _IN_USE) for name in sorted(each.directory if several else each.label for each in held.values())
    ]
    if not output.json:
        for label, _ in outcome.left:
            output.show(f"in use, left alone: {printable(label)}", style="yellow")
        if args.dry_run:
            _print_files(output, deletions, several=several)
    refused = False
    if deletions and not args.dry_run:
        if args.yes or confirm(f"Delete {len(deletions):,} files, {bytes_text(nbytes)}?"):
            with output.progress("deleting", len(deletions)) as advance:
                for source, files in _by_source(deletions, chunks):
                    if isinstance(source, ObjectSource):
                        _delete_objects(source, files, outcome, advance)
                    else:
                        _delete(files, outcome, advance)
        else:
            refused = True
    _report(deletions, nbytes, args, output, outcome, dict(chunks.skipped), sources, refused=refused)
    return exit_status.LEFT if outcome.left or refused else exit_status.DONE


def _by_source(
    deletions: Iterable[Deletion], chunks: ChunkStreams
) -> Iterable[tuple[ChunkSource | None, list[Deletion]]]:
    sources = {stream.reader.cold_path: stream.reader.source for stream in chunks.each}
    files: dict[str, list[Deletion]] = defaultdict(list)
    for file in deletions:
        files[source_of(file.namespace)].append(file)
    return ((sources.get(source), some) for source, some in files.items())


def _print_files(output: Output, deletions: Iterable[Deletion], *, several: bool) -> None:
    above = None
    for file in deletions:
        source = source_of(file.namespace)
        if several and output.width is not None and source != above:  # below it, paths are relative
            output.show(printable(source), style="bold")
            above = source
        width = None if output.width is None else max(20, output.width - 16 - len(file.why))
        path = printable(path_text(file.path, source, width))
        output.write(f"{bytes_text(file.size):>10}  {path}  ({file.why})\n")


def _delete(deletions: Iterable[Deletion], outcome: DeletionOutcome, advance: Callable[[int], None]) -> None:
    from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock  # imports aiofiles

    by_namespace: dict[str, list[Deletion]] = defaultdict(list)
    for file in deletions:
        by_namespace[file.namespace.directory].append(file)
    for directory, files in by_namespace.items():
        label = files[0].namespace.label
        try:
            lock = NamespaceLock.take(directory)
        except OSError as error:
            outcome.left.append((label, f"cannot be locked: {error.strerror}"))
            continue
        if lock is None:
            outcome.left.append((label, _IN_USE))
            continue
        try:
            for file in files:
                _unlink(file, outcome)
                advance(1)
        finally:
            lock.close()


def _delete_objects(
    source: ObjectSource, deletions: Iterable[Deletion], outcome: DeletionOutcome, advance: Callable[[int], None]
) -> None:
    """Without a lock: there is none in a bucket, and an object that is gone is a miss to every node."""
    sizes = {file.path: file.size for file in deletions}
    for urls, why in source.delete(list(sizes)):
        if why:
            outcome.left += [(url, why) for url in urls]
        else:
            outcome.deleted += len(urls)
            outcome.nbytes += sum(sizes[url] for url in urls)
        advance(len(urls))


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
    sources: Sources | None,
    *,
    refused: bool,
) -> None:
    if output.json:
        figures: dict[str, Any] = {
            **(sources.head() if sources is not None and sources.several else {}),
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
        if why != _IN_USE:
            output.show(f"left: {printable(what)}: {why}", style="yellow")
    if skipped:
        output.show(skipped_text(skipped), style="yellow")
    for text in sources.missing() if sources is not None else ():
        output.show(text, style="yellow")
    if refused:
        output.show("nothing was deleted")
    elif args.dry_run:
        output.show(f"would delete {len(deletions):,} files, {bytes_text(nbytes)}", style="bold")
    else:
        output.show(f"deleted {outcome.deleted:,} files, {bytes_text(outcome.nbytes)}", style="bold")
