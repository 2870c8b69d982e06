"""What LMCache's HiddenStateStore promises holds for ours: the same tests run over both.

The behaviours are those that LMCache's own tests assert (tests/v1/test_hidden_state_store.py on its main branch), and
those that its consumers rely on. What every store promises, theirs too, is in test_engine_contract.py. No engine here:
a token database, and KV that is there or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmcache_hs_backend import TieredHiddenStateStore
from lmcache_hs_backend.integrations.lmcache.store import key_name
from tests.support.engines import GIB, ChunkedTokenDatabase, HiddenStateStore, make_config, make_metadata

pytestmark = pytest.mark.engine

CHUNK, HIDDEN = 8, 16


class HeldKv:
    """A storage manager as upstream's store knows it: one that can say where the KV of a key is."""

    def __init__(self) -> None:
        self.keys: set[Any] = set()

    def contains(self, key, search_range=None, pin=False) -> str | None:
        return "LocalCPUBackend" if key in self.keys else None


class Subject:
    """A store under test, its token database and its KV."""

    def __init__(self, kind: type, cold_path, **changes: Any) -> None:
        self.is_ours = kind is TieredHiddenStateStore
        settings = {"store_count": "new"}  # only what a call adds, as upstream; ours by default also counts the rest
        config = make_config(cold_path, hot_bytes=1 << 20, chunk_size=CHUNK, settings=settings, **changes)
        self.database = ChunkedTokenDatabase(config, make_metadata(chunk=CHUNK))
        self.store = kind(config, self.database)
        self.kv = HeldKv()
        self.store.bind_storage_manager(self.kv)

    def keys(self, tokens: list[int]) -> list[Any]:
        return [key for _, _, key in self.database.process_tokens(tokens=tokens)]

    def prompt(self, chunks: float, first: int = 0) -> list[int]:
        """A prompt whose KV is there."""
        tokens = list(range(first, first + int(chunks * CHUNK)))
        self.kv.keys.update(self.keys(tokens))
        return tokens


@pytest.fixture(params=[HiddenStateStore, TieredHiddenStateStore], ids=["upstream", "ours"])
def make(request, tmp_path) -> Iterator[Any]:
    made = []

    def build(**changes: Any) -> Subject:
        made.append(Subject(request.param, tmp_path / f"cold-{len(made)}", **changes))
        return made[-1]

    yield build
    for subject in made:
        subject.store.close()


@pytest.fixture
def subject(make) -> Subject:
    return make()


def rows_for(tokens: list[int], seed: int = 0, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(len(tokens), hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_token_ids_may_be_a_tensor(subject, dtype):
    tokens = subject.prompt(2)
    rows, ids = rows_for(tokens), torch.tensor(tokens, dtype=dtype)
    assert subject.store.store_hidden_states(ids, rows) == 2
    assert torch.equal(subject.store.retrieve_hidden_states(ids), rows)
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows)


def test_kv_that_is_gone_ends_the_prefix_and_takes_its_chunk_along(subject):
    tokens = subject.prompt(3)
    rows = rows_for(tokens)
    subject.store.store_hidden_states(tokens, rows)
    keys = subject.keys(tokens)
    subject.kv.keys.discard(keys[1])
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows[:CHUNK])
    assert not subject.store.has_chunk(keys[1])


def test_kv_that_is_gone_from_the_start_gives_nothing(subject):
    tokens = subject.prompt(2)
    subject.store.store_hidden_states(tokens, rows_for(tokens))
    subject.kv.keys.clear()
    assert subject.store.retrieve_hidden_states(tokens) is None


def test_dropping_a_chunk_does_not_touch_kv(subject):
    tokens = subject.prompt(2)
    subject.store.store_hidden_states(tokens, rows_for(tokens))
    held = set(subject.kv.keys)
    keys = subject.keys(tokens)
    assert subject.store.drop_key(keys[0]) is True
    assert subject.store.drop_key(keys[0]) is False
    assert subject.kv.keys == held
    assert subject.store.num_cached_chunks() == 1


