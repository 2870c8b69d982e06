"""How fast store and hot retrieve are, against LMCache's HiddenStateStore and against plain copies.

All sides run in one process, in turn, over the same rows: 16,384 tokens x 4096, bfloat16, chunks of 256, two
threads, memory that has been touched before. Prints medians with their spread, and ratios of medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from engines import ChunkedTokenDatabase, HiddenStateStore, make_config, make_metadata
from rich.console import Console
from rich.table import Table

from lmcache_hs_backend import TieredHiddenStateStore

TOKENS, HIDDEN, CHUNK = 16_384, 4096, 256


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - started
    del result
    return elapsed * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    cold_path = tempfile.mkdtemp(prefix="hs-speed-")
    settings = {"write_back_sec": 3600, "clean_fraction": 0}
    config = make_config(cold_path, hot_bytes=1 << 30, chunk_size=CHUNK, settings=settings)
    database = ChunkedTokenDatabase(config, make_metadata(chunk=CHUNK))
    upstream, tiered = HiddenStateStore(config, database), TieredHiddenStateStore(config, database)
    ids = list(range(TOKENS))
    rows = torch.randn(TOKENS, HIDDEN).bfloat16()
    same, wide = torch.zeros_like(rows), torch.zeros(TOKENS, HIDDEN)
    keys = [key for _, _, key in database.process_tokens(tokens=ids)]

    def forget() -> None:
        tiered.clear()
        for key in keys:
            upstream.drop_key(key)

    steps: dict[str, Callable[[], object]] = {
        "store, upstream": lambda: upstream.store_hidden_states(ids, rows),
        "store": lambda: tiered.store_hidden_states(ids, rows),
        "bfloat16 copy_": lambda: same.copy_(rows),
        "retrieve, upstream": lambda: upstream.retrieve_hidden_states(ids),
        "retrieve, float32": lambda: tiered.retrieve_hidden_states(ids),
        "bfloat16 to float32 copy_": lambda: wide.copy_(rows),
        "retrieve, native": lambda: tiered.retrieve_layers(ids, [0], None),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        forget()
        for name, step in steps.items():
            elapsed = timed(step)
            if number >= 3:  # the first rounds touch fresh memory
                times[name].append(elapsed)
    assert torch.equal(tiered.retrieve_hidden_states(ids), rows.float())
    median = {name: statistics.median(values) for name, values in times.items()}

    console = Console()
    table = Table(
        "step", "median ms", "min", "max", title=f"{TOKENS} x {HIDDEN} bfloat16, chunk {CHUNK}, {rounds} rounds"
    )
    for name, values in times.items():
        table.add_row(name, f"{median[name]:.1f}", f"{min(values):.1f}", f"{max(values):.1f}")
    console.print(table)
    ratios = [
        ("store, times upstream", median["store, upstream"] / median["store"], 1.3),
        ("store, share of a plain copy", median["bfloat16 copy_"] / median["store"], None),
        ("retrieve float32, times upstream", median["retrieve, upstream"] / median["retrieve, float32"], 2.5),
        ("retrieve float32, share of a plain copy",
         median["bfloat16 to float32 copy_"] / median["retrieve, float32"], None),
        ("retrieve native, share of a plain copy", median["bfloat16 copy_"] / median["retrieve, native"], None),
    ]  # fmt: skip
    table = Table("figure", "measured", "at least")
    for name, ratio, least in ratios:
        table.add_row(name, f"{ratio:.2f}", "" if least is None else f"{least:.2f}")
    console.print(table)
    upstream.close()
    tiered.close()
    shutil.rmtree(cold_path)
    return any(least is not None and ratio < least for _, ratio, least in ratios)


if __name__ == "__main__":
    raise SystemExit(main())
