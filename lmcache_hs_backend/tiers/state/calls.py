"""What a call of the store holds while it runs, so that it can be taken back from a call that was interrupted.

An exception may come from outside at any moment (KeyboardInterrupt, a handler's timeout), also within the ``finally``
that gives everything back. So nothing is held by a frame alone: a call is in ``TierState.calls``, and writes down what
it takes in the transition that takes it. Its lock says whether it still runs: the call has it for as long as a ``with``
of its frame lasts, and Python lets go of a lock of its own on every way out.
"""

from __future__ import annotations

from _thread import allocate_lock
from typing import TYPE_CHECKING, Any

from lmcache_hs_backend.tiers.state.entries import ChunkEntry, Slot
from lmcache_hs_backend.tiers.state.jobs import FileJob

if TYPE_CHECKING:
    from lmcache_hs_backend.tiers.state.tier_state import TierState


_NO_PLACES: list[dict[int, Slot]] = []
_NO_SLOTS: dict[int, dict[int, Slot]] = {}
_NO_READS: dict[bytes, FileJob] = {}


class ActiveCall:
    """One call. Its thread holds ``running`` from before it is in ``TierState.calls`` until it returns or raises.

    Most calls need little of this, and one is made for every retrieve: what is not set is the class's own.
    """

    uses_slots = True  # a store that closes waits for it
    served = 0  # so many of ``entries``, from the first on, count as used when they are unpinned
    slots: list[dict[int, Slot]] = _NO_PLACES  # on loan, for rows that are being stored
    reserved = _NO_SLOTS  # on loan, for reads that have not begun, by position
    handed_over = _NO_READS  # by name: reads that the call has to finish
    wanted_bytes = 0  # its part of TierState.wanted_bytes
    flushing = False  # it counts in TierState.flushing
    writer: Any = None  # what may be writing into ``slots``; it can say when it does not any more
    lost = False  # nobody can say that: its slots are never used again
    over = False  # it wants no more reads

    def __init__(self) -> None:
        """It holds nothing yet."""
        self.running = allocate_lock()
        self.entries: list[ChunkEntry] = []  # pinned, in the order of the prompt

    @property
    def interrupted(self) -> bool:
        """Whether it has left without ``end``."""
        return not self.running.locked()


def _abandon_reads(state: TierState, call: ActiveCall) -> None:
    """The reads that the call was to finish end here, and have brought nothing; those to come find out themselves."""
    for name, read in call.handed_over.items():
        if state.jobs.current(name) is read:  # else it has ended already
            if read.loan:
                state.return_slots(read.loan.values())
            if read.pinned_entry is not None:
                state.unpin([read.pinned_entry])
            state.jobs.finish(name)
    call.handed_over.clear()
    for slots in call.reserved.values():
        state.return_slots(slots.values())
    call.reserved.clear()


def end(state: TierState, call: ActiveCall) -> None:
    """Give back whatever a call holds. Slots that something may still write into stay its own, and it stays.

    What it holds is written down until all of it was given back: should that be cut short, all counts as held.
    """
    call.over = True
    if call.handed_over or call.reserved:
        _abandon_reads(state, call)
    if call.entries:
        state.unpin(call.entries)
        call.entries.clear()
    if call.wanted_bytes:
        state.wanted_bytes -= call.wanted_bytes
        call.wanted_bytes = 0
    if call.flushing:
        state.flushing -= 1
        call.flushing = False
    if call.writer is None:
        if call.slots:
            for slots in call.slots:
                state.return_slots(slots.values())
            call.slots.clear()
        state.calls.discard(call)