def test_layers_that_are_not_allowed_are_left_out(make):
    subject = make(hidden_state_layers=[0, -1])
    tokens = subject.prompt(1)
    assert subject.store.store_hidden_states(tokens, rows_for(tokens), layer_idx=0) == 1
    assert subject.store.store_hidden_states(tokens, rows_for(tokens), layer_idx=-1) == 1
    assert subject.store.store_hidden_states(tokens, rows_for(tokens), layer_idx=1) == 0
    [key] = subject.keys(tokens)
    assert [subject.store.has_chunk(key, layer_idx=idx) for idx in (0, -1, 1)] == [True, True, False]


def test_two_stores_have_nothing_in_common(make):
    one, other = make(), make()
    tokens = one.prompt(4)
    assert one.store.store_hidden_states(tokens, rows_for(tokens)) == 4
    assert one.store.num_cached_chunks() == 4
    assert other.store.num_cached_chunks() == 0


def test_without_a_storage_manager_all_kv_counts_as_present(make):
    subject = make()
    subject.store.bind_storage_manager(None)
    tokens = list(range(2 * CHUNK))
    rows = rows_for(tokens)
    assert subject.store.store_hidden_states(tokens, rows) == 2
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows)


def test_tokens_that_do_not_fill_a_chunk_are_left_out(subject):
    tokens = subject.prompt(2.5)
    rows = rows_for(tokens)
    assert subject.store.store_hidden_states(tokens, rows) == 2
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows[: 2 * CHUNK])


def test_a_shorter_tail_has_a_key_of_its_own(make):
    subject = make(save_unfull_chunk=True)
    tokens = subject.prompt(2.5)
    longer = subject.prompt(3)
    rows = rows_for(longer)
    assert subject.store.store_hidden_states(tokens, rows[: len(tokens)]) == 3
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows[: len(tokens)])
    assert torch.equal(subject.store.retrieve_hidden_states(longer), rows[: 2 * CHUNK])
    assert subject.store.store_hidden_states(longer, rows) == 1
    assert torch.equal(subject.store.retrieve_hidden_states(longer), rows)


def test_under_pressure_the_suffix_leaves_before_the_prefix_that_was_retrieved(make):
    """Upstream's lose it; ours go to disk, and the prefix is what stays in RAM."""
    hidden = 1024 // 4
    chunk_bytes = CHUNK * hidden * 4
    subject = make(max_hidden_state_cpu_size=8 * chunk_bytes / GIB)
    tokens, other = subject.prompt(4), subject.prompt(6, first=1000)
    rows = rows_for(tokens, hidden=hidden)
    assert subject.store.store_hidden_states(tokens, rows) == 4
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows)
    assert subject.store.store_hidden_states(other, rows_for(other, hidden=hidden)) == 6
    keys = subject.keys(tokens)
    if subject.is_ours:
        in_ram = [subject.store.tiers.has(key_name(key), 0)[0] for key in keys]
        assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows)
    else:
        in_ram = [subject.store.has_chunk(key) for key in keys]
    assert in_ram == [True, True, False, False]


WRONG_STORES = {
    "rows missing": lambda tokens: ((tokens, torch.randn(len(tokens) - 1, HIDDEN)), {}),
    "one dimension": lambda tokens: ((tokens, torch.randn(len(tokens))), {}),
    "three dimensions": lambda tokens: ((tokens, torch.randn(1, len(tokens), HIDDEN)), {}),
    "offset below 0": lambda tokens: ((tokens, torch.randn(len(tokens), HIDDEN)), {"token_offset": -1}),
    "offset too large": lambda tokens: ((tokens, torch.randn(0, HIDDEN)), {"token_offset": len(tokens) + 1}),
    "rows in front": lambda tokens: ((tokens, torch.randn(len(tokens), HIDDEN)), {"token_offset": 2}),
    "no width": lambda tokens: ((tokens, torch.randn(len(tokens), 0)), {}),
}


@pytest.mark.parametrize("wrong", WRONG_STORES)
def test_wrong_arguments_are_value_errors_that_store_nothing(subject, wrong):
    tokens = subject.prompt(2)
    arguments, options = WRONG_STORES[wrong](tokens)
    with pytest.raises(ValueError, match=r".+"):
        subject.store.store_hidden_states(*arguments, **options)
    assert subject.store.num_cached_chunks() == 0
