"""What LMCache's HiddenStateStore promises holds for ours: the same tests run over both.

The behaviours are those that LMCache's own tests assert (tests/v1/test_hidden_state_store.py on its main
branch), and those that its consumers rely on. No engine here: a token database, and KV that is there or not.
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


def test_chunks_have_the_keys_of_the_kv(subject):
    tokens = subject.prompt(3)
    assert subject.store.store_hidden_states(tokens, rows_for(tokens)) == 3
    assert subject.store.num_cached_chunks() == 3
    assert all(subject.store.has_chunk(key, layer_idx=0) for key in subject.keys(tokens))
    assert not any(subject.store.has_chunk(key, layer_idx=1) for key in subject.keys(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_rows_come_back_as_float32_on_the_cpu(subject, dtype, as_tensor):
    tokens = subject.prompt(2)
    rows = rows_for(tokens).to(dtype)
    ids = torch.tensor(tokens) if as_tensor else tokens
    assert subject.store.store_hidden_states(ids, rows) == 2
    back = subject.store.retrieve_hidden_states(ids)
    assert (back.dtype, back.device.type, back.is_contiguous()) == (torch.float32, "cpu", True)
    assert torch.equal(back, rows.float())


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


def test_a_hole_in_the_middle_ends_the_prefix(subject):
    tokens = subject.prompt(3)
    rows = rows_for(tokens)
    subject.store.store_hidden_states(tokens, rows)
    subject.store.drop_key(subject.keys(tokens)[1])
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows[:CHUNK])
    subject.store.drop_key(subject.keys(tokens)[0])
    assert subject.store.retrieve_hidden_states(tokens) is None


@pytest.mark.parametrize("layer_idxs", [(0, 3), (-1, 0), (-(2**31), 2**40)], ids=str)
def test_layers_are_kept_apart(subject, layer_idxs):
    tokens = subject.prompt(2)
    rows = {idx: rows_for(tokens, seed=number) for number, idx in enumerate(layer_idxs)}
    for idx, layer in rows.items():
        assert subject.store.store_hidden_states(tokens, layer, layer_idx=idx) == 2
    for idx, layer in rows.items():
        assert torch.equal(subject.store.retrieve_hidden_states(tokens, layer_idx=idx), layer)
    assert subject.store.retrieve_hidden_states(tokens, layer_idx=99) is None
    assert subject.store.num_cached_chunks() == 2


def test_a_layer_that_only_the_prefix_has_is_served_that_far(subject):
    tokens = subject.prompt(3)
    rows = rows_for(tokens)
    subject.store.store_hidden_states(tokens, rows)
    subject.store.store_hidden_states(tokens[: 2 * CHUNK], rows[: 2 * CHUNK], layer_idx=1)
    assert len(subject.store.retrieve_hidden_states(tokens, layer_idx=1)) == 2 * CHUNK
    assert len(subject.store.retrieve_hidden_states(tokens)) == 3 * CHUNK


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


def test_storing_again_counts_only_what_is_new(subject):
    tokens = subject.prompt(3)
    rows = rows_for(tokens)
    assert subject.store.store_hidden_states(tokens[: 2 * CHUNK], rows[: 2 * CHUNK]) == 2
    assert subject.store.store_hidden_states(tokens, rows) == 1
    assert subject.store.store_hidden_states(tokens, rows) == 0
    assert subject.store.store_hidden_states(tokens, rows, layer_idx=1) == 3


def test_rows_arrive_piece_by_piece(subject):
    tokens = subject.prompt(2)
    rows = rows_for(tokens)
    assert subject.store.store_hidden_states(tokens[:CHUNK], rows[:CHUNK], token_offset=0) == 1
    assert subject.store.store_hidden_states(tokens, rows[CHUNK:], token_offset=CHUNK) == 1
    assert all(subject.store.has_chunk(key) for key in subject.keys(tokens))
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows)


def test_a_chunk_that_begins_before_the_offset_is_left_out(subject):
    tokens = subject.prompt(3)
    rows = rows_for(tokens)
    assert subject.store.store_hidden_states(tokens, rows[3:], token_offset=3) == 2
    first, second, third = subject.keys(tokens)
    assert [subject.store.has_chunk(key) for key in (first, second, third)] == [False, True, True]
    assert subject.store.retrieve_hidden_states(tokens) is None
    assert subject.store.store_hidden_states(tokens, rows) == 1
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows)


def test_an_offset_at_the_end_stores_nothing(subject):
    tokens = subject.prompt(1)
    assert subject.store.store_hidden_states(tokens, torch.empty(0, HIDDEN), token_offset=CHUNK) == 0


def test_a_prompt_without_tokens_is_nothing(subject):
    assert subject.store.store_hidden_states([], torch.empty(0, HIDDEN)) == 0
    assert subject.store.retrieve_hidden_states([]) is None


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


def test_what_is_returned_belongs_to_the_caller(subject):
    tokens = subject.prompt(1)
    rows = rows_for(tokens)
    subject.store.store_hidden_states(tokens, rows)
    first = subject.store.retrieve_hidden_states(tokens)
    first.zero_()
    second = subject.store.retrieve_hidden_states(tokens)
    assert torch.equal(second, rows)
    subject.store.drop_key(subject.keys(tokens)[0])
    subject.store.store_hidden_states(tokens, 5 * rows)
    assert torch.equal(second, rows)


def test_what_is_stored_no_longer_belongs_to_the_caller(subject):
    tokens = subject.prompt(1)
    rows = rows_for(tokens)
    given = rows.clone().requires_grad_()
    subject.store.store_hidden_states(tokens, given)
    with torch.no_grad():
        given.zero_()
    back = subject.store.retrieve_hidden_states(tokens)
    assert torch.equal(back, rows)
    assert not back.requires_grad


def test_rows_need_not_be_contiguous(subject):
    tokens = subject.prompt(2)
    wide = rows_for(tokens, hidden=3 * HIDDEN)
    rows = wide[:, ::3]
    subject.store.store_hidden_states(tokens, rows)
    subject.store.store_hidden_states(tokens, wide.t()[:HIDDEN].t(), layer_idx=1)
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows)
    assert torch.equal(subject.store.retrieve_hidden_states(tokens, layer_idx=1), wide[:, :HIDDEN])


def test_values_that_are_not_finite_are_kept(subject):
    tokens = subject.prompt(1)
    rows = rows_for(tokens)
    rows[0, 0], rows[1, 1], rows[2, 2] = float("nan"), float("inf"), float("-inf")
    subject.store.store_hidden_states(tokens, rows)
    back = subject.store.retrieve_hidden_states(tokens)
    assert torch.equal(back.isnan(), rows.isnan())
    assert torch.equal(back.nan_to_num(), rows.nan_to_num())


def test_float64_becomes_float32(subject):
    tokens = subject.prompt(1)
    rows = rows_for(tokens).double() / 3
    subject.store.store_hidden_states(tokens, rows)
    assert torch.equal(subject.store.retrieve_hidden_states(tokens), rows.float())


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


def test_closing_twice_is_fine(subject):
    tokens = subject.prompt(1)
    subject.store.store_hidden_states(tokens, rows_for(tokens))
    subject.store.close()
    subject.store.close()
    assert subject.store.retrieve_hidden_states(tokens) is None
    assert subject.store.num_cached_chunks() == 0
