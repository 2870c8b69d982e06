"""What every store of hidden states promises, written once: sentences that run over each of them.

A subject adapts one of them to five questions. ``StoreContract`` has the sentences; a test module subclasses it with a
fixture ``subject``. Prompts are of whole chunks, rows of one layer are a tensor over the whole prompt.
"""

from __future__ import annotations

import abc

import torch


class Subject(abc.ABC):
    """One store, or one tier of it, as the contract sees it."""

    chunk: int  # tokens
    hidden: int

    @abc.abstractmethod
    def store(self, ids: list[int], layers: dict[int, torch.Tensor]) -> None:
        """Store layers of a prompt, and have them where this subject reads them."""

    @abc.abstractmethod
    def read(self, ids: list[int], layer_idx: int) -> torch.Tensor | None:
        """The rows of the longest prefix that has the layer, None where the first chunk has not."""

    @abc.abstractmethod
    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        """Whether a layer of one chunk of a prompt is here."""

    @abc.abstractmethod
    def drop(self, ids: list[int], chunk: int) -> None:
        """Delete one chunk of a prompt."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Delete everything."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it."""

    @abc.abstractmethod
    def written(self) -> float:
        """How many chunks were given memory or a file so far: what a store that copies nothing does not change."""

    @abc.abstractmethod
    def check(self) -> list[str]:
        """Violated invariants."""


class StoreContract:
    """The sentences. Subclasses provide the fixture ``subject``."""

    def ids(self, subject: Subject, chunks: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed + 1)
        return torch.randint(0, 30_000, (chunks * subject.chunk,), generator=generator).tolist()

    def rows(self, subject: Subject, chunks: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(chunks * subject.chunk, subject.hidden, generator=generator).to(torch.bfloat16)

    def test_what_is_stored_comes_back_equal_to_the_bit(self, subject: Subject) -> None:
        ids, x, y = self.ids(subject, 4), self.rows(subject, 4), self.rows(subject, 4, seed=1)
        subject.store(ids, {0: x, 7: y})
        for layer_idx, rows in ((0, x), (7, y)):
            got = subject.read(ids, layer_idx)
            assert got is not None
            assert torch.equal(got.to(torch.bfloat16), rows)
        assert subject.check() == []

    def test_what_comes_back_is_memory_that_the_store_does_not_share(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 2), self.rows(subject, 2)
        subject.store(ids, {0: x})
        first = subject.read(ids, 0)
        assert first is not None
        first.zero_()
        again = subject.read(ids, 0)
        assert again is not None
        assert torch.equal(again.to(torch.bfloat16), x)

    def test_the_callers_rows_may_change_after_the_call(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 2), self.rows(subject, 2)
        given = x.clone()
        subject.store(ids, {0: given})
        given.zero_()
        got = subject.read(ids, 0)
        assert got is not None
        assert torch.equal(got.to(torch.bfloat16), x)

    def test_a_layer_that_was_not_stored_is_a_miss(self, subject: Subject) -> None:
        ids = self.ids(subject, 2)
        subject.store(ids, {0: self.rows(subject, 2)})
        assert subject.read(ids, 1) is None
        assert subject.has(ids, 0, 0)
        assert not subject.has(ids, 0, 1)

    def test_a_prompt_that_was_not_stored_is_a_miss(self, subject: Subject) -> None:
        subject.store(self.ids(subject, 2), {0: self.rows(subject, 2)})
        assert subject.read(self.ids(subject, 2, seed=5), 0) is None

    def test_a_longer_prompt_gets_the_prefix_that_is_there(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 4), self.rows(subject, 4)
        subject.store(ids[: 2 * subject.chunk], {0: x[: 2 * subject.chunk]})
        got = subject.read(ids, 0)
        assert got is not None
        assert torch.equal(got.to(torch.bfloat16), x[: 2 * subject.chunk])

    def test_storing_again_changes_and_copies_nothing(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 3), self.rows(subject, 3)
        subject.store(ids, {0: x})
        before = subject.written()
        subject.store(ids, {0: self.rows(subject, 3, seed=9)})
        assert subject.written() == before
        got = subject.read(ids, 0)
        assert got is not None
        assert torch.equal(got.to(torch.bfloat16), x)

    def test_a_layer_that_comes_later_joins_its_chunk(self, subject: Subject) -> None:
        ids, x, y = self.ids(subject, 3), self.rows(subject, 3), self.rows(subject, 3, seed=2)
        subject.store(ids, {0: x})
        subject.store(ids, {-1: y})
        for layer_idx, rows in ((0, x), (-1, y)):
            got = subject.read(ids, layer_idx)
            assert got is not None
            assert torch.equal(got.to(torch.bfloat16), rows)
        assert subject.check() == []

    def test_a_chunk_that_is_dropped_is_gone_and_ends_the_prefix(self, subject: Subject) -> None:
        ids, x = self.ids(subject, 3), self.rows(subject, 3)
        subject.store(ids, {0: x})
        subject.drop(ids, 1)
        assert [subject.has(ids, chunk, 0) for chunk in range(3)] == [True, False, True]
        got = subject.read(ids, 0)
        assert got is not None
        assert torch.equal(got.to(torch.bfloat16), x[: subject.chunk])
        assert subject.check() == []

    def test_what_was_cleared_is_gone_and_can_be_stored_again(self, subject: Subject) -> None:
        ids, y = self.ids(subject, 3), self.rows(subject, 3, seed=4)
        subject.store(ids, {0: self.rows(subject, 3)})
        subject.clear()
        assert subject.read(ids, 0) is None
        subject.store(ids, {0: y})
        got = subject.read(ids, 0)
        assert got is not None
        assert torch.equal(got.to(torch.bfloat16), y)
        assert subject.check() == []

    def test_after_close_everything_is_a_miss_and_nothing_raises(self, subject: Subject) -> None:
        ids = self.ids(subject, 2)
        subject.store(ids, {0: self.rows(subject, 2)})
        subject.close()
        assert subject.read(ids, 0) is None
        assert not subject.has(ids, 0, 0)
        subject.drop(ids, 0)
        subject.clear()
        subject.close()
