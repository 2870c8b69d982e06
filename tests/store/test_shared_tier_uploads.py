"""What goes up to the bucket of the shared tier, when, and what then leaves the disk; kills and outages in between."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.reader import ColdTierReader
from lmcache_hs_backend.tiers.flows.share import Share
from lmcache_hs_backend.tiers.shared.bucket import Bucket
from tests.support.amounts import amount
from tests.support.figures import tell
from tests.support.prompts import CHUNK, LAYER_BYTES, Prompt, honest_rows, opened, prompt
from tests.support.seaweed import SeaweedServer
from tests.support.sharing import MODEL, OTHER_RANK, chunks_in, elsewhere, on_server, uploaded
from tests.support.waiting import wait_until

pytest.importorskip("obstore")

ARCHIVE: dict[str, Any] = {"shared_write": "archive", "on_kv_gone": "archive"}
#: How often a node is killed, and how many chunks wait for a bucket that is away; the nightly run has more.
KILLS = int(amount("HS_SHARED_KILLS", 5, 100))
BACKLOG = int(amount("HS_SHARED_BACKLOG", 300, 10_000))
#: A bucket on a port that refuses.
NO_BUCKET: dict[str, Any] = {
    "shared_url": "s3://nowhere/hs",
    "shared_options": {"endpoint": "http://127.0.0.1:9", "access_key_id": "k", "secret_access_key": "s"},
}


def test_a_node_that_loses_its_disk_serves_on_and_a_lost_upload_is_made_up_for(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    p, late = prompt(3), prompt(2)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 3)
    with opened(tmp_path / "a", ident=MODEL) as a:  # without a shared tier: only on disk
        a.store(late.refs, late.bytes, {0: honest_rows(late.ids)})
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        uploaded(a, 5)
        assert a.stats()["shared_puts"] == 2
        assert a.stats()["shared_exists"] == 3
    shutil.rmtree(tmp_path / "a")
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        for each in (p, late):
            assert torch.equal(a.retrieve(each.refs, [0], None)[0], honest_rows(each.ids))


def test_a_disk_that_gives_less_at_a_time_than_it_was_asked_for_uploads_as_well(
    tmp_path: Path, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pread = os.preadv, os.pread
    monkeypatch.setattr(FileLayer, "preadv", staticmethod(lambda fd, views, at: preadv(fd, [views[0][:1000]], at)))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 1000), at))
    p = prompt(2)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 2)
    monkeypatch.undo()
    with opened(tmp_path / "b", ident=MODEL, **shared) as b:
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))


def test_what_was_stored_while_the_bucket_was_down_is_uploaded_when_it_is_back(tmp_path: Path) -> None:
    server = SeaweedServer(tmp_path / "weed", start=False)
    try:
        shared = on_server(server, "backlog")
        backlog = [prompt(5) for _ in range(BACKLOG // 5)]
        with opened(tmp_path / "a", ident=MODEL, chunks=16, store_wait_ms=10_000, **shared) as a:
            wait_until(lambda: a.stats()["shared_write_online"] == 0, 20)
            for each in backlog:
                assert a.store(each.refs, each.bytes, {0: honest_rows(each.ids)}) == 5
            assert a.flush(60) == 0
            assert a.stats()["queue_uploads"] == BACKLOG
            server.start()
            wait_until(lambda: a.stats()["shared_write_online"] == 1, 60)
            began = time.monotonic()
            wait_until(lambda: a.stats()["shared_chunks"] == BACKLOG, 60 + BACKLOG / 10)
            tell(f"a backlog of {BACKLOG} chunks was in the bucket after {time.monotonic() - began:.0f} s")
            assert a.stats()["shared_puts"] == BACKLOG
            assert a.stats()["drops_unshared"] == 0
        assert len(chunks_in(shared)) == BACKLOG
        with opened(tmp_path / "b", ident=OTHER_RANK, chunks=64, **shared) as b:
            for each in backlog[:: max(1, len(backlog) // 20)]:
                assert torch.equal(b.retrieve(elsewhere(each).refs, [0], None)[0], honest_rows(each.ids))
    finally:
        server.stop()


#: Forks a node for each line that it reads: what a node imports takes longer than what it does.
_NODES = """
import json, os, signal, sys, time
from tests.support.prompts import *
from tests.support.sharing import MODEL
path, shared = sys.argv[1], json.loads(sys.argv[2])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork():
        continue
    try:
        store = TieredStore(settings(path, write_back_sec=0, on_locked="error", **shared), 64 * LAYER_BYTES, MODEL)
        assert store.wait_recovered(120)
        for n in range(int(line), int(line) + 4):
            p = Prompt([n * 100_000 + token for token in range(3 * CHUNK)])
            store.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        assert store.flush(120) == 0
        print(os.getpid(), flush=True)
        time.sleep(120)
    finally:
        print(0, flush=True)
        os._exit(1)
