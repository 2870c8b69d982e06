"""What every store of hidden states promises, written once: sentences that run over each of them.

A subject adapts one of them to a few questions. ``StoreContract`` has the sentences that also hold for one tier alone,
and for LMCache's own store; ``TieredContract`` those that need both tiers. A test module subclasses one of them with a
fixture ``make``. Prompts are of whole chunks, rows of one layer are a tensor over the whole prompt.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

Make = Callable[..., Any]


class Subject(abc.ABC):
    """One store, or one tier of it, as the contract sees it."""

    chunk: int  # tokens
    hidden: int
    keeps_dtype = True  # or everything is kept as float32

    @abc.abstractmethod
    def store(self, ids: list[int], layers: Mapping[int, torch.Tensor], offset: int = 0) -> int:
        """Store layers of a prompt, and have them where this subject reads them. The rows begin at token ``offset``.

        How many chunks newly hold one of the layers.
        """

    @abc.abstractmethod
    def read(self, ids: list[int], layer_idx: int, dtype: torch.dtype | None = torch.float32) -> torch.Tensor | None:
        """The rows of the longest prefix that has the layer, None where the first chunk has not.

        ``dtype`` None: as they are kept.
        """

    @abc.abstractmethod
    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        """Whether a layer of one chunk of a prompt is here."""

    @abc.abstractmethod
    def drop(self, ids: list[int], chunk: int) -> bool:
        """Delete one chunk of a prompt. Whether it was here."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Delete everything."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it."""

    @abc.abstractmethod
    def held(self) -> float:
        """How many chunks are here."""

    @abc.abstractmethod
    def written(self) -> float:
        """How many chunks were given memory or a file so far: what a store that copies nothing does not change."""

    @abc.abstractmethod
    def check(self) -> list[str]:
        """Violated invariants."""


class StoreContract:
    """The sentences. Subclasses provide the fixture ``make``, which makes a Subject."""

    @pytest.fixture
    def subject(self, make: Make) -> Subject:
        made: Subject = make()
        return made

    def ids(self, subject: Subject, chunks: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed + 1)
        return torch.randint(0, 30_000, (chunks * subject.chunk,), generator=generator).tolist()

    def rows(self, subject: Subject, chunks: int, seed: int = 0, wider: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (chunks * subject.chunk, wider * subject.hidden)
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    def is_read(self, subject: Subject, ids: list[int], layer_idx: int, rows: torch.Tensor) -> None:
        """These rows are what is read, as float32 and to the bit as they were stored."""
        got = subject.read(ids, layer_idx)
        assert got is not None
        assert (got.dtype, got.device.type, got.is_contiguous()) == (torch.float32, "cpu", True)
        assert not got.requires_grad
        torch.testing.assert_close(got, rows.float(), rtol=0, atol=0, equal_nan=True)
        if subject.keeps_dtype:
            native = subject.read(ids, layer_idx, None)
            assert native is not None
            assert native.dtype == rows.dtype
            assert torch.equal(native.contiguous().view(torch.uint8), rows.contiguous().view(torch.uint8))

    # -- rows ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_what_is_stored_comes_back_equal_to_the_bit(self, subject: Subject, dtype: torch.dtype) -> None:
        ids, x, y = self.ids(subject, 4), self.rows(subject, 4).to(dtype), self.rows(subject, 4, seed=1).to(dtype)
        x[0, 0], x[1, 1], x[2, 2], x[3, 3] = float("nan"), float("inf"), float("-inf"), -0.0
        assert subject.store(ids, {0: x, 7: y}) == 4
        self.is_read(subject, ids, 0, x)
        self.is_read(subject, ids, 7, y)
        assert subject.check() == []

    def test_float64_becomes_float32_also_where_it_is_not_finite(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 1), self.rows(subject, 1).double() / 3
        x[0, 0], x[1, 1] = float("inf"), float("nan")
        assert subject.store(ids, {0: x}) == 1
        self.is_read(subject, ids, 0, x.float())

    def test_rows_need_not_be_contiguous(self, subject: Subject) -> None:
        ids, wide = self.ids(subject, 2), self.rows(subject, 2, wider=3)
        subject.store(ids, {0: wide[:, ::3]})
        subject.store(ids, {1: wide.t()[: subject.hidden].t()})
        self.is_read(subject, ids, 0, wide[:, ::3])
        self.is_read(subject, ids, 1, wide[:, : subject.hidden])

    def test_what_comes_back_is_the_callers_own(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 2), self.rows(subject, 2)
        subject.store(ids, {0: x})
        first = subject.read(ids, 0)
        assert first is not None
        first.zero_()
        again = subject.read(ids, 0)
        assert again is not None
        assert torch.equal(again, x.float())
        subject.drop(ids, 0)
        subject.store(ids, {0: 5 * x})
        assert torch.equal(again, x.float())

    def test_the_callers_rows_may_change_after_the_call_and_no_gradient_hangs_on_them(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 2), self.rows(subject, 2)
        given = x.clone().requires_grad_()
        subject.store(ids, {0: given})
        with torch.no_grad():
            given.zero_()
        self.is_read(subject, ids, 0, x)

    # -- layers ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layer_idxs", [(0, 3), (-1, 0), (-(2**31), 2**40), (-(2**63), 2**63 - 1)], ids=str)
    def test_layers_are_kept_apart_whatever_their_numbers(self, subject: Subject, layer_idxs: tuple[int, int]) -> None:
        ids = self.ids(subject, 2)
        layers = {idx: self.rows(subject, 2, seed=number) for number, idx in enumerate(layer_idxs)}
        for idx, x in layers.items():
            assert subject.store(ids, {idx: x}) == 2
        for idx, x in layers.items():
            self.is_read(subject, ids, idx, x)
        assert subject.held() == 2
        assert subject.check() == []

    def test_a_layer_that_was_not_stored_is_a_miss(self, subject: Subject) -> None:
        ids = self.ids(subject, 3)
        subject.store(ids, {0: self.rows(subject, 3)})
        assert subject.read(ids, 1) is None
        assert [subject.has(ids, chunk, 0) for chunk in range(3)] == [True] * 3
        assert not any(subject.has(ids, chunk, 1) for chunk in range(3))
        assert subject.held() == 3

    def test_a_layer_that_only_the_prefix_has_is_served_that_far(self, subject: Subject) -> None:
        ids, x, two = self.ids(subject, 3), self.rows(subject, 3), 2 * subject.chunk
        subject.store(ids, {0: x})
        subject.store(ids[:two], {1: x[:two]})
        self.is_read(subject, ids, 1, x[:two])
        self.is_read(subject, ids, 0, x)

    # -- prompts ---------------------------------------------------------------------------------------------

    def test_a_prompt_that_was_not_stored_is_a_miss(self, subject: Subject) -> None:
        subject.store(self.ids(subject, 2), {0: self.rows(subject, 2)})
        assert subject.read(self.ids(subject, 2, seed=5), 0) is None

    def test_a_prompt_without_tokens_is_nothing(self, subject: Subject) -> None:
        assert subject.store([], {0: torch.empty(0, subject.hidden)}) == 0
        assert subject.read([], 0) is None

    def test_a_longer_prompt_gets_the_prefix_that_is_there(self, subject: Subject) -> None:
        ids, x, two = self.ids(subject, 4), self.rows(subject, 4), 2 * subject.chunk
        subject.store(ids[:two], {0: x[:two]})
        self.is_read(subject, ids, 0, x[:two])

    def test_prompts_that_share_a_prefix_store_it_once(self, subject: Subject) -> None:
        shared, x = self.ids(subject, 4), self.rows(subject, 6)
        for number in range(5):
            ids, before, new = shared + self.ids(subject, 2, seed=number + 1), subject.written(), 2 if number else 6
            assert subject.store(ids, {0: x}) == new
            assert subject.written() - before == new
        assert subject.held() == 4 + 5 * 2

    def test_storing_again_counts_and_copies_only_what_is_new(self, subject: Subject) -> None:
        ids, x, two = self.ids(subject, 3), self.rows(subject, 3), 2 * subject.chunk
        assert subject.store(ids[:two], {0: x[:two]}) == 2
        assert subject.store(ids, {0: x}) == 1
        before = subject.written()
        assert subject.store(ids, {0: self.rows(subject, 3, seed=9)}) == 0
        assert subject.written() == before
        self.is_read(subject, ids, 0, x)
        assert subject.store(ids, {1: x}) == 3

    def test_rows_arrive_piece_by_piece(self, subject: Subject) -> None:
        ids, x, one = self.ids(subject, 2), self.rows(subject, 2), subject.chunk
        assert subject.store(ids[:one], {0: x[:one]}) == 1
        assert subject.store(ids, {0: x[one:]}, one) == 1
        assert subject.has(ids, 0, 0)
        assert subject.has(ids, 1, 0)
        self.is_read(subject, ids, 0, x)
        assert subject.store(ids, {0: x[:0]}, 2 * one) == 0

    def test_a_chunk_that_begins_before_the_offset_is_left_out(self, subject: Subject) -> None:
        ids, x, one = self.ids(subject, 3), self.rows(subject, 3), subject.chunk
        assert subject.store(ids, {0: x[3:]}, 3) == 2
        assert [subject.has(ids, chunk, 0) for chunk in range(3)] == [False, True, True]
        assert subject.read(ids, 0) is None
        assert subject.store(ids, {0: x}) == 1
        self.is_read(subject, ids, 0, x)
        ids = self.ids(subject, 3, seed=1)
        assert subject.store(ids[:one], {0: x[:one]}) == 1
        assert subject.store(ids, {0: x[one + 5 :]}, one + 5) == 1
        self.is_read(subject, ids, 0, x[:one])
        assert subject.store(ids, {0: x[one:]}, one) == 1
        self.is_read(subject, ids, 0, x)

    # -- what goes -------------------------------------------------------------------------------------------

    def test_a_chunk_that_is_dropped_is_gone_and_ends_the_prefix(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 3), self.rows(subject, 3)
        subject.store(ids, {0: x})
        assert subject.drop(ids, 1)
        assert not subject.drop(ids, 1)
        assert [subject.has(ids, chunk, 0) for chunk in range(3)] == [True, False, True]
        assert subject.held() == 2
        self.is_read(subject, ids, 0, x[: subject.chunk])
        assert subject.drop(ids, 0)
        assert subject.read(ids, 0) is None
        assert subject.check() == []

    def test_what_was_cleared_is_gone_and_can_be_stored_again(self, subject: Subject) -> None:
        ids, y = self.ids(subject, 3), self.rows(subject, 3, seed=4)
        subject.store(ids, {0: self.rows(subject, 3)})
        subject.clear()
        assert subject.held() == 0
        assert subject.read(ids, 0) is None
        subject.store(ids, {0: y})
        self.is_read(subject, ids, 0, y)
        assert subject.check() == []

    def test_after_close_everything_is_a_miss_and_nothing_raises(self, subject: Subject) -> None:
        ids = self.ids(subject, 2)
        subject.store(ids, {0: self.rows(subject, 2)})
        subject.close()
        assert subject.read(ids, 0) is None
        assert not subject.has(ids, 0, 0)
        assert not subject.drop(ids, 0)
        assert subject.held() == 0
        subject.clear()
        subject.close()


class TieredSubject(Subject):
    """A store of both tiers. ``make(room=8)`` makes one whose hot tier holds so many chunks of a bfloat16 layer."""

    @abc.abstractmethod
    def read_layers(
        self, ids: list[int], layer_idxs: list[int], dtype: torch.dtype | None = None
    ) -> Mapping[int, torch.Tensor]:
        """``read`` of several layers in one call: the longest prefix that has all of them."""

    @abc.abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """Its figures."""

    @abc.abstractmethod
    def is_hot(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        """Whether a layer of one chunk of a prompt is in RAM."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Have everything written."""


