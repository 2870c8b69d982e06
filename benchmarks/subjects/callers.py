"""What real callers do: a few chunks per step, every 20 ms or back to back, beside an idle or a busy machine.

vLLM-Omni stores 1 to 4 chunks of a prompt in three layers per step, on the worker's main thread. So that is what is
timed: one step, all its layers, for ours and for LMCache's own store in turns within one run, with the same rows.
Upstream has one call per layer; ours is timed that way, and with all layers in one ``store_layers``. A *busy* machine
has one process per core that computes all the time. With ``--real-time`` an *idle* one may have other work, which then
takes no part; what it leaves in the caches it does leave.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.context import Context
from benchmarks.figures import Result, Spread, Table
from benchmarks.machine import real_time
from benchmarks.sizes import CallerCase
from benchmarks.workload import Stores, expect, new_prompt, random_rows, wait_until

TITLE = "Small calls, as a serving worker makes them"

_PAUSE_SEC = 0.02
_SIDES = ("upstream", "ours", "ours at once")


def run(context: Context) -> Result:
    result = Result(TITLE)
    columns = ["hidden × chunks", "layers", "machine", "threads", "calls", "pool"]
    columns += ["store p50 / p90 / p99 µs, upstream", "ours", "in one call", "retrieve p50 / p90 µs, upstream", "ours"]
    table = Table("one step, all its layers", columns, [])
    result.tables.append(table)
    ratios: dict[tuple[str, str, int], list[float]] = {}
    for case in context.size.caller_cases:
        row, stored, retrieved = _case(context, case)
        table.rows.append(row)
        for what, times in (("store", stored), ("retrieve", retrieved)):
            for percent in (50, 90):
                ratio = _quantile(times["upstream"], percent) / _quantile(times["ours"], percent)
                ratios.setdefault((what, _machine(case), percent), []).append(ratio)
    for (what, machine, percent), found in ratios.items():
        text = f"small calls, {machine} machine: {what} p{percent}, times upstream, the worst of {len(found)} cases"
        name = f"callers.{what}.{machine}.p{percent}"
        result.figure(name, text, Spread(min(found), min(found), max(found)), at_least=1.0)
    return result


def _case(context: Context, case: CallerCase) -> tuple[list[str], dict[str, list[float]], dict[str, list[float]]]:
    """The case's row of the table, and the seconds of its stores and its retrieves by side."""
    tokens = case.chunks * context.size.chunk
    layers = {layer: random_rows(tokens, case.hidden) for layer in range(case.layers)}
    step_bytes = case.layers * case.chunks * max(4096, context.size.chunk * case.hidden * 2)
    steps = context.size.caller_steps + 5
    # A pool with room keeps every step of both ways of ours; one that demotes is turned over several times.
    pool = step_bytes * (2 * steps + 4 if case.room else max(4, steps // 4))
    writing = {} if case.room else {"clean_fraction": 0.25}
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        with (
            context.folder() as path,
            Stores(path, context.size.chunk, pool, 2 * pool, **writing) as stores,
            _busy_cores(case.busy),
            real_time(context.real_time and not case.busy),
        ):
            stored, retrieved = _steps(stores, case, layers, tokens, steps)
    finally:
        torch.set_num_threads(threads)
    calls = "paced" if case.paced else "back to back"
    row = [f"{case.hidden} × {case.chunks}", str(case.layers), _machine(case), str(case.threads), calls]
    row += ["with room" if case.room else "demotes"]
    row += [_quantiles(stored[side], (50, 90, 99)) for side in _SIDES]
    row += [_quantiles(retrieved[side], (50, 90)) for side in _SIDES[:2]]
    return row, stored, retrieved


def _machine(case: CallerCase) -> str:
    return "busy" if case.busy else "idle"


def _steps(
    stores: Stores, case: CallerCase, layers: dict[int, torch.Tensor], tokens: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each side's stores and retrieves, step by step in turns, the first few left out."""
    use = stores.ours.debug.memory
    wait_until(lambda: use().touched in (0, use().mapped), 60)  # in a pool that is older than a second
    stored: dict[str, list[float]] = {side: [] for side in _SIDES}
    retrieved: dict[str, list[float]] = {side: [] for side in _SIDES}
    for number in range(steps):
        order = _SIDES[number % 3 :] + _SIDES[: number % 3]
        for side in order:
            ids = new_prompt(tokens)
            if case.paced:
                time.sleep(_PAUSE_SEC)
            store = stores.upstream if side == "upstream" else stores.ours
            took = _timed(lambda side=side, ids=ids: _store(stores, side, ids, layers))
            if case.paced:
                time.sleep(_PAUSE_SEC)
            started = time.perf_counter()
            got = [store.retrieve_hidden_states(ids, layer_idx=layer) for layer in layers]
            back = time.perf_counter() - started
            for layer, rows in layers.items():
                expect(got[layer], rows, f"{side}, layer {layer}")
            del got
            if number >= 5:
                stored[side].append(took)
                retrieved[side].append(back)
    return stored, retrieved


def _store(stores: Stores, side: str, ids: list[int], layers: dict[int, torch.Tensor]) -> None:
    if side == "ours at once":
        stores.ours.store_layers(ids, layers)
        return
    store = stores.upstream if side == "upstream" else stores.ours
    for layer, rows in layers.items():
        store.store_hidden_states(ids, rows, layer_idx=layer)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _quantile(seconds: list[float], percent: int) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def _quantiles(seconds: list[float], percents: tuple[int, ...]) -> str:
    return " / ".join(f"{_quantile(seconds, percent) * 1e6:,.0f}" for percent in percents)


def _compute() -> None:
    value = 0
    while os.getppid() != 1:
        for number in range(1_000_000):
            value += number


@contextlib.contextmanager
def _busy_cores(busy: bool) -> Iterator[None]:
    """One process per core that computes, while the block runs."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute, daemon=True) for _ in range(os.cpu_count() or 1)] if busy else []
    for process in processes:
        process.start()
    try:
        if processes:
            time.sleep(0.5)  # until they run
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()
