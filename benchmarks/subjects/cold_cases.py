"""Cold and half cold retrieves from one chunk to many, of narrow and wide rows, of one layer and of several.

Small files show what a file costs besides its bytes: the system calls, the look-ups and the change of threads. The
limit of a case is the same read by four threads, with nothing but xxh3 and ``copy_`` to float32 after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from benchmarks import disk
from benchmarks.context import Context
from benchmarks.disk import RawDisk
from benchmarks.figures import Result, Table
from benchmarks.measuring import Step, Times, fastest, interleaved, median, quotients
from benchmarks.workload import Stores, expect, huge_rows, new_prompt, random_rows
from lmcache_hs_backend.tiers.memory.copies import alone

TITLE = "Cold retrieve, from one chunk to many"

_RAW = "raw read, {} at a time"
_LIMIT = "raw read, xxh3, copy_ to float32"
_COLD = "retrieve cold"
_NATIVE = "retrieve cold, native"
_HALF = "retrieve, half of it hot"


def run(context: Context) -> Result:
    result = Result(TITLE)
    columns = [
        "chunks", "hidden", "layers", "dtype", "MiB a file", "raw read ms", "retrieve ms", "of raw", "of the limit",
        "native ms", "of raw", "half hot ms",
    ]  # fmt: skip
    table = Table("Medians, and shares in the same rounds (the limit: raw read, xxh3 and copy_)", columns, [])
    shares = []
    for chunks, hidden, layers, dtype in context.size.cases:
        times = _case(context, chunks, hidden, layers, getattr(torch, dtype))
        raw = times[fastest(times, [_RAW.format(depth) for depth in context.size.depths[-2:]])]
        share = median(quotients(times[_LIMIT], times[_COLD]))
        shares.append(share)
        megabytes = context.size.chunk * hidden * layers * getattr(torch, dtype).itemsize / 2**20
        numbers = [
            megabytes, median(raw) * 1e3,
            median(times[_COLD]) * 1e3, median(quotients(raw, times[_COLD])), share,
            median(times[_NATIVE]) * 1e3, median(quotients(raw, times[_NATIVE])),
        ]  # fmt: skip
        half = f"{median(times[_HALF]) * 1e3:.3g}" if chunks > 1 else ""
        table.rows.append([str(chunks), str(hidden), str(layers), dtype, *(f"{n:.3g}" for n in numbers), half])
    result.tables.append(table)
    result.figure("cold_cases.vs_limit", "retrieve cold, share of that limit, over all cases", shares)
    return result


def _case(context: Context, chunks: int, hidden: int, layers: int, dtype: torch.dtype) -> Times:
    """All layers in one call."""
    size = context.size
    chunk, tokens = size.chunk, chunks * size.chunk
    rows = {layer: random_rows(tokens, hidden, dtype) for layer in range(layers)}
    ids = new_prompt(tokens)
    half = ids[: chunks // 2 * chunk]
    layer_bytes = chunk * hidden * dtype.itemsize
    pool = layers * chunks * max(4096, layer_bytes) * 5 // 4 + (1 << 20)
    with context.folder() as path, Stores(os.path.join(path, "cold"), chunk, pool) as stores:
        ours = stores.ours
        ours.store_layers(ids, rows)
        stores.write_all()
        files = stores.files()
        file_bytes = os.path.getsize(files[0])
        raw = RawDisk(size.depths[-2:], file_bytes, chunks, direct=disk.takes_direct(path))
        wide = [huge_rows(tokens, hidden, torch.float32) for _ in rows]

        def use(number: int) -> None:
            raw.check_and_copy(number, [target[number * chunk : (number + 1) * chunk] for target in wide], dtype)

        def bare() -> None:
            with alone():
                raw.read_and(files, size.depths[-2], use)

        def cold() -> None:
            stores.leave_ram()
            disk.leave_page_cache(files)

        def half_hot() -> None:
            cold()
            ours.retrieve_layers(half, list(rows), None)

        def drop() -> None:
            disk.leave_page_cache(files)

        def read(depth: int) -> Callable[[], None]:
            return lambda: raw.read(files, depth)

        steps = {_RAW.format(depth): Step(read(depth), drop) for depth in size.depths[-2:]}
        steps |= {
            _LIMIT: Step(bare, drop),
            _COLD: Step(lambda: ours.retrieve_layers(ids, list(rows)), cold),
            _NATIVE: Step(lambda: ours.retrieve_layers(ids, list(rows), None), cold),
        }
        if half:
            steps[_HALF] = Step(lambda: ours.retrieve_layers(ids, list(rows), None), half_hot)
        times = interleaved(steps, 5 if chunks >= 16 else max(5, size.rounds))
        cold()
        for layer, got in ours.retrieve_layers(ids, list(rows), None).items():
            expect(got, rows[layer], f"cold, layer {layer}")
        raw.close()
    return times
