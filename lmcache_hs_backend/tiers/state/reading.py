"""Rows go out, and cold rows come back.

A retrieve is ``prepare_retrieve`` (pins what it found), ``judge_presence``, copies and reads without the lock,
``end_retrieve`` (unpins); the first and the last go through a long prompt in parts. Each cold chunk of it is a read:
``prepare_read`` says what the file has to fill, ``commit_read`` makes that part of the chunk, ``abort_read`` gives the
memory back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec, Presence
from lmcache_hs_backend.format.header import Description, FileLayout
from lmcache_hs_backend.tiers.state import making_room
from lmcache_hs_backend.tiers.state.calls import ActiveCall
from lmcache_hs_backend.tiers.state.entries import CONFIRMED, ChunkEntry, Slot
from lmcache_hs_backend.tiers.state.tier_state import TierState

_NOTHING_COLD: dict[int, tuple[int, ...]] = {}


class PromptWalk(ActiveCall):
    """A call of retrieve, and what its walk over the prompt has found: ``entries``, pinned, from the first chunk on."""

    cold = _NOTHING_COLD  # by position: the layers that must be read
    specs: Sequence[LayerSpec] = ()  # of the first chunk
    miss: str | None = None  # why the next chunk does not count, one of metrics.MISSES; None at the prompt's end


def prepare_retrieve(
    state: TierState,
    walk: PromptWalk,
    refs: Sequence[ChunkRef],
    layer_idxs: Sequence[int],
    *,
    native: bool,
    readable: bool,
) -> None:
    """Go on with a walk: pin the next chunks, ``refs``, as far as they have every layer in one shape.

    ``native``: in one dtype, too. ``readable``: whether the disk answers.
    """
    walked = len(walk.entries)
    walk.miss = _look_up(state, refs, layer_idxs, native, readable, walk)
    state.pin(walk.entries[walked:] if walked else walk.entries)


def _look_up(
    state: TierState,
    refs: Sequence[ChunkRef],
    layer_idxs: Sequence[int],
    native: bool,
    readable: bool,
    walk: PromptWalk,
) -> str | None:
    """Add to the walk what may be served. Returns why the chunk after it may not."""
    found, entries = walk.entries, state.entries
    for ref in refs:
        entry = entries.get(ref.name)
        if entry is None or not entry.prefix:
            return "absent"
        if entry.prefix != ref.prefix or entry.num_tokens != ref.end - ref.start:
            return "collision"
        specs = []
        cold: tuple[int, ...] = ()
        for layer_idx in layer_idxs:
            slot = entry.hot.get(layer_idx)
            spec = slot.spec if slot is not None else entry.spec(layer_idx)
            if spec is None:
                return "layer"
            if slot is None:
                if not readable:
                    return "offline"
                cold += (layer_idx,)
            specs.append(spec)
        if not found:
            walk.specs = specs
        elif specs != walk.specs and (native or [s.hidden_dim for s in specs] != [s.hidden_dim for s in walk.specs]):
            return "shape"
        if cold:
            walk.cold = walk.cold or {}
            walk.cold[len(found)] = cold
        found.append(entry)
    return None


def nothing_to_judge(walk: PromptWalk, answers: Sequence[Presence]) -> bool:
    """Whether all of the walk's chunks may be served and ``judge_presence`` would change nothing.

    Needs no lock: a chunk that is confirmed stays so for as long as it is pinned.
    """
    entries = walk.entries
    if answers.count(Presence.PRESENT) != len(entries):
        return False
    return not [entry for entry in entries if entry.kv is not CONFIRMED or entry.unacknowledged]


def judge_presence(
    state: TierState,
    refs: Sequence[ChunkRef],
    walk: PromptWalk,
    answers: Sequence[Presence],
    asked_ns: int,
    now_ns: int,
    *,
    writable: bool,
) -> tuple[int, str | None]:
    """How many of the walk's chunks may be served, as to their KV, and why the next one may not.

    The first ``PRESENT`` ones are confirmed; those whose KV is gone leave both tiers.
    """
    entries, miss = walk.entries, walk.miss
    present = Presence.PRESENT
    known = next((number for number, answer in enumerate(answers) if answer is not present), len(entries))
    for position, entry in enumerate(entries[:known]):
        if entry.kv is not CONFIRMED or entry.unacknowledged:
            state.confirm(entry, refs[position].kv_key, now_ns)
            entry.unacknowledged = frozenset()
    for position in range(known, len(entries)):
        entry, answer = entries[position], answers[position]
        gone = state.kv_answered(entry, answer, asked_ns, writable=writable)
        if position == known:
            miss = "kv_gone" if gone else "kv_absent" if answer is Presence.GONE else "kv_unknown"
    return known, miss


def end_retrieve(state: TierState, entries: Sequence[ChunkEntry], *, served: bool) -> None:
    """Unpin chunks of a walk; those that were served become the youngest, the first one youngest of all."""
    state.unpin(entries)
    if served:
        state.orders.touch(entries)


def end_part(state: TierState, call: ActiveCall, count: int, *, served: bool) -> None:
    """``end_retrieve`` for the last ``count`` chunks that the call still has pinned."""
    entries = call.entries
    end_retrieve(state, entries if count == len(entries) else entries[-count:], served=served)
    del entries[-count:]  # not before: should this be cut short, all of them count as pinned


@dataclass(slots=True)
class ReadPlan:
    """What a read has to do. ``miss``: why it is in vain."""

    layout: FileLayout | None = None  # of the file, if it has to be read
    specs: Sequence[LayerSpec] = ()
    slots: dict[int, Slot] = field(default_factory=dict)  # the reader's until commit or abort; empty: not promoted
    miss: str | None = None


def prepare_read(
    state: TierState, entry: ChunkEntry, layer_idxs: Sequence[int], reserved: dict[int, Slot], *, promote: bool
) -> ReadPlan:
    """What of a pinned chunk has to be read, and slots for it, if there are any and ``promote``.

    ``reserved``: slots that the caller already has for it; they are the plan's, or free, from now on.
    """
    # A read before this one may have brought some of the layers already.
    wanted = [layer_idx for layer_idx in layer_idxs if layer_idx not in entry.hot]
    specs = entry.specs(wanted)
    if wanted and entry.dropped:
        miss: str | None = "absent"  # the file of that name may be another chunk's by now
    else:
        # It was lost after the walk, and perhaps written again with fewer layers.
        miss = "bad_file" if len(specs) < len(wanted) else None
    slots = reserved
    if miss is not None or specs != [slot.spec for slot in slots.values()]:
        state.return_slots(slots.values())
        slots = {}
        if miss is None and promote and specs:
            # Slots for all the layers, or none: then nothing is promoted.
            slots = next(iter(making_room.allocate(state, [(entry.num_tokens, specs)])), {})
    if miss is not None or not specs:
        return ReadPlan(miss=miss)
    return ReadPlan(entry.layout, specs, slots)


def commit_read(
    state: TierState, entry: ChunkEntry, slots: Mapping[int, Slot], digests: bytes, metadata: Description
) -> None:
    """What was read is good: the slots, if there are any, are the chunk's. The caller unpins it."""
    if entry.layout is not None:
        entry.digests = digests
    if slots:
        entry.metadata = metadata
        state.add_slots(entry, slots)
        state.tally.add("promoted")


