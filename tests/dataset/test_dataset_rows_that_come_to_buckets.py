"""speculators' live backend finds rows that come to a shared tier after it looked: by listings, a few, at intervals."""

from __future__ import annotations

import argparse
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.format.objects import Found, Objects, Reply
from tests.support.dataset_capture import Writer, ids_of, stacked_of
from tests.support.seaweed import BUCKET, SeaweedServer, reader_threads
from tests.support.waiting import wait_until

pytest.importorskip("obstore")

ROWS = [ids_of(16 + 7 * n, seed=n) for n in range(8)]
#: So often is listed here.
SOON = 0.05


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("weed"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _environment(weed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket's keys; and whoever has read in this process has closed what it read."""
    for name, value in (weed.variables() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    yield
    wait_until(lambda: not reader_threads(), 60)


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}" if request.param == "s3" else f"file://{tmp_path}/bucket"


def put(url: str, disk: Path, *rows: list[int]) -> None:
    """What a node does: rows to its disk, and from there to the shared tier. Their records come minutes later."""
    with Writer(disk, revision="abc", shared_url=url) as writer:
        for ids in rows:
            writer.put(ids)


def transfer(tmp_path: Path, *where: str, every: float = SOON, on_missing: str = "generate") -> Any:
    from lmcache_hs_backend.integrations.speculators import TieredBackend

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in ROWS))
    parser = argparse.ArgumentParser()
    TieredBackend.add_train_args(parser)
    args = parser.parse_args(["--hs-cold-path", ":".join(where), "--hs-follow-sec", str(every)])
    args.on_missing = on_missing
    return TieredBackend.from_train_args(args, str(path))


def found(live: Any) -> list[int]:
    """The rows that are there, each equal to what was stored."""
    rows = []
    for number, ids in enumerate(ROWS):
        cached = live.get_cached(number)
        if cached is not None:
            assert cached["token_ids"].tolist() == ids
            assert torch.equal(cached["hidden_states"], stacked_of(ids))
            rows.append(number)
    return rows


def test_rows_that_come_to_a_shared_tier_are_found(url: str, tmp_path: Path) -> None:
    put(url, tmp_path / "node1", *ROWS[:3])
    live = transfer(tmp_path, url, on_missing="skip")
    assert found(live) == [0, 1, 2]
    put(url, tmp_path / "node1", ROWS[3], ROWS[4])
    wait_until(lambda: found(live) == [0, 1, 2, 3, 4])
    put(url, tmp_path / "node2", ROWS[7])
    other = pickle.loads(pickle.dumps(live))  # as a DataLoader's worker has it
    wait_until(lambda: found(other) == [0, 1, 2, 3, 4, 7])
    wait_until(lambda: found(live) == [0, 1, 2, 3, 4, 7])
    live.close()
    other.close()


def test_an_empty_shared_tier_is_waited_for(url: str, tmp_path: Path) -> None:
    live = transfer(tmp_path, url)
    assert found(live) == []
    put(url, tmp_path / "node", *ROWS)
    wait_until(lambda: found(live) == [*range(8)])
    live.close()


def test_a_disk_and_a_bucket_are_followed_together(url: str, tmp_path: Path) -> None:
    with Writer(tmp_path / "own", revision="abc") as writer:
        writer.put(ROWS[0])
    put(url, tmp_path / "node", ROWS[1])
    live = transfer(tmp_path, str(tmp_path / "own"), url)
    assert found(live) == [0, 1]
    put(url, tmp_path / "node", ROWS[2])
    wait_until(lambda: found(live) == [0, 1, 2])
    live.close()


def test_the_rows_of_a_disk_are_there_while_the_bucket_beside_it_is_empty(url: str, tmp_path: Path) -> None:
    with Writer(tmp_path / "own", revision="abc") as writer:
        writer.put(ROWS[0])
    live = transfer(tmp_path, str(tmp_path / "own"), url, str(tmp_path / "later"))
    assert found(live) == [0]
    put(url, tmp_path / "node", ROWS[1])
    wait_until(lambda: found(live) == [0, 1])
    live.close()


def test_without_news_nothing_is_looked_through_and_between_listings_nothing_is_asked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(url, tmp_path / "node", ROWS[0])
    listings = 0

    def counted(self: Objects, folder: str = "") -> Iterator[Found]:
        nonlocal listings
        listings += 1
        return listing(self, folder)

    listing = Objects.list
    monkeypatch.setattr(Objects, "list", counted)
    live = transfer(tmp_path, url, every=3600)
    before = listings
    put(url, tmp_path / "node", ROWS[1])
    asked = listings - before  # by the node
    for _ in range(20):
        assert found(live) == [0]
    assert listings == before + asked
    assert live.looks == 1
    live.close()
    never = transfer(tmp_path, url, every=0)
    assert found(never) == [0, 1]
    never.close()


def test_only_new_headers_are_fetched(weed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    put(url, tmp_path / "node", *ROWS[:7])
    asked: Counter[str] = Counter()
    counting = True
    get_range = Objects.get_range

    def counted(self: Objects, path: str, begin: int, end: int) -> Reply:
        if counting and begin == 0:
            asked[path] += 1
        return get_range(self, path, begin, end)

    monkeypatch.setattr(Objects, "get_range", counted)
    live = transfer(tmp_path, url)
    assert len(asked) == sum(-(-len(ids) // 16) for ids in ROWS[:7])
    assert live.get_cached(7) is None
    counting = False
    put(url, tmp_path / "node", ROWS[7])
    asked.clear()
    counting = True
    wait_until(lambda: live.get_cached(7) is not None)
    assert live.looks == 2
    assert len(asked) == -(-len(ROWS[7]) // 16)
    live.close()


def test_a_bucket_that_does_not_answer_ends_no_training(
    weed: SeaweedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    put(url, tmp_path / "node", *ROWS[:2])
    live = transfer(tmp_path, url)
    assert found(live) == [0, 1]
    weed.stop()
    try:
        caplog.clear()
        wait_until(lambda: live.get_cached(5) is None and "new rows cannot be looked for" in caplog.text)
    finally:
        weed.start()
    put(url, tmp_path / "node", ROWS[5])
    wait_until(lambda: found(live) == [0, 1, 5], 60)
    live.close()


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_wrong_interval_is_one_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(SystemExit, match=f"--hs-follow-sec is {value}"):
        transfer(tmp_path, "file:///nowhere", every=float(value))
