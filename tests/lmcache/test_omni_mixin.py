"""What the one known consumer needs of the count that a store returns.

``Runner`` behaves as the hidden-state mixin of vLLM-Omni's pull request 1330 is described to (it is in no release):
the rows of each step are buffered per request and tap, whole chunks are stored when a request crosses a chunk border, a
count other than the number of chunks handed over is one error per tap, and then border and buffer stay as they are,
so that the next step stores everything again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.engines import CHUNK, HIDDEN, Engine, tokens_of

pytestmark = pytest.mark.engine

TAPS = (-1, 0, 24)
REQUESTS, SHARED, DECODES = 8, 4, 30  # requests; chunks of the system prompt that they share; decode steps


def row_of(tokens: list[int], tap: int) -> torch.Tensor:
    """Rows that depend on nothing but the tokens so far, as a model's do."""
    sums = torch.tensor(tokens).cumsum(0).unsqueeze(1) * (tap + 2)
    return ((sums + torch.arange(HIDDEN)) % 251).to(torch.bfloat16)


@dataclass
class Request:
    tokens: list[int]
    computed: int = 0
    border: int = 0
    buffers: dict[int, list[torch.Tensor]] = field(default_factory=lambda: {tap: [] for tap in TAPS})

    @property
    def buffered_rows(self) -> int:
        return sum(len(rows) for parts in self.buffers.values() for rows in parts)


class Runner:
    """Steps of a batch, its KV stored first, then its hidden states."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.errors = 0

    def step(self, requests: list[Request], num_tokens: int) -> None:
        for request in requests:
            first, request.computed = request.computed, request.computed + num_tokens
            assert request.computed <= len(request.tokens)
            whole = request.tokens[: request.computed // CHUNK * CHUNK]
            if whole:
                self.engine.store_kv(whole)
            for tap, parts in request.buffers.items():
                parts.append(row_of(request.tokens[: request.computed], tap)[first:])
        for request in requests:
            self._flush(request)

    def _flush(self, request: Request) -> None:
        border = request.computed // CHUNK * CHUNK
        if border == request.border:
            return
        failed = False
        joined = {tap: torch.cat(parts) for tap, parts in request.buffers.items()}
        for tap, rows in joined.items():
            stored = self.engine.store.store_hidden_states(
                request.tokens[:border], rows[: border - request.border], layer_idx=tap, token_offset=request.border
            )
            if stored is not None and stored != (border - request.border) // CHUNK:
                self.errors += 1
                failed = True
        if not failed:
            for tap, rows in joined.items():
                request.buffers[tap] = [rows[border - request.border :]]
            request.border = border


def burst() -> list[Request]:
    system = tokens_of(SHARED)
    return [Request(system + tokens_of(SHARED + 2, seed=number + 1)) for number in range(REQUESTS)]


def everything_is_restored(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        tokens = request.tokens[: request.border]
        for tap in TAPS:
            rows = engine.retrieve(tokens, layer_idx=tap)
            assert rows is not None
            assert torch.equal(rows, row_of(tokens, tap).float())


def run_burst(start: Any, **changes: Any) -> tuple[Engine, Runner, list[Request]]:
    engine = start(hot_bytes=64 << 20, max_local_cpu_size=0.1, **changes)
    runner, requests = Runner(engine), burst()
    runner.step(requests, 2 * SHARED * CHUNK)
    for _ in range(DECODES):
        runner.step(requests, 1)
    return engine, runner, requests


def test_a_burst_that_shares_its_system_prompt_ends_without_errors_and_without_a_buffer(start):
    engine, runner, requests = run_burst(start)
    assert runner.errors == 0
    assert [request.border for request in requests] == [2 * SHARED * CHUNK] * REQUESTS
    assert all(request.buffered_rows == DECODES * len(TAPS) for request in requests)  # what fills no chunk yet
    everything_is_restored(engine, requests)
    runner.step(requests, CHUNK - DECODES)
    assert runner.errors == 0
    assert all(request.buffered_rows == 0 for request in requests)
    everything_is_restored(engine, requests)


def test_the_burst_fails_at_every_step_with_upstreams_count(start):
    """So the stand-in can tell the two counts apart."""
    _, runner, requests = run_burst(start, settings={"store_count": "new"})
    assert runner.errors == (REQUESTS - 1) * len(TAPS) * (1 + DECODES)
    assert requests[1].border == 0


def test_equal_prompts_in_one_batch_and_a_prompt_computed_again_are_no_failure(start):
    engine = start()
    tokens = tokens_of(6)
    runner, twins = Runner(engine), [Request(tokens), Request(tokens)]
    runner.step(twins, 4 * CHUNK)
    preempted = Request(tokens)
    runner.step([preempted], 4 * CHUNK + 5)
    assert runner.errors == 0
    everything_is_restored(engine, [*twins, preempted])


def test_what_was_not_kept_is_not_counted(start):
    """A pool of four chunks' layers, a chunk that never fits, and a layer that is not on the allowlist."""
    engine = start(hot_bytes=4 * CHUNK * HIDDEN * 2, hidden_state_layers=[0], settings={"store_wait_ms": 0})
    tokens = tokens_of(2)
    engine.store_kv(tokens)
    wide = torch.ones(2 * CHUNK, 5 * HIDDEN, dtype=torch.bfloat16)
    assert engine.store.store_hidden_states(tokens, wide) == 0
    rows = torch.ones(2 * CHUNK, HIDDEN, dtype=torch.bfloat16)
    assert engine.store.store_hidden_states(tokens, rows, layer_idx=7) == 0
    assert engine.store.store_hidden_states(tokens, rows) == 2
    assert engine.store.store_hidden_states(tokens, rows) == 2
    assert engine.store.store_hidden_states(tokens, rows[CHUNK:], token_offset=CHUNK) == 1
    assert engine.store.stats()["stored_chunks"] == 2


def test_layers_stored_together_count_where_all_of_them_are_held(start):
    engine = start()
    tokens = tokens_of(3)
    engine.store_kv(tokens)
    rows = torch.ones(3 * CHUNK, HIDDEN, dtype=torch.bfloat16)
    assert engine.store.store_hidden_states(tokens[:CHUNK], rows[:CHUNK], layer_idx=1) == 1
    assert engine.store.store_layers(tokens, {1: rows, 2: rows}) == 3
    assert engine.store.store_layers(tokens, {1: rows, 2: rows}) == 3
