"""Each account broken on purpose and put in order again, and transitions cut short at every moment."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.format.layout import FoundFile
from lmcache_hs_backend.tiers.state import calls, leaving, making_room, reading, recovering, storing, writing
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.checking import check
from lmcache_hs_backend.tiers.state.jobs import ArchiveJob, DeleteJob, WriteJob
from lmcache_hs_backend.tiers.state.mending import mend
from lmcache_hs_backend.tiers.state.tier_state import TierState
from tests.state.test_checking import BREAKS, CLEAN, DIRTY, FOUND, SLOT, SPEC, clean, describe, dirty, found, ref, state
from tests.support.interrupts import Interrupt, InterruptAt

__all__ = ["state"]  # the fixture

#: What is broken in a way that leaves a chunk itself in doubt: it is dropped. All else costs no chunk.
COSTS_A_CHUNK = (
    "is in the index under the name",
    "it was dropped and is in the index",
    "its file is known, and its layout is not set",
    "its file is unread, and its layout is set",
    "its file is unread and has digests",
    "its file is absent and has 100 bytes",
    "its file has 100 bytes, its layout",
    "its file is being deleted, and its name is not busy",
    "it is in neither tier",
    "it is not identified, and has rows, a known file or confirmed KV",
    "without the metadata that a file needs",
    "the slot of layer 3 does not fit its rows",
    "belong to two owners",
    "is counted as its own and as a leftover",
)


@pytest.mark.parametrize(("break_it", "words"), BREAKS, ids=[words for _, words in BREAKS])
def test_whatever_is_broken_is_put_in_order(
    state: TierState, break_it: Callable[[TierState], object], words: str
) -> None:
    before = set(state.entries)
    break_it(state)
    mend(state)
    assert check(state) == []
    lost = before - set(state.entries)
    assert bool(lost) == (words in COSTS_A_CHUNK)
    mend(state)
    assert check(state) == []


def test_what_calls_and_jobs_hold_is_counted_again(state: TierState) -> None:
    call = ActiveCall()
    state.calls.add(call)
    call.entries += [clean(state), dirty(state)]
    call.slots = making_room.allocate(state, [(16, [SPEC])])
    call.reserved = {0: making_room.allocate(state, [(16, [SPEC])])[0]}
    call.wanted_bytes, call.flushing = 5 * SLOT, True
    job = writing.next_write(state, writing.WritePolicy(8 * SLOT, 0.0), 20.0)
    assert isinstance(job, WriteJob)
    mend(state)
    assert check(state) == []
    assert (clean(state).pins, dirty(state).pins) == (1, 2)
    assert (state.loaned_bytes, state.wanted_bytes, state.flushing) == (2 * SLOT, 5 * SLOT, 1)
    assert state.writing_bytes == SLOT
    calls.end(state, call)
    writing.abort_write(state, job, 21.0)
    assert check(state) == []
    assert (clean(state).pins, dirty(state).pins) == (0, 0)
    assert (state.loaned_bytes, state.wanted_bytes, state.flushing, state.free_list.used_bytes) == (0, 0, 0, 2 * SLOT)


def test_a_chunk_that_was_dropped_while_pinned_keeps_its_slots_and_no_more(state: TierState) -> None:
    call = ActiveCall()
    state.calls.add(call)
    call.entries.append(clean(state))
    state.pin(call.entries)
    state.drop(clean(state))
    mend(state)
    assert check(state) == []
    assert state.detached_bytes == SLOT
    calls.end(state, call)
    assert state.detached_bytes == 0
    assert check(state) == []


def test_the_order_in_which_chunks_leave_stays(state: TierState) -> None:
    state.orders.touch([found(state)])
    before = [list(order) for order in (state.orders.clean, state.orders.dirty, state.orders.aging, state.orders.cold)]
    since = dirty(state).dirty_since
    mend(state)
    after = [list(order) for order in (state.orders.clean, state.orders.dirty, state.orders.aging, state.orders.cold)]
    assert (after, dirty(state).dirty_since) == (before, since)


# -- transitions cut short ----------------------------------------------------------------------------------------


def _store(state: TierState, call: ActiveCall) -> None:
    state.calls.add(call)
    call.slots = []
    refs = [ref("new"), DIRTY, FOUND]
    plan = storing.plan_store(state, refs, [SPEC], [Presence.PRESENT] * 3, 5)
    call.slots += making_room.allocate(state, [(16, [SPEC])] * len(plan.missing))
    batch = plan.missing[: len(call.slots)]
    storing.commit_store(state, plan, batch, call.slots, describe, 30.0, streaming=False, more=True)
    del call.slots[:]
    storing.end_store(state, refs)


def _store_that_evicts(state: TierState, call: ActiveCall) -> None:
    state.calls.add(call)
    call.slots = []
    call.slots += making_room.allocate(state, [(16, [SPEC])] * 7)
    for slots in call.slots:
        state.return_slots(slots.values())
    call.slots.clear()


def _retrieve(state: TierState, call: ActiveCall) -> None:
    state.calls.add(call)
    walk = reading.PromptWalk()
    walk.entries = call.entries
    reading.prepare_retrieve(state, walk, [CLEAN, DIRTY], [0], native=True, readable=True)
    reading.judge_presence(state, [CLEAN, DIRTY], walk, [Presence.PRESENT] * 2, 50, 60, writable=True)
    reading.end_part(state, call, 1, served=False)
    reading.end_part(state, call, 1, served=True)


def _kv_gone(state: TierState, call: ActiveCall) -> None:
    for one in (CLEAN, DIRTY):
        state.kv_gone(state.entries[one.name], writable=True)


def _archive(state: TierState, call: ActiveCall) -> None:
    state.archive_gone = True
    _kv_gone(state, call)


def _clear(state: TierState, call: ActiveCall) -> None:
    state.clear()


def _demote(state: TierState, call: ActiveCall) -> None:
    making_room.demote(state, [CLEAN.name, DIRTY.name])
    making_room.discard_dirty(state, ())


TRANSITIONS = [_store, _store_that_evicts, _retrieve, _kv_gone, _archive, _clear, _demote]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="says at which moments Python 3.11 looks for exceptions")
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_transition_that_is_cut_short_at_any_moment_is_put_in_order(
    transition: Callable[[TierState, ActiveCall], None],
) -> None:
    at, reached = 0, True
    while reached:
        at += 1
        one, call = state.__wrapped__(), ActiveCall()  # type: ignore[attr-defined]
        with InterruptAt(at) as interrupted:
            transition(one, call)
        reached = bool(interrupted.where)
        mend(one)
        assert check(one) == [], interrupted.where
        calls.end(one, call)
        assert check(one) == [], interrupted.where
        _end_jobs(one)
        assert check(one) == [], interrupted.where
        assert not one.jobs.busy_names, interrupted.where
        assert not any(entry.pins for entry in one.entries.values()), interrupted.where
        assert (one.loaned_bytes, one.detached_bytes) == (0, 0), interrupted.where
        assert not one.accounts.leftover, interrupted.where
    assert at > 20


def _end_jobs(state: TierState) -> None:
    while (job := state.jobs.start(40.0)) is not None:
        if isinstance(job, DeleteJob):
            leaving.end_delete(state, job, deleted=True)
        else:
            assert isinstance(job, ArchiveJob)
            leaving.end_archive(state, job, 100, 0, kept=True, deleted=True)


def test_a_clear_that_is_interrupted_once_it_has_begun_is_ended(
    state: TierState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise Interrupt

    monkeypatch.setattr(state.accounts, "clear", interrupted)
    with pytest.raises(Interrupt):
        state.clear()
    monkeypatch.undo()
    mend(state)
    assert not state.entries
    assert state.epoch
    assert state.purge_pending
    recovering.found(state, [FOUND.name])
    recovering.sized(state, [FoundFile("", 5000, 1, FOUND.name)])
    assert not state.entries
    assert check(state) == []
