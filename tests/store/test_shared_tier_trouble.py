"""A bucket of the shared tier in trouble: no wrong row, no call beyond its bound, everything counted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from lmcache_hs_backend.format.objects import Answer, Objects
from lmcache_hs_backend.format.shared_names import content_name
from tests.support.prompts import CHUNK, honest_rows, opened, prompt
from tests.support.seaweed import SeaweedServer
from tests.support.sharing import MODEL, on_server, uploaded
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