def _too_large(rows: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(rows.shape, dtype=torch.float64)
    rows[-1, -1] = 1e300
    return rows


#: Rows made of good ones, and what is said of them; ``{}`` is how many there should be.
WRONG_ROWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "complex": (lambda rows: rows.to(torch.complex64), "must be float .* got torch.complex64"),
    "bool": (lambda rows: rows > 0, "must be float .* got torch.bool"),
    "int": (lambda rows: rows.to(torch.int64), "must be float .* got torch.int64"),
    "byte": (lambda rows: rows.to(torch.uint8), "must be float .* got torch.uint8"),
    "no width": (lambda rows: rows[:, :0], r"at least one column, got shape \({}, 0\)"),
    "float64 too large": (_too_large, "float64 with a finite value beyond float32's range"),
    "one dimension": (lambda rows: rows[:, 0], "must be 2-D"),
    "three dimensions": (lambda rows: rows[:, None], "must be 2-D"),
    "too few": (lambda rows: rows[1:], r"first dim \(\d+\) must equal .*\({}\)"),
    "too many": (lambda rows: torch.cat([rows, rows[:1]]), r"first dim \(\d+\) must equal .*\({}\)"),
}


class TieredContract(StoreContract):
    """The sentences that need a store of both tiers."""

    @pytest.mark.parametrize("wrong", WRONG_ROWS)
    def test_wrong_rows_are_refused_with_what_was_given_and_nothing_is_stored(
        self, subject: TieredSubject, wrong: str
    ) -> None:
        ids, good = self.ids(subject, 2), self.rows(subject, 2)
        change, said = WRONG_ROWS[wrong]
        for layers in ({0: change(good)}, {0: good, 1: change(good)}):
            with pytest.raises(ValueError, match=said.format(len(ids))):
                subject.store(ids, layers)
        stats = subject.stats()
        assert subject.held() == stats["hot_bytes"] == stats["stored_chunks"] == stats["errors_internal"] == 0
        assert subject.store(ids, {0: good}) == 2
        self.is_read(subject, ids, 0, good)

    @pytest.mark.parametrize(
        ("layer_idxs", "together"),
        [((0,), True), ((-1, 0, 12, 24), True), ((-1, 0, 12, 24), False)],
        ids=["one layer", "four layers together", "four layers one by one"],
    )
    def test_a_prompt_longer_than_the_hot_tier_is_stored_and_served_whole(
        self, make: Make, layer_idxs: tuple[int, ...], together: bool
    ) -> None:
        room = 8 * len(layer_idxs) if together else 8
        subject = make(room=room)
        ids, layers = self.ids(subject, 12), {idx: self.rows(subject, 12, seed=idx + 5) for idx in layer_idxs}
        for part in [layers] if together else [{idx: x} for idx, x in layers.items()]:
            assert subject.store(ids, part) == 12
        for idx, x in layers.items():
            self.is_read(subject, ids, idx, x)
        for dtype in (torch.float32, None):
            out = subject.read_layers(ids, list(layers), dtype)
            assert all(torch.equal(out[idx], x.to(dtype or x.dtype)) for idx, x in layers.items())
        assert subject.stats()["hot_bytes"] <= room * subject.chunk * subject.hidden * 2
        if together:
            hot = [subject.is_hot(ids, chunk, layer_idxs[0]) for chunk in range(4)]
            assert hot == [True] * 4, "the prefix stays in RAM, the suffix streams through the last slots"

    def test_a_chunk_sixteen_times_larger_than_its_neighbours_finds_room(self, make: Make) -> None:
        # The large one takes the room of sixteen that must be written first, by whatever disk there is.
        subject = make(room=20, store_wait_ms=60_000)
        small, large = self.ids(subject, 20, seed=1), self.ids(subject, 1, seed=2)
        x, wide = self.rows(subject, 20), self.rows(subject, 1, wider=16)
        assert subject.store(small, {0: x}) == 20
        assert subject.store(large, {0: wide}) == 1
        self.is_read(subject, large, 0, wide)
        self.is_read(subject, small, 0, x)

    def test_a_chunk_larger_than_the_hot_tier_is_refused_and_evicts_nothing(self, make: Make) -> None:
        subject = make(room=8)
        small, large = self.ids(subject, 8, seed=1), self.ids(subject, 1, seed=2)
        subject.store(small, {0: self.rows(subject, 8)})
        subject.flush()
        assert subject.store(large, {0: self.rows(subject, 1, wider=9)}) == 0
        assert all(subject.is_hot(small, chunk, 0) for chunk in range(8))
        assert subject.stats()["hot_chunks"] == 8
        assert subject.stats()["drops_no_room"] == 1

    def test_a_prefix_ends_where_the_hidden_size_changes(self, subject: TieredSubject) -> None:
        ids, two = self.ids(subject, 4), 2 * subject.chunk
        x, wide = self.rows(subject, 2), self.rows(subject, 2, wider=2)
        assert subject.store(ids[:two], {0: x}) == 2
        assert subject.store(ids, {0: wide}, two) == 2
        self.is_read(subject, ids, 0, x)
        assert subject.held() == 4
        assert subject.stats()["misses_shape"] > 0
