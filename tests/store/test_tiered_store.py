"""What a store of two tiers does, as rules: rows in, rows out, who leaves RAM, what is on disk."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.format.chunk_file import FileLayer, read_header
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.flows import io_threads
from lmcache_hs_backend.tiers.memory import buffers
from lmcache_hs_backend.tiers.state import writing
from tests.support.prompts import (
    CHUNK,
    HIDDEN,
    IDENT,
    LAYER_BYTES,
    Prompt,
    check_balance,
    chunk_files,
    opened,
    prompt,
    rows,
    tokens,
)
from tests.support.waiting import wait_until

FOREVER = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    # A store that has to wait for the disk waits for as long as it takes: another process may keep the disk busy.
    with opened(tmp_path, write_back_sec=FOREVER, store_wait_ms=60_000) as store:
        yield store
        store.flush(10)
        wait_until(lambda: not store.debug.busy())
        check_balance(store)


def demote_all(store: TieredStore) -> None:
    """Everything on disk, nothing in RAM."""
    assert store.flush(10) == 0
    store.debug.evict_clean()
    assert store.stats()["hot_chunks"] == 0


@pytest.mark.parametrize("cold", [False, True], ids=["hot", "cold"])
@pytest.mark.parametrize("first", [True, False], ids=["first within inference mode", "first outside"])
def test_inference_mode_binds_neither_the_store_nor_its_results(tmp_path: Path, first: bool, cold: bool) -> None:
    # Engines run in it; a tensor that is made in it can be written in it alone, and I/O threads are outside.
    with opened(tmp_path, chunks=64) as store:
        for inside in (first, not first, first):
            p, x = prompt(20), rows(20 * CHUNK, seed=int(inside))
            with torch.inference_mode(inside):
                assert store.store(p.refs, p.bytes, {0: x}) == 20
            if cold:
                demote_all(store)
            for reading_inside in (inside, not inside):
                with torch.inference_mode(reading_inside):
                    out = store.retrieve(p.refs, [0])[0]
                    assert torch.equal(out, x.float())
                    assert torch.equal(store.retrieve(p.refs, [0], None)[0], x)
                if cold:
                    demote_all(store)
        assert store.stats()["errors_internal"] == 0


@pytest.mark.parametrize("chunks", [2, 20])
def test_rows_that_a_gradient_hangs_on_leave_none_in_the_store(tmp_path: Path, chunks: int) -> None:
    with opened(tmp_path, chunks=64) as store:
        p, x = prompt(chunks), rows(chunks * CHUNK).requires_grad_()
        assert store.store(p.refs, p.bytes, {0: x}) == chunks
        for _ in ("hot", "cold"):
            out = store.retrieve(p.refs, [0])[0]
            assert not out.requires_grad
            assert torch.equal(out, x.detach().float())
            demote_all(store)
        assert x.grad_fn is None


@pytest.mark.parametrize("clean", [True, False])
def test_what_is_on_disk_leaves_ram_when_it_is_told_to(tmp_path: Path, clean: bool) -> None:
    with opened(tmp_path, write_back_sec=FOREVER, clean_fraction=0) as store:
        p, x = prompt(4), rows(4 * CHUNK)
        store.store(p.refs, p.bytes, {0: x})
        if clean:
            store.flush(10)
        assert store.demote(p.names[:3]) == (3 if clean else 0)
        assert store.stats()["hot_chunks"] == (1 if clean else 4)
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


def test_the_suffix_of_a_prompt_leaves_ram_before_its_prefix(store: TieredStore) -> None:
    p, x = prompt(8), rows(8 * CHUNK)
    store.store(p.refs, p.bytes, {0: x})
    store.flush(10)
    other = prompt(3)
    store.store(other.refs, other.bytes, {0: rows(3 * CHUNK)})
    assert [store.has(name, 0)[0] for name in p.names] == [True] * 5 + [False] * 3
    assert store.stats()["demoted"] == 3


def test_a_clean_chunk_is_never_written_again(store: TieredStore) -> None:
    p, x = prompt(8), rows(8 * CHUNK)
    store.store(p.refs, p.bytes, {0: x})
    store.flush(10)
    assert store.stats()["written_chunks"] == 8
    for _ in range(3):
        q = prompt(8)
        store.store(q.refs, q.bytes, {0: x})
        store.retrieve(p.refs, [0])
    store.flush(10)
    assert store.stats()["written_chunks"] == 8 + 3 * 8


def test_a_cold_hit_is_served_in_the_call_and_hot_the_next_time(store: TieredStore) -> None:
    p, x = prompt(4), rows(4 * CHUNK)
    store.store(p.refs, p.bytes, {0: x})
    demote_all(store)
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
    assert store.stats()["hits_cold"] == 4
    assert store.stats()["promoted"] == 4
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
    assert store.stats()["hits_hot"] == 4
    assert len(load_file(store.debug.path(p.names[0]))) == 2, "the file stays"


def test_without_promotion_cold_chunks_stay_cold(tmp_path: Path) -> None:
    with opened(tmp_path, promote=False) as store:
        p, x = prompt(4), rows(4 * CHUNK)
        store.store(p.refs, p.bytes, {0: x})
        demote_all(store)
        for _ in range(2):
            assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["hot_chunks"] == 0
        assert store.stats()["hits_cold"] == 8


def test_prefetch_promotes_behind_and_returns_at_once(store: TieredStore) -> None:
    p, x = prompt(4), {0: rows(4 * CHUNK), 5: rows(4 * CHUNK, seed=5)}
    store.store(p.refs, p.bytes, x)
    demote_all(store)
    store.prefetch(p.refs, [5])
    wait_until(lambda: all(store.has(name, 5)[0] for name in p.names))
    assert not any(store.has(name, 0)[0] for name in p.names), "only the layers asked for are read"
    assert torch.equal(store.retrieve(p.refs, [5])[5], x[5].float())
    assert store.stats()["hits_hot"] == 4


def test_write_back_sec_leaves_nothing_dirty_even_when_it_is_used_all_the_time(tmp_path: Path) -> None:
    with opened(tmp_path, write_back_sec=0.3) as store:
        p, x = prompt(2), rows(2 * CHUNK)
        store.store(p.refs, p.bytes, {0: x})

        def clean() -> bool:
            assert store.retrieve(p.refs, [0])
            return store.stats()["dirty_chunks"] == 0

        wait_until(clean)
        assert len(chunk_files(tmp_path)) == 2


def test_the_cleaner_works_ahead_so_that_eviction_is_only_a_free(tmp_path: Path) -> None:
    with opened(tmp_path, chunks=8, clean_fraction=0.5, write_back_sec=FOREVER) as store:
        p = prompt(8)
        store.store(p.refs, p.bytes, {0: rows(8 * CHUNK)})
        wait_until(lambda: store.debug.memory().ready >= 4 * LAYER_BYTES)
        assert store.stats()["dirty_chunks"] <= 4
        assert store.stats()["hot_chunks"] == 8, "clean chunks stay in RAM until somebody needs the room"


def test_what_arrives_faster_than_it_settles_is_written_before_a_store_has_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "COALESCE_SEC", FOREVER)
    with opened(tmp_path, chunks=8, clean_fraction=0.5, write_back_sec=FOREVER, store_wait_ms=0) as store:
        p = prompt(4)
        store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
        assert store.stats()["written_chunks"] == 0, "there is room: further layers may come"
        for _ in range(12):
            p = prompt(1)
            assert store.store(p.refs, p.bytes, {0: rows(CHUNK)}) == 1
            wait_until(lambda: store.debug.memory().ready > 0)
        assert store.stats()["drops_no_room"] == 0


def test_where_memory_has_been_short_a_store_wakes_no_thread_and_its_rows_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_threads, "_WATCH_SEC", 1.0)
    monkeypatch.setattr(io_threads, "_WATCHED_SEC", FOREVER)
    with opened(tmp_path, chunks=32, clean_fraction=0.5, write_back_sec=FOREVER) as store:
        core, woken = store._core, set()
        wake = core.wake
        monkeypatch.setattr(core, "wake", lambda: (woken.add(threading.current_thread()), wake()))
        for number in range(6):
            p = prompt(17 if not number else 6)
            if number:
                wait_until(lambda: core.watched)
            assert store.store(p.refs, p.bytes, {0: rows(len(p.refs) * CHUNK)}) == len(p.refs)
            assert (threading.current_thread() in woken) == (number == 0), "then a thread looks by itself"
            woken.clear()
            wait_until(lambda: store.debug.memory().ready >= 16 * LAYER_BYTES)
        assert store.stats()["drops_no_room"] == 0


def test_layers_that_arrive_one_by_one_make_one_file(tmp_path: Path) -> None:
    with opened(tmp_path, layers=4, write_back_sec=0) as store:
        p = prompt(4)
        x = {idx: rows(4 * CHUNK, seed=idx) for idx in range(4)}
        for idx in x:
            assert store.store(p.refs, p.bytes, {idx: x[idx]}) == 4
        wait_until(lambda: store.stats()["dirty_chunks"] == 0)
        assert store.stats()["written_chunks"] <= 8, "not once per layer"
        demote_all(store)
        out = store.retrieve(p.refs, list(x))
        assert all(torch.equal(out[idx], x[idx].float()) for idx in x)


def test_a_chunk_that_came_back_to_ram_is_filed_again_as_it_was_when_a_layer_is_added(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p, x, y = prompt(3), rows(3 * CHUNK), rows(3 * CHUNK, seed=9)
        store.store(p.refs, p.bytes, {3: x})
        demote_all(store)
        paths = [store.debug.path(name) for name in p.names]
        before = [read_header(FileLayer(), path) for path in paths]
        assert torch.equal(store.retrieve(p.refs, [3])[3], x.float())
        assert store.has(p.names[0], 3) == (True, True)
        assert store.store(p.refs, p.bytes, {-1: y}) == 3
        os.unlink(paths[1])  # behind our back: what the file says has to come from RAM
        assert store.flush(10) == 0
        for path, old in zip(paths, before, strict=True):
            new = read_header(FileLayer(), path)
            assert (new.meta, new.token_ids) == (old.meta, old.token_ids)
        demote_all(store)
        out = store.retrieve(p.refs, [3, -1])
        assert torch.equal(out[3], x.float())
        assert torch.equal(out[-1], y.float())


def test_a_new_layer_of_a_cold_chunk_is_merged_into_its_file(store: TieredStore) -> None:
    p, x, y = prompt(2), rows(2 * CHUNK), rows(2 * CHUNK, seed=9, dtype=torch.float32)
    store.store(p.refs, p.bytes, {3: x})
    demote_all(store)
    assert store.store(p.refs, p.bytes, {-1: y}) == 2
    assert not store.has(p.names[0], 3)[0], "the layer on disk need not come back for it"
    demote_all(store)
    tensors = load_file(store.debug.path(p.names[0]))
    assert set(tensors) == {"token_ids", "layer.3", "layer.-1"}
    out = store.retrieve(p.refs, [3, -1])
    assert torch.equal(out[3], x.float())
    assert torch.equal(out[-1], y)


def test_only_the_layers_asked_for_are_read(store: TieredStore) -> None:
    p = prompt(2)
    x = {idx: rows(2 * CHUNK, seed=idx) for idx in (0, 1, 2)}
    store.store(p.refs, p.bytes, x)
    demote_all(store)
    before = store.stats()["read_bytes"]
    assert torch.equal(store.retrieve(p.refs, [1])[1], x[1].float())
    assert store.stats()["read_bytes"] - before == 2 * LAYER_BYTES
    assert [store.has(p.names[0], idx)[0] for idx in x] == [False, True, False]


def test_a_retrieve_ends_where_one_of_the_layers_does(store: TieredStore) -> None:
    p = prompt(3)
    store.store(p.refs, p.bytes, {0: rows(3 * CHUNK)})
    store.store(p.refs[:2], p.bytes, {1: rows(2 * CHUNK)})
    assert {idx: len(out) for idx, out in store.retrieve(p.refs, [0, 1]).items()} == {0: 2 * CHUNK, 1: 2 * CHUNK}
    assert store.stats()["misses_layer"] == 1
    assert store.retrieve(p.refs, [0, 7]) == {}


def test_two_hidden_sizes_live_in_one_store_and_end_a_prefix_where_they_change(store: TieredStore) -> None:
    p, wide = prompt(3), rows(CHUNK, hidden=2 * HIDDEN)
    narrow = rows(2 * CHUNK)
    store.store(p.refs[:2], p.bytes, {0: narrow})
    store.store(p.refs, p.bytes, {0: wide}, row_offset=2 * CHUNK)
    out = store.retrieve(p.refs, [0])[0]
    assert torch.equal(out, narrow.float())
    assert store.stats()["misses_shape"] == 1
    assert torch.equal(store.read_layer(p.names[2], 0, p.refs[2].kv_key), wide)


@pytest.mark.parametrize("hidden", [HIDDEN, 100, 7], ids=lambda hidden: f"hidden{hidden}")
def test_a_shorter_tail_and_odd_sizes_are_filed_and_read(store: TieredStore, hidden: int) -> None:
    p = Prompt(tokens(2.4, seed=hidden), tail=True)
    x = rows(len(p), hidden=hidden)
    assert store.store(p.refs, p.bytes, {0: x}) == 3
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
    demote_all(store)
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())


def test_another_prompt_with_the_same_chunk_hash_is_a_miss_and_is_not_stored(store: TieredStore) -> None:
    a = prompt(3)
    hashes = [ref.chunk_hash for ref in a.refs]
    # Every chunk hash of b is that of a: the first chunk's, and those of the later chunks, whose own
    # tokens are even equal.
    b = Prompt(tokens(1, seed=4242) + a.ids[CHUNK:], key_of=lambda number, _: hashes[number])
    x = rows(3 * CHUNK)
    store.store(a.refs, a.bytes, {0: x})
    for cold in (False, True):
        if cold:
            demote_all(store)
        assert store.retrieve(b.refs, [0]) == {}
        assert store.store(b.refs, b.bytes, {0: rows(3 * CHUNK, seed=1)}) == 0
        assert torch.equal(store.retrieve(a.refs, [0])[0], x.float())
    assert store.stats()["misses_collision"] == 2
    assert store.stats()["drops_collision"] == 6


def test_rows_may_be_kept_for_ever(store: TieredStore) -> None:
    kept = []
    for number in range(100):
        p, x = prompt(2), rows(2 * CHUNK, seed=number)
        store.store(p.refs, p.bytes, {0: x})
        kept.append((store.retrieve(p.refs, [0])[0][1:], x[1:].float()))
    store.clear()
    store.close()
    gc.collect()
    assert all(torch.equal(out, x) for out, x in kept)


def test_recycled_output_memory_is_never_shared_by_two_results(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SMALL_RESULT", 0)  # small ones come from the C library, which recycles itself
    p, x = prompt(4), rows(4 * CHUNK)
    store.store(p.refs, p.bytes, {0: x})
    a = store.retrieve(p.refs, [0])[0]
    piece = a[5:7]
    address = a.data_ptr()
    del a
    gc.collect()
    b = store.retrieve(p.refs, [0])[0]
    assert b.data_ptr() != address, "a slice of the first result is still in use"
    assert torch.equal(piece, x[5:7].float())
    address = b.data_ptr()
    del b
    assert store.retrieve(p.refs, [0])[0].data_ptr() == address, "but idle memory is used again"


def test_store_and_hot_retrieve_do_no_file_io_on_the_callers_thread(store: TieredStore) -> None:
    def system_calls() -> tuple[int, int]:
        """Reads and writes of this thread so far, those of this look included."""
        with open("/proc/thread-self/io") as file:
            figures = dict(line.split(": ") for line in file.read().splitlines())
        return int(figures["syscr"]), int(figures["syscw"])

    p, x = prompt(12), rows(12 * CHUNK)
    hot = Prompt(p.ids[: 3 * CHUNK])
    first = system_calls()
    look = tuple(b - a for a, b in zip(first, system_calls(), strict=True))
    before = system_calls()
    assert store.store(p.refs, p.bytes, {0: x}) == 12
    assert torch.equal(store.retrieve(hot.refs, [0])[0], x[: 3 * CHUNK].float())
    assert tuple(b - a for a, b in zip(before, system_calls(), strict=True)) == look
    assert store.stats()["hits_hot"] == 3
    assert store.stats()["written_chunks"] >= 4, "the files were written by others"


def test_coverage_counts_both_tiers_up_to_the_first_gap(store: TieredStore) -> None:
    p = prompt(4)
    store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
    demote_all(store)
    store.prefetch(p.refs[:2])
    wait_until(lambda: store.has(p.names[1], 0)[0])
    assert store.covered(p.names, [0]) == 4
    assert store.covered(p.names, [0, 1]) == 0
    store.drop([p.names[2]])
    assert store.covered(p.names, [0]) == 2


def test_dropped_chunks_leave_ram_and_disk(store: TieredStore, tmp_path: Path) -> None:
    p = prompt(4)
    store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
    store.flush(10)
    assert store.drop(p.names[2:]) == 2
    assert store.drop(p.names[2:]) == 0
    assert len(store.retrieve(p.refs, [0])[0]) == 2 * CHUNK
    wait_until(lambda: len(chunk_files(tmp_path)) == 2)
    assert store.clear() == 2
    wait_until(lambda: not chunk_files(tmp_path))
    wait_until(lambda: store.stats()["cold_bytes"] == 0)
    assert store.stats()["hot_bytes"] == 0


def test_the_oldest_files_leave_when_the_limit_is_reached(tmp_path: Path) -> None:
    file_bytes = 4096 + LAYER_BYTES
    limit = 10.5 * (file_bytes + 4096) / 1024**3  # a write reserves a little more than its file takes
    with opened(tmp_path, max_cold_size=limit) as store:
        prompts = [prompt(1) for _ in range(20)]
        for p in prompts:
            store.store(p.refs, p.bytes, {0: rows(CHUNK)})
            store.flush(10)
            assert store.stats()["cold_bytes"] <= limit * 1024**3
        present = [bool(store.retrieve(p.refs, [0])) for p in prompts]
        assert present == sorted(present), "least recently used first"
        assert 8 <= sum(present) <= 14
        assert store.stats()["drops_cold_limit"] == 20 - sum(present)
        assert len(chunk_files(tmp_path)) == sum(present)


def test_a_chunk_larger_than_the_limit_stays_in_ram_until_evicted_and_then_counts_as_lost(tmp_path: Path) -> None:
    with opened(tmp_path, max_cold_size=LAYER_BYTES / 1024**3) as store:
        p = prompt(8)
        store.store(p.refs, p.bytes, {0: rows(8 * CHUNK)})
        store.flush(1)
        assert len(store.retrieve(p.refs, [0])[0]) == 8 * CHUNK
        q = prompt(2)
        assert store.store(q.refs, q.bytes, {0: rows(2 * CHUNK)}) == 2
        assert len(store.retrieve(p.refs, [0])[0]) == 6 * CHUNK
        assert store.stats()["drops_too_large"] == 2
        assert not chunk_files(tmp_path)


def test_a_restart_finds_everything_in_order_of_use(tmp_path: Path) -> None:
    p, q = prompt(3), prompt(3)
    x, y = rows(3 * CHUNK, seed=1), rows(3 * CHUNK, seed=2)
    with opened(tmp_path) as store:
        store.store(p.refs, p.bytes, {0: x})
        store.store(q.refs, q.bytes, {0: y})
        store.flush(10)
        store.retrieve(p.refs, [0])
    with opened(tmp_path) as store:
        assert store.stats()["cold_chunks"] == 6
        assert store.stats()["unconfirmed_chunks"] == 6
        assert store.stats()["cold_bytes"] == sum(file.stat().st_size for file in chunk_files(tmp_path))
        order = store.debug.cold_order()
        assert order == [*reversed(q.names), *reversed(p.names)], "the suffix is older than its prefix"
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        assert store.stats()["unconfirmed_chunks"] == 0
        check_balance(store)


def test_recovered_chunks_are_hidden_until_their_kv_is_seen_and_not_deleted_meanwhile(tmp_path: Path) -> None:
    p, x = prompt(3), rows(3 * CHUNK)
    with opened(tmp_path) as store:
        store.store(p.refs, p.bytes, {0: x})
    answer = Presence.GONE
    with opened(tmp_path, ask=lambda keys, memory_only: [answer] * len(keys)) as store:
        assert store.retrieve(p.refs, [0]) == {}
        assert store.covered(p.names, [0]) == 3
        assert len(store) == 3
        assert store.stats()["misses_kv_absent"] == 1
        answer = Presence.PRESENT
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        answer = Presence.UNKNOWN
        assert store.retrieve(p.refs, [0]) == {}
        assert len(store) == 3
        answer = Presence.GONE
        assert store.retrieve(p.refs, [0]) == {}
        wait_until(lambda: not chunk_files(tmp_path))
        assert store.stats()["kv_gone_deleted"] == 3


def test_storing_a_recovered_chunk_again_counts_once_per_layer_and_copies_nothing(tmp_path: Path) -> None:
    p = prompt(3)
    x = {idx: rows(3 * CHUNK, seed=idx) for idx in range(4)}
    with opened(tmp_path, layers=4) as store:
        store.store(p.refs, p.bytes, x)
    with opened(tmp_path, layers=4) as store:
        for idx in x:
            assert store.store(p.refs, p.bytes, {idx: x[idx]}) == 3
        assert store.stats()["hot_bytes"] == 0
        assert store.store(p.refs, p.bytes, x) == 0


def test_kv_gone_with_archive_keeps_the_file_but_never_serves_it(tmp_path: Path) -> None:
    answer = Presence.PRESENT
    with opened(
        tmp_path, on_kv_gone="archive", write_back_sec=FOREVER, ask=lambda keys, memory_only: [answer] * len(keys)
    ) as store:
        p, q = prompt(2), prompt(2)
        store.store(p.refs, p.bytes, {0: rows(2 * CHUNK)})
        store.flush(10)
        store.store(q.refs, q.bytes, {0: rows(2 * CHUNK, seed=1)})  # dirty when its KV goes
        answer = Presence.GONE
        assert store.retrieve(p.refs, [0]) == {}
        assert store.retrieve(q.refs, [0]) == {}
        wait_until(lambda: store.stats()["archived_chunks"] == 4)
        assert len(list(tmp_path.glob("*/archive/??/*.safetensors"))) == 4
        assert not chunk_files(tmp_path)
        answer = Presence.PRESENT
        assert store.retrieve(p.refs, [0]) == {}
        wait_until(lambda: store.stats()["hot_bytes"] == 0)
        check_balance(store)
        archived = load_file(next(tmp_path.glob(f"*/archive/??/{q.names[1].hex()}.safetensors")))
        assert torch.equal(archived["layer.0"], rows(2 * CHUNK, seed=1)[CHUNK:])


def test_an_orphan_is_dropped_instead_of_written(tmp_path: Path) -> None:
    answer = Presence.PRESENT
    with opened(
        tmp_path, write_back_sec=FOREVER, clean_fraction=0, ask=lambda keys, memory_only: [answer] * len(keys)
    ) as store:
        p = prompt(4)
        store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
        answer = Presence.GONE
        assert store.flush(10) == 0
        wait_until(lambda: len(store) == 0)
        assert store.stats()["written_chunks"] == 0
        assert store.stats()["hot_bytes"] == 0


def test_orphans_that_nobody_retrieves_are_found_by_the_idle_pass(tmp_path: Path) -> None:
    answer = Presence.PRESENT
    with opened(tmp_path, ask=lambda keys, memory_only: [answer] * len(keys)) as store:
        p = prompt(4)
        store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
        store.flush(10)
        answer = Presence.GONE
        wait_until(lambda: len(store) == 0)
        wait_until(lambda: not chunk_files(tmp_path))


def test_presence_that_raises_is_unknown_and_deletes_nothing(tmp_path: Path) -> None:
    def ask(keys: object, memory_only: bool) -> list[Presence]:
        raise RuntimeError("dictionary changed size during iteration")

    with opened(tmp_path, ask=ask) as store:
        p = prompt(2)
        assert store.store(p.refs, p.bytes, {0: rows(2 * CHUNK)}) == 2
        assert store.retrieve(p.refs, [0]) == {}
        assert len(store) == 2
        assert store.stats()["errors_presence"] >= 2


def test_a_second_process_gets_a_directory_of_its_own_and_its_chunks_are_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    p, q = prompt(1), prompt(1)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert second.directory == f"{first.directory}/p1"
        assert f"{first.directory} is held by another process" in caplog.text
        first.store(p.refs, p.bytes, {0: rows(CHUNK, seed=1)})
        second.store(q.refs, q.bytes, {0: rows(CHUNK, seed=2)})
        assert first.retrieve(q.refs, [0]) == {}
        assert torch.equal(second.retrieve(q.refs, [0])[0], rows(CHUNK, seed=2).float())
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert second.directory == f"{first.directory}/p1"
        assert torch.equal(first.retrieve(p.refs, [0])[0], rows(CHUNK, seed=1).float())
        assert torch.equal(first.retrieve(q.refs, [0])[0], rows(CHUNK, seed=2).float())
        assert len(second) == 0
        check_balance(first)


def test_the_chunks_of_a_process_that_ends_are_adopted_while_we_run(tmp_path: Path) -> None:
    p, q = prompt(4), prompt(4)
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            second.store(q.refs, q.bytes, {0: rows(4 * CHUNK, seed=2)})
            first.store(p.refs, p.bytes, {0: rows(4 * CHUNK, seed=1)})
        first.debug.run_chores()
        wait_until(lambda: first.covered(q.names, [0]) == 4)
        assert torch.equal(first.retrieve(q.refs, [0])[0], rows(4 * CHUNK, seed=2).float())
        assert first.flush(10) == 0
        check_balance(first)


def test_what_was_filled_before_a_clear_is_not_adopted_after_it(tmp_path: Path) -> None:
    q = prompt(4)
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            second.store(q.refs, q.bytes, {0: rows(4 * CHUNK, seed=2)})
            first.clear()
        first.debug.run_chores()
        assert first.covered(q.names, [0]) == 0
        wait_until(lambda: first.debug.run_chores() or not list(tmp_path.glob("**/*.safetensors")))
        assert first.debug.disk().dead == 0, "it was counted, and has left"


def test_a_namespace_whose_process_ends_while_we_run_counts_and_leaves_first(tmp_path: Path) -> None:
    other = IDENT.__class__(**{**IDENT.__dict__, "model": "org/other"})
    size = 4096 + LAYER_BYTES
    with opened(tmp_path, max_cold_size=8 * size / 1024**3) as store:
        with opened(tmp_path, ident=other) as dying:
            p = prompt(4)
            dying.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
            store.debug.run_chores()
            assert store.debug.disk().dead == 0
            dead = Path(dying.directory)
        store.debug.run_chores()
        assert store.debug.disk().dead == 4 * size
        q = prompt(6)
        store.store(q.refs, q.bytes, {0: rows(6 * CHUNK)})
        assert store.flush(10) == 0
        assert len(list(dead.glob("??/*.safetensors"))) <= 3
        assert store.covered(q.names, [0]) == 6
        with opened(tmp_path, ident=other):
            store.debug.run_chores()
            assert store.debug.disk().dead == 0, "it has an owner again"
        check_balance(store)


def test_a_dead_namespace_leaves_first_and_a_live_one_never(tmp_path: Path) -> None:
    other = IDENT.__class__(**{**IDENT.__dict__, "model": "org/other"})
    size = 4096 + LAYER_BYTES
    with opened(tmp_path, ident=other) as store:
        p = prompt(4)
        store.store(p.refs, p.bytes, {0: rows(4 * CHUNK)})
        dead = Path(store.directory)
    with opened(tmp_path, max_cold_size=8 * size / 1024**3) as store:
        assert store.stats()["cold_bytes"] == 4 * size
        q = prompt(6)
        store.store(q.refs, q.bytes, {0: rows(6 * CHUNK)})
        assert store.flush(10) == 0
        assert len(list(dead.glob("??/*.safetensors"))) <= 3
        assert store.covered(q.names, [0]) == 6
        assert store.stats()["drops_cold_limit"] == 0
    with opened(tmp_path, ident=other) as alive, opened(tmp_path, max_cold_size=4 * size / 1024**3) as store:
        left = len(list(dead.glob("??/*.safetensors")))
        q = prompt(6)
        store.store(q.refs, q.bytes, {0: rows(6 * CHUNK)})
        store.flush(10)
        assert len(list(dead.glob("??/*.safetensors"))) == left == len(alive)


def test_close_writes_what_is_dirty_ends_its_threads_and_is_idempotent(tmp_path: Path) -> None:
    p, x = prompt(8), rows(8 * CHUNK)
    with opened(tmp_path, write_back_sec=FOREVER) as store:
        store.store(p.refs, p.bytes, {0: x})
        out = store.retrieve(p.refs, [0])[0]
    store.close()
    assert len(chunk_files(tmp_path)) == 8
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hs-")]
    assert store.store(p.refs, p.bytes, {0: x}) == 0
    assert store.retrieve(p.refs, [0]) == {}
    assert store.covered(p.names, [0]) == 0
    assert len(store) == store.drop(p.names) == store.clear() == 0
    store.prefetch(p.refs)
    assert store.stats()["drops_close"] == 0
    assert torch.equal(out, x.float())
