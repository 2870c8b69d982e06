"""A bucket of the shared tier in trouble: no wrong row, no call beyond its bound, everything counted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from lmcache_hs_backend.format.objects import Answer, Objects
from lmcache_hs_backend.format.shared_names import content_name
from tests.support.prompts import CHUNK, Prompt, honest_rows, opened, prompt
from tests.support.s3_server import S3Server
from tests.support.seaweed import BUCKET, SeaweedServer
from tests.support.sharing import MODEL, OTHER_RANK, chunks_in, elsewhere, objects_of, on_server, uploaded
from tests.support.waiting import wait_until

pytest.importorskip("obstore")


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


# -- a bucket that is slow, full, gone, or ignores conditions -------------------------------------------------------


class Proxy:
    """A TCP proxy in front of a server: each GET waits ``delay`` seconds, and answers come at ``bytes_per_sec``."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.delay = 0.0
        self.bytes_per_sec = math.inf
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._move, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._move, args=(server, client, True), daemon=True).start()

    def _move(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not answers and data.startswith(b"GET "):
                    time.sleep(self.delay)
                if answers and self.bytes_per_sec < math.inf:
                    time.sleep(len(data) / self.bytes_per_sec)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(weed: SeaweedServer) -> Iterator[Proxy]:
    made = Proxy(weed.port)
    yield made
    made.close()


def through(proxy: Proxy, shared: dict[str, Any]) -> dict[str, Any]:
    options = {**shared["shared_options"], "endpoint": f"http://127.0.0.1:{proxy.port}"}
    return {**shared, "shared_options": options}


@pytest.mark.timing
def test_what_comes_too_late_is_there_for_the_next_call(tmp_path: Path, weed: SeaweedServer, proxy: Proxy) -> None:
    shared, p = on_server(weed, "late"), prompt(64)
    with opened(tmp_path / "a", chunks=80, ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 64)
    with opened(tmp_path / "b", chunks=80, ident=MODEL, shared_read_sec=4, **through(proxy, shared)) as b:
        proxy.delay = 2.2  # two rounds of 32 side by side take longer than the call may
        began = time.monotonic()
        found = b.retrieve(p.refs, [0], None)
        assert time.monotonic() - began < 5
        assert 0 < len(found[0]) < len(p.ids)
        assert torch.equal(found[0], honest_rows(p.ids)[: len(found[0])])
        assert b.stats()["shared_timeouts"] == 1
        assert b.stats()["shared_read_online"] == 1
        wait_until(lambda: b.stats()["shared_hits"] == 64, 30)
        proxy.delay = 20
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))


@pytest.mark.timing
def test_a_slow_bucket_costs_no_call_more_than_its_bound(tmp_path: Path, weed: SeaweedServer, proxy: Proxy) -> None:
    shared, p, q = on_server(weed, "slow"), prompt(3), prompt(3)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 3)
    with opened(tmp_path / "b", ident=MODEL, shared_read_sec=1, **through(proxy, shared)) as b:
        wait_until(lambda: b.stats()["shared_write_online"] == 1)
        proxy.bytes_per_sec = 2000  # an object takes six seconds
        began = time.monotonic()
        assert b.retrieve(p.refs, [0]) == {}
        assert time.monotonic() - began < 2
        began = time.monotonic()
        for _ in range(10):
            assert b.retrieve(p.refs, [0]) == {}
            assert b.store(q.refs, q.bytes, {0: honest_rows(q.ids)}) in (0, 3)
            assert torch.equal(b.retrieve(q.refs, [0], None)[0], honest_rows(q.ids))
        assert time.monotonic() - began < 2
        assert b.stats()["shared_offline"] >= 10
        proxy.bytes_per_sec = math.inf
        wait_until(lambda: b.stats()["shared_read_online"] == 1, 40)
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))
        uploaded(b, 6)


@pytest.mark.timing
def test_a_bucket_that_is_gone_costs_nothing_until_it_is_back(tmp_path: Path) -> None:
    server = SeaweedServer(tmp_path / "weed")
    try:
        shared, p, q = on_server(server, "gone"), prompt(3), prompt(3)
        with opened(tmp_path / "a", ident=MODEL, **shared) as a:
            a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
            uploaded(a, 3)
        with opened(tmp_path / "b", ident=MODEL, **shared) as b:
            server.stop()
            began = time.monotonic()
            assert b.retrieve(p.refs, [0]) == {}
            assert time.monotonic() - began < 2.5
            began = time.monotonic()
            for _ in range(20):
                assert b.retrieve(p.refs, [0]) == {}
            assert time.monotonic() - began < 1
            assert b.store(q.refs, q.bytes, {0: honest_rows(q.ids)}) == 3
            server.start()
            wait_until(lambda: b.stats()["shared_read_online"] == 1, 60)
            assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))
            uploaded(b, 6)
            assert b.stats()["drops_unshared"] == 0
    finally:
        server.stop()


