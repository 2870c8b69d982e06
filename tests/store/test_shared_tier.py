"""Two stores with other ranks, hashes and disks, and one bucket: a directory, or a real S3-compatible server."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save

from lmcache_hs_backend.chunk import ChunkMeta, KeyedChunk, Presence, chunk_refs
from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.objects import Answer, Objects, ObjectsError
from lmcache_hs_backend.format.reader import ColdTierReader, NotAColdPath
from lmcache_hs_backend.format.shared_names import content_name, shared_meta, tags
from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES, Prompt, honest_rows, opened, prompt, settings, tokens
from tests.support.seaweed import BUCKET, SeaweedServer
from tests.support.waiting import wait_until

pytest.importorskip("obstore")

MODEL = dataclasses.replace(IDENT, model_revision="abc123", world_size=2)
OTHER_RANK = dataclasses.replace(MODEL, worker_id=1, none_hash="17")


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("weed"))
    yield server
    server.stop()


@pytest.fixture(params=["file", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a shared tier that no other test uses."""
    if request.param == "file":
        return {"shared_url": f"file://{tmp_path}/bucket"}
    server: SeaweedServer = request.getfixturevalue("weed")
    return on_server(server, request.node.name)


def on_server(server: SeaweedServer, name: str, **keys: str) -> dict[str, Any]:
    place = xxhash.xxh3_64_hexdigest(name.encode())
    return {"shared_url": f"s3://{BUCKET}/{place}", "shared_options": server.options(**keys)}


def elsewhere(p: Prompt, tag: str = "") -> Prompt:
    """The same prompt as another rank with another hash seed names it."""
    other = Prompt(p.ids)
    chunks = []
    for ref in p.refs:
        value = f"{xxhash.xxh3_64_intdigest(ref.chunk_hash.encode(), seed=99):x}"
        chunks.append(KeyedChunk(ref.start, ref.end, f"org/test-model@2@1@{value}@bfloat16{tag}", value, value))
    other.refs = chunk_refs(chunks, p.bytes)
    return other


def uploaded(store: Any, count: int) -> None:
    assert store.flush(10) == 0
    wait_until(lambda: store.stats()["shared_chunks"] >= count and not store.stats()["queue_uploads"], 30)


def objects_of(shared: dict[str, Any]) -> Objects:
    return Objects(shared["shared_url"], shared.get("shared_options"))


def chunks_in(shared: dict[str, Any]) -> list[str]:
    return [found.path for found in objects_of(shared).list() if found.path.endswith(".safetensors")]


def test_what_one_node_stored_another_one_serves_bit_equal(tmp_path: Path, shared: dict[str, Any]) -> None:
    p = prompt(4)
    x = honest_rows(p.ids)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a, opened(tmp_path / "b", ident=OTHER_RANK, **shared) as b:
        assert a.store(p.refs, p.bytes, {0: x}) == 4
        uploaded(a, 4)
        q = elsewhere(p)
        assert set(q.names).isdisjoint(p.names)
        assert torch.equal(b.retrieve(q.refs, [0], None)[0], x)
        assert b.stats()["shared_hits"] == 4
        uploaded(b, 4)  # what came from the bucket does not go there again
        assert b.stats()["shared_puts"] == 0
        assert torch.equal(b.retrieve(q.refs, [0], None)[0], x)
        assert b.stats()["shared_hits"] == 4
    assert len(chunks_in(shared)) == 4
    one = objects_of(shared).get(chunks_in(shared)[0], 1 << 20)
    (tmp_path / "one.safetensors").write_bytes(one.body)
    assert load_file(tmp_path / "one.safetensors").keys() == {"token_ids", "layer.0"}


def test_rows_are_served_only_where_their_kv_is(tmp_path: Path) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket"}
    p, kv = prompt(3), [Presence.GONE]
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 3)
    with opened(tmp_path / "b", ident=MODEL, ask=lambda keys, _: kv * len(keys), **shared) as b:
        for kv[0] in (Presence.GONE, Presence.UNKNOWN):
            assert b.retrieve(p.refs, [0]) == {}
            assert b.stats()["shared_read_bytes"] == 0
        kv[0] = Presence.PRESENT
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))


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


