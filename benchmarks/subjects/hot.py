"""Hot store and retrieve beside LMCache's HiddenStateStore and beside plain copies of the same rows in warm memory.

What there is to win is bounded. Upstream converts to float32 while it stores, so it writes twice the bytes; it
concatenates into fresh memory while it retrieves, and the page faults cost more than the copy. A plain copy of the same
rows is the limit for both, and the two rows named "the limit" say how far away that is from upstream. A caller who
keeps every result leaves nothing to recycle: the next result then comes from fresh memory (in huge pages), which is the
row "every result kept".
"""

from __future__ import annotations

import torch

from benchmarks.context import Context
from benchmarks.figures import Result, Series, Table, times_table
from benchmarks.measuring import Step, Times, interleaved, median, quotients
from benchmarks.workload import Stores, expect, new_prompt, random_rows

TITLE = "Hot store and retrieve"

_STORE, _STORE_UP, _COPY = "store", "store, upstream", "plain copy_"
_GET, _GET_UP, _WIDEN = "retrieve, float32", "retrieve, upstream", "copy_ to float32"
_NATIVE = "retrieve, native dtype"


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    times = _case(context, size.chunks, size.hidden, 1, "bfloat16", size.rounds)
    tokens = size.chunks * size.chunk
    narrow, wide = tokens * size.hidden * 2, tokens * size.hidden * 4
    sizes = {name: narrow if name in (_STORE, _STORE_UP, _COPY, _NATIVE) else wide for name in times}
    result.tables.append(times_table(f"{tokens:,} × {size.hidden} bfloat16, warm", times, sizes))

    def figure(name: str, text: str, above: str, below: str, least: float) -> None:
        result.figure(f"hot.{name}", text, quotients(times[above], times[below]), at_least=least)

    figure("store_vs_upstream", "store, times upstream", _STORE_UP, _STORE, 1.6)
    figure("store_vs_copy", "store, share of a plain copy_", _COPY, _STORE, 0.85)
    figure("retrieve_vs_upstream", "retrieve float32, times upstream", _GET_UP, _GET, 4.0)
    figure("retrieve_vs_copy", "retrieve float32, share of copy_ to float32", _WIDEN, _GET, 0.8)
    figure("native_vs_copy", "retrieve native, share of a plain copy_", _COPY, _NATIVE, 0.8)
    result.figure(
        "hot.store_limit", "the limit: plain copy_, times upstream's store", quotients(times[_STORE_UP], times[_COPY])
    )
    result.figure(
        "hot.retrieve_limit", "the limit: copy_ to float32, times upstream's retrieve",
        quotients(times[_GET_UP], times[_WIDEN]),
    )  # fmt: skip
    _sweep(context, result)
    _kept(context, result)
    return result


