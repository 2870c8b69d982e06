"""Sets for one algorithm or another: SpecForge's own readers take each; TorchSpec's layout is as it has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.formats import FORMATS, format_of
from lmcache_hs_backend.dataset.formats.torchspec import packed
from tests.support.dataset_capture import (
    AUX,
    HIDDEN,
    LAST,
    Writer,
    aux_of,
    ids_of,
    normed,
    rows_of,
    save_norm,
    store_prompts,
)
from tests.support.extracting import extract

PROMPTS = [ids_of(50), ids_of(32) + ids_of(30, seed=1), ids_of(10, seed=2), ids_of(90, seed=3)]


@pytest.fixture
def stored(cold_path: Path) -> Path:
    return store_prompts(cold_path, PROMPTS)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_norm(tmp_path / "model"))


def specforge_batches(out: Path, algorithm: str) -> list[dict[str, torch.Tensor]]:
    """Everything in a folder, through the reader, normaliser and collator that SpecForge registers for an algorithm."""
    import importlib

    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    registration = importlib.import_module(f"specforge.algorithms.{algorithm}.providers").create_registration()
    (provider,) = registration.providers.offline
    reader = provider.build_reader(str(out), run_id="test", ttt_length=7, max_len=4096)
    reader.validate_files = True
    loader = FeatureDataLoader(
        LocalFeatureStore(), refs=reader.read(), batch_size=1, strategy=algorithm,
        per_sample_transform=provider.build_normalizer(4096), collate_fn=provider.build_collator(),
    )  # fmt: skip
    return [batch.tensors for batch in loader]


@pytest.mark.parametrize("algorithm", ["dflash", "domino", "dspark"])
def test_specforges_own_readers_take_every_algorithm(stored: Path, model: str, tmp_path: Path, algorithm: str) -> None:
    pytest.importorskip("specforge", reason="scripts/test.sh installs it")
    options = ["--final-norm", model] if algorithm == "dspark" else []
    manifest = extract(stored, tmp_path / "out", "--format", "specforge", "--algorithm", algorithm, *options)
    assert manifest["algorithm"] == algorithm
    batches = specforge_batches(tmp_path / "out", algorithm)
    found = {tuple(batch["input_ids"].flatten().tolist()): batch for batch in batches}
    assert len(batches) == len(found) == len(PROMPTS)
    for ids in PROMPTS:
        batch = found[tuple(ids)]
        assert torch.equal(batch["hidden_states"], aux_of(ids).unsqueeze(0))
        assert batch["loss_mask"].tolist() == [[1] * len(ids)]
        if algorithm == "dspark":
            assert torch.equal(batch["target_last_hidden_states"], normed(model, ids).unsqueeze(0))
        else:
            assert set(batch) == {"input_ids", "loss_mask", "hidden_states"}


def test_a_set_for_another_algorithm_is_not_taken(stored: Path, model: str, tmp_path: Path) -> None:
    pytest.importorskip("specforge", reason="scripts/test.sh installs it")
    extract(stored, tmp_path / "out", "--format", "specforge", "--final-norm", model)
    with pytest.raises(KeyError, match="hidden_states"):
        specforge_batches(tmp_path / "out", "dflash")


def test_samples_without_two_trained_tokens_in_a_row_are_rejected(stored: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    masks = [[n % 2 for n in range(50)], [0] * 60 + [1, 1]]
    rows = [{"input_ids": ids, "loss_mask": mask} for ids, mask in zip(PROMPTS, masks, strict=False)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--format", "specforge", "--algorithm", "dflash", "--sequences", f"dataset:{path}"]
    assert main([str(stored), "--out", str(tmp_path / "dry"), *options, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "would write 1 rows, 62 tokens" in shown.out
    assert "1 samples would be rejected (1 no_loss)" in shown.err
    manifest = extract(stored, tmp_path / "out", *options)
    assert (manifest["samples_published"], manifest["rejected"]) == (1, {"no_loss": 1})


def test_the_last_layer_need_not_be_there_for_those_that_do_not_read_it(
    cold_path: Path, tmp_path: Path, model: str, capsys: Any
) -> None:
    with Writer(cold_path) as writer:
        writer.put(PROMPTS[0], slots=AUX)
    options = ["--format", "specforge", "--algorithm", "dflash"]
    manifest = extract(cold_path, tmp_path / "out", *options)
    assert manifest["layers"]["slots"] == list(AUX)
    assert (manifest["layers"]["last"], manifest["last_layer"]) == (None, "none")
    assert main([str(cold_path), "--out", str(tmp_path / "a"), *options, "--final-norm", model]) == 1
    assert "stores no last layer to norm or check" in capsys.readouterr().err
    assert main([str(cold_path), "--out", str(tmp_path / "b"), *options, "--last-layer", "5"]) == 1
    assert "--last-layer 5: this format stores no last layer" in capsys.readouterr().err


def test_an_interrupted_set_without_a_last_layer_goes_on(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--format", "torchspec", "--algorithm", "dflash"]
    extract(stored, tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole", out)
    assert main([str(stored), "--out", str(out), *options, "--resume", "-q"]) == 0  # is complete
    assert main([str(stored), "--out", str(tmp_path / "new"), *options, "--resume", "-q"]) == 0
    same = [(folder / "manifest.jsonl").read_bytes() for folder in (tmp_path / "whole", out, tmp_path / "new")]
    assert same[0] == same[1] == same[2]


# -- TorchSpec -------------------------------------------------------------------------------------------


def torchspec_samples(out: Path) -> list[tuple[str, dict[str, Any]]]:
    """As TorchSpec's ``offline/dataset.py`` reads a folder: the head, each line, each file that it names."""
    assert json.loads((out / "dataset.json").read_text())["version"] == 1
    found, seen = [], set()
    for line in (out / "manifest.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["split"] in ("train", "eval")
        assert row["data_id"] not in seen
        seen.add(row["data_id"])
        record = torch.load(out / row["file"], map_location="cpu", weights_only=True, mmap=True)
        assert record["data_id"] == row["data_id"]
        found.append((row["split"], record))
    return found


def unpacked(text: str) -> list[int]:
    mask: list[int] = []
    for number, length in enumerate(text.split(",")):
        mask += [number % 2] * int(length)
    return mask


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "domino", "dspark"])
def test_torchspecs_folder(stored: Path, model: str, tmp_path: Path, algorithm: str) -> None:
    out = tmp_path / "out"
    options = ["--final-norm", model] if algorithm == "dspark" else []
    extract(stored, out, "--format", "torchspec", "--algorithm", algorithm, "--val-fraction", "0.25", *options)
    prenorm = json.loads((out / "dataset.json").read_text())["last_hidden_states_prenorm"]
    samples = torchspec_samples(out)
    assert [split for split, _ in samples] == ["train"] * 3 + ["eval"]
    found = {tuple(record["input_ids"][0].tolist()): record for _, record in samples}
    for ids in PROMPTS:
        record = found[tuple(ids)]
        assert record["input_ids"].shape == (1, len(ids))
        assert torch.equal(record["hidden_states"], aux_of(ids).unsqueeze(0))
        assert unpacked(record["packed_loss_mask"]) == [1] * len(ids)
        if algorithm in ("dflash", "domino"):
            assert "last_hidden_states" not in record
        else:
            expected = rows_of(ids, LAST) if algorithm == "eagle3" else normed(model, ids)
            assert prenorm == (algorithm == "eagle3")
            assert torch.equal(record["last_hidden_states"], expected.unsqueeze(0))
    assert record["hidden_states"].shape[2] == len(AUX) * HIDDEN


@pytest.mark.parametrize(
    ("mask", "text"), [([0, 0, 1, 1, 1, 0], "2,3,1"), ([1, 0, 1], "0,1,1,1"), ([1], "0,1"), ([0, 1], "1,1")]
)
def test_a_mask_is_packed_as_its_reader_unpacks_it(mask: list[int], text: str) -> None:
    assert packed(torch.tensor(mask)) == text
    assert unpacked(text) == mask


# -- names -----------------------------------------------------------------------------------------------


def test_an_algorithm_that_a_trainer_has_not_is_named(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(DatasetError, match="--algorithm mtp: --format specforge is for eagle3, dflash, domino, dspark"):
        format_of("specforge", "mtp")
    assert main(["cold", "--out", str(tmp_path / "out"), "--format", "deepspec", "--algorithm", "mtp"]) == 1
    assert "--format deepspec is for dspark" in capsys.readouterr().err
    assert all(format_of(trainer) is next(iter(known.values())) for trainer, known in FORMATS.items())
