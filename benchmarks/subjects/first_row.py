"""Time to the first row: one chunk, hot and cold, over what its copy or its raw read takes.

What no implementation could save is measured beside it: LMCache's hash of the prompt, and a read that is also checked
and converted, on the calling thread and on another one, which may hang without it.
"""

from __future__ import annotations

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


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    ids, rows = new_prompt(size.chunk), random_rows(size.chunk, size.hidden)
    # Each step has memory of its own, so that the caches of the processor know as little of it as of ours.
    wide, narrow = torch.zeros(size.chunk, size.hidden), torch.zeros(size.chunk, size.hidden, dtype=rows.dtype)
    sources, read_wide = (rows.clone(), rows.clone()), torch.zeros_like(wide)
    pool = 8 * size.chunk_bytes + (1 << 20)
    with (
        context.folder() as path,
        Stores(os.path.join(path, "hot"), size.chunk, pool, 2 * pool) as hot,
        Stores(os.path.join(path, "cold"), size.chunk, pool) as cold,
    ):
        for one in (hot, cold):
            one.ours.store_hidden_states(ids, rows)
        hot.upstream.store_hidden_states(ids, rows)
        cold.write_all()
        file = cold.files()[0]
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

        def drop() -> None:
            disk.leave_page_cache([file])

        steps = {
            "copy_ to float32": Step(lambda: wide.copy_(sources[0])),
            "plain copy_": Step(lambda: narrow.copy_(sources[1])),
            "retrieve hot": Step(lambda: hot.ours.retrieve_hidden_states(ids)),
            "retrieve hot, native": Step(lambda: hot.ours.retrieve_layers(ids, [0], None)),
            "retrieve, upstream": Step(lambda: hot.upstream.retrieve_hidden_states(ids)),
            "LMCache's hash and key": Step(names),
            "raw read": Step(lambda: raw.read_here(file), drop),
            "raw read, xxh3, copy_ to float32": Step(bare, drop),
            "raw read on another thread, xxh3, copy_ to float32": Step(lambda: raw.read_and([file], 1, use), drop),
            "retrieve cold": Step(lambda: cold.ours.retrieve_hidden_states(ids), cold.leave_ram),
            "retrieve cold, native": Step(lambda: cold.ours.retrieve_layers(ids, [0], None), cold.leave_ram),
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
