"""Rows come in: which chunks of a call need what, and how copied rows become part of their chunks.

``plan_store`` says what is new; ``making_room.allocate`` gives slots; the caller copies without the lock; then
``commit_store`` publishes, or ``abort_store`` gives the slots back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec, Presence
from lmcache_hs_backend.format.header import MAX_LAYERS, Description
from lmcache_hs_backend.tiers.state.entries import CONFIRMED, UNCONFIRMED, ChunkEntry, Slot, slot_bytes
from lmcache_hs_backend.tiers.state.tier_state import TierState


class MissingLayers(NamedTuple):
    """Layers of one chunk that neither tier holds yet."""

    ref: ChunkRef
    specs: Sequence[LayerSpec]
    present: bool  # its KV was seen
    counted: bool  # the call's result counts this chunk already

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that they need."""
        return sum([slot_bytes(spec, self.ref.num_tokens) for spec in self.specs])


def needs(missing: Sequence[MissingLayers]) -> list[tuple[int, Sequence[LayerSpec]]]:
    """What they need, as ``making_room.allocate`` takes it."""
    return [(one.ref.end - one.ref.start, one.specs) for one in missing]


@dataclass(slots=True)
class StorePlan:
    """What a call of store has to do."""

    refs: Sequence[ChunkRef]  # up to the first chunk that cannot be stored
    specs: Sequence[LayerSpec]
    answers: Sequence[Presence]  # of LMCache, one for each chunk
    seen_ns: int  # when the KV of chunks that are present was seen (monotonic)
    epoch: int  # rows of a call that began before a clear are not kept
    missing: list[MissingLayers] = field(default_factory=list)
    stored: int = 0  # chunks that count as stored already
    planned: int = 0  # of so many of ``refs``, from the first on, it is known what is new


def plan_store(
    state: TierState,
    refs: Sequence[ChunkRef],
    specs: Sequence[LayerSpec],
    answers: Sequence[Presence],
    now_ns: int,
    most: int | None = None,
) -> StorePlan:
    """What of these chunks is new. ``answers``: of LMCache, one for each; ``now_ns``: monotonic.

    ``most``: begin with so many of them, and go on with ``plan_more``. None: all of them.
    """
    plan = StorePlan(refs, specs, answers, now_ns, state.epoch)
    plan_more(state, plan, len(refs) if most is None else most)
    return plan


def plan_more(state: TierState, plan: StorePlan, most: int) -> None:
    """Go on with a plan, by ``most`` chunks at most.

    Chunks whose KV is present are confirmed. Chunks that are here already become the youngest.
    """
    entries, missing, specs, now_ns = state.entries, plan.missing, plan.specs, plan.seen_ns
    layer_idxs: frozenset[int] | None = None
    seen = Presence.PRESENT
    known = []
    begin = plan.planned
    plan.planned = end = min(begin + most, len(plan.refs))
    for number in range(begin, end):
        ref, present = plan.refs[number], plan.answers[number] is seen
        entry = entries.get(ref.name)
        if entry is None or not entry.prefix:
            missing.append(MissingLayers(ref, specs, present, counted=False))
            continue
        if entry.prefix != ref.prefix or entry.num_tokens != ref.end - ref.start:
            state.tally.loss("collision", len(plan.refs) - number)
            plan.refs = plan.refs[:number]
            plan.planned = number
            break
        new, reshaped = [], False
        for spec in specs:
            old = entry.spec(spec.layer_idx)
            if old is None:
                new.append(spec)
            elif old.hidden_dim != spec.hidden_dim:
                reshaped = True
        if reshaped:
            # The same tokens with rows of another width: of another model, under a name that has not changed.
            state.tally.loss("reshaped")
            state.drop(entry)
            missing.append(MissingLayers(ref, specs, present, counted=False))
            continue
        if present:
            state.confirm(entry, ref.kv_key, now_ns)
        known.append(entry)
        counted = False
        if entry.unacknowledged:
            layer_idxs = layer_idxs or frozenset([spec.layer_idx for spec in specs])
            counted = bool(entry.unacknowledged & layer_idxs)
            entry.unacknowledged -= layer_idxs
            plan.stored += counted
        if new and len(new) + len(entry.layer_idxs()) <= MAX_LAYERS:
            missing.append(MissingLayers(ref, new, present, counted))
    if known:
        state.orders.touch(known)  # what this prompt already has shall not leave to make room for its rest


