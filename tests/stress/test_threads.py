"""Eight threads on one store of a real engine whose pool always evicts: no wrong row, no exception, no leak."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.amounts import amount
from tests.support.engines import CHUNK, Engine, make_config
from tests.support.figures import tell
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS = amount("HS_STRESS_SEC", 8, 30)
HIDDEN = 256
LAYERS = (0, 3)
SLOT = CHUNK * HIDDEN * 2


def prompt(branches: list[int]) -> list[int]:
    """Prompts that share prefixes."""
    return [branch * 1000 + token for branch in branches for token in range(CHUNK)]


def honest(tokens: list[int], layer: int) -> torch.Tensor:
    """Rows that depend on every token up to theirs."""
    running = torch.tensor(tokens, dtype=torch.float64).cumsum(0) % 8191 + layer
    return (running.unsqueeze(1) + torch.arange(HIDDEN)).to(torch.bfloat16)


@pytest.mark.parametrize("damage", [False, True], ids=["clean disk", "files cut and deleted meanwhile"])
def test_eight_threads_on_a_pool_that_always_evicts(tmp_path: Path, damage: bool) -> None:
    config = make_config(
        tmp_path, hot_bytes=10 * len(LAYERS) * SLOT, settings={"write_back_sec": 0.5}, max_local_cpu_size=0.05
    )
    with Engine(config) as engine:
        until = time.monotonic() + SECONDS
        counts: Counter[str] = Counter()
        problems: list[str] = []

        def work(number: int) -> None:
            choose = random.Random(number)
            try:
                while time.monotonic() < until and not problems:
                    one_operation(engine, choose, counts, problems)
            except Exception as error:  # the test fails with it below
                problems.append(f"{type(error).__name__}: {error}")
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        if damage:
            threads.append(threading.Thread(target=vandal, args=(tmp_path, until, counts)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems[:3]
        store = engine.store
        store.flush(20)
        wait_until(lambda: not store.debug.busy())
        chunks = store.debug.chunks().values()
        assert store.debug.memory().used == sum(chunk.hot_bytes for chunk in chunks)
        assert all(chunk.pins == 0 for chunk in chunks)
        figures = store.stats()
        assert figures["errors_internal"] == 0
        assert figures["hits_cold"] > 0
        assert figures["demoted"] > 0
        tell(
            f"operations under stress: {sum(counts.values())} {dict(counts)}, wrong rows: 0, "
            f"drops: { {name[6:]: int(n) for name, n in figures.items() if name.startswith('drops_') and n} }"
        )


def one_operation(engine: Engine, choose: random.Random, counts: Counter[str], problems: list[str]) -> None:
    store: Any = engine.store
    tokens = prompt([choose.randrange(4) for _ in range(choose.randint(1, 5))])
    layers = choose.sample(LAYERS, choose.randint(1, 2))
    kind = choose.choices(["store", "retrieve", "prefetch", "coverage", "drop", "kv"], [5, 6, 1, 2, 1, 1])[0]
    counts[kind] += 1
    if kind == "store":
        engine.engine.store(torch.tensor(tokens), kv=engine.kv(tokens))
        store.store_layers(tokens, {layer: honest(tokens, layer) for layer in layers})
    elif kind == "retrieve":
        for layer, rows in store.retrieve_layers(tokens, layers).items():
            if not torch.equal(rows, honest(tokens, layer)[: len(rows)].float()):
                problems.append(f"wrong rows of layer {layer}")
    elif kind == "prefetch":
        store.prefetch(tokens)
    elif kind == "coverage":
        chunks = list(engine.engine.token_database.process_tokens(tokens=tokens))
        assert store.coverage(chunks, layers) % CHUNK == 0
    elif kind == "drop":
        store.drop_key(choose.choice(engine.keys(tokens)))
    else:
        engine.evict_kv(engine.keys(tokens)[-1])


def vandal(root: Path, until: float, counts: Counter[str]) -> None:
    """Cuts and deletes files under the running store."""
    choose = random.Random(99)
    pause = threading.Event()
    while time.monotonic() < until:
        files = list(root.glob("*/??/*.safetensors"))
        if files:
            path = choose.choice(files)
            try:
                if choose.random() < 0.5:
                    os.truncate(path, choose.randrange(path.stat().st_size + 1))
                else:
                    path.unlink()
                counts["files damaged"] += 1
            except FileNotFoundError:
                pass
        pause.wait(0.02)
