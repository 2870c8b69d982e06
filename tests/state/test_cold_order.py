"""The order in which files leave is that of an OrderedDict, at a tenth of its memory."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_hs_backend.tiers.state.cold_order import ColdOrder
from lmcache_hs_backend.tiers.state.entries import ChunkEntry

_STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "touch", "popitem", "walk"]), st.integers(0, 9)))


def names_from_the_youngest(order: ColdOrder) -> list[bytes]:
    """Along the other link of each entry."""
    names, entry = [], order.end.older
    while entry is not order.end:
        names.append(entry.name)
        entry = entry.older
    return names


@given(_STEPS)
def test_it_is_an_ordered_dict(steps: list[tuple[str, int]]) -> None:
    entries = [ChunkEntry(bytes([number])) for number in range(10)]
    order, model = ColdOrder(), OrderedDict[bytes, ChunkEntry]()
    for step, number in steps:
        entry = entries[number]
        if step == "add":
            order.add(entry)
            model.setdefault(entry.name, entry)
        elif step == "remove":
            order.remove(entry)
            model.pop(entry.name, None)
        elif step == "touch" and entry.name in model:
            order.touch(entry)
            model.move_to_end(entry.name)
        elif step == "popitem" and model:
            assert order.popitem() == model.popitem(last=False)
        elif step == "walk":
            assert all(found.name in model for found in order.next_batch(number))
        assert [found.name for found in order] == list(model)
        assert names_from_the_youngest(order) == list(reversed(model))
        assert len(order) == len(model)
        assert [entry.older is not None for entry in entries] == [entry.name in model for entry in entries]


def test_an_empty_order_has_nothing_to_give() -> None:
    with pytest.raises(KeyError):
        ColdOrder().popitem()
    assert ColdOrder().next_batch(5) == []


@given(st.integers(1, 7), st.lists(st.integers(0, 19), max_size=60))
def test_a_walk_visits_every_chunk_whatever_is_used_meanwhile(count: int, used: list[int]) -> None:
    entries = [ChunkEntry(bytes([number])) for number in range(20)]
    order = ColdOrder()
    for entry in entries:
        order.add(entry)
    uses, seen, batches = iter(used), set[bytes](), 0
    assert order.next_batch(count) == [], "the round before is over"
    while batch := order.next_batch(count):
        seen |= {entry.name for entry in batch}
        batches += 1
        assert batches <= 20, "a round has an end"
        for number in (next(uses, None), next(uses, None)):
            if number is not None:
                order.touch(entries[number])
    while batch := order.next_batch(count):  # what moved away from this round comes in the next one
        seen |= {entry.name for entry in batch}
    assert len(seen) == 20
