"""Three nodes to one training set: their chunks by URLs, read by ranges, and by the parts of several machines."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lmcache_hs_backend import HiddenStateDataset
from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.errors import RowRejected, Unreachable
from lmcache_hs_backend.dataset.journal import STATE
from lmcache_hs_backend.format.objects import Objects
from tests.support.dataset_capture import AUX, LAST, Writer, ids_of, stacked_of
from tests.support.ray_cluster import ray_cluster
from tests.support.seaweed import BUCKET, SeaweedServer, reader_threads
from tests.support.waiting import wait_until

pytest.importorskip("obstore")

SYSTEM = ids_of(32, seed=999)
CONVERSATIONS = [SYSTEM + ids_of(40 + seed % 9, seed=seed) for seed in range(24)]


def fill_nodes(folder: Path, urls: list[str], weed: SeaweedServer, conversations: list[list[int]]) -> None:
    """Store them on ``folder/node0``, …, each with a shared tier: most on one node, every sixteenth on all."""
    for node, url in enumerate(urls):
        shared = {"shared_url": url} | ({} if url.startswith("file") else {"shared_options": weed.options()})
        with Writer(folder / f"node{node}", revision="abc", salt=f"node{node}", **shared) as writer:
            for number, ids in enumerate(conversations):
                if number % 3 == node or number % 16 == 0:
                    writer.put(ids)


@pytest.fixture(scope="module")
def nodes(weed: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Three nodes with hash seeds of their own: what they have on their disks, and the URLs of their shared tiers."""
    folder = tmp_path_factory.mktemp("nodes")
    urls = [f"file://{folder}/bucket", f"s3://{BUCKET}/one", f"s3://{BUCKET}/two"]
    fill_nodes(folder, urls, weed, CONVERSATIONS)
    return [str(folder / f"node{node}") for node in range(3)], urls


