"""What another rank of a node reads of the first rank's files, and what it costs when they are damaged or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.first_rank import FirstRankFiles
from tests.store.test_directories import program
from tests.support.disks import FaultyDisk
from tests.support.prompts import CHUNK, IDENT, honest_rows, opened, prompt, settings


@contextmanager
def reading(cold_path: Path, ask: Any = None, files: Any = None, **changes: Any) -> Iterator[FirstRankFiles]:
    ask = ask or (lambda keys, memory_only: [Presence.PRESENT] * len(keys))
    reader = FirstRankFiles(settings(cold_path, ranks="first", **changes), IDENT, ask=ask, files=files)
    try:
        yield reader
    finally:
        reader.close()


def test_rows_on_disk_are_read_and_rows_in_ram_are_a_miss(tmp_path: Path) -> None:
    p, q = prompt(3), prompt(1)
    with opened(tmp_path, layers=2, write_back_sec=3600, clean_fraction=0) as first, reading(tmp_path) as other:
        layers = {0: honest_rows(p.ids), 5: honest_rows(p.ids, 5)}
        first.store(p.refs, p.bytes, layers)
        assert other.retrieve(p.refs, [0]) == {}
        assert other.stats()["misses_absent"] == 1
        assert first.flush(10) == 0
        first.store(q.refs, q.bytes, {0: honest_rows(q.ids)})
        out = other.retrieve(p.refs, [5, 0], None)
        assert all(torch.equal(out[idx], rows) for idx, rows in layers.items())
        assert torch.equal(other.retrieve(p.refs, [0])[0], layers[0].float())
        assert other.retrieve(q.refs, [0]) == {}
        assert other.retrieve(p.refs, [0, 9]) == {}
        assert other.stats()["misses_layer"] == 1
        assert other.covered([*p.names, *q.names], [0, 5]) == 3
        assert other.stats()["hits_cold"] == 6
        first.drop(p.names[1:])
        assert torch.equal(other.retrieve(p.refs, [0], None)[0], layers[0][:CHUNK])


@pytest.mark.parametrize(("answer", "miss"), [(Presence.GONE, "kv_absent"), (Presence.UNKNOWN, "kv_unknown")])
def test_rows_are_given_out_only_where_this_ranks_kv_is(tmp_path: Path, answer: Presence, miss: str) -> None:
    p = prompt(3)
    with opened(tmp_path) as first:
        first.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        assert first.flush(10) == 0
    answers = [Presence.PRESENT, answer, Presence.PRESENT]
    with reading(tmp_path, ask=lambda keys, memory_only: answers) as other:
        assert torch.equal(other.retrieve(p.refs, [0], None)[0], honest_rows(p.ids)[:CHUNK])
        assert other.stats()[f"misses_{miss}"] == 1


def test_a_damaged_file_is_a_miss_and_stays_where_it_is(tmp_path: Path) -> None:
    p = prompt(2)
    with opened(tmp_path) as first:
        first.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        assert first.flush(10) == 0
        path = Path(first.debug.path(p.names[1]))
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with reading(tmp_path) as other:
        assert torch.equal(other.retrieve(p.refs, [0], None)[0], honest_rows(p.ids)[:CHUNK])
        assert other.stats()["misses_bad_file"] == 1
    assert path.exists()


def test_the_files_of_a_first_rank_in_a_subdirectory_are_found(tmp_path: Path) -> None:
    p = prompt(2)
    with opened(tmp_path), opened(tmp_path) as first, reading(tmp_path) as other:
        assert os.path.basename(first.directory) == "p1"
        first.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        assert first.flush(10) == 0
        assert torch.equal(other.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))


@pytest.mark.timing
def test_a_disk_that_hangs_costs_one_call_and_the_next_ones_nothing(tmp_path: Path, disk: FaultyDisk) -> None:
    p = prompt(2)
    with opened(tmp_path) as first:
        first.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        assert first.flush(10) == 0
    with reading(tmp_path, files=disk, read_timeout_sec=0.5) as other:
        disk.hang()
        began = time.monotonic()
        assert other.retrieve(p.refs, [0]) == {}
        assert time.monotonic() - began < 2
        for _ in range(20):
            began = time.monotonic()
            assert other.retrieve(p.refs, [0]) == {}
            assert time.monotonic() - began < 0.2
        assert other.stats()["cold_state"] == "offline"
        assert other.stats()["misses_timeout"] == 21
        disk.resume()
        while not (found := other.retrieve(p.refs, [0], None)):
            assert time.monotonic() - began < 20
        assert torch.equal(found[0], honest_rows(p.ids))
        assert other.stats()["cold_state"] == "online"


def test_a_forked_child_reads_on(tmp_path: Path) -> None:
    program(f"""
import os, time
from lmcache_hs_backend.first_rank import FirstRankFiles
p = prompt(2)
with opened({str(tmp_path)!r}) as first:
    first.store(p.refs, p.bytes, {{0: honest_rows(p.ids)}})
    assert first.flush(10) == 0
present = lambda keys, memory_only: [Presence.PRESENT] * len(keys)
from lmcache_hs_backend.chunk import Presence
other = FirstRankFiles(settings({str(tmp_path)!r}, ranks="first"), IDENT, ask=present)
assert torch.equal(other.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(other.retrieve(p.refs, [0], None)[0], honest_rows(p.ids)) else 1)
assert os.waitpid(child, 0)[1] == 0
other.close()
""")
