"""Making room: slots for new rows, and files that leave the disk.

In RAM, clean chunks leave, least recently used first; that moves no bytes and cannot fail, so it has no pair. On
disk, ``prepare_eviction`` chooses a file and makes its name busy; after the deletion comes ``commit_eviction``, or
``abort_eviction``, which leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.tiers.state.entries import (
    IN_BUCKET,
    KNOWN,
    LEAVING,
    LEFT_DISK,
    SHARED,
    UNREAD,
    ChunkEntry,
    Slot,
    slot_bytes,
)
from lmcache_hs_backend.tiers.state.tier_state import TierState, Victim, VictimKind

#: A layer of a chunk that needs a slot, and of how many bytes.
_Need = tuple[LayerSpec, int]

# -- RAM -----------------------------------------------------------------------------------------------------


def allocate(state: TierState, chunks: Sequence[tuple[int, Sequence[LayerSpec]]]) -> list[dict[int, Slot]]:
    """Slots for as many chunks as there is room for, from the first on: layer_idx → slot for each.

    A chunk is ``(num_tokens, layers)``; it gets all its slots or none. Clean chunks leave, least recently used
    first, as far as that helps. The slots belong to the caller until it gives them to an entry or frees them.
    """
    ready = state.ready_bytes
    wanted = 0
    needs: list[list[_Need]] = []
    for tokens, specs in chunks:
        need = [(spec, slot_bytes(spec, tokens)) for spec in specs]
        nbytes = sum([nbytes for _, nbytes in need])
        if wanted + nbytes > ready:
            break
        wanted += nbytes
        needs.append(need)
    if not needs:
        return []
    free_list = state.free_list
    while free_list.free_bytes < wanted and evict_oldest(state):
        pass
    placed = _place(state, needs)
    # Enough bytes, but scattered: only now does a further chunk have to leave for the first one's sake.
    while not placed and evict_oldest(state):
        placed = _place(state, needs[:1])
    return placed


def _place(state: TierState, needs: Sequence[Sequence[_Need]]) -> list[dict[int, Slot]]:
    """Slots layer by layer, so that the same layer of neighbouring chunks is side by side."""
    if len(needs) == 1:
        return _place_one(state, needs[0])
    placed: list[dict[int, Slot]] = [{} for _ in needs]
    by_layer: dict[_Need, list[int]] = {}
    for number, chunk in enumerate(needs):
        for need in chunk:
            by_layer.setdefault(need, []).append(number)
    fit = len(needs)
    for (spec, nbytes), numbers in by_layer.items():
        offsets = state.free_list.allocate(nbytes, len(numbers))
        for number, offset in zip(numbers, offsets, strict=False):
            placed[number][spec.layer_idx] = Slot(offset, nbytes, spec)
        if len(offsets) < len(numbers):
            fit = min(fit, numbers[len(offsets)])
        state.loaned_bytes += nbytes * len(offsets)
    for slots in placed[fit:]:
        state.return_slots(slots.values())
    return placed[:fit]


def _place_one(state: TierState, needs: Sequence[_Need]) -> list[dict[int, Slot]]:
    """The same for one chunk, which has no neighbours."""
    slots: dict[int, Slot] = {}
    for spec, nbytes in needs:
        offsets = state.free_list.allocate(nbytes)
        if not offsets:
            state.return_slots(slots.values())
            return []
        slots[spec.layer_idx] = Slot(offsets[0], nbytes, spec)
        state.loaned_bytes += nbytes
    return [slots]


def evict_oldest(state: TierState) -> bool:
    """The least recently used clean chunk leaves RAM. False when there is none."""
    entry = state.orders.oldest(state.orders.clean.values())
    if entry is None:
        return False
    evict(state, entry)
    return True


def evict(state: TierState, entry: ChunkEntry) -> None:
    """A clean chunk leaves RAM; one that the disk does not keep is lost with that."""
    if entry.drop_reason and entry.file is not LEAVING:  # else the end of its eviction says whether it is lost
        _count_departure(state, entry.drop_reason)
        entry.drop_reason = ""
    else:
        state.tally.add("demoted")
    state.leave_ram(entry)


def demote(state: TierState, names: Iterable[bytes]) -> int:
    """Those of these chunks that are clean leave RAM. Returns how many."""
    demoted = 0
    for name in names:
        entry = state.orders.clean.get(name)
        if entry is not None and not entry.dirty:
            evict(state, entry)
            demoted += 1
    return demoted


def discard_dirty(state: TierState, spare: Collection[bytes]) -> bool:
    """The oldest dirty chunk leaves RAM unwritten, sparing some. False when there is none.

    The last resort: for a disk that takes no writes.
    """
    for entry in state.orders.dirty.values():
        if entry.name not in spare and not entry.pins and not state.jobs.is_busy(entry.name):
            state.tally.loss("offline")
            state.leave_ram(entry)
            return True
    return False


# -- disk ----------------------------------------------------------------------------------------------------


def _departure(state: TierState, entry: ChunkEntry) -> str:
    """Why the disk does not keep a chunk that makes room: one of LEFT_DISK."""
    if entry.share is SHARED:
        return IN_BUCKET
    return "unshared" if state.orders.is_wanted(entry) else "cold_limit"


def _count_departure(state: TierState, reason: str) -> None:
    if reason == IN_BUCKET:
        state.tally.add("evicted_shared")
    else:
        state.tally.loss(reason)


def reserve(state: TierState, nbytes: int) -> int:
    """Count ``nbytes`` as promised to a write. Returns 0, or how many bytes must leave first; then none are counted."""
    over = state.accounts.total + nbytes - state.max_cold_bytes
    if over > 0:
        return over
    state.accounts.reserved += nbytes
    return 0


def prepare_eviction(state: TierState, now: float) -> Victim | None:
    """The file that leaves next, its name busy; None when there is none. ``now``: monotonic."""
    victim = _next_victim(state, now)
    if victim is not None:
        state.evictions.add(victim)
    return victim


def _next_victim(state: TierState, now: float) -> Victim | None:
    accounts, jobs = state.accounts, state.jobs
    if accounts.quarantined:
        file = accounts.quarantined.popleft()
        return Victim(VictimKind.QUARANTINE, file.size, file=file)
    dead = next((directory for directory, nbytes in accounts.dead_bytes.items() if nbytes), None)
    if dead is not None:
        return Victim(VictimKind.DEAD, 0, directory=dead)  # which file that is, its deletion finds out
    # What the bucket holds too leaves first: with that nothing is lost.
    shared, cold = (state.orders.shared, state.orders.cold) if accounts.sized else ({}, ())
    spared = shared if state.orders.shares_archive else {}
    archived = _first_idle(state, accounts.archive_shared)
    entry = None if archived is not None else _oldest_idle(state, spared.values())
    if entry is None:
        if archived is None:
            archived = _first_idle(state, accounts.archived)
        if archived is not None:
            jobs.claim(archived, now)
            in_bucket = archived in accounts.archive_shared
            return Victim(VictimKind.ARCHIVE, accounts.take_archived(archived), archived, in_bucket=in_bucket)
        entry = _oldest_idle(state, shared.values()) or _oldest_idle(state, cold)
    if entry is None:
        return None
    jobs.claim(entry.name, now)
    victim = Victim(VictimKind.OWN, entry.size, entry.name, entry=entry, layout=entry.layout, digests=entry.digests)
    entry.file, entry.layout, entry.digests = LEAVING, None, b""
    if entry.hot:  # rows in RAM stay there, and are not written again
        entry.drop_reason = entry.drop_reason or _departure(state, entry)
    state.orders.reindex(entry)
    return victim


def _first_idle(state: TierState, names: Iterable[bytes]) -> bytes | None:
    return next((name for name in names if not state.jobs.is_busy(name)), None)


def _oldest_idle(state: TierState, entries: Iterable[ChunkEntry]) -> ChunkEntry | None:
    return state.orders.oldest(entry for entry in entries if not entry.pins and not state.jobs.is_busy(entry.name))


def commit_eviction(state: TierState, victim: Victim) -> None:
    """The victim's file is gone."""
    _end_eviction(state, victim)
    entry = victim.entry
    if entry is None:
        _uncount(state, victim)
        if victim.kind is VictimKind.ARCHIVE and state.orders.shares_archive:
            _count_departure(state, IN_BUCKET if victim.in_bucket else "unshared")
    else:
        if not entry.dropped and not entry.hot:
            _count_departure(state, _departure(state, entry))
        state.file_gone(entry)


def abort_eviction(state: TierState, victim: Victim) -> None:
    """The victim's file cannot be deleted. A chunk stays in the index, readable, youngest of all.

    Other files stay on disk and are no longer counted; the next start finds them again.
    """
    _end_eviction(state, victim)
    entry = victim.entry
    if entry is None:
        _uncount(state, victim)
    elif not entry.dropped:
        entry.layout, entry.digests = victim.layout, victim.digests
        entry.file = UNREAD if victim.layout is None else KNOWN
        if entry.drop_reason in LEFT_DISK:
            entry.drop_reason = ""
        state.orders.reindex(entry)
        state.orders.touch([entry])  # the next victim shall not be the same again


def _end_eviction(state: TierState, victim: Victim) -> None:
    state.evictions.remove(victim)
    if victim.name:
        state.jobs.finish(victim.name)


def _uncount(state: TierState, victim: Victim) -> None:
    if victim.kind is VictimKind.DEAD:
        state.accounts.dead_deleted(victim.directory, victim.size)
        return
    kind = victim.kind.value
    setattr(state.accounts, kind, getattr(state.accounts, kind) - victim.size)
