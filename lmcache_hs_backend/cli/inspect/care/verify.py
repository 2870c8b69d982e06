"""``lmcache-hs-inspect verify``: is everything in a cold path what it should be?"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from lmcache_hs_backend.cli.console import Output, add_output_options, bytes_text, printable
from lmcache_hs_backend.cli.inspect.care.verifier import KINDS, NOTES, Finding, Verifier, summary
from lmcache_hs_backend.cli.inspect.selection import add_path_arguments, open_path

HELP = "check every chunk file, every checksum and every chain"
EXAMPLE = (
    "Finds:\n"
    + "".join(f"  {kind:11} {meaning}\n" for kind, meaning in KINDS.items())
    + """
Changes nothing without --fix, which moves bad files to the quarantine of their namespace and deletes nothing. Safe
beside a running engine. Exit status 1 when something is wrong, and with --fix when something still is; orphans are a
note.

examples:
  lmcache-hs-inspect verify /mnt/nvme/hs
  lmcache-hs-inspect verify /mnt/nvme/hs --fix --ignore orphan --ignore foreign
"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path_arguments(parser)
    parser.add_argument("--fix", action="store_true", help="move what is bad to the quarantine")
    parser.add_argument(
        "--ignore", metavar="KIND", choices=list(KINDS), action="append", default=[], help="do not report this kind"
    )
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    opened = open_path(args, notes=False)  # they are findings
    verifier = Verifier(opened.reader)
    with Output(args) as output:
        total = verifier.find()
        with output.progress("reading files", total, in_bytes=True) as advance:
            findings = list(verifier.check_files(advance))
        findings += verifier.check_records()
        with output.progress("following chains", verifier.links) as advance:
            findings += verifier.check_chains(advance)
        findings = [finding for finding in findings if finding.kind not in args.ignore]
        done = _fix(findings) if args.fix else [(finding, False, "") for finding in findings]
        left = sum(not dealt_with for finding, dealt_with, _ in done if finding.kind not in NOTES)
        if output.json:
            output.dump(_as_json(opened.reader.cold_path, verifier, done, left))
        else:
            _print(output, verifier, done, left, fixing=args.fix)
    return 1 if left else 0


Done = list[tuple[Finding, bool, str]]


def _fix(findings: list[Finding]) -> Done:
    from lmcache_hs_backend.cli.inspect.care.repair import repair

    return list(repair(findings))


def _as_json(path: str, verifier: Verifier, done: Done, left: int) -> dict[str, Any]:
    return {
        "cold_path": path,
        "chunks": verifier.chunks,
        "bytes": verifier.bytes,
        "skipped": dict(verifier.skipped),
        "records": sum(each.count for each in verifier.records.values()),
        "records_gone": sum(each.gone for each in verifier.records.values()),
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


def _print(output: Output, verifier: Verifier, done: Done, left: int, *, fixing: bool) -> None:
    orphans = Counter(finding.namespace.label for finding, _, _ in done if finding.kind in NOTES and finding.namespace)
    done = [item for item in done if item[0].kind not in NOTES]
    for finding, dealt_with, action in done:
        line = f"{finding.kind:11} {printable(finding.path)}: {printable(finding.detail)}"
        output.show(line + (f" -> {printable(action)}" if action else ""), style="green" if dealt_with else "red")
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
    if gone := sum(each.gone for each in records):
        every = sum(each.count for each in records)
        output.show(f"note: of {gone:,} of {every:,} request records, rows have been evicted", style="yellow")
    for path in (path for each in records for path in each.cut_short):
        output.show(
            f"note: the last line of {printable(path)} was never finished: its process died, or is writing it",
            style="yellow",
        )
    skipped = f", {sum(verifier.skipped.values())} vanished meanwhile" if verifier.skipped else ""
    looked = f"{verifier.chunks:,} chunk files, {bytes_text(verifier.bytes)}{skipped}"
    if not done:
        output.show(f"{looked}: nothing is wrong", style="bold green")
        return
    counts = ", ".join(f"{kind} {count:,}" for kind, count in summary([finding for finding, _, _ in done]).items())
    outcome = f"; {len(done) - left:,} dealt with, {left:,} left" if fixing else ""
    output.show(f"{looked}: {len(done):,} wrong ({counts}){outcome}", style="bold red" if left else "bold green")
