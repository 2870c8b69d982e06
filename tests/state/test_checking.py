"""Each invariant of the tiers, broken on purpose and named; and that a store in strict mode says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_hs_backend.chunk import ChunkMeta, ChunkRef, LayerSpec, Presence, chunk_name
from lmcache_hs_backend.format.header import Description, FileLayout
from lmcache_hs_backend.format.layout import FoundFile
from lmcache_hs_backend.tiers.flows import strict
from lmcache_hs_backend.tiers.state import making_room, recovering, sharing, storing, writing
from lmcache_hs_backend.tiers.state.checking import check
from lmcache_hs_backend.tiers.state.entries import CONFIRMED, LEAVING, UNREAD, ChunkEntry, Generation, Slot
from lmcache_hs_backend.tiers.state.jobs import DeleteJob, WriteJob
from lmcache_hs_backend.tiers.state.tier_state import TierState
from tests.support.prompts import prompt, rows, settings

SPEC = LayerSpec(0, "BF16", 128)
SLOT = 4096


def ref(key: str) -> ChunkRef:
    return ChunkRef(chunk_name(key), 0, 16, key.encode().ljust(16), key, key, "", key)


def describe(one: ChunkRef) -> Description:
    return Description(ChunkMeta(one.key, one.key, "", one.prefix, 0, 16, "m", "", "{}"), b"")


DIRTY, CLEAN, FOUND = ref("dirty"), ref("clean"), ref("found")


@pytest.fixture
def state() -> TierState:
    """One dirty chunk, one that is clean and on disk, and one found at start whose header is not read yet."""
    state = TierState(8 * SLOT, archive_gone=False, max_cold_bytes=1 << 20)
    state.accounts.sized = True
    for one in (CLEAN, DIRTY):
        plan = storing.plan_store(state, [one], [SPEC], [Presence.PRESENT], 1)
        placed = making_room.allocate(state, [(16, [SPEC])])
        storing.commit_store(state, plan, plan.missing, placed, describe, 1.0, streaming=False, more=False)
        if one is CLEAN:
            job = writing.next_write(state, writing.WritePolicy(8 * SLOT, 0.0), 10.0)
            assert isinstance(job, WriteJob)
            layout = FileLayout(16, 4096, (SPEC,))
            writing.commit_write(state, job, layout, b"digests", 1, 0, 11.0)
    recovering.found(state, [FOUND.name])
    recovering.sized(state, [FoundFile("", 5000, 1, FOUND.name)])
    assert check(state) == []
    return state


def dirty(state: TierState) -> ChunkEntry:
    return state.entries[DIRTY.name]


def clean(state: TierState) -> ChunkEntry:
    return state.entries[CLEAN.name]


def found(state: TierState) -> ChunkEntry:
    return state.entries[FOUND.name]


def set_field(get: Callable[[TierState], object], field: str, value: object) -> Callable[[TierState], None]:
    return lambda state: setattr(get(state), field, value)


def two_owners(state: TierState) -> None:
    dirty(state).hot = {0: Slot(clean(state).hot[0].offset, SLOT, SPEC)}


def foreign_entry(state: TierState) -> None:
    state.orders.cold.remove(clean(state))
    state.orders.cold.add(ChunkEntry(CLEAN.name))


def write_without_pin(state: TierState) -> None:
    job = writing.next_write(state, writing.WritePolicy(8 * SLOT, 0.0), 20.0)
    assert isinstance(job, WriteJob)
    job.entry.pins = 0


def wrong_name(state: TierState) -> None:
    state.entries[b"x" * 16] = state.entries.pop(FOUND.name)


BREAKS: list[tuple[Callable[[TierState], object], str]] = [
    (wrong_name, "is in the index under the name"),
    (set_field(found, "generation", Generation(cleared=True)), "it was dropped and is in the index"),
    (set_field(dirty, "pins", -1), "it has -1 pins"),
    (set_field(clean, "layout", None), "its file is known, and its layout is not set"),
    (set_field(found, "layout", FileLayout(16, 4096, (SPEC,))), "its file is unread, and its layout is set"),
    (set_field(found, "digests", b"x"), "its file is unread and has digests"),
    (set_field(dirty, "size", 100), "its file is absent and has 100 bytes"),
    (set_field(clean, "size", 100), "its file has 100 bytes, its layout"),
    (set_field(found, "file", LEAVING), "its file is being deleted, and its name is not busy"),
    (set_field(dirty, "hot", {}), "it is in neither tier"),
    (set_field(found, "kv", CONFIRMED), "it is not identified, and has rows, a known file or confirmed KV"),
    (set_field(dirty, "metadata", None), "without the metadata that a file needs"),
    (set_field(dirty, "hot", {3: Slot(SLOT, SLOT, SPEC)}), "the slot of layer 3 does not fit its rows"),
    (lambda state: state.orders.clean.pop(CLEAN.name), "is missing in the order 'clean'"),
    (lambda state: state.orders.dirty.pop(DIRTY.name), "is missing in the order 'dirty'"),
    (lambda state: state.orders.aging.pop(DIRTY.name), "is missing in the order 'aging'"),
    (lambda state: state.orders.cold.remove(found(state)), "is missing in the order 'cold'"),
    (lambda state: state.orders.clean.update({DIRTY.name: dirty(state)}), "in the order 'clean' and does not belong"),
    (foreign_entry, "of the order 'cold' is not the one in the index"),
    (set_field(lambda state: state.orders, "clean_bytes", 1), "bytes of clean chunks: counted 1, there are 4096"),
    (set_field(lambda state: state.orders, "hot_chunks", 9), "chunks with rows in RAM: counted 9, there are 2"),
    (set_field(lambda state: state.orders, "dirty_chunks", 9), "dirty chunks: counted 9, there are 1"),
    (set_field(lambda state: state.orders, "unread_files", 9), "files with an unread header: counted 9, there are 1"),
    (set_field(lambda state: state, "confirmed_chunks", 9), "confirmed chunks: counted 9, there are 2"),
    (two_owners, "belong to two owners"),
    (lambda state: state.free_list.allocate(SLOT), "used bytes of the hot tier: 12288, but chunks hold 8192"),
    (set_field(lambda state: state.free_list, "free_bytes", 0), "free bytes of the hot tier: counted 0"),
    (set_field(lambda state: state, "loaned_bytes", -1), "loaned bytes: -1"),
    (set_field(lambda state: state, "detached_bytes", -1), "detached bytes: -1"),
    (lambda state: state.free_list._insert(6 * SLOT, SLOT), "overlaps the one before, or touches it"),
    (lambda state: state.free_list._insert(9 * SLOT, SLOT), "beyond the hot tier's 32768 bytes"),
    (set_field(lambda state: state.accounts, "own", 1), "bytes on disk of kind 'own': counted 1, there are"),
    (set_field(lambda state: state.accounts, "archive", 1), "bytes on disk of kind 'archive': counted 1"),
    (set_field(lambda state: state.accounts, "quarantine", 1), "bytes on disk of kind 'quarantine': counted 1"),
    (set_field(lambda state: state.accounts, "dead", 1), "bytes on disk of kind 'dead': counted 1"),
    (set_field(lambda state: state.accounts, "reserved", -1), "-1 bytes on disk are reserved"),
    (set_field(lambda state: state.accounts, "trash", -1), "-1 bytes on disk are trash"),
    (lambda state: state.accounts.set_leftover(CLEAN.name, 1), "is counted as its own and as a leftover"),
    (lambda state: state.accounts.set_leftover(b"x" * 16, 1), "will never be deleted"),
    (lambda state: state.jobs._running.update({b"x" * 16: 0.0}), "is running, and the name is not busy"),
    (set_field(lambda state: state, "writing_bytes", 1), "bytes being written: counted 1, there are 0"),
    (lambda state: state.rate.start(0.0), "writes under way: counted 1, there are 0"),
    (write_without_pin, "is being written, and is not pinned and busy"),
    (set_field(lambda state: state, "flushing", -1), "flushing is -1"),
    (set_field(lambda state: state, "wanted_bytes", -1), "wanted_bytes is -1"),
]


@pytest.mark.parametrize(("break_it", "words"), BREAKS, ids=[words for _, words in BREAKS])
def test_a_broken_invariant_is_named(state: TierState, break_it: Callable[[TierState], object], words: str) -> None:
    break_it(state)
    assert any(words in problem for problem in check(state)), check(state)


def test_every_sentence_of_check_has_a_test() -> None:
    source = Path(strict.__file__).parents[1].joinpath("state", "checking.py").read_text()
    assert source.count("yield ") - source.count('yield f"chunk {name.hex()}: {problem}"') <= len(BREAKS)


def test_what_is_in_flight_breaks_nothing(state: TierState) -> None:
    state.pin([clean(state)])
    assert check(state) == []
    state.drop(clean(state))
    assert check(state) == []
    assert isinstance(state.jobs.start(1.0), DeleteJob)
    victim = making_room.prepare_eviction(state, 1.0)
    assert victim is not None
    assert check(state) == []
    making_room.abort_eviction(state, victim)
    assert found(state).file is UNREAD
    assert check(state) == []


@pytest.mark.parametrize("uploaded", [True, False])
def test_an_upload_that_ends_after_a_clear_changes_no_order(uploaded: bool) -> None:
    state = TierState(8 * SLOT, archive_gone=False, max_cold_bytes=1 << 20, share="all")
    plan = storing.plan_store(state, [CLEAN], [SPEC], [Presence.PRESENT], 1)
    placed = making_room.allocate(state, [(16, [SPEC])])
    storing.commit_store(state, plan, plan.missing, placed, describe, 1.0, streaming=False, more=False)
    job = writing.next_write(state, writing.WritePolicy(8 * SLOT, 0.0), 10.0)
    assert isinstance(job, WriteJob)
    writing.commit_write(state, job, FileLayout(16, 4096, (SPEC,)), b"digests", 1, 0, 11.0)
    upload = sharing.prepare_upload(state, 20.0)
    assert isinstance(upload, sharing.Upload)
    state.clear()
    (sharing.commit_upload if uploaded else sharing.abort_upload)(state, upload)
    assert check(state) == []
    assert len(state.orders.cold) == 0


def test_in_strict_mode_every_transition_is_checked_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lmcache_hs_backend.tiered import TieredStore
    from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES

    store = TieredStore(settings(tmp_path), 8 * LAYER_BYTES, IDENT)
    try:
        p = prompt(2)
        assert store.store(p.refs, p.bytes, {0: rows(2 * CHUNK)}) == 2
        assert store.check() == []
        assert not strict.violations
        with store._core.lock, store._core.step:
            store._core.state.wanted_bytes -= 1
        assert store.check() == ["wanted_bytes is -1"]
        assert strict.violations
        assert "wanted_bytes is -1" in caplog.text
        with store._core.lock, store._core.step:
            store._core.state.wanted_bytes += 1
        assert store.check() == []
    finally:
        store.close()
        strict.violations.clear()


@pytest.mark.timing
def test_without_strict_mode_nothing_is_checked(tmp_path: Path) -> None:
    state = TierState(SLOT, archive_gone=False, max_cold_bytes=0)
    assert type(strict.transition(state, lambda: None)) is not strict.StrictTransition
