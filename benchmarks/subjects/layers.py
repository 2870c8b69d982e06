"""Four layers in one ``retrieve_layers`` beside four calls, on a real engine that is asked for the KV."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.context import Context
from benchmarks.figures import Result, Table, WrongRows
from benchmarks.measuring import Step, interleaved, median, quotients
from benchmarks.workload import LAZY, Engine, expect, make_config, new_prompt, random_rows

TITLE = "Four layers at once"

_LAYERS = [0, 1, 2, 3]


def run(context: Context) -> Result:
    result = Result(TITLE)
    table = Table("medians", ["chunks", "hidden", "one call ms", "four calls ms", "ratio"], [])
    result.tables.append(table)
    for chunks, hidden in context.size.layer_cases:
        _case(context, chunks, hidden, result, table)
    return result


def _case(context: Context, chunks: int, hidden: int, result: Result, table: Table) -> None:
    size = context.size
    tokens = chunks * size.chunk
    ids = new_prompt(tokens)
    rows = {layer: random_rows(tokens, hidden) for layer in _LAYERS}
    pool = 5 * chunks * max(4096, size.chunk * hidden * 2) + (1 << 20)
    with context.folder() as path:
        config = make_config(
            path, chunk_size=size.chunk, hot_bytes=pool, settings=LAZY, max_local_cpu_size=0.002 * chunks + 0.02
        )
        with Engine(config) as engine:
            engine.store_kv(ids)
            store: Any = engine.store
            store.store_layers(ids, rows)
            wide = [torch.zeros(tokens, hidden) for _ in rows]

            def copies() -> None:
                for target, source in zip(wide, rows.values(), strict=True):
                    target.copy_(source)

            steps = {
                "copies": Step(copies),
                "one": Step(lambda: store.retrieve_layers(ids, _LAYERS)),
                "four": Step(lambda: [store.retrieve_hidden_states(ids, layer_idx=layer) for layer in _LAYERS]),
            }
            times = interleaved(steps, max(size.rounds, 40 if size.name == "full" else 0))
            got = store.retrieve_layers(ids, _LAYERS)
            for layer in _LAYERS:
                expect(got[layer], rows[layer], f"layer {layer} of four")
            asked = _times_asked(store, ids)
    if asked != 1:
        raise WrongRows(f"one retrieve_layers asked {asked} times for the KV of its chunks")
    ratios = quotients(times["one"], times["four"])
    one, four = median(times["one"]) * 1e3, median(times["four"]) * 1e3
    table.rows.append([str(chunks), str(hidden), f"{one:.3g}", f"{four:.3g}", f"{median(ratios):.3f}"])
    result.figure(
        f"layers.{chunks}x{hidden}", f"four layers of {chunks} chunks × {hidden}: one call over four", ratios,
        at_most=0.9,
    )  # fmt: skip
    result.figure(
        f"layers.{chunks}x{hidden}_limit", "… and of a call that does nothing but copy",
        quotients(times["copies"], times["four"]),
    )  # fmt: skip


def _times_asked(store: Any, ids: list[int]) -> int:
    """How often one call asks LMCache for KV."""
    with store.debug.questions() as asked:
        store.retrieve_layers(ids, _LAYERS)
    return sum(not question.memory_only for question in asked)  # the store's chores ask memory, now and then
