"""The one entry: run subjects, print what they found, write it down.

    python -m benchmarks [--quick | --tiny] [--only hot,cold] [--out DIR] [--docs] …

Exits with 1 when a subject crashed or rows came back wrong, never for a figure that was missed: ratios on a shared
machine are noise, and who looks at them reads the list that is printed at the end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch

from benchmarks import machine, report
from benchmarks.context import Context
from benchmarks.figures import Result, WrongRows
from benchmarks.sizes import SIZES

#: In the order of their value: when time is short, the last are left out with --only.
SUBJECTS = (
    "callers", "hot", "cold", "cold_cases", "demotion", "first_row", "overhead", "opening", "zipf", "latency", "layers",
    "threads", "space", "cost",
)  # fmt: skip
THREADS = 2  # of torch: the figures are for two cores
DOCS = Path(__file__).parent.parent / "docs"
APPENDIX = DOCS / "performance"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench.sh", description=(__doc__ or "").splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="for CI: under three minutes")
    size.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="for the tests: seconds")
    parser.add_argument("--only", metavar="SUBJECTS", help=f"some of: {','.join(SUBJECTS)}")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write performance.json (and plots) there")
    parser.add_argument(
        "--docs", action="store_true", help="write docs/performance/ and the figures of docs/performance.md"
    )
    parser.add_argument(
        "--render", action="store_true", help="write these again from what was measured last; run nothing"
    )
    parser.add_argument("--dir", metavar="DIR", help="where the data goes: a directory on the disk to measure")
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", default=os.environ.get("HS_BENCH_VLLM_PYTHON"),
        help="an interpreter that has vLLM, to measure its file tier too",
    )  # fmt: skip
    parser.add_argument(
        "--real-time", action="store_true",
        help="as root, on a machine that has other work: small calls of an idle machine are scheduled before that",
    )  # fmt: skip
    parser.set_defaults(size="full")
    options = parser.parse_args(argv)
    names = options.only.split(",") if options.only else SUBJECTS
    unknown = set(names) - set(SUBJECTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not a subject; they are {', '.join(SUBJECTS)}")
    if options.render and (options.only or options.docs or options.out or options.size != "full"):
        parser.error("--render takes no other option: it measures nothing")
    options.subjects = [name for name in SUBJECTS if name in names]
    if options.docs and options.size != "full":
        parser.error("--docs takes the full size: smaller ones are for checking, their figures mean little")
    here = importlib.util.find_spec("vllm")  # without an origin it is some directory of that name
    if (
        options.vllm_python is None and here is not None and here.origin is not None
    ):  # not just a directory of that name
        options.vllm_python = sys.executable
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.render:
        render(json.loads((APPENDIX / "performance.json").read_text()))
        return 0
    torch.set_num_threads(THREADS)
    context = Context(SIZES[options.size], options.dir, options.vllm_python, options.real_time)
    record: dict[str, Any] = {"machine": machine.describe(options.dir), "size": options.size, "subjects": {}}
    failed = []
    begun = time.monotonic()
    for name in options.subjects:
        subject = importlib.import_module(f"benchmarks.subjects.{name}")
        started = time.monotonic()
        try:
            result: Result = subject.run(context)
        except WrongRows:
            traceback.print_exc()
            failed.append(f"{name}: WRONG ROWS")
            continue
        except Exception:  # noqa: BLE001 - it is printed and makes the run fail; the other subjects are still worth running
            traceback.print_exc()
            failed.append(f"{name}: crashed")
            continue
        seconds = time.monotonic() - started
        report.show(name, result, seconds)
        taken = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        record["subjects"][name] = {**result.to_json(), "seconds": round(seconds, 1), "taken": taken}
    report.show_summary(record, failed, time.monotonic() - begun)
    out = APPENDIX if options.docs else options.out
    if out is not None and record["subjects"]:
        write(out, record)
    if options.docs and record["subjects"]:
        render(record)
    return bool(failed)


def write(out: Path, record: dict[str, Any]) -> None:
    """``performance.json`` in ``out``, with subjects that were not run this time as they were; then the plots."""
    from benchmarks import plots

    out.mkdir(parents=True, exist_ok=True)
    path = out / "performance.json"
    if path.exists():
        former = json.loads(path.read_text())
        if former["size"] == record["size"]:
            kept = {**former["subjects"], **record["subjects"]}
            record["subjects"] = {name: kept[name] for name in SUBJECTS if name in kept}
    path.write_text(json.dumps(record, indent=1) + "\n")
    plots.draw(record, out)


def render(record: dict[str, Any]) -> None:
    """The page and its appendix. The plots are there already."""
    from benchmarks import plots

    (APPENDIX / "measured.md").write_text(report.appendix(record, plots.names(record)))
    report.fill(DOCS / "performance.md", record)


if __name__ == "__main__":
    raise SystemExit(main())
