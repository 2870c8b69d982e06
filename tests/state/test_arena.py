"""Memory: slots never overlap and always come back; result buffers are recycled only when nobody looks."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_hs_backend.format.pages import ALIGN
from lmcache_hs_backend.tiers.memory.arena import HUGE_PAGE, Arena
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from lmcache_hs_backend.tiers.state.slots import FreeList
from tests.support.threads import side_by_side


@settings(deadline=None, max_examples=150)
@given(
    pages=st.integers(1, 200),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(1, 9)), max_size=120),
    seed=st.integers(),
)
def test_slots_never_overlap_and_free_memory_joins(pages: int, steps: list[tuple[bool, int, int]], seed: int) -> None:
    free_list = FreeList(pages * ALIGN)
    choose = random.Random(seed)
    held: list[tuple[int, int]] = []
    for give_back, size, count in steps:
        if give_back and held:
            free_list.free(*held.pop(choose.randrange(len(held))))
        else:
            nbytes = size * ALIGN
            offsets = free_list.allocate(nbytes, count)
            assert len(offsets) <= count
            held += [(offset, nbytes) for offset in offsets]
        spans = sorted(held)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert all(0 <= a <= free_list.capacity - n and a % ALIGN == 0 for a, n in spans)
        assert free_list.free_bytes == free_list.capacity - sum(n for _, n in held)
    for slot in held:
        free_list.free(*slot)
    assert free_list.allocate(free_list.capacity) == [0], "everything joins into one run again"


def test_neighbours_are_given_out_together() -> None:
    free_list = FreeList(16 * ALIGN)
    offsets = free_list.allocate(2 * ALIGN, 8)
    assert offsets == list(range(0, 16 * ALIGN, 2 * ALIGN))
    for offset in offsets[2:6]:
        free_list.free(offset, 2 * ALIGN)
    assert free_list.allocate(2 * ALIGN, 4) == offsets[2:6]


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="4095"):
        FreeList(4095)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("odd_pages", [0, 1, 255, 511])
def test_memory_for_a_huge_page_begins_where_one_does(odd_pages: int) -> None:
    """In front of a huge page's start lie small ones: hundreds of pieces for the disk, for the first slot of all."""
    nbytes = 3 * HUGE_PAGE + odd_pages * ALIGN
    between = BufferPool(0).get(ALIGN)  # so that the next mappings do not happen to begin on such a boundary
    arena = Arena(nbytes)
    (slot,) = FreeList(nbytes).allocate(HUGE_PAGE)
    result = BufferPool(0).get(nbytes).rows(nbytes // ALIGN, ALIGN, torch.uint8)
    assert address_of(arena.bytes_at(slot, HUGE_PAGE)) % HUGE_PAGE == 0
    assert result.data_ptr() % HUGE_PAGE == 0
    assert arena.mapped_bytes == nbytes == result.nbytes
    result.fill_(1)
    arena.bytes_at(0, nbytes)[:] = bytes([2]) * nbytes
    assert bool((result == 1).all())
    del between


def test_a_buffer_comes_back_only_when_its_last_view_is_gone() -> None:
    pool = BufferPool(64 << 20)
    rows = pool.get(4 << 20).rows(1024, 1024, torch.float32)
    view = rows[5:9].t()
    del rows
    gc.collect()
    assert pool.idle_bytes == 0
    del view
    gc.collect()
    assert pool.idle_bytes == 4 << 20
    again = pool.get(3 << 20)
    assert pool.idle_bytes == 0
    del again


def test_idle_buffers_are_limited_and_let_go() -> None:
    pool = BufferPool(8 << 20, idle_sec=0.0)
    held = [pool.get(4 << 20) for _ in range(5)]
    held.clear()
    gc.collect()
    assert pool.idle_bytes == 8 << 20
    pool.trim()
    assert pool.idle_bytes == 0
    kept = pool.get(4 << 20)
    pool.close()
    del kept
    gc.collect()
    assert pool.idle_bytes == 0


def test_threads_never_get_the_same_buffer() -> None:
    pool = BufferPool(64 << 20)
    wrong = []

    def use(number: int) -> None:
        for turn in range(200):
            rows = pool.get(1 << 16).rows(16, 1024, torch.float32)
            rows.fill_(number * 1000 + turn)
            if not bool((rows == number * 1000 + turn).all()):
                wrong.append(number)

    side_by_side(use, range(6))
    assert not wrong