def test_layers_that_come_later_join_the_object(tmp_path: Path, shared: dict[str, Any]) -> None:
    p = prompt(2)
    with opened(tmp_path / "a", ident=MODEL, layers=3, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 2)
        a.store(p.refs, p.bytes, {1: honest_rows(p.ids, 1)})
        uploaded(a, 2)
    with opened(tmp_path / "b", ident=OTHER_RANK, layers=3, **shared) as b:
        q = elsewhere(p)
        b.store(q.refs, q.bytes, {7: honest_rows(q.ids, 7)})  # has not seen the other two
        uploaded(b, 2)
        shutil.rmtree(tmp_path / "a")
    with opened(tmp_path / "c", ident=MODEL, layers=3, **shared) as c:
        out = c.retrieve(p.refs, [0, 1, 7], None)
        assert all(torch.equal(out[idx], honest_rows(p.ids, idx)) for idx in (0, 1, 7))
    assert len(chunks_in(shared)) == 2


def test_sixteen_writers_of_one_object_leave_one_whole_object(tmp_path: Path, shared: dict[str, Any]) -> None:
    objects = objects_of(shared)
    bodies = [bytes([n]) * 100_000 for n in range(16)]
    answers: list[Answer] = []
    start = threading.Barrier(16)

    def write(body: bytes) -> None:
        start.wait()
        answers.append(objects.create("x/y.safetensors", body).answer)

    threads = [threading.Thread(target=write, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count(Answer.OK) == 1
    assert answers.count(Answer.EXISTS) == 15
    assert bytes(objects.get("x/y.safetensors", 1 << 20).body) in bodies


def _flip(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


def _other_model(body: bytes) -> bytes:
    return body.replace(b"org/test-model", b"org/best-model")


def _other_revision(body: bytes) -> bytes:
    return body.replace(b"abc123", b"abd123")


@pytest.mark.parametrize(
    "damage",
    [_flip, _other_model, _other_revision, lambda body: body[:5000], lambda _: b"", lambda _: b"\xff" * 9000,
     lambda _: save({"token_ids": torch.zeros(CHUNK, dtype=torch.int64)})],
    ids=["a bit", "another model", "another revision", "short", "empty", "noise", "foreign"],
)  # fmt: skip
def test_a_damaged_or_foreign_object_is_a_miss_and_is_counted(tmp_path: Path, damage: Any) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket"}
    p = prompt(2)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 2)
    name = content_name(p.refs[1].prefix, CHUNK, "").hex()
    (second,) = (tmp_path / "bucket").glob(f"*/*/*/{name}.safetensors")
    second.write_bytes(damage(second.read_bytes()))
    with opened(tmp_path / "b", ident=MODEL, **shared) as b:
        out = b.retrieve(p.refs, [0], None)[0]
        assert torch.equal(out, honest_rows(p.ids)[:CHUNK])
        assert b.stats()["errors_shared_bad"] == 1
    assert second.exists()  # a reader deletes nothing


def test_swapped_objects_are_misses(tmp_path: Path) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket"}
    p = prompt(2)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 2)
    one, two = sorted((tmp_path / "bucket").glob("*/*/??/*.safetensors"))
    swapped = one.read_bytes(), two.read_bytes()
    two.write_bytes(swapped[0])
    one.write_bytes(swapped[1])
    with opened(tmp_path / "b", ident=MODEL, **shared) as b:
        assert b.retrieve(p.refs, [0]) == {}
        assert b.stats()["errors_shared_bad"] >= 1


@pytest.mark.timing
def test_a_bucket_that_hangs_costs_one_call_and_comes_back_by_itself(tmp_path: Path, weed: SeaweedServer) -> None:
    shared = on_server(weed, "hangs")
    p, q, r = prompt(3), prompt(3), prompt(3)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 3)
    with opened(tmp_path / "b", ident=MODEL, shared_read_sec=1, **shared) as b:
        weed.pause()
        try:
            began = time.monotonic()
            assert b.retrieve(p.refs, [0]) == {}
            assert time.monotonic() - began < 1.5
            for _ in range(20):
                began = time.monotonic()
                assert b.retrieve(q.refs, [0]) == {}
                assert time.monotonic() - began < 0.1
            began = time.monotonic()
            assert b.store(r.refs, r.bytes, {0: honest_rows(r.ids)}) == 3
            assert b.flush(10) == 0
            assert time.monotonic() - began < 5
            assert torch.equal(b.retrieve(r.refs, [0], None)[0], honest_rows(r.ids))
            assert b.stats()["shared_read_online"] == 0
            assert b.stats()["shared_offline"] >= 20
        finally:
            weed.resume()
        wait_until(lambda: b.stats()["shared_read_online"] == 1, 40)
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))
        uploaded(b, 3)


