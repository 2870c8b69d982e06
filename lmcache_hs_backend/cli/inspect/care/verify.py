"""``lmcache-hs-inspect verify``: is everything in a cold path what it should be?"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from lmcache_hs_backend.cli import arguments, exit_status
from lmcache_hs_backend.cli.console import Output, add_output_options, bytes_text, path_text, printable
from lmcache_hs_backend.cli.inspect.care import cursor
from lmcache_hs_backend.cli.inspect.care.verification import Verification
from lmcache_hs_backend.cli.inspect.care.verifier import KINDS, NOTES, Extent, Finding, Verifier, summary
from lmcache_hs_backend.cli.inspect.opened_paths import Sources, add_path_arguments, open_paths

HELP = "check every chunk file, every checksum and every chain"
EXAMPLE = (
    "Finds:\n"
    + "".join(f"  {kind:11} {meaning}\n" for kind, meaning in KINDS.items())
    + """
Changes nothing without --fix, which moves bad files to the quarantine of their namespace and deletes nothing. Safe
beside a running engine. Exit status 1 when something is wrong, and with --fix when something still is (orphans are a
note); 3 when nothing is wrong so far, but --max-time ended the run.

Several cold paths and URLs are checked in their order, each by itself: a chunk's parent must be in the same one.
--sample is drawn from all of them, --max-time is the time for all, and a cursor keeps a place in each.

examples:
  lmcache-hs-inspect verify /mnt/nvme/hs
  lmcache-hs-inspect verify /mnt/nvme/hs --fix --ignore orphan --ignore foreign
  lmcache-hs-inspect verify /mnt/nvme/hs --sample 5%
  lmcache-hs-inspect verify /mnt/nvme/hs --max-time 2h --cursor /var/lib/hs-verify.cursor    # every night
  lmcache-hs-inspect verify /data/node1/hs /data/node2/hs s3://my-bucket/hs --sample 5%
