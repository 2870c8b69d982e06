"""What each format writes is what its trainer reads: the real readers where they are small, else the layout."""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import xxhash

from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.chains import Report, leaves, read_once
from lmcache_hs_backend.dataset.forest import UsableForest
from lmcache_hs_backend.dataset.formats.base import HashingFile
from lmcache_hs_backend.dataset.formats.deepspec import DeepSpec
from lmcache_hs_backend.dataset.formats.speculators import _ratio
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from tests.support.connectors import hs_connectors
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
    stacked_of,
    store_prompts,
)
from tests.support.extracting import extract

PROMPTS = [ids_of(50), ids_of(32) + ids_of(30, seed=1), ids_of(10, seed=2), ids_of(90, seed=3)]


@pytest.fixture
def stored(cold_path: Path) -> Path:
    return store_prompts(cold_path, PROMPTS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_norm(tmp_path / "model")


def by_ids(items: list[tuple[torch.Tensor, Any]]) -> list[tuple[list[int], Any]]:
    """Every prompt exactly once, in the order of PROMPTS."""
    found = {tuple(ids.tolist()): value for ids, value in items}
    assert len(found) == len(items) == len(PROMPTS)
    return [(prompt, found[tuple(prompt)]) for prompt in PROMPTS]


# -- speculators -----------------------------------------------------------------------------------------


def test_speculators_own_file_transfer_reads_the_rows(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = extract(stored, out, "--format", "speculators")
    table = datasets.load_from_disk(str(out))
    transfer = hs_connectors().FileTransfer(out / "hidden_states")
    items = [(table[row]["input_ids"], transfer.get_cached(row)) for row in range(len(table))]
    for ids, sample in by_ids(items):
        assert sample["token_ids"].tolist() == ids
        assert sample["token_ids"].dtype == torch.int64
        assert torch.equal(sample["hidden_states"], stacked_of(ids))
    assert [row["file"] for row in manifest["samples"]] == [f"hidden_states/hs_{row}.safetensors" for row in range(4)]
    assert (manifest["last_layer"], manifest["layers"]["vllm_ids"]) == ("pre-norm", [2, 4, 5])


def test_the_arrow_table_is_what_array_dataset_computes_with(stored: Path, tmp_path: Path) -> None:
    extract(stored, tmp_path / "out", "--format", "speculators")
    table = datasets.load_from_disk(str(tmp_path / "out"))
    assert table.format["type"] == "torch"
    for row in table:
        assert row["input_ids"].dtype == row["loss_mask"].dtype == torch.int64
        assert len(row["input_ids"]) == len(row["loss_mask"]) == row["seq_len"]
    counts = torch.load(tmp_path / "out" / "token_freq.pt", weights_only=True)
    assert sum(counts.values()) == sum(map(len, PROMPTS))


def test_fp8_is_restored_by_speculators_own_transfer(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = extract(stored, out, "--format", "speculators", "--dtype", "fp8")
    table, transfer = (
        datasets.load_from_disk(str(out)),
        hs_connectors("hs_connectors.transfer").FP8Transfer(out / "hidden_states"),
    )
    error = torch.zeros(4)
    total = torch.zeros(4)
    for row in range(len(table)):
        sample = transfer.get_cached(row)
        true = stacked_of(table[row]["input_ids"].tolist()).float()
        error += (sample["hidden_states"].float() - true).square().sum((0, 2))
        total += true.square().sum((0, 2))
    measured = (error / total).sqrt()
    assert bool((measured < 0.04).all())
    assert measured.tolist() == pytest.approx(manifest["fp8_relative_error"], rel=1e-3)


def test_the_error_of_fp8_is_printed_by_layer(stored: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main([str(stored), "--out", str(out), "--format", "speculators", "--dtype", "fp8"]) == 0
    errors = json.loads((out / "manifest.json").read_text())["fp8_relative_error"]
    said = ", ".join(f"{slot}: {error:.4f}" for slot, error in zip((*AUX, LAST), errors, strict=True))
    assert f"relative error of fp8 by layer: {said}" in capsys.readouterr().out


def test_a_scale_for_each_layer_keeps_small_layers_accurate(cold_path: Path, tmp_path: Path) -> None:
    sizes = {2: 0.01, 4: 1.0, 5: 10.0, LAST: 1000.0}
    with Writer(cold_path) as writer:
        writer.put(PROMPTS[0], make=lambda ids, slot: rows_of(ids, slot) * sizes[slot])
    manifest = extract(cold_path, tmp_path / "out", "--format", "speculators", "--dtype", "fp8")
    assert max(manifest["fp8_relative_error"]) < 0.04


def test_mtp_needs_the_last_layer_only(stored: Path, tmp_path: Path) -> None:
    extract(stored, tmp_path / "out", "--format", "speculators", "--last-layer", str(LAST))
    sample = hs_connectors().FileTransfer(tmp_path / "out" / "hidden_states").get_cached(0)
    assert sample["hidden_states"].shape[1:] == (1, HIDDEN)


def test_validation_rows_are_the_last_ones_and_the_ratio_finds_them(stored: Path, tmp_path: Path) -> None:
    manifest = extract(stored, tmp_path / "out", "--format", "speculators", "--val-fraction", "0.25")
    assert [row["split"] for row in manifest["samples"]] == ["train", "train", "train", "val"]
    assert int(4 * manifest["train_ratio"]) == 3


def test_the_ratio_survives_rounding() -> None:
    assert all(int(total * _ratio(train, total)) == train for total in range(1, 200) for train in range(total + 1))


def test_without_datasets_the_error_names_the_extra(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert main([str(stored), "--out", str(tmp_path / "out"), "--format", "speculators"]) == 1
    assert "lmcache-hs-backend[extract]" in capsys.readouterr().err


# -- the others ------------------------------------------------------------------------------------------


def test_specforge_files_hold_the_normed_last_layer(stored: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = extract(stored, out, "--format", "specforge", "--final-norm", str(model))
    paths = sorted(out.rglob("*.ckpt"))
    assert [str(path.relative_to(out)) for path in paths] == [row["file"] for row in manifest["samples"]]
    loaded = [torch.load(path, mmap=True, weights_only=True) for path in paths]
    for ids, sample in by_ids([(sample["input_ids"], sample) for sample in loaded]):
        assert sample["loss_mask"].tolist() == [1] * len(ids)
        assert torch.equal(sample["aux_hidden_state"], aux_of(ids).unsqueeze(0))
        assert torch.equal(sample["hidden_state"], normed(model, ids).unsqueeze(0))
    assert manifest["layers"]["output_ids"] == [1, 3, 4]
    assert manifest["last_layer"] == "post-norm"


@pytest.mark.parametrize("with_norm", [True, False])
def test_modelopt_flags_the_side_of_the_norm(stored: Path, model: Path, tmp_path: Path, with_norm: bool) -> None:
    options = ("--final-norm", str(model)) if with_norm else ()
    extract(stored, tmp_path / "out", "--format", "modelopt", *options)
    loaded = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "out").glob("*.pt"))]
    for ids, sample in by_ids([(sample["input_ids"], sample) for sample in loaded]):
        assert sample["hidden_states_prenorm"] is not with_norm
        assert torch.equal(sample["hidden_states"], normed(model, ids) if with_norm else rows_of(ids, LAST))
        assert torch.equal(sample["aux_hidden_states"], aux_of(ids))
        assert isinstance(sample["conversation_id"], str)


def read_target_cache(folder: Path) -> list[dict[str, torch.Tensor]]:
    """A reader of DeepSpec's target cache, version 2, written from its description."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 2
    assert manifest["num_shards"] == len(manifest["shards"])
    assert (manifest["hidden_dtype"], manifest["token_dtype"], manifest["mask_dtype"]) == ("bfloat16", "int32", "uint8")
    record = struct.Struct("<QIIQQQQQ")
    assert manifest["index_record_size"] == record.size == 56
    index = (folder / "samples.idx").read_bytes()
    assert len(index) == 56 * manifest["num_samples"]
    width, hidden = len(manifest["target_layer_ids"]), manifest["hidden_size"]
    samples = []
    for number, (sample_id, shard, tokens, *offsets) in enumerate(record.iter_unpack(index)):
        assert sample_id == number
        with open(folder / manifest["shards"][shard]["file_name"], "rb") as file:
            data = bytearray(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

        def take(
            at: int, count: int, dtype: torch.dtype, data: bytearray = data, offsets: list[int] = offsets
        ) -> torch.Tensor:
            return torch.frombuffer(data, dtype=torch.uint8, offset=offsets[at], count=count * dtype.itemsize).view(
                dtype
            )

        samples.append(
            {
                "input_ids": take(0, tokens, torch.int32),
                "attention_mask": take(1, tokens, torch.uint8),
                "loss_mask": take(2, tokens, torch.uint8),
                "target_hidden_states": take(3, tokens * width * hidden, torch.bfloat16).view(tokens, width * hidden),
                "target_last_hidden_states": take(4, tokens * hidden, torch.bfloat16).view(tokens, hidden),
            }
        )
    return samples


@pytest.mark.parametrize("shard_bytes", [None, 20_000])
def test_deepspec_cache_reads_as_described(
    stored: Path, model: Path, tmp_path: Path, shard_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shard_bytes is not None:
        monkeypatch.setattr(DeepSpec, "max_shard_bytes", shard_bytes)
    out = tmp_path / "out"
    manifest = extract(stored, out, "--format", "deepspec", "--final-norm", str(model))
    assert manifest["target_layer_ids"] == [1, 3, 4]
    assert manifest["target_model_name_or_path"] == "org/tiny"
    assert (manifest["num_shards"] > 1) == (shard_bytes is not None)
    for ids, sample in by_ids([(s["input_ids"].long(), s) for s in read_target_cache(out)]):
        assert torch.equal(sample["target_hidden_states"], aux_of(ids))
        assert torch.equal(sample["target_last_hidden_states"], normed(model, ids))
        assert sample["attention_mask"].tolist() == sample["loss_mask"].tolist() == [1] * len(ids)


@pytest.mark.parametrize("format_", ["specforge", "modelopt", "deepspec"])
def test_validation_samples_have_a_folder_of_their_own(stored: Path, model: Path, tmp_path: Path, format_: str) -> None:
    out = tmp_path / "out"
    manifest = extract(stored, out, "--format", format_, "--final-norm", str(model), "--val-fraction", "0.25")
    assert manifest["samples_by_split"] == {"train": 3, "val": 1}
    assert all(row["file"].startswith(row["split"] + "/") for row in manifest["samples"])
    if format_ == "deepspec":
        assert [len(read_target_cache(out / split)) for split in ("train", "val")] == [3, 1]


@pytest.mark.parametrize("format_", ["specforge", "modelopt", "deepspec"])
def test_formats_without_fp8_or_without_auxiliary_layers_say_so(
    stored: Path, tmp_path: Path, format_: str, capsys: Any
) -> None:
    options = [str(stored), "--out", str(tmp_path / "out"), "--format", format_]
    assert main([*options, "--dtype", "fp8"]) == 1
    assert "bf16 only" in capsys.readouterr().err
    assert main([*options, "--last-layer", str(LAST)]) == 1
    assert "needs auxiliary layers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- how files are written and chunks are read -----------------------------------------------------------


@pytest.mark.parametrize("sizes", [[4096, 8192], [4096, 5000], [100, 4096], [4096, 10_001, 4096], [0, 1]])
def test_writing_past_the_page_cache_gives_the_same_bytes(tmp_path: Path, sizes: list[int]) -> None:
    pool = BufferPool(1 << 20)
    parts = []
    for number, size in enumerate(sizes):
        view = pool.get(max(size, 1)).bytes()[:size]
        view[:] = bytes((number + i) % 251 for i in range(size))
        parts.append(view)
    for direct in (True, False):
        with HashingFile(str(tmp_path / f"{direct}"), direct=direct) as file:
            for part in parts:
                assert file.write(part) == len(part)
        expected = b"".join(bytes(part) for part in parts)
        assert (tmp_path / f"{direct}").read_bytes() == expected
        assert (file.nbytes, file.checksum) == (len(expected), xxhash.xxh3_64_hexdigest(expected))


def test_memory_that_does_not_lie_on_pages_is_written_as_well(tmp_path: Path) -> None:
    data = memoryview(bytearray(range(256)) * 64)[1:]
    with HashingFile(str(tmp_path / "file"), direct=True) as file:
        file.write(data)
    assert (tmp_path / "file").read_bytes() == bytes(data)


def test_only_chunks_that_no_other_sample_needs_are_read_past_the_page_cache(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        for ids in (ids_of(64), ids_of(32) + ids_of(32, seed=1), ids_of(48, seed=2)):
            writer.put(ids)
    index = ChunkIndex([str(cold_path)])
    samples = leaves(UsableForest(index, (*AUX, LAST)), Report("leaves"))
    once = read_once(index, samples)
    starts = sorted(index.chunks[position].start for position in once)
    assert starts == [0, 16, 32, 32, 32, 48, 48], "all but the two that the first two prompts share"
    assert read_once(index, [*samples, *samples]) == set()
