"""Hot retrieve of different prompts from several threads at once, beside as many threads that only copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.context import Context
from benchmarks.figures import Result, Table
from benchmarks.measuring import Step, interleaved, median, quotients
from benchmarks.workload import Stores, expect, new_prompt, random_rows

TITLE = "Threads"


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    tokens = size.thread_chunks * size.chunk
    most = max(size.threads)
    prompts = [new_prompt(tokens) for _ in range(most)]
    rows = random_rows(tokens, size.hidden)
    wide = [torch.zeros(tokens, size.hidden) for _ in range(most)]
    pool = most * size.thread_chunks * size.chunk_bytes * 9 // 8 + (1 << 20)
    table = Table(
        f"prompts of {size.thread_chunks} chunks, all threads together",
        ["threads", "retrieve GB/s", "copy_ GB/s", "share"],
        [],
    )
    with context.folder() as path, Stores(path, size.chunk, pool) as stores:
        for ids in prompts:
            stores.ours.store_hidden_states(ids, rows)

        def retrieve(number: int) -> None:
            got = stores.ours.retrieve_hidden_states(prompts[number])
            assert got is not None
            assert len(got) == tokens

        def copy(number: int) -> None:
            wide[number].copy_(rows)

        nbytes = size.thread_calls * wide[0].numel() * 4
        for count in size.threads:
            with ThreadPoolExecutor(count) as workers:
                numbers = [call % count for call in range(size.thread_calls)]
                steps = {
                    "retrieve": Step(functools.partial(_all, workers, retrieve, numbers)),
                    "copy": Step(functools.partial(_all, workers, copy, numbers)),
                }
                times = interleaved(steps, size.rounds)
            shares = quotients(times["copy"], times["retrieve"])
            rates = [f"{nbytes / median(times[name]) / 1e9:.1f}" for name in ("retrieve", "copy")]
            table.rows.append([str(count), *rates, f"{median(shares):.2f}"])
            result.figure(f"threads.{count}", f"hot retrieve, {count} thread(s), share of as many that copy", shares)
        for ids in prompts:
            expect(stores.ours.retrieve_hidden_states(ids), rows, "threads")
    result.tables.append(table)
    return result


def _all(workers: ThreadPoolExecutor, call: Callable[[int], None], numbers: Sequence[int]) -> None:
    for _ in workers.map(call, numbers):
        pass