def _case(context: Context, chunks: int, hidden: int, layers: int, dtype: str, rounds: int) -> Times:
    """Several layers: one call for us, one call per layer for upstream."""
    chunk = context.size.chunk
    tokens = chunks * chunk
    kind = getattr(torch, dtype)
    rows = {layer: random_rows(tokens, hidden, kind) for layer in range(layers)}
    ids = new_prompt(tokens)
    same = [torch.zeros_like(r) for r in rows.values()]
    wide = [torch.zeros(tokens, hidden) for _ in rows]
    pool = layers * chunks * max(4096, chunk * hidden * kind.itemsize) * 5 // 4 + (1 << 20)

    with context.folder() as path, Stores(path, chunk, pool, pool * 4 // kind.itemsize + (8 << 20)) as stores:
        ours, upstream = stores.ours, stores.upstream

        def copy(targets: list[torch.Tensor]) -> None:
            for target, source in zip(targets, rows.values(), strict=True):
                target.copy_(source)

        steps = {
            _STORE_UP: Step(
                lambda: [upstream.store_hidden_states(ids, r, layer_idx=i) for i, r in rows.items()],
                lambda: stores.forget(upstream, ids),
            ),
            _STORE: Step(lambda: ours.store_layers(ids, rows), lambda: stores.forget(ours, ids)),
            _COPY: Step(lambda: copy(same)),
            _GET_UP: Step(lambda: [upstream.retrieve_hidden_states(ids, layer_idx=i) for i in rows]),
            _GET: Step(lambda: ours.retrieve_layers(ids, list(rows))),
            _WIDEN: Step(lambda: copy(wide)),
            _NATIVE: Step(lambda: ours.retrieve_layers(ids, list(rows), None)),
        }
        times = interleaved(steps, rounds, warmups=3)
        for layer, stored in rows.items():
            expect(ours.retrieve_layers(ids, [layer])[layer], stored, f"hot, layer {layer}")
            expect(ours.retrieve_layers(ids, [layer], None)[layer], stored, f"hot native, layer {layer}")
            expect(upstream.retrieve_hidden_states(ids, layer_idx=layer), stored, "upstream")
    return times


def _sweep(context: Context, result: Result) -> None:
    columns = [
        "chunks", "hidden", "layers", "dtype", "store ms", "× upstream", "of copy_",
        "retrieve ms", "× upstream", "of copy_", "native ms", "of copy_",
    ]  # fmt: skip
    table = Table("From one chunk to many: medians, and ratios in the same rounds", columns, [])
    lines: dict[str, dict[int, float]] = {}
    for chunks, hidden, layers, dtype in context.size.cases:
        times = _case(context, chunks, hidden, layers, dtype, max(5, context.size.rounds) if chunks < 16 else 5)

        def ratio(above: str, below: str, times: Times = times) -> float:
            return median(quotients(times[above], times[below]))

        cells = [
            (median(times[_STORE]) * 1e3, ratio(_STORE_UP, _STORE), ratio(_COPY, _STORE)),
            (median(times[_GET]) * 1e3, ratio(_GET_UP, _GET), ratio(_WIDEN, _GET)),
            (median(times[_NATIVE]) * 1e3, ratio(_COPY, _NATIVE)),
        ]
        numbers = [f"{value:.3g}" for group in cells for value in group]
        table.rows.append([str(chunks), str(hidden), str(layers), dtype, *numbers])
        if layers == 1 and dtype == "bfloat16":
            lines.setdefault(f"store, hidden {hidden}", {})[chunks] = cells[0][1]
            lines.setdefault(f"retrieve, hidden {hidden}", {})[chunks] = cells[1][1]
    result.tables.append(table)
    x = sorted({chunks for line in lines.values() for chunks in line})
    if x:
        result.series.append(
            Series(
                "Hot tier, times upstream (bfloat16)", "chunks in the prompt", "times faster than upstream",
                [float(chunks) for chunks in x],
                {label: [line.get(chunks) for chunks in x] for label, line in lines.items()},
            )
        )  # fmt: skip


def _kept(context: Context, result: Result) -> None:
    """A caller that keeps every result: nothing can be recycled, and nothing may change."""
    size = context.size
    chunks = max(1, size.chunks // 8)
    tokens = chunks * size.chunk
    ids, rows = new_prompt(tokens), random_rows(tokens, size.hidden)
    pool = 2 * chunks * size.chunk_bytes + (1 << 20)
    with context.folder() as path, Stores(path, size.chunk, pool, 2 * pool + (8 << 20)) as stores:
        stores.ours.store_hidden_states(ids, rows)
        stores.upstream.store_hidden_states(ids, rows)
        kept: list[torch.Tensor | None] = []
        steps = {
            _GET_UP: Step(lambda: kept.append(stores.upstream.retrieve_hidden_states(ids))),
            _GET: Step(lambda: kept.append(stores.ours.retrieve_hidden_states(ids))),
        }
        times = interleaved(steps, size.kept_results // 2, warmups=0)  # each runs twice
        stores.ours.clear()
        for got in kept:
            expect(got, rows, "a result that was kept")
    result.figure(
        "hot.kept_vs_upstream", f"retrieve, every result kept ({size.kept_results} of {chunks} chunks), times upstream",
        quotients(times[_GET_UP], times[_GET]),
    )  # fmt: skip
