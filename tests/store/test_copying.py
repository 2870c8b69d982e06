"""Who copies: I/O threads alone, a crew together, and nobody else's torch threads are touched."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.pages import ALIGN, align
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiered import all_present
from lmcache_hs_backend.tiers.flows.copier import Copier
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoThreads
from lmcache_hs_backend.tiers.memory import copies
from lmcache_hs_backend.tiers.memory.arena import Arena
from lmcache_hs_backend.tiers.memory.copies import copy_alone, work_alone
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES, checked_rows


def on_a_thread(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]


def test_a_thread_that_works_alone_forms_no_team_and_no_other_thread_notices():
    before = torch.get_num_threads()

    def alone() -> int:
        work_alone()
        return torch.get_num_threads()

    assert on_a_thread(alone) == 1
    assert torch.get_num_threads() == before
    assert on_a_thread(torch.get_num_threads) == before, "a thread that comes later starts as if nothing had been"


@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 4096), (256, 1000), (3, 40_000)])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "where no runtime is found"])
def test_rows_are_copied_whole_and_converted(shape, source_dtype, target_dtype, alone):
    source = torch.randn(shape).to(source_dtype)
    target = torch.full(shape, float("nan"), dtype=target_dtype)

    def copy() -> bool:
        if alone:
            work_alone()
        copy_alone(target, source)
        return True

    assert on_a_thread(copy)
    assert torch.equal(target, source.to(target_dtype))


def neg(rows):
    """The same rows as a view whose sign is still to be applied."""
    return torch._neg_view(-rows)


#: How callers' rows may lie in memory, by name: what turns plain rows into such.
FORMS = {
    "plain": lambda rows: rows,
    "a part of more rows": lambda rows: torch.cat([rows, rows, rows])[len(rows) : 2 * len(rows)],
    "some of the columns": lambda rows: torch.cat([rows, rows], 1)[:, rows.shape[1] :],
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every second row": lambda rows: rows.repeat_interleave(2, 0)[::2],
    "one row for all": lambda rows: rows[:1].expand(rows.shape),
    "negated later": neg,
    "a parameter": lambda rows: torch.nn.Parameter(rows),
    "not a leaf": lambda rows: torch.nn.Parameter(rows) * 1,
}


@pytest.mark.parametrize("hidden", [1, 64, 5000], ids=["narrow", "small", "too large to be alone"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_come_into_their_slots_whatever_way_they_lie_in_memory(tmp_path, form, dtype, hidden):
    tokens = 300
    rows = FORMS[form](torch.randn(tokens, hidden).to(dtype))
    spec = LayerSpec(3, DTYPE_NAMES[dtype], hidden)
    core = Core(TieredConfig(cold_path=str(tmp_path)), 4 * align(spec.nbytes(tokens)), all_present, Metrics())
    io = IoThreads(core, 1)
    try:
        # Out of order, so that they are no single run: the last 100 rows, then 80 of the middle.
        slots = [(200, 100, 0), (20, 80, align(spec.nbytes(100)))]
        moves = [(row, count, (offset, align(spec.nbytes(count)), spec)) for row, count, offset in slots]
        Copier(core.arena, io).copy_in(checked_rows(rows, tokens), moves)
    finally:
        io.stop()
    for row, count, offset in slots:
        assert torch.equal(core.arena.rows_at(offset, count, hidden, spec.dtype), rows.detach()[row : row + count])
    assert not core.arena.rows_at(0, 100, hidden, spec.dtype).requires_grad


def test_memory_that_is_released_takes_no_more_rows(tmp_path):
    arena = Arena(ALIGN)
    rows = torch.ones(1, 4)
    arena.release()
    with pytest.raises(ValueError, match="released"):
        arena.write(0, rows.data_ptr(), rows.nbytes)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_is_read_from_a_slot_belongs_to_the_mode_of_its_caller(core, copier, mode):
    rows = torch.randn(8, 64)
    moves = [(0, 8, (0, ALIGN, LayerSpec(0, "F32", 64)))]
    copier.copy_in(rows, moves)
    with mode():
        out = torch.empty(8, 64)
        copier.copy_out({0: out}, {0: moves})
    assert torch.equal(out, rows)
    assert out.is_inference() == (mode is torch.inference_mode)
    copier.copy_in(rows + 1, moves)  # a slot that was read is as writable as any other
    assert torch.equal(core.arena.rows_at(0, 8, 64, "F32"), rows + 1)


def test_a_small_store_calls_for_no_team_of_threads(core, io, copier, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("torch would form a team"))
    rows = torch.randn(8, 64)
    copier.copy_in(rows, [(0, 8, (0, ALIGN, LayerSpec(0, "F32", 64)))])
    assert torch.equal(core.arena.rows_at(0, 8, 64, "F32"), rows)


SHAPES = [
    [(1, 1)],
    [(256, 4096)] * 7,
    [(3000, 4096)],
    [(16, 64)] * 50,
    [(7, 5), (5000, 600), (1, 1), (9, 9), (2, 4096)],
]


@pytest.fixture
def core(tmp_path):
    return Core(TieredConfig(cold_path=str(tmp_path)), ALIGN, all_present, Metrics())


@pytest.fixture
def io(core):
    io = IoThreads(core, 3)
    yield io
    io.stop()
    assert io.join(time.monotonic() + 10)
    assert core.metrics.snapshot()["errors_internal"] == 0, "no I/O thread has crashed"


@pytest.fixture
def copier(core, io):
    return Copier(core.arena, io)


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_crew_copies_every_row_once_whatever_its_pieces_are(copier, shapes, reading):
    sources = [torch.randn(shape).bfloat16() for shape in shapes]
    targets = [torch.full(shape, float("nan")) for shape in shapes]
    threads = torch.get_num_threads()
    for _ in range(5):
        copier.copy(list(zip(targets, sources, strict=True)), reading=reading)
    assert all(torch.equal(target, source.float()) for target, source in zip(targets, sources, strict=True))
    assert torch.get_num_threads() == threads, "the caller's threads are its own again"


def test_a_copy_that_fails_is_the_callers_error_and_nobody_works_on_behind_its_back(copier):
    good = [(torch.zeros(256, 4096), torch.ones(256, 4096)) for _ in range(6)]
    bad = (torch.zeros(256, 4096), torch.ones(255, 4096))
    with pytest.raises(RuntimeError):
        copier.copy([*good[:2], bad, *good[2:]])
    before = [target.clone() for target, _ in good]
    copier.copy(good)  # whoever was still at work would have to end first
    assert all(torch.equal(target, source) for target, source in good)
    assert all(bool((old == old.flatten()[0]).all()) for old in before), "no piece was left in the middle"


def test_little_is_copied_by_the_caller_alone_whose_threads_are_its_own_again(copier, monkeypatch):
    threads = torch.get_num_threads()
    teams = []
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args: (teams.append(torch.get_num_threads()), real(*args))[1])
    source, target = torch.randn(256, 1024), torch.zeros(256, 1024)
    copier.copy([(target, source)])
    assert torch.equal(target, source)
    assert teams == [1]
    with pytest.raises(RuntimeError):
        copier.copy([(target, source[:3])])
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("rows", [512, 8192], ids=["8 MiB", "128 MiB"])
def test_while_an_io_thread_works_a_small_copy_waits_for_no_team(copier, io, monkeypatch, rows, busy):
    teams = []
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args: (teams.append(torch.get_num_threads()), real(*args))[1])
    monkeypatch.setattr(copies, "_runtimes", list)  # threads cannot be limited: then it copies in serial slices
    source, target = torch.randn(rows, 4096), torch.zeros(rows, 4096)
    gate, begun = threading.Event(), threading.Event()
    call = io.call(lambda: begun.set() or gate.wait(20)) if busy else None
    try:
        assert call is None or begun.wait(10)
        copier.copy([(target, source)])
    finally:
        gate.set()
    assert torch.equal(target, source)
    assert (len(teams) > 1) == (busy and rows == 512 and torch.get_num_threads() > 1)


def test_a_crew_whose_threads_are_all_busy_copies_without_them(copier, io, core):
    gate = threading.Event()
    calls = [io.call(lambda: gate.wait(20)) for _ in range(3)]
    source, target = torch.randn(4096, 4096), torch.zeros(4096, 4096)
    copier.copy(list(zip(target.split(512), source.split(512), strict=True)))
    assert torch.equal(target, source)
    assert not core.state.jobs.ready, "nothing is left behind for threads that are busy"
    gate.set()
    assert all(call.result(10) for call in calls)
