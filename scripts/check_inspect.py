"""Holds ``lmcache-hs-inspect`` to its limits with 100,000 chunk files, the disk cache dropped before each run.

    python scripts/check_inspect.py /some/directory/on/a/disk

Makes the files there (0.8 GB, kept for the next run), then prints time, time to the first chunk, CPU time and
peak memory (of the largest process) of ``list --format json`` and ``stats``. Exit status 1 when 20 s, 1 s or
200 MB are not kept; with ``--chunks``, time and memory in proportion.
Dropping the cache needs root; otherwise the figures are of a warm cache, and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS, FIRST_SECONDS, MEGABYTES = 20.0, 1.0, 200.0


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def run(*args: str) -> tuple[float, float, float, float, str]:
    """Seconds in all, seconds to the second line, CPU seconds, peak megabytes, and the last line printed.

    Keeps nothing of the rest: the peak of a child is at least what its parent took when it was started.
    """
    started = time.monotonic()
    command = [sys.executable, "-m", "lmcache_hs_backend.cli.inspect", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    first, last = 0.0, b""
    for number, line in enumerate(process.stdout):
        last = line
        if number == 1:
            first = time.monotonic() - started
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    cpu = usage.ru_utime + usage.ru_stime
    return time.monotonic() - started, first, cpu, usage.ru_maxrss / 1024, last.decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--chunks", type=int, default=100_000)
    args = parser.parse_args()
    cold = args.directory / f"cold-{args.chunks}"
    if not (cold / "complete").exists():
        maker = [sys.executable, "-m", "tests.support.cold_paths", cold, "--chunks", str(args.chunks)]
        subprocess.run(maker, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        (cold / "complete").touch()
    good = True
    for command in ("list", "stats"):
        cache = "cold" if drop_caches() else "warm"
        is_list = command == "list"
        seconds, first, cpu, megabytes, last = run(command, str(cold), *(("--format", "json") if is_list else ()))
        found = (
            json.loads("{" + last.lstrip("], "))["summary"]["chunks"]
            if is_list
            else int(last.split(" ")[0].replace(",", ""))
        )
        share = args.chunks / 100_000
        kept = seconds < SECONDS * share and megabytes < MEGABYTES * max(1, share) and found == args.chunks
        kept = kept and (not is_list or first < FIRST_SECONDS)
        good = good and kept
        begins = f"first chunk after {first:.2f} s, " if is_list else ""
        verdict = "" if kept else "  NOT KEPT"
        figures = f"{seconds:.1f} s ({cpu:.1f} s of CPU), {begins}{megabytes:.0f} MB"
        print(f"{command:5} {found:,} chunks, {cache} cache: {figures}{verdict}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
