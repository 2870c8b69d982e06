"""What a chunk costs besides its rows: look-up, KV check, prefix digest; and what the index keeps in RAM for it.

Thread time of calls on a real engine with very small rows, less LMCache's own hashing of the same prompt and less a
plain copy of the same rows, with up to a million other chunks in the index. On one thread: the others of torch would
spend thread time on waiting for each other.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.context import Context
from benchmarks.figures import Result, Series, Table
from benchmarks.measuring import median
from benchmarks.workload import LAZY, Engine, expect, make_config, new_prompt, random_rows
from lmcache_hs_backend.integrations.lmcache.store import key_name

TITLE = "Index overhead"


def run(context: Context) -> Result:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(context)
    finally:
        torch.set_num_threads(threads)


def _run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    tokens = size.chunks * size.chunk
    hidden = 4096 // (2 * size.chunk)  # one page per chunk: no padding, so one copy for all
    ids, rows = new_prompt(tokens), random_rows(tokens, hidden)
    table = Table(
        f"thread time in µs per chunk, prompt of {size.chunks} chunks",
        ["chunks in the index", "LMCache's hashing", "retrieve, beyond it", "store of what is there, beyond it",
         "store of new rows, beyond it", "coverage"],
        [],
    )  # fmt: skip
    series = Series(
        "Overhead per chunk", "chunks in the index", "µs per chunk beyond LMCache's hashing", [],
        {"retrieve": [], "store of what is there": [], "store of new rows": []},
    )  # fmt: skip
    with context.folder() as path:
        config = make_config(
            path, chunk_size=size.chunk, hot_bytes=(2 * size.chunks + 8) * 4096, settings=LAZY,
            max_local_cpu_size=0.002 * size.chunks + 0.02,
        )  # fmt: skip
        with Engine(config) as engine:
            engine.store_kv(ids)
            store: Any = engine.store
            stored = store.store_hidden_states(ids, rows)
            assert stored == size.chunks
            by_size = {}
            for number in size.index_sizes:
                _fill(store, number)
                by_size[number] = found = _measure(engine, ids, rows, size.overhead_calls)
                for line, key in zip(series.lines.values(), ("retrieve", "again", "new"), strict=True):
                    line.append(median(found[key]))
                series.x.append(float(number))
                cells = [f"{median(found[key]):.2f}" for key in ("hashing", "retrieve", "again", "new", "coverage")]
                table.rows.append([f"{number:,}", *cells])
            expect(store.retrieve_hidden_states(ids), rows, "small rows")
            engine.store.clear()
    result.tables.append(table)
    result.series.append(series)
    first, last = by_size[size.index_sizes[0]], by_size[size.index_sizes[-1]]
    for key, text in (("retrieve", "retrieve"), ("again", "store of what is there"), ("new", "store of new rows")):
        most = 8.0 if key != "new" else None  # new rows also take slots and leave a description for their file
        name = f"overhead.{key}"
        result.figure(name, f"{text}, per chunk beyond LMCache's hashing", last[key], unit="µs", at_most=most)
    growth = median(last["retrieve"]) / median(first["retrieve"])
    result.figure(
        "overhead.growth", f"retrieve: {size.index_sizes[-1]:,} chunks in the index over {size.index_sizes[0]:,}",
        [growth], at_most=1.5,
    )  # fmt: skip
    _memory(result, size.index_sizes[-1])
    return result


def _fill(store: Any, count: int) -> None:
    """Put cold chunks into the index until it has ``count`` of them."""
    store.debug.add_cold_chunks(count - store.num_cached_chunks())


def _measure(engine: Engine, ids: list[int], rows: torch.Tensor, calls: int) -> dict[str, list[float]]:
    """µs of thread time per chunk, call by call."""
    store, database = engine.store, engine.engine.token_database
    chunks = len(ids) // engine.config.chunk_size
    listed = list(database.process_tokens(tokens=ids))
    keys = [key for _, _, key in listed]

    def forget() -> None:
        store.tiers.drop([key_name(key) for key in keys])

    other = new_prompt(engine.config.chunk_size)

    def of_a_new_prompt(call: Callable[[], object]) -> float:
        store.retrieve_layers(other, [0])  # or the store would not hash the prompt of its last call again
        return _thread_us(call)

    found: dict[str, list[float]] = {key: [] for key in ("hashing", "retrieve", "again", "new", "coverage")}
    same = torch.zeros_like(rows)
    for number in range(calls + 3):
        hashing = _thread_us(lambda: list(database.process_tokens(tokens=ids)))
        copy = _thread_us(lambda: same.copy_(rows))
        retrieve = of_a_new_prompt(lambda: store.retrieve_layers(ids, [0], None))
        again = of_a_new_prompt(lambda: store.store_hidden_states(ids, rows))
        coverage = _thread_us(lambda: store.coverage(listed))
        forget()
        new = of_a_new_prompt(lambda: store.store_hidden_states(ids, rows))
        if number >= 3:
            found["hashing"].append(hashing / chunks)
            found["coverage"].append(coverage / chunks)
            for key, value in (("retrieve", retrieve - copy), ("again", again), ("new", new - copy)):
                found[key].append((value - hashing) / chunks)
    return found


def _thread_us(call: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e3


#: Each of these is a file that is written, and a million of them would take an hour.
_USED_CHUNKS = 20_000


def _memory(result: Result, count: int) -> None:
    """Resident memory per cold chunk, in a fresh process: the heap of this one has holes."""
    table = Table(f"resident bytes per cold chunk, {count:,} of them", ["chunk", "bytes"], [])
    used = min(count, _USED_CHUNKS)
    measured: dict[str, float] = {}
    for kind, chunks, text in (
        ("recovered", count, "recovered at start"),
        ("stored", count, "stored by this process, then demoted"),
        ("used", used, f"{used:,} that were stored, written, served and stored again, in prompts of 500"),
        ("keys", count, "LMCache's own key object, of which the hash is kept"),
    ):
        command = [sys.executable, "-m", "benchmarks.index_memory", str(chunks), kind]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        (measured[kind],) = [float(line.split()[1]) for line in lines if line.startswith(f"{kind} ")]
        table.rows.append([text, f"{measured[kind]:.0f}"])
    result.tables.append(table)
    worst = max(measured["recovered"], measured["stored"])
    result.figure("overhead.ram_per_cold_chunk", "RAM per cold chunk", [worst], unit="bytes", at_most=600)
