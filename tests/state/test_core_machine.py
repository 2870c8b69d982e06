"""The functional core on its own: any order of transitions, without threads or a disk, thousands of steps a second.

Memory and disk are dictionaries that remember whose rows are where. So a slot that is handed out twice, a file that
outlives its chunk or a layer that is said to be clean and is not shows at once, and every invariant is checked after
every step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_hs_backend.chunk import ChunkMeta, ChunkRef, LayerSpec, Presence, chunk_name
from lmcache_hs_backend.format.header import Description, FileLayout, Header
from lmcache_hs_backend.format.layout import FoundFile
from lmcache_hs_backend.tiers.state import leaving, making_room, reading, recovering, storing, writing
from lmcache_hs_backend.tiers.state.checking import check
from lmcache_hs_backend.tiers.state.entries import KNOWN, UNREAD, ChunkEntry, Slot
from lmcache_hs_backend.tiers.state.jobs import ArchiveJob, DeleteJob, SaveUseJob, WriteJob
from lmcache_hs_backend.tiers.state.tier_state import TierState, Victim, VictimKind

TOKENS, HIDDEN = 16, 128
LAYERS = (-1, 0, 7)
SLOT = 4096
PREAMBLE = 4096
CAPACITY = 6 * SLOT
COLD_LIMIT = 6 * (PREAMBLE + 2 * SLOT)

#: Prompts of one to four chunks that share prefixes; the last number tells two prompts with colliding hashes apart.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
LAYER_SETS = st.lists(st.sampled_from(LAYERS), min_size=1, max_size=2, unique=True)

#: Whose rows: the prefix digest, and the layer.
Tag = tuple[bytes, int]


def prompt(path: list[int], collision: bool = False) -> list[ChunkRef]:
    refs, parent = [], ""
    for number in range(len(path)):
        key = "".join(map(str, path[: number + 1]))
        prefix = f"{'x' if collision else 'p'}{key}".encode().ljust(16, b".")
        refs.append(ChunkRef(chunk_name(key), number * TOKENS, (number + 1) * TOKENS, prefix, key, key, parent, key))
        parent = key
    return refs


def spec_of(layer_idx: int) -> LayerSpec:
    return LayerSpec(layer_idx, "BF16", HIDDEN)


def describe(ref: ChunkRef) -> Description:
    meta = ChunkMeta(ref.key, ref.chunk_hash, ref.parent, ref.prefix, ref.start, ref.num_tokens, "m", "", "{}")
    return Description(meta, b"")


@dataclass
class DiskFile:
    """A file as it would be on disk: whose rows it has, and what its header says."""

    tags: dict[int, Tag]
    prefix: bytes
    key: str

    @property
    def layout(self) -> FileLayout:
        return FileLayout(TOKENS, PREAMBLE, tuple(spec_of(idx) for idx in sorted(self.tags)))

    def header(self) -> Header:
        meta = ChunkMeta(self.key, self.key, "", self.prefix, 0, TOKENS, "m", "", "{}")
        return Header(meta, self.layout, {}, b"", b"digests")


@dataclass
class PendingStore:
    """A store between ``allocate`` and ``commit``."""

    plan: storing.StorePlan
    batch: list[storing.MissingLayers]
    placed: list[dict[int, Slot]]
    refs: list[ChunkRef]


@dataclass
class PendingWrite:
    job: WriteJob
    file: DiskFile
    used_ns: int
    reserved: int = field(default=0)


@dataclass
class PendingRead:
    entry: ChunkEntry
    plan: reading.ReadPlan
    tags: dict[int, Tag]


class Core(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = TierState(CAPACITY, archive_gone=False, max_cold_bytes=COLD_LIMIT)
        self.state.accounts.sized = True
        self.policy = writing.WritePolicy(CAPACITY / 4, 0.0)
        self.memory: dict[int, Tag] = {}
        self.files: dict[bytes, DiskFile] = {}
        self.archive: dict[bytes, DiskFile] = {}
        self.clock = itertools.count(1000)
        self.stores: list[PendingStore] = []
        self.writes: list[PendingWrite] = []
        self.reads: list[PendingRead] = []
        self.victims: list[Victim] = []

    def now(self) -> float:
        return float(next(self.clock))

    # -- rows come in -------------------------------------------------------------------------------------

    @rule(path=PATHS, layers=LAYER_SETS, present=st.booleans(), collision=st.booleans())
    def begin_store(self, path: list[int], layers: list[int], present: bool, collision: bool) -> None:
        refs = prompt(path, collision)
        answers = [Presence.PRESENT if present else Presence.UNKNOWN] * len(refs)
        plan = storing.plan_store(self.state, refs, [spec_of(idx) for idx in layers], answers, next(self.clock))
        if not plan.missing:
            return
        chunks = [(one.ref.num_tokens, one.specs) for one in plan.missing]
        placed = making_room.allocate(self.state, chunks)
        if not placed:
            spare = frozenset(ref.name for ref in refs)
            if making_room.discard_dirty(self.state, spare):
                placed = making_room.allocate(self.state, chunks)
        if placed:
            batch = plan.missing[: len(placed)]
            for one, slots in zip(batch, placed, strict=True):
                for idx, slot in slots.items():
                    self.memory[slot.offset] = one.ref.prefix, idx
            self.stores.append(PendingStore(plan, batch, placed, refs))

    @precondition(lambda self: self.stores)
    @rule(pick=st.integers(0, 99), good=st.booleans(), streaming=st.booleans())
    def end_store(self, pick: int, good: bool, streaming: bool) -> None:
        pending = self.stores.pop(pick % len(self.stores))
        if good:
            storing.commit_store(
                self.state, pending.plan, pending.batch, pending.placed, describe, self.now(),
                streaming=streaming, more=False,
            )  # fmt: skip
            storing.end_store(self.state, pending.refs)
        else:
            storing.abort_store(self.state, pending.placed)

    # -- rows go out --------------------------------------------------------------------------------------

    @rule(path=PATHS, layers=LAYER_SETS, answers=st.lists(st.sampled_from(Presence), min_size=4, max_size=4))
    def retrieve(self, path: list[int], layers: list[int], answers: list[Presence]) -> None:
        refs = prompt(path)
        walk = reading.PromptWalk()
        for part in (refs[:2], refs[2:]):  # as a long prompt is walked
            if walk.miss is None:
                reading.prepare_retrieve(self.state, walk, part, layers, native=True, readable=True)
        asked = next(self.clock)
        known, _ = reading.judge_presence(
            self.state, refs, walk, answers[: len(walk.entries)], asked, next(self.clock), writable=True
        )
        for position, entry in enumerate(walk.entries[:known]):
            for idx in layers:
                if idx in walk.cold.get(position, ()):
                    continue
                assert self.memory[entry.hot[idx].offset] == (refs[position].prefix, idx), "a wrong row would be served"
        cold = [position for position in walk.cold if position < known]
        for position in cold:
            entry = walk.entries[position]
            if not self.state.jobs.is_busy(entry.name):
                self.begin_read(entry, walk.cold[position])
        reading.end_retrieve(self.state, walk.entries[known:], served=False)
        reading.end_retrieve(self.state, walk.entries[:known], served=True)

    def begin_read(self, entry: ChunkEntry, layer_idxs: tuple[int, ...]) -> None:
        self.state.jobs.claim(entry.name, self.now())
        self.state.pin([entry])
        plan = reading.prepare_read(self.state, entry, layer_idxs, {}, promote=True)
        tags = {}
        if plan.miss is None and plan.layout is not None:
            file = self.files[entry.name]
            assert plan.layout == file.layout, "the index knows the file as it is"
            tags = {spec.layer_idx: file.tags[spec.layer_idx] for spec in plan.specs}
        self.reads.append(PendingRead(entry, plan, tags))

    @precondition(lambda self: self.reads)
    @rule(pick=st.integers(0, 99), outcome=st.sampled_from(["good", "bad", "lost", "stuck"]))
    def end_read(self, pick: int, outcome: str) -> None:
        read = self.reads.pop(pick % len(self.reads))
        entry, plan = read.entry, read.plan
        if outcome == "good" and plan.layout is not None:
            for idx, slot in plan.slots.items():
                self.memory[slot.offset] = read.tags[idx]
                assert read.tags[idx] == (entry.prefix, idx), "the file has this chunk's rows"
            ref = ChunkRef(entry.name, 0, TOKENS, entry.prefix, "", "", "", None)
            reading.commit_read(self.state, entry, plan.slots, b"digests", describe(ref))
        else:
            reading.abort_read(self.state, plan.slots)
            if outcome == "lost" and entry.name in self.files:
                del self.files[entry.name]
                recovering.file_lost(self.state, entry, FoundFile("quarantine/x", 10, 0, b""), still_there=False)
            elif outcome == "stuck" and entry.name in self.files:
                recovering.file_lost(self.state, entry, None, still_there=True)
        self.state.unpin([entry])
        self.state.jobs.finish(entry.name)

    # -- writing ------------------------------------------------------------------------------------------

    @rule()
    def begin_write(self) -> None:
        job = writing.next_write(self.state, self.policy, self.now())
        if not isinstance(job, WriteJob):
            return
        entry = job.entry
        if entry.file is UNREAD:
            recovering.header_read(self.state, entry, self.files[entry.name].header()) if self.fits(entry) else None
        if entry.file is UNREAD or entry.metadata is None:
            writing.abort_write(self.state, job, self.now())
            return
        tags = dict(self.files[entry.name].tags) if entry.file is KNOWN else {}
        for idx, slot in entry.hot.items():
            tags[idx] = self.memory[slot.offset]
            assert tags[idx] == (entry.prefix, idx), "only this chunk's rows go into its file"
        meta, _ = entry.metadata.parts()
        pending = PendingWrite(job, DiskFile(tags, entry.prefix, meta.key), entry.used_ns)
        size = pending.file.layout.size
        if making_room.reserve(self.state, size) == 0:
            pending.reserved = size
            self.writes.append(pending)
        else:
            writing.abort_write(self.state, job, self.now(), drop_reason="too_large" if size > COLD_LIMIT else "")

    def fits(self, entry: ChunkEntry) -> bool:
        file = self.files[entry.name]
        return not entry.identified or file.prefix == entry.prefix

    @precondition(lambda self: self.writes)
    @rule(pick=st.integers(0, 99), outcome=st.sampled_from(["written", "failed", "unwritable"]))
    def end_write(self, pick: int, outcome: str) -> None:
        pending = self.writes.pop(pick % len(self.writes))
        if outcome == "written" and not pending.job.entry.dropped:
            self.files[pending.job.name] = pending.file
            writing.commit_write(
                self.state, pending.job, pending.file.layout, b"digests", pending.used_ns, pending.reserved, self.now()
            )
        else:
            reason = "unwritable" if outcome == "unwritable" else ""
            writing.abort_write(self.state, pending.job, self.now(), reserved=pending.reserved, drop_reason=reason)

    @rule(pick=st.integers(0, 99))
    def a_write_comes_late(self, pick: int) -> None:
        """The chunk was dropped between the rename of its file and the commit."""
        late = [pending for pending in self.writes if pending.job.entry.dropped]
        if late:
            pending = late[pick % len(late)]
            self.writes.remove(pending)
            self.files[pending.job.name] = pending.file
            writing.commit_write(
                self.state, pending.job, pending.file.layout, b"", pending.used_ns, pending.reserved, self.now()
            )

    # -- leaving ------------------------------------------------------------------------------------------

    @rule(works=st.booleans())
    def run_a_job(self, works: bool) -> None:
        job = self.state.jobs.start(self.now())
        if isinstance(job, DeleteJob):
            if job.name in self.state.accounts.leftover and works:
                self.files.pop(job.name, None)
            leaving.end_delete(self.state, job, deleted=works)
        elif isinstance(job, ArchiveJob):
            file = self.files.get(job.name)
            if job.pinned:
                tags = dict(file.tags) if file is not None and job.entry.file is KNOWN else {}
                tags |= {idx: self.memory[slot.offset] for idx, slot in job.entry.hot.items()}
                file = DiskFile(tags, job.entry.prefix, "")
            if works and file is not None:
                self.archive[job.name] = file
            if works:
                self.files.pop(job.name, None)
            size = file.layout.size if works and file is not None else 0
            leaving.end_archive(self.state, job, size, 0, kept=works, deleted=works)
        elif isinstance(job, SaveUseJob):
            leaving.end_save_use(self.state, job, job.entry.used_ns if works else 0)
        else:
            assert job is None

    @rule()
    def delete_again(self) -> None:
        leaving.delete_again(self.state)

    @rule(count=st.integers(1, 3))
    def save_uses(self, count: int) -> None:
        leaving.submit_save_uses(self.state, self.state.next_batch(count), 1 << 62, 1e9)

    @rule(path=PATHS)
    def drop(self, path: list[int]) -> None:
        entry = self.state.entries.get(prompt(path)[-1].name)
        if entry is not None:
            self.state.drop(entry)

    @rule(path=PATHS, archive=st.booleans(), writable=st.booleans())
    def kv_gone(self, path: list[int], archive: bool, writable: bool) -> None:
        entry = self.state.entries.get(prompt(path)[-1].name)
        self.state.archive_gone = archive
        if entry is not None:
            self.state.kv_answered(entry, Presence.GONE, next(self.clock), writable=writable)
        self.state.archive_gone = False

    @rule()
    def clear(self) -> None:
        self.state.clear()
        assert not self.state.entries
        self.files.clear()  # they are in the trash
        self.state.purged()

    @rule(nbytes=st.integers(1, 3))
    def demote(self, nbytes: int) -> None:
        making_room.demote(self.state, list(self.state.orders.clean)[:nbytes])

    # -- room on disk -------------------------------------------------------------------------------------

    @rule()
    def begin_eviction(self) -> None:
        victim = making_room.prepare_eviction(self.state, self.now())
        if victim is not None:
            self.victims.append(victim)

    @precondition(lambda self: self.victims)
    @rule(pick=st.integers(0, 99), deleted=st.booleans())
    def end_eviction(self, pick: int, deleted: bool) -> None:
        victim = self.victims.pop(pick % len(self.victims))
        if deleted:
            if victim.kind is VictimKind.OWN:
                self.files.pop(victim.name, None)
            elif victim.kind is VictimKind.ARCHIVE:
                del self.archive[victim.name]
            making_room.commit_eviction(self.state, victim)
        else:
            making_room.abort_eviction(self.state, victim)

    # -- files found at start -----------------------------------------------------------------------------

    @rule(path=PATHS, layers=LAYER_SETS)
    def find_a_file(self, path: list[int], layers: list[int]) -> None:
        """A file of an earlier process, of a chunk that is not here."""
        ref = prompt(path)[-1]
        state = self.state
        if ref.name in self.files or state.jobs.is_busy(ref.name) or ref.name in state.accounts.leftover:
            return
        self.files[ref.name] = DiskFile({idx: (ref.prefix, idx) for idx in layers}, ref.prefix, ref.key)
        if state.epoch:
            state.epoch = 0  # a store that was opened again
        recovering.found(state, [ref.name])
        size = self.files[ref.name].layout.size
        recovering.sized(state, [FoundFile("", size, next(self.clock), ref.name)])
        recovering.all_sized(state)

    @rule(path=PATHS)
    def read_a_header(self, path: list[int]) -> None:
        entry = self.state.entries.get(prompt(path)[-1].name)
        if entry is not None and entry.file is UNREAD and not self.state.jobs.is_busy(entry.name):
            if self.fits(entry):
                recovering.header_read(self.state, entry, self.files[entry.name].header())
            else:
                del self.files[entry.name]
                recovering.file_lost(self.state, entry, None, still_there=False)

    # -- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def every_invariant_holds(self) -> None:
        assert check(self.state) == []

    @invariant()
    def hot_rows_are_their_chunks_own(self) -> None:
        for entry in self.state.entries.values():
            for idx, slot in entry.hot.items():
                assert self.memory[slot.offset] == (entry.prefix, idx)

    @invariant()
    def every_file_belongs_to_a_chunk_or_is_about_to_go(self) -> None:
        accounts = self.state.accounts
        written = {pending.job.name for pending in self.writes}
        for name, file in self.files.items():
            entry = self.state.entries.get(name)
            if entry is not None and entry.file is KNOWN:
                assert entry.layout == file.layout
                assert entry.prefix == file.prefix
            else:
                assert (entry is not None and entry.has_file) or name in accounts.leftover or name in written
        for name, entry in self.state.entries.items():
            if entry.file is KNOWN:
                assert name in self.files

    def teardown(self) -> None:
        """When everything in flight is over, nothing is pinned, busy, reserved or on loan."""
        while self.stores:
            self.end_store(0, True, False)
        while self.reads:
            self.end_read(0, "good")
        while self.writes:
            self.end_write(0, "failed")
        while self.victims:
            self.end_eviction(0, True)
        for _ in range(200):
            self.run_a_job(True)
            leaving.delete_again(self.state)
        state = self.state
        assert check(state) == []
        assert not state.jobs.busy_names
        assert not any(entry.pins for entry in state.entries.values())
        assert (state.accounts.reserved, state.loaned_bytes, state.detached_bytes, state.writing_bytes) == (0, 0, 0, 0)
        assert not state.accounts.leftover
        assert set(self.files) == {name for name, entry in state.entries.items() if entry.has_file}


Core.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCore = Core.TestCase
