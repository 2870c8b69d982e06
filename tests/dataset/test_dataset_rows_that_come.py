"""speculators' live backend finds rows that came since it looked: what one epoch has generated, the next one reads."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.chunk import prefix_digests, token_bytes
from lmcache_hs_backend.format.request_log import RecordWriter
from tests.support.dataset_capture import Writer, ids_of, stacked_of

ROWS = [ids_of(16 + 7 * n, seed=n) for n in range(8)]


class Server:
    """What a vLLM with our connector does with a request: rows to chunks, then a record of it. Counts them."""

    def __init__(self, cold_path: Path) -> None:
        self._writer = Writer(cold_path).__enter__()
        self.directory = self._writer.directory
        self._log = RecordWriter(self.directory, 0o700)
        self.requests = 0

    def generate(self, ids: list[int]) -> None:
        self.requests += 1
        self._writer.put(ids)
        assert self._writer.store.flush(30) == 0
        before = len(ids) - 1 - (len(ids) - 1) % 16
        *parents, prefix = prefix_digests(token_bytes(ids), [before, len(ids)] if before else [len(ids)])
        self._log.append(
            {
                "request_id": f"r{self.requests}", "prompt_tokens": len(ids), "num_tokens": len(ids),
                "prefix": prefix.hex(), "parent_prefix": parents[0].hex() if parents else "",
            }
        )  # fmt: skip

    def close(self) -> None:
        self._log.close()
        self._writer.__exit__()


@pytest.fixture
def server(cold_path: Path) -> Iterator[Server]:
    server = Server(cold_path)
    yield server
    server.close()


def transfer(cold_path: Path, tmp_path: Path, on_missing: str = "generate") -> Any:
    from lmcache_hs_backend.integrations.speculators import TieredBackend

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in ROWS))
    parser = argparse.ArgumentParser()
    TieredBackend.add_train_args(parser)
    args = parser.parse_args(["--hs-cold-path", str(cold_path)])
    args.on_missing = on_missing
    return TieredBackend.from_train_args(args, str(path))


def epoch(live: Any, server: Server) -> list[torch.Tensor]:
    """Each row as speculators' ArrowDataset gets it: what is not there is generated, and used as it came."""
    rows = []
    for number, ids in enumerate(ROWS):
        found = live.get_cached(number)
        if found is None:
            server.generate(ids)
            found = {"hidden_states": stacked_of(ids), "token_ids": torch.tensor(ids)}
        assert found["token_ids"].tolist() == ids
        rows.append(found["hidden_states"].clone())
    return rows


def test_the_second_epoch_generates_nothing_and_is_the_first(server: Server, cold_path: Path, tmp_path: Path) -> None:
    live = transfer(cold_path, tmp_path)  # no row is there yet
    first = epoch(live, server)
    assert server.requests == len(ROWS)
    second, third = epoch(live, server), epoch(live, server)
    assert server.requests == len(ROWS)
    assert live.looks == 2  # at the start, and once for all that came
    for one, two, three in zip(first, second, third, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_a_worker_that_is_older_than_the_rows_finds_them(server: Server, cold_path: Path, tmp_path: Path) -> None:
    live = transfer(cold_path, tmp_path)
    other = pickle.loads(pickle.dumps(live))
    epoch(live, server)
    epoch(other, server)
    assert server.requests == len(ROWS)


def test_a_second_process_on_the_same_cold_path_is_followed_too(cold_path: Path, tmp_path: Path) -> None:
    with Writer(cold_path) as first:
        server = Server(cold_path)
        assert server.directory == f"{first.directory}/p1"
        live = transfer(cold_path, tmp_path)
        epoch(live, server)
        epoch(live, server)
        server.close()
        assert server.requests == len(ROWS)


def test_a_cold_path_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    cold_path = tmp_path / "later"
    live = transfer(cold_path, tmp_path)
    assert live.get_cached(0) is None
    server = Server(cold_path)
    epoch(live, server)
    epoch(live, server)
    server.close()
    assert server.requests == len(ROWS)


@pytest.mark.parametrize("on_missing", ["raise", "skip", "warn"])
def test_where_nothing_is_generated_an_empty_cold_path_is_an_error(tmp_path: Path, on_missing: str) -> None:
    with pytest.raises(SystemExit, match="is not a directory"):
        transfer(tmp_path / "later", tmp_path, on_missing)


def test_rows_that_went_are_generated_again_and_found_again(server: Server, cold_path: Path, tmp_path: Path) -> None:
    live = transfer(cold_path, tmp_path)
    first = epoch(live, server)
    epoch(live, server)
    server.close()
    for folder in cold_path.glob("*/[0-9a-f][0-9a-f]"):
        shutil.rmtree(folder)
    again = Server(cold_path)
    epoch(live, again)
    assert again.requests == len(ROWS)
    last = epoch(live, again)
    assert again.requests == len(ROWS)
    assert all(torch.equal(one, two) for one, two in zip(first, last, strict=True))
    again.close()


def test_a_row_that_nobody_asks_a_server_for_costs_no_look(server: Server, cold_path: Path, tmp_path: Path) -> None:
    server.generate(ROWS[0])
    live = transfer(cold_path, tmp_path)
    for _ in range(3):
        assert live.get_cached(0) is not None
        assert live.get_cached(1) is None
    server.generate(ids_of(40, seed=99))  # a request that is no row of the dataset
    assert live.get_cached(1) is None
    assert live.looks == 1
