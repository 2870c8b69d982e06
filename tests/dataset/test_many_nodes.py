"""Three nodes to one training set: their chunks by URLs, read by ranges, and by the parts of several machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lmcache_hs_backend import HiddenStateDataset
from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.errors import RowRejected
from lmcache_hs_backend.format.objects import Objects
from tests.support.dataset_capture import AUX, LAST, Writer, ids_of, stacked_of
from tests.support.seaweed import BUCKET, SeaweedServer

pytest.importorskip("obstore")

SYSTEM = ids_of(32, seed=999)
CONVERSATIONS = [SYSTEM + ids_of(40 + seed % 9, seed=seed) for seed in range(24)]


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("weed"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def nodes(weed: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Three nodes with hash seeds of their own: what they have on their disks, and the URLs of their shared tiers."""
    folder = tmp_path_factory.mktemp("nodes")
    urls = [f"file://{folder}/bucket", f"s3://{BUCKET}/one", f"s3://{BUCKET}/two"]
    for node, url in enumerate(urls):
        shared = {"shared_url": url} | ({} if url.startswith("file") else {"shared_options": weed.options()})
        with Writer(folder / f"node{node}", revision="abc", salt=f"node{node}", **shared) as writer:
            for number, ids in enumerate(CONVERSATIONS):
                if number % 3 == node or number % 16 == 0:
                    writer.put(ids)
    return [str(folder / f"node{node}") for node in range(3)], urls


@pytest.fixture(autouse=True)
def _keys(weed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = weed.options()
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a set but its manifest, which names what it was made of."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    return files | {"samples": json.dumps(manifest["samples"]).encode()}


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
    data = HiddenStateDataset(urls[1:])
    mine = [ids for number, ids in enumerate(CONVERSATIONS) if number % 3 or number % 16 == 0]
    assert sorted(data.lengths) == sorted(map(len, mine))
    rows = {tuple(item["input_ids"].tolist()): item for item in map(data.__getitem__, range(len(data)))}
    for ids in mine:
        expected = stacked_of(ids, (*AUX, LAST))
        assert torch.equal(rows[tuple(ids)]["hidden_states"], expected[:, :-1].flatten(1))
        assert torch.equal(rows[tuple(ids)]["last_hidden_states"], expected[:, -1])
    loader: Any = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert {tuple(item["input_ids"].tolist()) for item in loader} == rows.keys()
    forked = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="spawn or forkserver"):
        next(iter(forked))


def test_an_object_that_was_deleted_rejects_its_samples_only(
    weed: SeaweedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{BUCKET}/holes"
    with Writer(tmp_path / "cold", revision="abc", shared_url=url, shared_options=weed.options()) as writer:
        for ids in CONVERSATIONS[:4]:
            writer.put(ids)
    data = HiddenStateDataset(url, cache_gb=0)
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