def test_a_read_only_key_reads_and_a_wrong_key_does_neither(
    tmp_path: Path, weed: SeaweedServer, caplog: pytest.LogCaptureFixture
) -> None:
    p = prompt(2)
    with opened(tmp_path / "a", ident=MODEL, **on_server(weed, "keys")) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 2)
    with opened(tmp_path / "b", ident=MODEL, **on_server(weed, "keys", key="rokey", secret="rosecret")) as b:
        wait_until(lambda: b.stats()["shared_write_online"] == 0)
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))
        assert b.stats()["shared_read_online"] == 1
    with opened(tmp_path / "c", ident=MODEL, **on_server(weed, "keys", secret="wrong")) as c:
        assert c.retrieve(p.refs, [0]) == {}
        assert c.stats()["shared_read_online"] == 0
        assert c.store(p.refs, p.bytes, {0: honest_rows(p.ids)}) == 2
    assert "403" in caplog.text


def test_a_directory_of_objects_is_read_like_a_cold_path(tmp_path: Path) -> None:
    url, p = f"file://{tmp_path}/bucket", prompt(3)
    for node, named in (("a", p), ("b", elsewhere(prompt(2)))):
        with opened(tmp_path / node, ident=MODEL, shared_url=url) as store:
            store.store(named.refs, named.bytes, {0: honest_rows(named.ids)})
            uploaded(store, len(named.refs))
    for place in (url, str(tmp_path / "bucket" / "v1")):
        headers = [info.header for info in ColdTierReader(place).chunks()]
        assert len(headers) == 5
        metas = {header.meta.chunk_hash: header.meta for header in headers if header is not None}
        assert len(metas) == 5
        assert all(not meta.start or meta.parent in metas for meta in metas.values())
    verify = [sys.executable, "-m", "lmcache_hs_backend.cli.inspect", "verify", str(tmp_path / "bucket" / "v1")]
    subprocess.run(verify, check=True, timeout=60)
    with pytest.raises(NotAColdPath, match="only file:// URLs"):
        ColdTierReader("s3://bucket/prefix")


_KILLED = """
import os, sys, time
from tests.store.test_shared_tier import MODEL
from tests.support.prompts import *
store = TieredStore(settings({path!r}, write_back_sec=0, shared_url={url!r}), 64 * LAYER_BYTES, MODEL)
assert store.wait_recovered(20)
for n in range({first}, {first} + 12):
    p = Prompt([n * 100_000 + token for token in range(3 * CHUNK)])
    store.store(p.refs, p.bytes, {{0: honest_rows(p.ids)}})
assert store.flush(20) == 0
os.write(1, b"on disk")
time.sleep(60)
"""