def commit_store(
    state: TierState,
    plan: StorePlan,
    batch: Sequence[MissingLayers],
    placed: Sequence[dict[int, Slot]],
    describe: Callable[[ChunkRef], Description],
    now: float,
    *,
    streaming: bool,
    more: bool,
) -> int:
    """The copied rows of ``batch`` become part of their chunks. Returns how many chunks are newly counted.

    Args:
        state: The tiers' state.
        plan: What ``plan_store`` has returned for the call.
        batch: The chunks of the plan whose rows were copied.
        placed: The slots of each chunk of the batch.
        describe: What a file of the chunk will say of it, kept for as long as it has rows in RAM.
        now: Monotonic time in seconds.
        streaming: There was no room for this batch when the call began. What does not fit beside the prefix passes
            through the last slots: written first, evicted first.
        more: More batches follow, or other parts of this one.
    """
    if state.epoch != plan.epoch:
        abort_store(state, placed)
        return 0
    stored = 0
    kept: list[ChunkEntry] = []
    for missing, slots in zip(batch, placed, strict=True):
        ref = missing.ref
        entry = state.entries.get(ref.name)
        if entry is None:
            kv = CONFIRMED if missing.present else UNCONFIRMED
            key = state.keep_key(ref.kv_key)
            entry = ChunkEntry(ref.name, ref.prefix, ref.end - ref.start, key, kv, generation=state.generation)
            entry.metadata, entry.stored_at = describe(ref), now
            entry.kv_seen_ns = plan.seen_ns if missing.present else 0
            entry.hot = dict(slots)  # the call's record of what it holds is its own
            state.loaned_bytes -= missing.nbytes
            state.add(entry)
        else:
            if not entry.prefix:  # a file found at start: whose it is, the store knows before its header is read
                entry.prefix, entry.num_tokens = ref.prefix, ref.num_tokens
                entry.kv_key = state.keep_key(ref.kv_key)
                if missing.present:
                    state.confirm(entry, ref.kv_key, plan.seen_ns)
            # In the meantime another call may have stored the chunk, or a colliding one, or recovery have found it.
            if entry.prefix != ref.prefix or entry.num_tokens != ref.end - ref.start:
                state.return_slots(slots.values())
                state.tally.loss("collision")
                continue
            fresh = {idx: slot for idx, slot in slots.items() if not entry.has(idx)}
            state.return_slots([slot for idx, slot in slots.items() if idx not in fresh])
            if not fresh and not entry.unacknowledged & slots.keys():
                continue
            entry.unacknowledged -= slots.keys()
            if fresh:
                entry.drop_reason = ""
                if entry.metadata is None:
                    entry.metadata = describe(ref)
                entry.stored_at = now
                state.add_slots(entry, fresh)
        kept.append(entry)
        stored += not missing.counted
    if streaming:
        for entry in kept:
            state.orders.age(entry)
    elif more:
        state.orders.touch(kept)
    return stored


def abort_store(state: TierState, placed: Sequence[Mapping[int, Slot]]) -> None:
    """The rows were not copied: their slots are free again."""
    for slots in placed:
        state.return_slots(slots.values())


def end_store(state: TierState, refs: Sequence[ChunkRef]) -> None:
    """A prompt was stored: its chunks become the youngest, the first one youngest of all."""
    entries = state.entries
    state.orders.touch([entry for ref in refs if (entry := entries.get(ref.name)) is not None])