"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    add_path_arguments(parser, several=True)
    parser.add_argument("--fix", action="store_true", help="move what is bad to the quarantine")
    parser.add_argument(
        "--ignore", metavar="KIND", choices=list(KINDS), action="append", default=[], help="do not report this kind"
    )
    extent = parser.add_argument_group("how much")
    which = extent.add_mutually_exclusive_group()
    which.add_argument(
        "--sample", metavar="N|P%", type=arguments.sample,
        help="read so many chunk files whole, or such a share of them, drawn anew by every run; of the others only the "
        "header, by which chains are followed",
    )  # fmt: skip
    which.add_argument(
        "--cursor", metavar="FILE",
        help="go on where the last run with this file stopped; it is written when --max-time is over, and deleted when "
        "everything has been checked",
    )  # fmt: skip
    extent.add_argument(
        "--max-time", metavar="SECONDS", type=arguments.seconds,
        help="stop after so long (or 30min, 2h); what was not checked is counted, and the exit status is 3",
    )  # fmt: skip
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Check, perhaps repair, and print; the exit status."""
    started = time.monotonic()
    sources = open_paths(args, notes=False)  # they are findings
    named = [*(reader.cold_path for reader in sources.readers), *sources.not_read]
    before = cursor.load(args.cursor, named) if args.cursor else {}
    until = started + args.max_time if args.max_time else math.inf
    check = Verification(sources.readers, Extent(args.sample, in_order=bool(args.cursor), until=until), before)
    with Output(args) as output:
        found = [[each for each in group if each.kind not in args.ignore] for group in check.run(output)]
        done = [_fix(group) if args.fix else [(finding, False, "") for finding in group] for group in found]
        left = sum(map(_left, done))
        if output.json:
            output.dump(_as_json(sources, check, done))
        else:
            _print(output, sources, check, done, args)
        output.flush()
    if args.cursor:
        goes_on = check.cut_short or sources.not_read
        places = {**before, **{verifier.reader.cold_path: verifier.place for verifier in check.verifiers}}
        cursor.save(args.cursor, {each: places.get(each) for each in named} if goes_on else {})
    if left:
        return exit_status.FINDING
    return sources.status(exit_status.UNFINISHED if check.cut_short else exit_status.DONE)


Done = list[tuple[Finding, bool, str]]


def _fix(findings: list[Finding]) -> Done:
    from lmcache_hs_backend.cli.inspect.care.repair import repair

    return list(repair(findings))


def _left(done: Done) -> int:
    """What is wrong and has not been dealt with."""
    return sum(not dealt_with for finding, dealt_with, _ in done if finding.kind not in NOTES)


def _as_json(sources: Sources, check: Verification, done: list[Done]) -> dict[str, Any]:
    problems = [
        {
            **({"source": verifier.reader.cold_path} if sources.several else {}),
            "kind": finding.kind,
            "path": finding.path,
            "namespace": finding.namespace.label if finding.namespace else None,
            "detail": finding.detail,
            "fixed": dealt_with,
            "action": action or None,
        }
        for verifier, group in zip(check.verifiers, done, strict=True)
        for finding, dealt_with, action in group
    ]
    result = {**sources.head(), **_figures(check, [item for group in done for item in group])}
    if sources.several:
        result["sources"] = [
            {"source": verifier.reader.cold_path, **_figures(verifier, group)}
            for verifier, group in zip(check.verifiers, done, strict=True)
        ]
    return {**result, "problems": problems}


def _figures(check: Verifier | Verification, done: Done) -> dict[str, Any]:
    return {
        "chunks": check.read.chunks,
        "bytes": check.read.bytes,
        "found": asdict(check.found),
        "only_headers": asdict(check.headers),
        "read_before": asdict(check.read_before),
        "not_reached": asdict(check.not_reached),
        "chains_followed": check.chains_followed,
        "time_over": check.time_over,
        "broken_off": check.broken_off,
        "skipped": dict(check.skipped),
        "records": sum(each.count for each in check.records.values()),
        "records_gone": _gone(check),
        "records_cut_short": sum(len(each.cut_short) for each in check.records.values()),
        "in_use": [namespace.label for namespace in check.unjudged],
        "counts": summary([finding for finding, _, _ in done]),
        "left": _left(done),
    }


def _gone(verifier: Verifier | Verification) -> int | None:
    """Request records whose rows are gone; None where chains have not been followed, which is how it is known."""
    return sum(each.gone for each in verifier.records.values()) if verifier.chains_followed else None


def _print(output: Output, sources: Sources, check: Verification, done: list[Done], args: argparse.Namespace) -> None:
    """Each cold path by itself, below its name where there are several, and then a line for all of them."""
    for verifier, group in zip(check.verifiers, done, strict=True):
        if sources.several:
            output.show(printable(verifier.reader.cold_path), style="bold")
        _print_one(output, verifier, group, args)
        _print_outcome(output, verifier, group, args)
    if sources.several:
        for text in sources.missing():
            output.show(text, style="yellow")
        _print_outcome(output, check, [item for group in done for item in group], args, "in all ")


def _print_one(output: Output, verifier: Verifier, done: Done, args: argparse.Namespace) -> None:
    """What was found in a cold path, what is to be known of it, and what was not checked."""
    orphans = Counter(finding.namespace.label for finding, _, _ in done if finding.kind in NOTES and finding.namespace)
    done = [item for item in done if item[0].kind not in NOTES]
    for finding, dealt_with, action in done:
        _print_finding(output, verifier.reader.cold_path, finding, action, style="green" if dealt_with else "red")
    for label, count in orphans.items():
        output.show(
            f"note: {count:,} branches in {printable(label)} have no parent on disk; they are served again when it has "
            "been stored (--format json names them)",
            style="yellow",
        )
    for namespace in verifier.unjudged:
        output.show(
            f"note: {namespace.label} is in use: some chunks have no parent on disk, which may be in RAM still",
            style="yellow",
        )
    records = verifier.records.values()
    if gone := _gone(verifier):
        every = sum(each.count for each in records)
        output.show(f"note: of {gone:,} of {every:,} request records, rows have been evicted", style="yellow")
    for path in (path for each in records for path in each.cut_short):
        output.show(
            f"note: the last line of {printable(path)} was never finished: its process died, or is writing it",
            style="yellow",
        )
    for note in _not_checked(verifier, args):
        output.show(f"not checked: {note}", style="yellow")


def _print_outcome(
    output: Output, check: Verifier | Verification, done: Done, args: argparse.Namespace, where: str = ""
) -> None:
    """How much was checked, and how much of it is wrong."""
    done = [item for item in done if item[0].kind not in NOTES]
    left = _left(done)
    read, found = check.read, check.found
    looked = f"{read.chunks:,} chunk files, {bytes_text(read.bytes)}"
    part = read.chunks + sum(check.skipped.values()) < found.chunks
    if part:
        looked = f"read {read.chunks:,} of {found.chunks:,} chunk files, {bytes_text(read.bytes)} of " + bytes_text(
            found.bytes
        )
    if check.skipped:
        looked += f", {sum(check.skipped.values())} vanished meanwhile"
    if not done:
        output.show(f"{where}{looked}: nothing is wrong{' in what was checked' if part else ''}", style="bold green")
        return
    counts = ", ".join(f"{kind} {count:,}" for kind, count in summary([finding for finding, _, _ in done]).items())
    outcome = f"; {len(done) - left:,} dealt with, {left:,} left" if args.fix else ""
    output.show(f"{where}{looked}: {len(done):,} wrong ({counts}){outcome}", style="bold red" if left else "bold green")


def _print_finding(output: Output, cold_path: str, finding: Finding, action: str, style: str) -> None:
    """On one line; on a terminal that is too narrow for it, what is wrong stands below the path."""
    # What is said of a directory begins with its path, which stands beside it already.
    detail = finding.detail.replace(finding.path + ": ", "").replace(finding.path + "/", "")
    detail = printable(detail) + (f" -> {printable(action)}" if action else "")
    path = printable(path_text(finding.path, cold_path, None if output.width is None else max(20, output.width - 12)))
    line = f"{finding.kind:11} {path}"
    if output.width is None or len(line) + 2 + len(detail) <= output.width:
        output.show(f"{line}: {detail}", style=style)
        return
    output.line(line, style=style)
    output.listed(detail.split(" "), indent=" " * 12, style=style, separator="")


def _not_checked(verifier: Verifier, args: argparse.Namespace) -> list[str]:
    """What this run has not checked, one thing a line."""
    notes = []
    if verifier.headers.chunks:
        size = bytes_text(verifier.headers.bytes)
        notes.append(f"the rows of {verifier.headers.chunks:,} chunk files that are not in the sample, {size}")
    if verifier.read_before.chunks:
        size = bytes_text(verifier.read_before.bytes)
        notes.append(f"the rows of {verifier.read_before.chunks:,} chunk files that earlier runs have read, {size}")
    if not verifier.cut_short:
        return notes
    why = "--max-time was over" if verifier.time_over else "the bucket has broken off its listing"
    what = f"{verifier.not_reached.chunks:,} chunk files, {bytes_text(verifier.not_reached.bytes)}"
    notes.append(f"{what}, chains and the rows of request records, because {why}")
    if args.cursor:
        notes[-1] += f"; the same command goes on from {args.cursor}"
    return notes