@pytest.fixture(autouse=True)
def _keys(weed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket's keys. Whoever has read in this process has closed what it read, so no thread is left."""
    for name, value in (weed.variables() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    yield
    wait_until(lambda: not reader_threads(), 60)


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a set but its manifest, which names what it was made of."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    return files | {"samples": json.dumps(manifest["samples"]).encode()}


@pytest.mark.slow
def test_400_conversations_of_three_nodes_with_one_system_prompt(weed: SeaweedServer, tmp_path: Path) -> None:
    """From their disks, from three URLs, by 16 parts, and on a Ray cluster that loses a node: the same bytes."""
    conversations = [SYSTEM + ids_of(24 + seed % 9, seed=2000 + seed) for seed in range(400)]
    urls = [f"file://{tmp_path}/bucket", f"s3://{BUCKET}/many-one", f"s3://{BUCKET}/many-two"]
    fill_nodes(tmp_path, urls, weed, conversations)
    options = ["--format", "speculators", "-q", "--val-fraction", "0.1", "--out"]
    disks = [str(tmp_path / f"node{node}") for node in range(3)]
    assert main([*disks, *options, str(tmp_path / "disks")]) == 0
    expected = contents(tmp_path / "disks")
    assert sum(name.startswith("hidden_states/") for name in expected) == 400
    by_parts = [*urls, *options, str(tmp_path / "parts")]
    assert main([*by_parts, "--plan"]) == 0
    for number in range(16, 0, -1):
        assert main([*by_parts, "--part", f"{number}/16"]) == 0
    assert main([*by_parts, "--finish"]) == 0
    assert contents(tmp_path / "parts") == expected
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    out = tmp_path / "ray"
    with ray_cluster(3) as (address, nodes, remove):
        command = [sys.executable, "-m", "lmcache_hs_backend.cli.extract", *urls, *options, str(out)]
        command += ["--ray", address, "--ray-parts", "16"]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
        logs = out / STATE / "parts"
        wait_until(
            lambda: (
                sum(path.read_bytes().count(b"\n") for path in logs.glob("*.jsonl")) >= 60 or process.poll() is not None
            ),
            300,
        )
        assert process.poll() is None, "it ended before a node could be lost"
        remove(nodes[1])
        assert process.wait(400) == 0
    assert contents(out) == expected


def test_urls_give_the_bytes_of_the_disks(nodes: tuple[list[str], list[str]], tmp_path: Path) -> None:
    paths, urls = nodes
    assert main([*paths, "--out", str(tmp_path / "disks"), "--format", "speculators", "-q"]) == 0
    assert main([*urls, "--out", str(tmp_path / "urls"), "--format", "speculators", "-q"]) == 0
    assert contents(tmp_path / "urls") == contents(tmp_path / "disks")
    assert len(contents(tmp_path / "urls")) > len(CONVERSATIONS)
    text = (tmp_path / "urls" / "manifest.json").read_text()
    assert "testsecret" not in text
    assert main([*urls, paths[0], "--out", str(tmp_path / "both"), "--format", "speculators", "-q"]) == 0
    assert contents(tmp_path / "both") == contents(tmp_path / "disks")


def test_only_shared_chunks_are_kept_and_only_so_many_bytes(nodes: tuple[list[str], list[str]], tmp_path: Path) -> None:
    _, urls = nodes
    arguments = [*urls[1:], "--format", "modelopt", "-q", "--cache-dir", str(tmp_path / "kept")]
    assert main([*arguments, "--out", str(tmp_path / "one"), "--cache-size", "1MB"]) == 0
    kept = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert len(kept) == len(SYSTEM) // 16, "the chunks of the system prompt, each from one node"
    kept[0].write_bytes(b"damaged" + kept[0].read_bytes()[7:])
    assert main([*arguments, "--out", str(tmp_path / "two"), "--cache-size", "1MB"]) == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    shutil.rmtree(tmp_path / "kept")
    assert main([*arguments, "--out", str(tmp_path / "three"), "--cache-size", "0"]) == 0
    assert not (tmp_path / "kept").exists()


def test_a_dataset_reads_urls_in_spawned_workers_and_says_why_not_in_forked_ones(
    nodes: tuple[list[str], list[str]],
) -> None:
    _, urls = nodes
    with HiddenStateDataset(urls[1:]) as data:
        mine = [ids for number, ids in enumerate(CONVERSATIONS) if number % 3 or number % 16 == 0]
        assert sorted(data.lengths) == sorted(map(len, mine))
        rows = {tuple(item["input_ids"].tolist()): item for item in map(data.__getitem__, range(len(data)))}
        for ids in mine:
            expected = stacked_of(ids, (*AUX, LAST))
            assert torch.equal(rows[tuple(ids)]["hidden_states"], expected[:, :-1].flatten(1))
            assert torch.equal(rows[tuple(ids)]["last_hidden_states"], expected[:, -1])
        for method in ("spawn", "forkserver"):
            loader: Any = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=method)
            assert {tuple(item["input_ids"].tolist()) for item in loader} == rows.keys()
        forked = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(Unreachable, match="spawn or forkserver"):
            next(iter(forked))
    wait_until(lambda: not reader_threads())


def test_an_object_that_was_deleted_rejects_its_samples_only(
    weed: SeaweedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{BUCKET}/holes"
    with Writer(tmp_path / "cold", revision="abc", shared_url=url, shared_options=weed.options()) as writer:
        for ids in CONVERSATIONS[:4]:
            writer.put(ids)
    with HiddenStateDataset(url, cache_gb=0) as data:
        last = {chunk.prefix: chunk for chunk in data.plan.index.chunks if chunk.end in map(len, CONVERSATIONS[:4])}
        victim = next(iter(last.values())).files[0].path.removeprefix(f"{url}/")
        Objects(url, weed.options()).delete([victim])
        outcomes = []
        for number in range(len(data)):
            try:
                data[number]
                outcomes.append("read")
            except RowRejected as rejected:
                outcomes.append(rejected.reason)
        assert sorted(outcomes) == ["gone", "read", "read", "read"]


def test_a_bucket_that_goes_away_rejects_nothing_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = SeaweedServer(tmp_path / "weed")
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.options()["endpoint"])
        url = f"s3://{BUCKET}/away"
        with Writer(tmp_path / "cold", revision="abc", shared_url=url, shared_options=server.options()) as writer:
            for ids in CONVERSATIONS[:6]:
                writer.put(ids)
        one = [url, "--format", "modelopt", "-q", "--cache-size", "0", "--out"]
        assert main([*one, str(tmp_path / "one")]) == 0
        assert main([*one, str(tmp_path / "many"), "--plan"]) == 0
        assert main([*one, str(tmp_path / "many"), "--part", "1/2"]) == 0
        server.stop()
        assert main([*one, str(tmp_path / "many"), "--part", "2/2"]) == 1
        assert "run the same part again" in capsys.readouterr().err
        assert main([*one, str(tmp_path / "other")]) == 1
        assert not (tmp_path / "other").exists()
        server.start()
        assert main([*one, str(tmp_path / "many"), "--part", "2/2"]) == 0
        assert main([*one, str(tmp_path / "many"), "--finish"]) == 0
        assert contents(tmp_path / "many") == contents(tmp_path / "one")
    finally:
        server.stop()


def test_speculators_trains_from_urls_what_it_would_from_disks(
    nodes: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("hs_connectors")
    from lmcache_hs_backend.integrations.speculators import TieredBackend

    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in CONVERSATIONS)
    )
    parser = argparse.ArgumentParser()
    TieredBackend.add_train_args(parser)
    disks, urls = (
        TieredBackend.from_train_args(parser.parse_args(["--hs-cold-path", os.pathsep.join(paths)]), str(rows))
        for paths in nodes
    )
    urls = pickle.loads(pickle.dumps(urls))
    for row, ids in enumerate(CONVERSATIONS):
        one, two = disks.get_cached(row), urls.get_cached(row)
        assert one is not None
        assert two is not None
        assert two["token_ids"].tolist() == ids
        assert all(torch.equal(one[key], two[key]) for key in one)
    urls.close()
    wait_until(lambda: not reader_threads())
    again = urls.get_cached(0)
    assert again is not None
    assert again["token_ids"].tolist() == CONVERSATIONS[0], "closed readers read on, by new threads"
    urls.close()
    wrong = parser.parse_args(["--hs-cold-path", nodes[1][1], "--hs-shared-options", "{"])
    with pytest.raises(SystemExit, match="--hs-shared-options is"):
        TieredBackend.from_train_args(wrong, str(rows))
