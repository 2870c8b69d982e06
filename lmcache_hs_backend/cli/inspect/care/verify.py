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
from lmcache_hs_backend.cli.inspect.care.verifier import KINDS, NOTES, Extent, Finding, Verifier, summary
from lmcache_hs_backend.cli.inspect.selection import add_path_arguments, open_path

HELP = "check every chunk file, every checksum and every chain"
EXAMPLE = (
    "Finds:\n"
    + "".join(f"  {kind:11} {meaning}\n" for kind, meaning in KINDS.items())
    + """
Changes nothing without --fix, which moves bad files to the quarantine of their namespace and deletes nothing. Safe
beside a running engine. Exit status 1 when something is wrong, and with --fix when something still is (orphans are a
note); 3 when nothing is wrong so far, but --max-time ended the run.

examples:
  lmcache-hs-inspect verify /mnt/nvme/hs
  lmcache-hs-inspect verify /mnt/nvme/hs --fix --ignore orphan --ignore foreign
  lmcache-hs-inspect verify /mnt/nvme/hs --sample 5%
  lmcache-hs-inspect verify /mnt/nvme/hs --max-time 2h --cursor /var/lib/hs-verify.cursor    # every night
"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    add_path_arguments(parser)
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
    opened = open_path(args, notes=False)  # they are findings
    cold_path = opened.reader.cold_path
    extent = Extent(
        sample=args.sample,
        after=cursor.load(args.cursor, cold_path) if args.cursor else None,
        in_order=bool(args.cursor),
        until=started + args.max_time if args.max_time else math.inf,
    )
    verifier = Verifier(opened.reader, extent)
    with Output(args) as output:
        to_read = verifier.find()
        findings = list(verifier.check_rest())
        with output.progress("reading files", to_read.bytes, in_bytes=True) as advance:
            findings += verifier.check_rows(advance)
        if not verifier.cut_short:
            with output.progress("reading headers", verifier.found.chunks - to_read.chunks) as advance:
                findings += verifier.check_headers(advance)
        findings += verifier.check_records()
        if not verifier.cut_short:
            with output.progress("following chains", verifier.links) as advance:
                findings += verifier.check_chains(advance)
        findings = [finding for finding in findings if finding.kind not in args.ignore]
        done = _fix(findings) if args.fix else [(finding, False, "") for finding in findings]
        left = sum(not dealt_with for finding, dealt_with, _ in done if finding.kind not in NOTES)
        if output.json:
            output.dump(_as_json(cold_path, verifier, done, left))
        else:
            _print(output, cold_path, verifier, done, left, args)
        output.flush()
    if args.cursor:
        cursor.save(args.cursor, cold_path, verifier.place if verifier.cut_short else None)
    if left:
        return exit_status.FINDING
    return exit_status.UNFINISHED if verifier.cut_short else exit_status.DONE


Done = list[tuple[Finding, bool, str]]


def _fix(findings: list[Finding]) -> Done:
    from lmcache_hs_backend.cli.inspect.care.repair import repair

    return list(repair(findings))


def _as_json(path: str, verifier: Verifier, done: Done, left: int) -> dict[str, Any]:
    return {
        "cold_path": path,
        "chunks": verifier.read.chunks,
        "bytes": verifier.read.bytes,
        "found": asdict(verifier.found),
        "only_headers": asdict(verifier.headers),
        "read_before": asdict(verifier.read_before),
        "not_reached": asdict(verifier.not_reached),
        "chains_followed": verifier.chains_followed,
        "time_over": verifier.time_over,
        "broken_off": verifier.broken_off,
        "skipped": dict(verifier.skipped),
        "records": sum(each.count for each in verifier.records.values()),
        "records_gone": _gone(verifier),
        "records_cut_short": sum(len(each.cut_short) for each in verifier.records.values()),
        "in_use": [namespace.label for namespace in verifier.unjudged],
        "counts": summary([finding for finding, _, _ in done]),
        "left": left,
        "problems": [
            {
                "kind": finding.kind,
                "path": finding.path,
                "namespace": finding.namespace.label if finding.namespace else None,
                "detail": finding.detail,
                "fixed": dealt_with,
                "action": action or None,
            }
            for finding, dealt_with, action in done
        ],
    }


def _gone(verifier: Verifier) -> int | None:
    """Request records whose rows are gone; None where chains have not been followed, which is how it is known."""
    return sum(each.gone for each in verifier.records.values()) if verifier.chains_followed else None


def _print(output: Output, cold_path: str, verifier: Verifier, done: Done, left: int, args: argparse.Namespace) -> None:
    orphans = Counter(finding.namespace.label for finding, _, _ in done if finding.kind in NOTES and finding.namespace)
    done = [item for item in done if item[0].kind not in NOTES]
    for finding, dealt_with, action in done:
        _print_finding(output, cold_path, finding, action, style="green" if dealt_with else "red")
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
    read, found = verifier.read, verifier.found
    looked = f"{read.chunks:,} chunk files, {bytes_text(read.bytes)}"
    part = read.chunks + sum(verifier.skipped.values()) < found.chunks
    if part:
        looked = f"read {read.chunks:,} of {found.chunks:,} chunk files, {bytes_text(read.bytes)} of " + bytes_text(
            found.bytes
        )
    if verifier.skipped:
        looked += f", {sum(verifier.skipped.values())} vanished meanwhile"
    if not done:
        output.show(f"{looked}: nothing is wrong{' in what was checked' if part else ''}", style="bold green")
        return
    counts = ", ".join(f"{kind} {count:,}" for kind, count in summary([finding for finding, _, _ in done]).items())
    outcome = f"; {len(done) - left:,} dealt with, {left:,} left" if args.fix else ""
    output.show(f"{looked}: {len(done):,} wrong ({counts}){outcome}", style="bold red" if left else "bold green")


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
