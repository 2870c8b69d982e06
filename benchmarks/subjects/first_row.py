"""Time to the first row: one chunk, hot and cold, over what its copy or its raw read takes.

What no implementation could save is measured beside it: LMCache's hash of the prompt, and a read that is also checked
and converted, on the calling thread and on another one, which may hang without it.

Every read is of another file than the last one, into memory that has been used since it was last read into. The same
two MiB once more come out of a cache of the host, and into memory that has not been touched they go twice as fast: on
a virtual disk 0.5 ms instead of 1.0. No cold hit has either.
"""

from __future__ import annotations

import itertools
import os

import torch
from xxhash import xxh3_64_hexdigest

from benchmarks import disk
from benchmarks.context import Context
from benchmarks.disk import RawDisk
from benchmarks.figures import Result, times_table
from benchmarks.measuring import Step, interleaved
from benchmarks.workload import Stores, expect, new_prompt, random_rows

TITLE = "Time to first row"

_FILES = 32


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    prompts = [new_prompt(size.chunk) for _ in range(_FILES)]
    ids, rows = prompts[0], random_rows(size.chunk, size.hidden)
    # Each step has memory of its own, so that the caches of the processor know as little of it as of ours.
    wide, narrow = torch.zeros(size.chunk, size.hidden), torch.zeros(size.chunk, size.hidden, dtype=rows.dtype)
    sources, read_wide = (rows.clone(), rows.clone()), torch.zeros_like(wide)
    pool = _FILES * size.chunk_bytes + (1 << 20)
    with (
        context.folder() as path,
        Stores(os.path.join(path, "hot"), size.chunk, pool, 2 * pool) as hot,
        Stores(os.path.join(path, "cold"), size.chunk, pool) as cold,
    ):
        for store in (hot.ours, hot.upstream):
            store.store_hidden_states(ids, rows)
        for prompt in prompts:
            cold.ours.store_hidden_states(prompt, rows)
        cold.write_all()
        files = itertools.cycle(cold.files())
        file = next(files)
        turns = itertools.cycle(prompts)
        raw = RawDisk((1,), os.path.getsize(file), 1, direct=disk.takes_direct(path))
        read_rows = torch.frombuffer(raw.rows_read(0), dtype=rows.dtype).view_as(rows)

        def use(_: int) -> None:
            xxh3_64_hexdigest(raw.rows_read(0))
            read_wide.copy_(read_rows)

        def bare() -> None:
            raw.read_here(file)
            use(0)

        def names() -> None:
            """The name of the chunk, as LMCache makes it."""
            assert len([key.to_string() for _, _, key in hot.database.process_tokens(tokens=ids)]) == 1

        def another() -> None:
            nonlocal file
            use(0)
            file = next(files)
            disk.leave_page_cache([file])

        def drop() -> None:
            cold.leave_ram()
            disk.leave_page_cache(cold.files())

        steps = {
            "copy_ to float32": Step(lambda: wide.copy_(sources[0])),
            "plain copy_": Step(lambda: narrow.copy_(sources[1])),
            "retrieve hot": Step(lambda: hot.ours.retrieve_hidden_states(ids)),
            "retrieve hot, native": Step(lambda: hot.ours.retrieve_layers(ids, [0], None)),
            "retrieve, upstream": Step(lambda: hot.upstream.retrieve_hidden_states(ids)),
            "LMCache's hash and key": Step(names),
            "raw read": Step(lambda: raw.read_here(file), another),
            "raw read, xxh3, copy_ to float32": Step(bare, another),
            "raw read on another thread, xxh3, copy_ to float32": Step(lambda: raw.read_and([file], 1, use), another),
            "retrieve cold": Step(lambda: cold.ours.retrieve_hidden_states(next(turns)), drop),
            "retrieve cold, native": Step(lambda: cold.ours.retrieve_layers(next(turns), [0], None), drop),
        }
        times = interleaved(steps, size.first_row_calls, warmups=10)
        expect(hot.ours.retrieve_hidden_states(ids), rows, "one hot chunk")
        cold.leave_ram()
        expect(cold.ours.retrieve_hidden_states(ids), rows, "one cold chunk")
        raw.close()
    result.tables.append(times_table(f"one chunk of {size.chunk_bytes / 2**20:g} MiB", times))
    for key, ours, limit, most in (
        ("hot", "retrieve hot", "copy_ to float32", 60),
        ("hot_native", "retrieve hot, native", "plain copy_", None),
        ("hot_upstream", "retrieve, upstream", "copy_ to float32", None),
        ("cold", "retrieve cold", "raw read", 150),
        ("cold_native", "retrieve cold, native", "raw read", None),
        ("cold_limit", "raw read, xxh3, copy_ to float32", "raw read", None),
        ("cold_handed", "raw read on another thread, xxh3, copy_ to float32", "raw read", None),
        ("cold_bare", "retrieve cold", "raw read on another thread, xxh3, copy_ to float32", None),
    ):
        over = [(a - b) * 1e6 for a, b in zip(times[ours], times[limit], strict=True)]
        result.figure(f"first_row.{key}", f"one chunk: {ours}, over {limit}", over, unit="µs", at_most=most)
    result.figure(
        "first_row.names",
        "LMCache's hash and key of one chunk",
        [s * 1e6 for s in times["LMCache's hash and key"]],
        unit="µs",
    )
    return result