"""


def test_kills_between_disk_and_bucket_lose_nothing_and_leave_whole_objects(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    command = [sys.executable, "-c", _NODES, str(tmp_path / "a"), json.dumps(shared)]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    moments, cut_off = random.Random(7), 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as nodes:
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        for kill in range(KILLS):
            print(kill * 4, file=nodes.stdin, flush=True)
            pid = int(nodes.stdout.readline())
            assert pid, "a node has failed"
            time.sleep(moments.uniform(0, 1.2))  # before, while and after uploads are under way
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
            cut_off += len(chunks_in(shared)) < 12 * (kill + 1)
        nodes.stdin.close()
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        uploaded(a, 12 * KILLS)
    assert len(chunks_in(shared)) == 12 * KILLS
    tell(f"{KILLS} kills between disk and bucket, {cut_off} of them with chunks that were not there yet: none lost")
    with opened(tmp_path / "b", chunks=200, ident=OTHER_RANK, **shared) as b:
        for n in range(4 * KILLS):
            p = Prompt([n * 100_000 + token for token in range(3 * CHUNK)])
            assert torch.equal(b.retrieve(elsewhere(p).refs, [0], None)[0], honest_rows(p.ids))
        assert b.stats()["errors_shared_bad"] == 0


def test_what_the_bucket_holds_leaves_the_disk_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    limit = 10 * (LAYER_BYTES + 4096) / 2**30
    shared: dict[str, Any] = {"shared_url": f"file://{tmp_path}/bucket", "shared_write": "reused"}
    old, new, third, fourth = (prompt(4) for _ in range(4))
    with opened(tmp_path / "a", ident=MODEL, max_cold_size=limit, **shared) as a:
        for each in (old, new):
            a.store(each.refs, each.bytes, {0: honest_rows(each.ids)})
        a.flush(10)
        a.retrieve(new.refs, [0])  # so these go to the bucket
        uploaded(a, 4)
        assert a.stats()["shared_puts"] == 4
        a.store(third.refs, third.bytes, {0: honest_rows(third.ids)})
        a.flush(10)
        a.debug.evict_clean()
        assert a.stats()["evicted_shared"] in (2, 3)
        assert a.stats()["drops_unshared"] == a.stats()["drops_cold_limit"] == 0
        assert torch.equal(a.retrieve(old.refs, [0], None)[0], honest_rows(old.ids))
        assert torch.equal(a.retrieve(new.refs, [0], None)[0], honest_rows(new.ids))
    with (
        opened(tmp_path / "b", ident=MODEL, max_cold_size=limit, **NO_BUCKET) as b,
        opened(tmp_path / "c", ident=MODEL, max_cold_size=limit, **shared) as c,
    ):
        for store in (b, c):
            for each in (old, third, fourth):
                store.store(each.refs, each.bytes, {0: honest_rows(each.ids)})
                store.flush(10)
                store.debug.evict_clean()
            assert store.stats()["evicted_shared"] == 0
        assert b.stats()["drops_unshared"] in (2, 3)
        assert c.stats()["drops_cold_limit"] in (2, 3)  # was never served, so it was not meant for the bucket
        assert c.stats()["drops_unshared"] == 0


def test_of_files_that_the_bucket_has_at_a_start_no_row_is_read_again(
    tmp_path: Path, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prompt(4)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 4)
    read: list[str] = []
    read_file = Bucket.read_file
    monkeypatch.setattr(Bucket, "read_file", lambda *args: (read.append(args[1]), read_file(*args))[1])
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        uploaded(a, 4)
        assert a.stats()["shared_exists"] == 4
        assert a.stats()["shared_puts"] == 0
    assert read == []


def test_an_object_of_the_same_size_with_another_layer_is_not_taken_for_the_chunk(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    p = prompt(2)
    for node, layer_idx in (("a", 3), ("b", 4)):
        with opened(tmp_path / node, ident=MODEL, layers=2) as store:
            store.store(p.refs, p.bytes, {layer_idx: honest_rows(p.ids, layer_idx)})
        with opened(tmp_path / node, ident=MODEL, layers=2, **shared) as store:
            uploaded(store, 2)
            assert store.stats()["shared_puts"] == 2
    with opened(tmp_path / "c", ident=MODEL, layers=2, **shared) as c:
        out = c.retrieve(p.refs, [3, 4], None)
        assert all(torch.equal(out[idx], honest_rows(p.ids, idx)) for idx in (3, 4))


def test_two_nodes_that_store_the_same_chunk_leave_one_object(tmp_path: Path, shared: dict[str, Any]) -> None:
    p = prompt(3)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a, opened(tmp_path / "b", ident=OTHER_RANK, **shared) as b:
        for store, named in ((a, p), (b, elsewhere(p))):
            store.store(named.refs, named.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 3)
        uploaded(b, 3)
        assert a.stats()["shared_puts"] + b.stats()["shared_puts"] == 3
        assert a.stats()["shared_exists"] + b.stats()["shared_exists"] == 3
    assert len(chunks_in(shared)) == 3


def test_what_leaves_a_node_stays_in_the_bucket(tmp_path: Path, shared: dict[str, Any]) -> None:
    gone, removed, cleared = (prompt(2) for _ in range(3))
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        for each in (gone, removed, cleared):
            a.store(each.refs, each.bytes, {0: honest_rows(each.ids)})
        uploaded(a, 6)
        assert a.kv_gone(gone.names) == 2
        assert a.drop(removed.names) == 2
        assert a.clear() == 2
        assert len(a) == 0
        assert len(chunks_in(shared)) == 6
        for each in (gone, removed, cleared):  # and comes back when its KV does
            assert torch.equal(a.retrieve(each.refs, [0], None)[0], honest_rows(each.ids))


def test_what_was_cleared_while_it_was_fetched_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket"}
    p = prompt(1)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 1)
    with opened(tmp_path / "b", ident=MODEL, **shared) as b:
        arrived, go_on, kept = threading.Event(), threading.Event(), threading.Event()
        get, keep = Bucket.get, Share._keep

        def gated(*args: Any) -> Any:
            arrived.set()
            assert go_on.wait(20)
            return get(*args)

        monkeypatch.setattr(Bucket, "get", gated)
        monkeypatch.setattr(Share, "_keep", lambda *args: (keep(*args), kept.set())[0])
        b.prefetch(p.refs)
        assert arrived.wait(20)
        b.clear()
        go_on.set()
        assert kept.wait(20)
        assert b.stats()["shared_read_bytes"] > 0
        assert len(b) == 0
        assert b.stats()["shared_hits"] == 0


def test_only_what_was_served_is_uploaded_with_reused(tmp_path: Path, shared: dict[str, Any]) -> None:
    used, unused = prompt(3), prompt(2)
    with opened(tmp_path / "a", ident=MODEL, shared_write="reused", **shared) as a:
        for each in (used, unused):
            a.store(each.refs, each.bytes, {0: honest_rows(each.ids)})
        assert a.flush(10) == 0
        a.retrieve(used.refs[:2], [0])
        uploaded(a, 2)
        assert a.stats()["shared_puts"] == 2
    assert len(chunks_in(shared)) == 2


def test_with_archive_a_chunk_goes_up_when_its_kv_has_gone_and_then_leaves_the_disk_first(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    limit = 9 * (LAYER_BYTES + 4096) / 2**30
    gone, kept, more = prompt(4), prompt(4), prompt(3)
    with opened(tmp_path / "a", ident=MODEL, max_cold_size=limit, **ARCHIVE, **shared) as a:
        for each in (gone, kept):
            a.store(each.refs, each.bytes, {0: honest_rows(each.ids)})
        assert a.flush(10) == 0
        assert a.stats()["queue_uploads"] == a.stats()["shared_puts"] == 0
        a.kv_gone(reversed(gone.names))  # as LRU does: the suffix first
        wait_until(lambda: a.stats()["archived_chunks"] == 4)
        uploaded(a, 4)
        assert a.stats()["shared_puts"] == len(chunks_in(shared)) == 4
        a.store(more.refs, more.bytes, {0: honest_rows(more.ids)})
        assert a.flush(10) == 0
        assert a.stats()["archived_chunks"] == 2
        assert a.stats()["evicted_shared"] == 2
        a.debug.evict_clean()
        for each in (kept, more):
            assert torch.equal(a.retrieve(each.refs, [0], None)[0], honest_rows(each.ids))
        assert a.stats()["drops_unshared"] == a.stats()["drops_cold_limit"] == 0
    with opened(tmp_path / "b", ident=OTHER_RANK, **shared) as b:
        assert torch.equal(b.retrieve(elsewhere(gone).refs, [0], None)[0], honest_rows(gone.ids))


def test_an_archived_chunk_that_was_not_uploaded_goes_up_after_a_restart_with_its_place_in_its_chain(
    tmp_path: Path,
) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket"}
    p = prompt(4)
    with opened(tmp_path / "a", ident=MODEL, on_kv_gone="archive") as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        assert a.flush(10) == 0
        a.kv_gone(p.names[:2])  # these two, the parent of the third, are in the archive when it is uploaded
        wait_until(lambda: a.stats()["archived_chunks"] == 2)
    with opened(tmp_path / "a", ident=MODEL, on_kv_gone="archive", **shared) as a:
        uploaded(a, 4)
    metas = [info.header.meta for info in ColdTierReader(str(tmp_path / "bucket" / "v1")).chunks() if info.header]
    metas.sort(key=lambda meta: meta.start)
    assert [meta.parent for meta in metas] == ["", *(meta.chunk_hash for meta in metas[:3])]


def test_what_the_bucket_has_when_it_is_archived_does_not_go_there_again(tmp_path: Path) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket"}
    p = prompt(2)
    with opened(tmp_path / "a", ident=MODEL, layers=2, on_kv_gone="archive", **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 2)
        a.store(p.refs[:1], p.bytes[: CHUNK * 8], {1: honest_rows(p.ids, 1)[:CHUNK]})  # only in RAM when the KV goes
        a.kv_gone(p.names)
        wait_until(lambda: a.stats()["archived_chunks"] == 2)
        uploaded(a, 2)
        assert a.stats()["shared_puts"] == 3  # one chunk once, the other one again with the layer that it lacked
    with opened(tmp_path / "b", ident=MODEL, layers=2, **shared) as b:
        out = b.retrieve(p.refs[:1], [0, 1], None)
        assert all(torch.equal(out[idx], honest_rows(p.ids, idx)[:CHUNK]) for idx in (0, 1))


def test_an_archived_chunk_that_must_leave_before_it_is_uploaded_is_counted(tmp_path: Path) -> None:
    limit = 5 * (LAYER_BYTES + 4096) / 2**30
    gone, more = prompt(4), prompt(3)
    with opened(tmp_path / "a", ident=MODEL, max_cold_size=limit, **ARCHIVE, **NO_BUCKET) as a:
        a.store(gone.refs, gone.bytes, {0: honest_rows(gone.ids)})
        assert a.flush(10) == 0
        a.kv_gone(gone.names)
        wait_until(lambda: a.stats()["archived_chunks"] == a.stats()["queue_uploads"] == 4)
        a.store(more.refs, more.bytes, {0: honest_rows(more.ids)})
        assert a.flush(10) == 0
        assert a.stats()["drops_unshared"] == 2
        assert a.stats()["queue_uploads"] == a.stats()["archived_chunks"] == 2
        a.debug.evict_clean()
        assert torch.equal(a.retrieve(more.refs, [0], None)[0], honest_rows(more.ids))
