"""When a write starts: beside whom it waits, and for how long at most."""

from __future__ import annotations

import pytest

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.tiers.state import making_room, storing
from lmcache_hs_backend.tiers.state.jobs import WriteJob
from lmcache_hs_backend.tiers.state.tier_state import TierState
from lmcache_hs_backend.tiers.state.writing import PATIENCE_SEC, WritePolicy, next_write
from tests.state.test_checking import SLOT, SPEC, describe, ref

SHORT = WritePolicy(8 * SLOT, 3600.0)  # more shall be free or clean than there is
AMPLE = WritePolicy(0.0, 10.0)


@pytest.fixture
def state() -> TierState:
    """Two dirty chunks, stored at 1 s."""
    state = TierState(8 * SLOT, archive_gone=False, max_cold_bytes=1 << 20)
    for one in (ref("older"), ref("newer")):
        plan = storing.plan_store(state, [one], [SPEC], [Presence.PRESENT], 1)
        placed = making_room.allocate(state, [(16, [SPEC])])
        storing.commit_store(state, plan, plan.missing, placed, describe, 1.0, streaming=False, more=False)
    for entry in state.entries.values():
        entry.dirty_since = 1.0
    return state


def test_while_memory_is_short_a_write_waits_until_a_caller_has_gone_on(state):
    wait = next_write(state, SHORT, 20.0, quiet_until=20.004)
    assert wait == pytest.approx(0.004)
    assert isinstance(next_write(state, SHORT, 20.004, quiet_until=20.004), WriteJob)


def test_a_caller_who_never_rests_holds_up_no_write_for_long(state):
    now = 20.0
    while not isinstance(wait := next_write(state, SHORT, now, quiet_until=now + 0.004), WriteJob):
        assert 0 < wait < 0.0041
        now += wait
    assert now == pytest.approx(20.0 + PATIENCE_SEC)
    assert isinstance(next_write(state, SHORT, now, quiet_until=now + 0.004), WriteJob), "nor the next one"


def test_patience_begins_anew_when_memory_was_not_short_in_between(state):
    next_write(state, SHORT, 20.0, quiet_until=21.0)
    next_write(state, WritePolicy(0.0, 3600.0), 20.01, quiet_until=21.0)
    assert isinstance(next_write(state, SHORT, 20.06, quiet_until=21.0), float)


def test_what_a_call_waits_for_starts_at_once(state):
    state.wanted_bytes = 8 * SLOT
    assert isinstance(next_write(state, SHORT, 20.0, quiet_until=21.0), WriteJob)
    state.wanted_bytes, state.flushing = 0, 1
    assert isinstance(next_write(state, SHORT, 20.0, quiet_until=21.0), WriteJob)


def test_a_chunk_that_is_old_enough_makes_way_too_but_not_for_long(state):
    assert next_write(state, AMPLE, 11.0, quiet_until=11.004) == pytest.approx(0.004)
    assert isinstance(next_write(state, AMPLE, 11.0 + PATIENCE_SEC, quiet_until=12.0), WriteJob)
