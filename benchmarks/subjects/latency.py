"""Store latency while everything stored must be written: p99 at half the measured write rate, over p99 when idle."""

from __future__ import annotations

import os
import time

import torch

from benchmarks.context import Context
from benchmarks.figures import Result, Table
from benchmarks.measuring import Spread, median, percentile
from benchmarks.workload import Stores, expect, new_prompt, random_rows

TITLE = "Store latency while demoting"


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    tokens = size.latency_chunks * size.chunk
    rows = random_rows(tokens, size.hidden)
    nbytes = size.latency_chunks * size.chunk_bytes
    calls = size.latency_calls
    idle_pool = (calls + 2) * nbytes
    busy_pool = max(16 * nbytes, idle_pool // 8)
    found: dict[str, list[float]] = {"idle": [], "demoting": []}
    with (
        context.folder() as path,
        Stores(os.path.join(path, "idle"), size.chunk, idle_pool) as idle,
        Stores(
            os.path.join(path, "busy"), size.chunk, busy_pool, clean_fraction=0.25, max_cold_size=8,
        ) as busy,
    ):  # fmt: skip
        interval = 2 * nbytes / _write_rate(idle, rows, tokens, calls, nbytes)
        _paced(busy, rows, tokens, 2 * busy_pool // nbytes, interval)  # until what comes in pushes something out
        short = 0
        for _ in range(size.latency_blocks):
            idle.delete_all()
            found["idle"] += _paced(idle, rows, tokens, calls, interval)[0]
            seconds, missing = _paced(busy, rows, tokens, calls, interval)
            found["demoting"] += seconds
            short += missing
        demoted = busy.ours.stats()["demoted"]
        ids = new_prompt(tokens)
        busy.ours.store_hidden_states(ids, rows)
        expect(busy.ours.retrieve_hidden_states(ids), rows, "a store while demoting")
    table = Table(
        f"store of {size.latency_chunks} chunks, {len(found['idle'])} calls each, one every {interval * 1e3:.1f} ms",
        ["", "median ms", "p90", "p99", "worst"],
        [],
    )
    for name, values in found.items():
        cells = [median(values), percentile(values, 90), percentile(values, 99), max(values)]
        table.rows.append([name, *(f"{value * 1e3:.3g}" for value in cells)])
    result.tables.append(table)
    result.notes.append(f"{demoted:.0f} chunks were demoted; {short} chunks found no room in store_wait_ms.")
    p99 = percentile(found["demoting"], 99) / percentile(found["idle"], 99)
    result.figure("latency.p99", "store p99 while demoting, over idle", Spread(p99, p99, p99), at_most=3.0)
    return result


def _write_rate(stores: Stores, rows: torch.Tensor, tokens: int, calls: int, nbytes: int) -> float:
    """Bytes per second that our demotion writes, measured as the median of three."""
    rates = []
    for _ in range(3):
        stores.delete_all()
        for _ in range(calls):
            stores.ours.store_hidden_states(new_prompt(tokens), rows)
        started = time.perf_counter()
        stores.write_all()
        rates.append(calls * nbytes / (time.perf_counter() - started))
    return median(rates)


def _paced(stores: Stores, rows: torch.Tensor, tokens: int, calls: int, interval: float) -> tuple[list[float], int]:
    """Seconds of each store, one begun every ``interval``; and how many chunks were not kept."""
    seconds, missing = [], 0
    chunks = tokens // stores.metadata.chunk_size
    due = time.perf_counter()
    for _ in range(calls):
        ids = new_prompt(tokens)
        due += interval
        time.sleep(max(0.0, due - time.perf_counter()))
        started = time.perf_counter()
        stored = stores.ours.store_hidden_states(ids, rows)
        seconds.append(time.perf_counter() - started)
        missing += chunks - stored
    return seconds, missing
