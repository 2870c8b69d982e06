"""Two stores with other ranks, hashes and disks, and one bucket: a directory, or a real S3-compatible server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lmcache_hs_backend import metrics
from lmcache_hs_backend.chunk import ChunkMeta, Presence
from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.objects import Answer, Objects, ObjectsError
from lmcache_hs_backend.format.reader import ColdTierReader, NotAColdPath
from lmcache_hs_backend.format.shared_names import content_name, shared_meta, tags
from tests.support.prompts import CHUNK, Prompt, honest_rows, opened, prompt, settings, tokens
from tests.support.seaweed import BUCKET, SeaweedServer
from tests.support.sharing import MODEL, OTHER_RANK, chunks_in, elsewhere, objects_of, uploaded
from tests.support.threads import side_by_side
from tests.support.waiting import wait_until

pytest.importorskip("obstore")


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

    side_by_side(write, bodies)
    assert answers.count(Answer.OK) == 1
    assert answers.count(Answer.EXISTS) == 15
    assert bytes(objects.get("x/y.safetensors", 1 << 20).body) in bodies


def test_a_directory_of_objects_is_read_like_a_cold_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NotAColdPath, match=r"s3://bucket/prefix.*cannot be listed"):
        ColdTierReader("s3://bucket/prefix")
    with pytest.raises(NotAColdPath, match="s3://, gs://, az:// or file:///"):
        ColdTierReader("https://bucket/prefix")


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


def test_prefetch_brings_rows_before_they_are_asked_for_and_coverage_counts_them(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    p, kv = prompt(4), [Presence.GONE]
    with opened(tmp_path / "a", ident=MODEL, **shared) as a:
        a.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
        uploaded(a, 4)
    with opened(tmp_path / "b", ident=MODEL, ask=lambda keys, _: kv * len(keys), **shared) as b:
        b.prefetch(p.refs, [0])
        assert b.covered(p.names, [0]) == 0
        kv[0] = Presence.PRESENT
        b.prefetch(p.refs, [0])
        wait_until(lambda: b.covered(p.names, [0]) == 4, 30)
        assert b.stats()["shared_hits"] == 4
        assert b.stats()["shared_timeouts"] == 0
        assert torch.equal(b.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))
        assert b.stats()["shared_hits"] == 4


def test_keys_and_the_endpoint_may_come_from_the_usual_variables(
    tmp_path: Path, weed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = weed.options()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    shared = {"shared_url": f"s3://{BUCKET}/variables", "shared_options": {"endpoint": options["endpoint"]}}
    p = prompt(2)
    for node in ("a", "b"):
        with opened(tmp_path / node, ident=MODEL, **shared) as store:
            if node == "a":
                store.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
                uploaded(store, 2)
            else:
                assert torch.equal(store.retrieve(p.refs, [0], None)[0], honest_rows(p.ids))


def test_the_clouds_urls_are_taken() -> None:
    """Prepared only: there is no such server here."""
    for url, options in (
        ("gs://bucket/prefix", {"skip_signature": True}),
        ("az://container/prefix", {"account_name": "account", "skip_signature": True}),
    ):
        assert Objects(url, options).url == url


def test_alert_rules_ask_for_metrics_that_there_are() -> None:
    rules = yaml.safe_load((Path(__file__).parents[2] / "configs/shared_tier_alerts.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 6
    kinds = ((metrics.COUNTERS, "_total"), (metrics.GAUGES, ""), (metrics.HISTOGRAMS, "_bucket"))
    known = {metrics.PREFIX + name + end for names, end in kinds for name in names}
    for rule in alerts:
        asked = set(re.findall(r"lmcache:hs_\w+", rule["expr"]))
        assert asked, rule["alert"]
        assert asked <= known, rule["alert"]
