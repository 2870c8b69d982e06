"""MP mode beside the in-process store: the same rows in turns, against the real ``lmcache server``.

Usage: python scripts/mp_speed.py [--rounds 60] [--dir DIR] [--real-time]

Prints medians and the 90th percentile in ms. Rows are bfloat16 of 2,048 columns, results float32; prompts are new for
each store, and the slots they get have been used before. Run it on an idle machine; the server needs a core. On a busy
one, ``--real-time`` (as root) gives both processes the cores that they need while they are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import Stores, new_prompt, random_rows  # noqa: E402
from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient  # noqa: E402

CHUNK, HIDDEN = 256, 2048
GIB = 1 << 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(directory: str) -> tuple[subprocess.Popen[bytes], HiddenStateClient]:
    port = free_port()
    config = {"cold_path": f"{directory}/mp", "hot_size": 1, "max_cold_size": 4, "write_back_sec": 3600}
    config["clean_fraction"] = 0
    module = {"module_path": "lmcache_hs_backend.integrations.lmcache_mp", "config": config}
    process = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port),
            "--http-port", str(free_port()), "--l1-size-gb", "0.1", "--eviction-policy", "LRU",
            "--disable-observability", "--server-module", json.dumps(module),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_TRACK_USAGE": "false"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    client = HiddenStateClient(f"tcp://127.0.0.1:{port}", model="org/speed")
    deadline = time.monotonic() + 90
    while not client.stats():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("lmcache server does not start")
        time.sleep(0.2)
    return process, client


def until_touched(pid: int) -> None:
    """Wait until the server has touched its hot tier."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        if int(status.split("RssShmem:")[1].split()[0]) >= GIB // 1024:
            return
        time.sleep(0.2)


@contextlib.contextmanager
def real_time(pids: list[int]) -> Iterator[None]:
    """Schedule all threads of these processes, and those that they start, before everything else."""

    def schedule(policy: int, priority: int) -> None:
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(int(task.name), policy, os.sched_param(priority))

    schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


def timed(call: Callable[[], Any], times: list[float]) -> Any:
    began = time.perf_counter()
    result = call()
    times.append((time.perf_counter() - began) * 1e3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="stores and retrieves of each size (default 60)")
    parser.add_argument("--real-time", action="store_true", help="schedule both sides before everything else")
    parser.add_argument("--dir", help="directory for the cold paths (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        process, client = start_server(directory)
        try:
            settings = {"write_back_sec": 3600, "clean_fraction": 0}
            with Stores(f"{directory}/in-process", CHUNK, GIB, 4 * GIB, **settings) as stores:
                sides = {"in process": stores.ours, "MP": client}
                print(f"{'size':>7} {'call':<9}" + "".join(f"{side:>22}" for side in sides) + "   ratio   more")
                until_touched(process.pid)
                for mib in (1, 4, 16, 32):
                    with real_time([process.pid, os.getpid()]) if options.real_time else contextlib.nullcontext():
                        measure(mib, sides, options.rounds)
        finally:
            client.close()
            process.terminate()
            process.wait(30)


def one_round(
    mib: int,
    order: list[str],
    sides: dict[str, Any],
    rows: torch.Tensor,
    store: dict[str, list[float]],
    fetch: dict[str, list[float]],
) -> None:
    ids = new_prompt(len(rows))
    for side in order:
        time.sleep(0.005)  # torch's threads go on spinning for a moment after each copy
        stored = timed(lambda side=side: sides[side].store_hidden_states(ids, rows), store[side])
        assert stored == mib, f"{side} kept {stored} of {mib} chunks"
    for side in order:
        time.sleep(0.005)
        found = timed(lambda side=side: sides[side].retrieve_hidden_states(ids), fetch[side])
        assert found is not None, side
        assert torch.equal(found, rows.float()), f"{side}: wrong rows"
        del found
    for side in order:
        sides[side].clear()


def measure(mib: int, sides: dict[str, Any], rounds: int) -> None:
    """One layer of ``mib`` MiB, in turns."""
    tokens = mib * CHUNK
    rows = random_rows(tokens, HIDDEN)
    rounds = max(10, min(rounds, 512 // mib))  # both pools keep all of it: 1 GB
    store: dict[str, list[float]] = {side: [] for side in sides}
    fetch: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        one_round(mib, list(sides)[:: 1 if number % 2 else -1], sides, rows, store, fetch)
    for call, times in (("store", store), ("retrieve", fetch)):
        cells, medians = "", []
        for side in sides:
            warm = sorted(times[side][5:])
            medians.append(statistics.median(warm))
            cells += f"{medians[-1]:>12.2f} (p90 {warm[int(len(warm) * 0.9)]:.2f})".rjust(22)
        compared = f"{medians[1] / medians[0]:.2f}   {medians[1] - medians[0]:+.2f} ms"
        print(f"{mib:>3} MiB {call:<9}{cells}   {compared}", flush=True)


if __name__ == "__main__":
    main()