def test_a_full_bucket_takes_nothing_loses_nothing_and_serves_on(tmp_path: Path) -> None:
    server = SeaweedServer(tmp_path / "weed", volumes=8, volume_mb=1)
    try:
        shared = on_server(server, "full")
        prompts = [prompt(2) for _ in range(60)]  # 400 kB each
        with opened(tmp_path / "a", chunks=16, layers=24, ident=MODEL, store_wait_ms=10_000, **shared) as a:
            kept = []
            for each in prompts:
                rows = {idx: honest_rows(each.ids, idx) for idx in range(24)}
                assert a.store(each.refs, each.bytes, rows) == 2
                kept.append(each)
                if a.stats()["errors_shared_write"]:
                    break
                assert a.flush(20) == 0
                wait_until(lambda: not a.stats()["queue_uploads"] or bool(a.stats()["errors_shared_write"]), 30)
            assert a.stats()["errors_shared_write"] > 0, "the server is not full"
            assert a.flush(20) == 0
            assert a.stats()["shared_write_online"] == 0
            assert a.stats()["queue_uploads"] > 0
            assert a.stats()["drops_unshared"] == 0
            for each in kept:  # on disk, all of it
                a.debug.evict_clean()
                assert torch.equal(a.retrieve(each.refs, [3], None)[3], honest_rows(each.ids, 3))
            in_bucket = a.stats()["shared_chunks"]
        assert in_bucket > 0
        with opened(tmp_path / "b", chunks=16, layers=24, ident=MODEL, **shared) as b:
            assert torch.equal(b.retrieve(kept[0].refs, [3], None)[3], honest_rows(kept[0].ids, 3))
    finally:
        server.stop()


def test_a_store_that_ignores_conditions_is_noticed_and_right_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = S3Server()
    try:
        options = {"endpoint": f"http://127.0.0.1:{server.port}", "access_key_id": "k", "secret_access_key": "s"}
        shared = {"shared_url": f"s3://{BUCKET}/hs", "shared_options": options}
        p = prompt(3)
        q = elsewhere(p)
        with (
            opened(tmp_path / "a", layers=3, ident=MODEL, **shared) as a,
            opened(tmp_path / "b", layers=3, ident=OTHER_RANK, **shared) as b,
        ):
            wait_until(lambda: caplog.text.count("ignores the condition") == 2, 20)
            for store, named, layer_idxs in ((a, p, (0, 1)), (b, q, (1, 2)), (a, p, (2,))):
                store.store(named.refs, named.bytes, {idx: honest_rows(p.ids, idx) for idx in layer_idxs})
                uploaded(store, 3)
            assert a.stats()["shared_puts"] == b.stats()["shared_puts"] == 3  # the last layer was there already
        with opened(tmp_path / "c", layers=3, ident=MODEL, **shared) as c:
            out = c.retrieve(p.refs, [0, 1, 2], None)  # what came second has not replaced what came first
            assert all(torch.equal(out[idx], honest_rows(p.ids, idx)) for idx in range(3))
            assert c.stats()["errors_shared_bad"] == 0
        assert len(chunks_in(shared)) == 3
    finally:
        server.stop()


# -- swapped, on the server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [_flip, _other_model, lambda body: body[:5000]], ids=["a bit", "model", "short"])
def test_a_damaged_object_on_a_server_is_a_miss_too(
    tmp_path: Path, weed: SeaweedServer, damage: Any, request: pytest.FixtureRequest
) -> None:
    shared, p = on_server(weed, request.node.nodeid), prompt(3)
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 3)
    objects, name = objects_of(shared), content_name(p.refs[1].prefix, CHUNK, "").hex()
    (path,) = (found.path for found in objects.list() if name in found.path)
    body = bytes(objects.get(path, 1 << 20).body)
    objects.replace(path, damage(body), None)
    with opened(tmp_path / "b", ident=MODEL, **shared) as b:
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids)[:CHUNK])
        assert b.stats()["errors_shared_bad"] == 1
        assert b.stats()["shared_read_online"] == 1


# -- forks --------------------------------------------------------------------------------------------------------

_FORKED = """
import json, os, sys, time
from tests.support.prompts import *
from tests.support.sharing import MODEL
path, shared = sys.argv[1], json.loads(sys.argv[2])
p = Prompt([token for token in range(3 * CHUNK)])
store = TieredStore(settings(path, **shared), 64 * LAYER_BYTES, MODEL)
assert store.wait_recovered(20)
assert torch.equal(store.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))  # the client has been used
store.drop(p.names)
pid = os.fork()
if not pid:
    began = time.monotonic()
    fine = store.retrieve(p.refs, [0]) == {} and store.stats()["shared_offline"] == 1
    fine &= store.stats()["shared_read_online"] == store.stats()["shared_write_online"] == 0
    store.prefetch(p.refs)
    os._exit(0 if fine and time.monotonic() - began < 1 else 1)
assert os.waitpid(pid, 0)[1] == 0
assert torch.equal(store.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))
"""


def test_a_store_in_a_forked_child_is_offline_at_once_and_goes_on_in_its_parent(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    p = Prompt(list(range(3 * CHUNK)))
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 3)
    command = [sys.executable, "-c", _FORKED, str(tmp_path / "b"), json.dumps(shared)]
    subprocess.run(command, check=True, timeout=240, env={**os.environ, "PYTHONPATH": os.getcwd(), "HS_STRICT": "0"})