def abort_read(state: TierState, slots: Mapping[int, Slot]) -> None:
    """Nothing good was read: the slots are free again. The caller unpins the chunk."""
    state.return_slots(slots.values())


def plan_prefetch(
    state: TierState, refs: Sequence[ChunkRef], layer_idxs: Sequence[int] | None
) -> list[tuple[ChunkEntry, list[int]]]:
    """The cold chunks of a prompt's prefix, and their layers, as far as there is room to promote them."""
    reads: list[tuple[ChunkEntry, list[int]]] = []
    room = state.ready_bytes
    for ref in refs:
        entry = state.entries.get(ref.name)
        if entry is None or entry.prefix != ref.prefix:
            break
        if state.jobs.is_busy(entry.name):
            continue  # it is being read or written already
        wanted = entry.layer_idxs() if layer_idxs is None else set(layer_idxs)
        if not all(entry.has(layer_idx) for layer_idx in wanted):
            break
        cold = [layer_idx for layer_idx in sorted(wanted) if layer_idx not in entry.hot]
        room -= sum(spec.nbytes(entry.num_tokens) for spec in entry.specs(cold))
        if room < 0:
            break
        if cold:
            reads.append((entry, cold))
    return reads


# -- questions -------------------------------------------------------------------------------------------------


def covered(state: TierState, names: Iterable[bytes], layer_idxs: Sequence[int], *, readable: bool) -> int:
    """How many chunks, from the first on, have every layer where it can be read."""
    count = 0
    for name in names:
        entry = state.entries.get(name)
        if entry is None or not entry.prefix:
            break
        if not all(idx in entry.hot or (readable and entry.on_file(idx)) for idx in layer_idxs):
            break
        count += 1
    return count


def held(state: TierState, refs: Iterable[ChunkRef], layer_idxs: Collection[int]) -> int:
    """How many chunks, anywhere among ``refs``, have every layer for just these tokens, in either tier."""
    count = 0
    for ref in refs:
        entry = state.entries.get(ref.name)
        if entry is not None and entry.prefix == ref.prefix and entry.num_tokens == ref.num_tokens:
            count += all(map(entry.has, layer_idxs))
    return count
