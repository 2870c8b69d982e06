"""LMCache's interface, interrupted from outside at random: nothing leaks and no row is wrong, on a real engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.amounts import amount
from tests.support.engines import CHUNK, Engine, make_config
from tests.support.figures import tell
from tests.support.interrupts import InterruptedThread, run_interrupted
from tests.support.prompts import check_balance, honest_rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

SECONDS = amount("HS_FUZZ_SEC", 20, 100) / 4
HIDDEN = 64
POOL = 24
PROMPTS = [[seed * 1000 + token for token in range(CHUNK * (1 + seed % 6))] for seed in range(12)]
ROWS = [honest_rows(tokens, hidden=HIDDEN) for tokens in PROMPTS]


class Caller:
    """Calls LMCache's interface, and compares every row."""

    def __init__(self, engine: Engine) -> None:
        self.store: Any = engine.store
        self.random = random.Random(5)
        self.chunks = [list(engine.engine.token_database.process_tokens(tokens=tokens)) for tokens in PROMPTS]
        self.rows = 0

    def step(self) -> None:
        store, choose = self.store, self.random
        number = choose.randrange(len(PROMPTS))
        tokens = PROMPTS[number]
        kind = choose.choices(
            ["store", "retrieve", "prefetch", "drop", "coverage", "flush", "clear"], [8, 12, 2, 1, 2, 1, 0.2]
        )[0]
        if kind == "store":
            store.store_hidden_states(tokens, ROWS[number])
        elif kind == "retrieve":
            found = store.retrieve_hidden_states(tokens)
            if found is not None:
                assert torch.equal(found, ROWS[number][: len(found)].float()), "a wrong row was served"
                self.rows += len(found)
        elif kind == "prefetch":
            store.prefetch(tokens)
        elif kind == "drop":
            store.drop_key(choose.choice(self.chunks[number])[2])
        elif kind == "coverage":
            assert store.coverage(self.chunks[number]) <= len(tokens)
        elif kind == "flush":
            store.flush(0.05)
        else:
            store.clear()


def test_calls_of_lmcaches_interface_that_are_interrupted_leak_nothing(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, hot_bytes=POOL * CHUNK * HIDDEN * 2, settings={"write_back_sec": 0.02, "read_timeout_sec": 3},
        max_local_cpu_size=0.05,
    )  # fmt: skip
    with Engine(config) as engine:
        for tokens in PROMPTS:
            engine.store_kv(tokens)
        caller, store = Caller(engine), engine.store
        thread = InterruptedThread(caller.step, seed=1)
        run_interrupted([thread], SECONDS)
        wait_until(lambda: not store.debug.active_calls() and not store.debug.busy())
        assert store.flush(20) == 0
        wait_until(lambda: not store.debug.busy())
        assert store.check() == []
        check_balance(store.tiers)
        for tokens, rows in zip(PROMPTS, ROWS, strict=True):
            assert store.store_hidden_states(tokens, rows) == len(tokens) // CHUNK, "there is room as at the start"
            assert torch.equal(store.retrieve_hidden_states(tokens), rows.float())
        tell(f"interrupts in LMCache's interface: {thread.interrupts}, {caller.rows} rows right")
        assert thread.interrupts > 20
        assert caller.rows
        assert store.stats()["errors_internal"] == 0
