"""The cold path as a torch Dataset, and as speculators' backend: rows without files in between."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.cli.train import main as train
from lmcache_hs_backend.dataset.errors import RowRejected
from lmcache_hs_backend.dataset.final_norm import FinalNorm
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.dataset.torch import HiddenStateDataset
from tests.support.connectors import hs_connectors
from tests.support.dataset_capture import AUX, HIDDEN, LAST, Writer, ids_of, rows_of, save_norm, stacked_of

FAMILIES = [[ids_of(48, seed=f) + ids_of(9, seed=100 * f + m) for m in range(4)] for f in range(1, 6)]
PROMPTS = [prompt for family in FAMILIES for prompt in family]


def integration() -> Any:
    return hs_connectors("lmcache_hs_backend.integrations.speculators")


@pytest.fixture
def stored(cold_path: Path) -> Path:
    with Writer(cold_path) as writer:
        for member in range(4):
            for family in FAMILIES:
                writer.put(family[member])
    return cold_path


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    masks = [[0] * 40 + [1] * 17 for _ in PROMPTS]
    lines = [json.dumps({"input_ids": i, "loss_mask": m}) for i, m in zip(PROMPTS, masks, strict=True)]
    path.write_text("\n".join(lines))
    return path


def test_items_are_the_stored_rows(stored: Path) -> None:
    data = HiddenStateDataset(str(stored))
    seen = []
    for item in data:  # type: ignore[attr-defined]
        ids = item["input_ids"].tolist()
        seen.append(ids)
        assert torch.equal(item["hidden_states"], stacked_of(ids, AUX).flatten(1))
        assert torch.equal(item["last_hidden_states"], rows_of(ids, LAST))
        assert item["loss_mask"].tolist() == [1] * len(ids)
        assert item["position_ids"].tolist() == list(range(len(ids)))
    assert sorted(seen) == sorted(PROMPTS)
    assert data.lengths == [57] * 20


def test_a_prepared_dataset_gives_order_and_masks(stored: Path, prepared: Path) -> None:
    data = HiddenStateDataset(str(stored), sequences=f"dataset:{prepared}", layers=[4], last_layer=LAST)
    assert [data[number]["input_ids"].tolist() for number in range(len(data))] == PROMPTS
    item = data[3]
    assert item["loss_mask"].tolist() == [0] * 40 + [1] * 17
    assert item["hidden_states"].shape == (57, HIDDEN)


def test_the_last_layer_alone_is_enough(stored: Path) -> None:
    item = HiddenStateDataset(str(stored), layers=[], last_layer=LAST)[0]
    assert item["hidden_states"].shape == (57, 0)
    assert torch.equal(item["last_hidden_states"], rows_of(item["input_ids"].tolist(), LAST))


def test_with_a_final_norm_the_last_layer_is_normed(stored: Path, tmp_path: Path) -> None:
    model = str(save_norm(tmp_path / "model"))
    data = HiddenStateDataset(str(stored), final_norm=model)
    item = data[0]
    assert data.normed
    expected = FinalNorm.load(model)(rows_of(item["input_ids"].tolist(), LAST)).bfloat16()
    assert torch.equal(item["last_hidden_states"], expected)


@pytest.mark.parametrize("source", ["leaves", "dataset"])
def test_spawned_workers_read_the_same(stored: Path, prepared: Path, source: str) -> None:
    data = HiddenStateDataset(str(stored), sequences=source if source == "leaves" else f"dataset:{prepared}")
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for number, item in enumerate(loader):
        assert torch.equal(item["hidden_states"], data[number]["hidden_states"])
        assert torch.equal(item["loss_mask"], data[number]["loss_mask"])


def test_the_nearby_shuffle_visits_all_and_keeps_families_together(stored: Path) -> None:
    data = HiddenStateDataset(str(stored))
    sampler = data.nearby(block=4, seed=1)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    families = [tuple(data[number]["input_ids"][:48].tolist()) for number in first]
    assert all(len({*families[at : at + 4]}) == 1 for at in range(0, 20, 4))


def test_a_vanished_chunk_is_an_error_that_says_so(stored: Path) -> None:
    data = HiddenStateDataset(str(stored))
    for chunk in ChunkIndex([str(stored)]).chunks:
        os.unlink(chunk.files[0].path)
    with pytest.raises(RowRejected, match="was deleted"):
        data[0]


# -- speculators' backend --------------------------------------------------------------------------------


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    hs_connectors().HiddenStatesBackend.registry[integration().NAME].add_train_args(parser)
    return parser.parse_args(given)


def test_the_backend_serves_what_the_files_would(stored: Path, prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(stored), "--out", str(out), "--format", "speculators", "--sequences", f"dataset:{prepared}", "-q"]
    assert main(command) == 0
    files = hs_connectors().FileTransfer(out / "hidden_states")
    live = integration().TieredBackend.from_train_args(options("--hs-cold-path", str(stored)), str(out))
    live = pickle.loads(pickle.dumps(live))
    for row in range(len(PROMPTS)):
        one, two = files.get_cached(row), live.get_cached(row)
        assert one is not None
        assert two is not None
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert live.get_cached(len(PROMPTS)) is None


def test_a_row_that_is_covered_in_part_counts_as_missing(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [PROMPTS[0], PROMPTS[0][:16] + ids_of(16, seed=77)]
    path.write_text("\n".join(json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) for row in rows))
    live = integration().TieredBackend.from_train_args(options("--hs-cold-path", str(stored)), str(path))
    assert live.get_cached(0) is not None
    assert live.get_cached(1) is None


def test_a_row_that_fails_its_checks_counts_as_missing_and_is_logged(
    stored: Path, prepared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = integration().TieredBackend.from_train_args(options("--hs-cold-path", str(stored)), str(prepared))
    for chunk in ChunkIndex([str(stored)]).chunks:
        os.unlink(chunk.files[0].path)
    assert live.get_cached(0) is None
    assert "row 0: gone" in caplog.text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "needs --hs-cold-path DIR"),
        (["--hs-cold-path", "/nowhere"], "is not a directory"),
        (["--hs-cold-path", "COLD", "--hs-layers", "two"], "--hs-layers is 'two'"),
        (["--hs-cold-path", "COLD", "--hs-layers", "2,9", "--hs-last-layer", "8"], "layer 9 was not captured"),
    ],
)
def test_the_backends_errors_are_one_line(stored: Path, prepared: Path, given: list[str], text: str) -> None:
    given = [str(stored) if word == "COLD" else word for word in given]
    with pytest.raises(SystemExit, match=text):
        integration().TieredBackend.from_train_args(options(*given), str(prepared))


def test_files_of_a_request_are_read_and_removed_as_speculators_does(
    stored: Path, prepared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main([str(stored), "--out", str(out), "--format", "speculators", "-q", "--limit", "1"]) == 0
    path = out / "hidden_states" / "hs_0.safetensors"
    live = integration().TieredBackend.from_train_args(options("--hs-cold-path", str(stored)), str(prepared))
    sample = live.get_generated({"hidden_states_path": str(path)})
    assert sample is not None
    assert torch.equal(sample["hidden_states"], stacked_of(sample["token_ids"].tolist()))
    live.delete(str(path))
    assert not path.exists()


def test_without_speculators_the_launcher_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "speculators.cli", None)
    assert train(["--help"]) == 1
    assert "pip install speculators" in capsys.readouterr().err