def test_a_kill_between_disk_and_bucket_loses_nothing_and_leaves_whole_objects(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    for kill in range(3):
        code = _KILLED.format(path=str(tmp_path / "a"), url=url, first=kill * 12)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as child:
            assert child.stdout is not None
            assert child.stdout.read(7) == b"on disk"
            time.sleep(0.4 + 0.1 * kill)  # around the moment at which uploads begin
            child.kill()
    with opened(tmp_path / "a", ident=MODEL, shared_url=url) as a:
        uploaded(a, 108)
    with opened(tmp_path / "b", chunks=200, ident=OTHER_RANK, shared_url=url) as b:
        for n in range(36):
            p = Prompt([n * 100_000 + token for token in range(3 * CHUNK)])
            assert torch.equal(b.retrieve(elsewhere(p).refs, [0], None)[0], honest_rows(p.ids))
        assert b.stats()["errors_shared_bad"] == 0


def test_what_was_stored_while_the_bucket_was_down_is_uploaded_when_it_is_back(tmp_path: Path) -> None:
    server = SeaweedServer(tmp_path / "weed", start=False)
    try:
        shared = on_server(server, "backlog")
        backlog = [prompt(5) for _ in range(20)]
        with opened(tmp_path / "a", ident=MODEL, chunks=16, store_wait_ms=10_000, **shared) as a:
            wait_until(lambda: a.stats()["shared_write_online"] == 0, 20)
            for each in backlog:
                assert a.store(each.refs, each.bytes, {0: honest_rows(each.ids)}) == 5
            assert a.flush(10) == 0
            assert a.stats()["queue_uploads"] == 100
            server.start()
            wait_until(lambda: a.stats()["shared_chunks"] == 100, 60)
            assert a.stats()["drops_unshared"] == 0
        assert len(chunks_in(shared)) == 100
    finally:
        server.stop()


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
    with opened(tmp_path / "b", ident=MODEL, max_cold_size=limit, shared_access="both", **shared) as b:
        for each in (old, third, fourth):
            b.store(each.refs, each.bytes, {0: honest_rows(each.ids)})
            b.flush(10)
            b.debug.evict_clean()
        assert b.stats()["drops_unshared"] in (2, 3)
        assert b.stats()["evicted_shared"] == 0


def test_a_retrieve_without_a_shared_tier_imports_nothing_and_starts_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, threading\n"
        "from lmcache_hs_backend.tiered import TieredStore\n"
        f"with TieredStore.open({str(tmp_path)!r}, model='m', hot_size=0.01, max_cold_size=1, min_free_disk=0) as s:\n"
        "    s.retrieve(s.prompt(range(512)).refs, [0])\n"
        "    assert 'obstore' not in sys.modules\n"
        "    assert not [t for t in threading.enumerate() if 'shared' in t.name]\n"
        "    assert 'lmcache_hs_backend.tiers.flows.share' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_a_forked_child_is_offline_at_once(tmp_path: Path) -> None:
    objects = Objects(f"file://{tmp_path}/bucket")
    assert objects.create("a", b"1").answer is Answer.OK
    pid = os.fork()
    if not pid:
        began = time.monotonic()
        fine = objects.get("a", 10).answer is Answer.OFFLINE
        fine &= Objects(f"file://{tmp_path}/bucket").create("b", b"2").answer is Answer.OFFLINE
        os._exit(0 if fine and time.monotonic() - began < 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert objects.get("a", 10).answer is Answer.OK


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="model_revision is empty"),
        opened(tmp_path / "a", shared_url=f"file://{tmp_path}/bucket"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"shared_url is 's3://x/y'.*no_such_option"),
        opened(tmp_path / "a", ident=MODEL, shared_url="s3://x/y", shared_options={"no_such_option": 1}),
    ):
        pass
    with pytest.raises(ConfigError, match=r"shared_url.*must be a URL"):
        type(settings(tmp_path)).from_mapping({"shared_url": "ftp://x"}, str)
    with pytest.raises(ObjectsError, match="three slashes"):
        Objects("file://relative")


def test_names_come_from_tokens_and_tags_alone() -> None:
    p = Prompt(tokens(2, 7))
    ref, other = p.refs[1], elsewhere(p, "@tenant%a").refs[1]
    assert tags(ref.key, "org/test-model") == ""
    assert tags(other.key, "org/test-model") == "tenant%a"
    assert content_name(ref.prefix, CHUNK, "") != content_name(other.prefix, CHUNK, "tenant%a")
    metas = [
        shared_meta(
            ChunkMeta(one.key, one.chunk_hash, one.parent, one.prefix, one.start, CHUNK, "org/test-model", "", "{}"),
            MODEL, p.refs[0].prefix,
        )
        for one in (ref, elsewhere(p).refs[1])
    ]  # fmt: skip
    assert metas[0] == metas[1]
    assert tags(shared_meta(metas[0]._replace(key=other.key), MODEL, b"").key, "org/test-model") == "tenant%a"
