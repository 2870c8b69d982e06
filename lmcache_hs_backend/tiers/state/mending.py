"""The state put in order again, after an exception from outside has cut a transition short.

Every account can be derived from a few tables: the chunks of the index and their slots, what was dropped and is still
on disk, the jobs of busy names, the running writes and evictions, and what active calls hold. Those are changed in
single steps of the interpreter, and in an order that lets each step tell how far a transition has come: a chunk that is
being dropped is a leftover first, a call's record is emptied after what it names was given back. So ``mend`` ends what
was begun where it can, drops chunks whose own state is in doubt, and adds everything else up again.

It takes time proportional to the index, and may itself be cut short and begun again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from lmcache_hs_backend.tiers.state.checking import problems_of
from lmcache_hs_backend.tiers.state.entries import ABSENT, CONFIRMED, REMOVED, UNCONFIRMED, UNREAD, ChunkEntry, Slot
from lmcache_hs_backend.tiers.state.jobs import ArchiveJob, DeleteJob
from lmcache_hs_backend.tiers.state.tier_state import TierState, VictimKind


def mend(state: TierState) -> None:
    """Make every invariant hold. The lock is held, and no transition is under way."""
    if state.generation.cleared:
        state.forget_all()
    state.jobs.mend()
    holders = list(_pinned(state))
    for entry in itertools.chain(state.entries.values(), holders):
        entry.pins = 0
    for entry in holders:
        entry.pins += 1
    _end_departures(state)
    for entry in holders:
        if state.entries.get(entry.name) is not entry and not entry.dropped:
            _remove(entry)
    _mend_memory(state, {entry for entry in holders if entry.dropped})
    state.orders.mend(state.entries.values())
    _mend_sums(state)
    _delete_leftovers(state)


def _pinned(state: TierState) -> Iterator[ChunkEntry]:
    """Every chunk that is pinned, once for each pin."""
    for call in state.calls:
        yield from call.entries
    for write in state.writes:
        yield write.entry
    for job in state.jobs.named():
        if job.pinned_entry is not None:
            yield job.pinned_entry


def _end_departures(state: TierState) -> None:
    """Chunks that were on their way out of the index, or are in doubt, leave it."""
    accounts, shared_bytes = state.accounts, _slots_of_two(state.entries.values())
    archived = {job.entry for job in state.jobs.named() if isinstance(job, ArchiveJob)}
    for name, entry in list(state.entries.items()):
        if entry.file is UNREAD and not entry.hot and entry.identified:  # it was leaving RAM: see leave_ram
            entry.prefix, entry.num_tokens, entry.kv_key, entry.kv = b"", 0, None, UNCONFIRMED
        leaving = entry in archived or (entry.has_file and name in accounts.leftover)
        leaving = leaving or (entry.file is ABSENT and not entry.hot)
        doubtful = name != entry.name or entry in shared_bytes or any(problems_of(state, entry))
        if not leaving and not doubtful:
            continue
        if not leaving:
            state.tally.loss("interrupted")
        if entry.has_file:
            accounts.leftover.setdefault(entry.name, entry.size)
        _remove(entry)
        del state.entries[name]


def _remove(entry: ChunkEntry) -> None:
    entry.generation = REMOVED
    entry.older = entry.younger = None


def _slots_of_two(entries: Iterable[ChunkEntry]) -> set[ChunkEntry]:
    """Chunks whose slots overlap. No order of steps leads there."""
    found: set[ChunkEntry] = set()
    slots = sorted(((slot.offset, slot.nbytes, entry) for entry in entries for slot in entry.hot.values()), key=_offset)
    for (offset, nbytes, entry), (after, _, other) in itertools.pairwise(slots):
        if offset + nbytes > after:
            found |= {entry, other}
    return found


def _offset(item: tuple[int, int, ChunkEntry]) -> int:
    return item[0]


def _mend_memory(state: TierState, dropped: set[ChunkEntry]) -> None:
    """Slots are a chunk's, on loan, or free. ``dropped``: chunks that are not in the index, and pinned."""
    chunks = [slot for entry in state.entries.values() for slot in entry.hot.values()]
    detached = [slot for entry in dropped for slot in entry.hot.values()]
    taken = {slot.offset for slot in itertools.chain(chunks, detached)}
    loaned: list[Slot] = []
    for slots in _loans(state):
        for layer_idx, slot in list(slots.items()):
            if slot.offset in taken:
                del slots[layer_idx]  # its rows have become a chunk's
            else:
                taken.add(slot.offset)
                loaned.append(slot)
    state.free_list.mend((slot.offset, slot.nbytes) for slot in itertools.chain(chunks, detached, loaned))
    state.loaned_bytes = sum(slot.nbytes for slot in loaned)
    state.detached_bytes = sum(slot.nbytes for slot in detached)


def _loans(state: TierState) -> Iterator[dict[int, Slot]]:
    for call in state.calls:
        yield from call.slots
        yield from call.reserved.values()
    for job in state.jobs.named():
        if job.loan:
            yield job.loan


def _mend_sums(state: TierState) -> None:
    leaving = dict.fromkeys(VictimKind, 0)
    for victim in state.evictions:
        leaving[victim.kind] += victim.size
    state.accounts.mend(
        sum(entry.size for entry in state.entries.values()),
        leaving[VictimKind.ARCHIVE],
        leaving[VictimKind.QUARANTINE],
    )
    state.confirmed_chunks = sum(entry.kv is CONFIRMED for entry in state.entries.values())
    state.writing_bytes = sum(job.slot_bytes for job in state.writes)
    state.rate.mend(len(state.writes))
    state.flushing = sum(call.flushing for call in state.calls)
    state.wanted_bytes = sum(call.wanted_bytes for call in state.calls)


def _delete_leftovers(state: TierState) -> None:
    """See to it that files of dropped chunks are deleted, where that was not submitted any more."""
    for name in state.accounts.leftover:
        jobs = state.jobs.of(name)
        if name not in state.undeletable and not any(isinstance(job, DeleteJob | ArchiveJob) for job in jobs):
            state.jobs.submit(DeleteJob(name))
