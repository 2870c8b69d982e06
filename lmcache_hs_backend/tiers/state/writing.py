"""Dirty chunks become files: which one is written next and when, and what a write leaves.

Three reasons to write, in this order: a store waits for room or a flush for everything, free and clean memory falls
short, a chunk has been dirty for too long. A chunk that got a layer a moment ago is left alone for that long unless
a call waits: its other layers are probably on their way, and each would mean another write of the whole file. How
long a moment is depends on how much room is left: a store that comes faster than that must not wait for the disk. And
a caller who has just called is probably about to call again: a write beside it would take the interpreter and a core
from it, so for a few milliseconds none begins.

``next_write`` starts a write (its chunk is pinned, its name busy); ``commit_write`` or ``abort_write`` ends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lmcache_hs_backend.format.header import FileLayout
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.entries import KNOWN, LEAVING, LEFT_DISK, LOCAL, ChunkEntry
from lmcache_hs_backend.tiers.state.jobs import DeleteJob, WriteJob
from lmcache_hs_backend.tiers.state.tier_state import TierState

IDLE_SEC = 3600.0
#: How long a chunk is left alone after its last layer, at most.
COALESCE_SEC = 0.2
#: A write that no call waits for makes way for the steps of a caller, but not for longer than this.
PATIENCE_SEC = 0.05
#: So old may a measured rate be and still promise something.
_RATE_VALID_SEC = 2.0
#: So long may a write that has just started, or is about to, be waited for while no rate is known.
_FIRST_WRITE_SEC = 1.0
_SOON_SEC = 0.15


@dataclass(frozen=True)
class WritePolicy:
    """The settings that writing depends on. ``clean_bytes``: how much of the hot tier is kept free or clean."""

    clean_bytes: float
    write_back_sec: float


def next_write(state: TierState, policy: WritePolicy, now: float, quiet_until: float = 0.0) -> WriteJob | float:
    """A write that starts now, or the seconds after which to ask again.

    ``now``, and ``quiet_until``, when a caller who has just called will have gone on (monotonic): until then only
    such writes start that are awaited or late.
    """
    orders = state.orders
    if not orders.aging:
        state.pressed_since = 0.0
        return IDLE_SEC
    if now < state.write_again_at:
        return state.write_again_at - now
    wait = IDLE_SEC
    ready = state.ready_bytes
    soon = ready + state.writing_bytes
    awaited = bool(state.flushing) or soon < state.wanted_bytes
    if not awaited and ready >= policy.clean_bytes:
        state.pressed_since = 0.0
    else:
        state.pressed_since = state.pressed_since or now
        entry = _first_idle(state, orders.dirty.values())
        if entry is not None:
            rest = 0.0
            if not awaited:
                rest = entry.stored_at + COALESCE_SEC * min(1.0, soon / policy.clean_bytes) - now
                rest = max(rest, min(quiet_until, state.pressed_since + PATIENCE_SEC) - now)
            if rest <= 0:
                return _start(state, entry, now)
            wait = min(wait, rest)
    entry = _first_idle(state, orders.aging.values())
    if entry is not None:
        due = max(entry.dirty_since + policy.write_back_sec, entry.stored_at + COALESCE_SEC) - now
        due = max(due, min(quiet_until - now, due + PATIENCE_SEC))
        if due <= 0:
            return _start(state, entry, now)
        wait = min(wait, due)
    return wait


def _first_idle(state: TierState, entries: Iterable[ChunkEntry]) -> ChunkEntry | None:
    """The first whose name is not busy; only as many are passed over as are in flight."""
    is_busy = state.jobs.is_busy
    for entry in entries:
        if not is_busy(entry.name):
            return entry
    return None


def _start(state: TierState, entry: ChunkEntry, now: float) -> WriteJob:
    state.jobs.claim(entry.name, now)
    state.pin([entry])
    state.rate.start(now)
    job = WriteJob(entry, entry.hot_bytes)
    state.writing_bytes += job.slot_bytes
    state.writes.add(job)
    return job


def commit_write(
    state: TierState, job: WriteJob, layout: FileLayout, digests: bytes, used_ns: int, reserved: int, now: float
) -> None:
    """The chunk's file is on disk, in place of the one it may have had: the layers it holds are clean.

    ``used_ns``: the use that its mtime tells; ``reserved``: what the write had promised.
    """
    entry = job.entry
    accounts = state.accounts
    accounts.reserved -= reserved
    if entry.dropped:
        accounts.set_leftover(entry.name, layout.size)
        state.jobs.submit(DeleteJob(entry.name))
    else:
        accounts.remove_leftover(entry.name)  # another file of that name, which could not be deleted
        state.undeletable.discard(entry.name)
        state.set_size(entry, layout.size)
        entry.file = KNOWN
        entry.layout, entry.digests, entry.share = state.share(layout), digests, LOCAL
        entry.saved_ns = used_ns
        state.orders.reindex(entry)
    state.eviction_helps = True
    state.waited_in_vain_at = -math.inf
    _end(state, job, layout.size, now)


def abort_write(
    state: TierState, job: WriteJob, now: float, *, reserved: int = 0, drop_reason: str = "", again_at: float = 0.0
) -> None:
    """The chunk was not written and stays dirty.

    ``drop_reason``: it never can be, so it may leave RAM unwritten. ``again_at``: when writing makes sense again.
    """
    state.accounts.reserved -= reserved
    if drop_reason and not job.entry.dropped:
        job.entry.drop_reason = drop_reason
        state.orders.reindex(job.entry)
    state.write_again_at = max(state.write_again_at, again_at)
    _end(state, job, 0, now)


def _end(state: TierState, job: WriteJob, written: int, now: float) -> None:
    state.writes.remove(job)
    state.rate.finish(written, now)
    state.writing_bytes -= job.slot_bytes
    state.unpin([job.entry])
    state.jobs.finish(job.name)


def disk_has_room_again(state: TierState) -> None:
    """After a disk was full: chunks in RAM whose files had to make room are to be written again."""
    for entry in list(state.orders.clean.values()):
        if entry.drop_reason in LEFT_DISK and entry.file is not LEAVING:
            entry.drop_reason = ""
            state.orders.reindex(entry)


def release(state: TierState, nbytes: int) -> None:
    """Bytes on disk that were reserved are not needed any more."""
    state.accounts.reserved -= nbytes


class Demand:
    """What one call of store wants free or clean, until the call ends."""

    def __init__(self, state: TierState, call: ActiveCall, began: float) -> None:
        """``began``: when the call started (monotonic)."""
        self._state = state
        self._call = call
        self._began = began

    def set(self, nbytes: int) -> None:
        """This call wants so many bytes in all."""
        self._state.wanted_bytes += nbytes - self._call.wanted_bytes
        self._call.wanted_bytes = nbytes

    def lower(self, nbytes: int) -> None:
        """It wants at most so many."""
        self.set(min(self._call.wanted_bytes, nbytes))

    def is_promised(self, needed: int, now: float, deadline: float, *, starting: bool) -> bool:
        """Whether the call may expect ``needed`` bytes by ``deadline`` (monotonic).

        Only a rate that was measured a moment ago says so or, where none is known, a write that has just started, if
        no other call has waited in vain since. ``starting``: no write may start yet; the caller limits that time.
        """
        state, left = self._state, deadline - now
        rate = state.rate
        if left <= 0 or starting:
            promised = left > 0
        elif rate.measured_at and now - rate.measured_at < _RATE_VALID_SEC:
            promised = needed <= left * rate.bytes_per_sec
        elif now - state.waited_in_vain_at < _RATE_VALID_SEC:
            promised = False
        else:
            promised = now - self._began < (_FIRST_WRITE_SEC if rate.active else _SOON_SEC)
            if not promised:
                state.waited_in_vain_at = now
        return promised


def is_pressed(state: TierState, policy: WritePolicy) -> bool:
    """Whether a write is wanted now, and not only when a chunk has been dirty for long enough."""
    return bool(state.flushing or state.wanted_bytes) or state.ready_bytes < policy.clean_bytes
