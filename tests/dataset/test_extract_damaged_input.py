"""Legal and unusual: cuts inside chunks, chunks of two sizes, a cold path that changes between runs or meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

from lmcache_hs_backend import HiddenStateDataset
from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import RowRejected
from lmcache_hs_backend.dataset.final_norm import FinalNorm
from lmcache_hs_backend.dataset.journal import STATE, Journal
from lmcache_hs_backend.dataset.masks import LossMask
from tests.support.dataset_capture import Writer, ids_of, rows_of, save_norm, store_prompts
from tests.support.extracting import manifest_of

PROMPTS = [ids_of(30, seed=seed) for seed in range(6)]


class Killed(BaseException):
    pass


@pytest.fixture
def cold(cold_path: Path) -> Path:
    return store_prompts(cold_path, PROMPTS)


def killed_after(
    results: int, arguments: list[str], monkeypatch: pytest.MonkeyPatch, *, before_line: bool = False
) -> None:
    """Run until so many samples have their line in the journal; ``before_line``: until the next one lacks only that."""
    append, count = Journal.append, 0

    def stopping(self: Journal, result: Any) -> None:
        nonlocal count
        if before_line and count == results:
            raise Killed
        append(self, result)
        count += 1
        if count == results and not before_line:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stopping)
        with pytest.raises(Killed):
            main(arguments)


# -- which samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [16, 24, 30])
def test_sequences_that_a_cut_makes_equal_are_one_wherever_it_lies(
    cold_path: Path, tmp_path: Path, max_tokens: int
) -> None:
    common = ids_of(30, seed=1)
    with Writer(cold_path) as writer:
        for seed in range(4):
            writer.put(common + ids_of(20, seed=100 + seed))
        writer.put(common)  # as long as the last of the cuts
    out = tmp_path / "out"
    options = ["--format", "modelopt", "--max-tokens", str(max_tokens), "-q"]
    assert main([str(cold_path), "--out", str(out), *options]) == 0
    (sample,) = manifest_of(out)["samples"]
    assert torch.load(out / sample["file"], weights_only=True)["input_ids"].tolist() == common[:max_tokens]


def test_chunks_of_two_sizes_are_not_mixed_and_one_of_them_can_be_chosen(
    cold_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for chunk in (16, 64):
        with Writer(cold_path, chunk=chunk) as writer:
            writer.put(ids_of(128))
    arguments = [str(cold_path), "--format", "modelopt", "-q", "--out"]
    assert main([*arguments, str(tmp_path / "both")]) == 1
    assert "choose with --chunk-size" in capsys.readouterr().err
    for chunk in (16, 64):
        out = tmp_path / str(chunk)
        assert main([*arguments, str(out), "--chunk-size", str(chunk)]) == 0
        assert [sample["tokens"] for sample in manifest_of(out)["samples"]] == [128]
    assert main([*arguments, str(tmp_path / "none"), "--chunk-size", "8"]) == 1
    assert "as --chunk-size says" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"input_ids": [[1], [2]], "loss_mask": [1, 1]},
            "input_ids are [[1], [2]], not a list of integers, flat or [1, N]",
        ),
        (
            {"input_ids": None, "loss_mask": None},
            "none of the dataset's 1 rows can be read; the first: input_ids are None",
        ),
        ({"input_ids": PROMPTS[0], "loss_mask": 1}, "mask"),
        ({"input_ids": PROMPTS[0], "loss_mask": [0.5] * 30}, "mask"),
        ({"input_ids": PROMPTS[0], "loss_mask": [None] * 30}, "mask"),
    ],
)
def test_rows_of_a_dataset_that_are_none_are_one_line(
    cold: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], text: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    arguments = [str(cold), "--out", str(tmp_path / "out"), "--format", "modelopt", "--sequences", f"dataset:{path}"]
    assert main([*arguments, "-q"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert text in line


def test_a_home_directory_is_expanded_before_the_place_is_judged(
    cold: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(cold.parent))
    arguments = [str(cold), "--format", "modelopt", "-q"]
    assert main([*arguments, "--out", f"~/{cold.name}/data"]) == 1
    assert "lies in the cold path" in capsys.readouterr().err
    assert main([*arguments, "--out", "~/data"]) == 0
    assert main([*arguments, "--out", "~/data", "--resume"]) == 0


# -- a cold path that changes ------------------------------------------------------------------------------


def test_a_run_that_is_resumed_goes_on_with_the_layers_and_the_model_that_it_began_with(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, unbroken = tmp_path / "out", tmp_path / "unbroken"
    options = ["--format", "speculators", "-q"]
    assert main([str(cold), "--out", str(unbroken), *options]) == 0
    killed_after(3, [str(cold), "--out", str(out), *options], monkeypatch)
    with Writer(cold) as writer:
        for ids in PROMPTS:
            writer.put(ids, slots=(3,))
    with Writer(cold, model="org/another") as writer:
        writer.put(PROMPTS[0])
    assert main([str(cold), "--out", str(out), "--resume", *options]) == 0
    assert manifest_of(out)["layers"] == manifest_of(unbroken)["layers"]
    shapes = {load_file(out / sample["file"])["hidden_states"].shape for sample in manifest_of(out)["samples"]}
    assert len(shapes) == 1
    assert [sample["xxh3"] for sample in manifest_of(out)["samples"]] == [
        sample["xxh3"] for sample in manifest_of(unbroken)["samples"]
    ]


def test_the_coverage_is_that_of_the_plan(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    longer = PROMPTS[0][:16] + ids_of(16, seed=77)
    rows = [longer, *PROMPTS[1:]]
    path.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in rows))
    arguments = [str(cold), "--out", str(out), "--format", "modelopt", "--sequences", f"dataset:{path}", "-q"]
    killed_after(2, arguments, monkeypatch)
    with Writer(cold) as writer:
        writer.put(longer)
    assert main([*arguments, "--resume"]) == 0
    covered = [json.loads(line)["covered"] for line in (out / "coverage.jsonl").read_text().splitlines()]
    assert covered[0] == manifest_of(out)["samples"][0]["tokens"] == 16


@pytest.mark.parametrize("format_", ["speculators", "specforge", "modelopt"])
def test_a_sample_that_was_put_in_its_place_unsaid_and_is_gone_now_is_no_stray_file(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    out = tmp_path / "out"
    arguments = [str(cold), "--out", str(out), "--format", format_, "-q"]
    arguments += ["--final-norm", str(save_norm(tmp_path / "model"))]
    last = len(PROMPTS) - 1
    killed_after(last, arguments, monkeypatch, before_line=True)
    published = {path.name for path in out.rglob("*") if path.is_file() and STATE not in path.parts}
    for folder in cold.glob("*/??"):
        for path in folder.glob("*.safetensors"):
            path.unlink()
    with Writer(cold) as writer:
        for ids in PROMPTS[:-1]:
            writer.put(ids)
    listed = (out / STATE / "plan.jsonl").read_text().splitlines()[1:]
    assert main([*arguments, "--resume"]) == 0
    names = {os.path.basename(sample["file"]) for sample in manifest_of(out)["samples"]}
    here = {path.name for path in out.rglob("*") if path.is_file()}
    assert len(listed) == len(PROMPTS)
    assert here & published == names & published


def test_a_chunk_that_an_engine_archives_meanwhile_is_read_there(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(PROMPTS[0])
    data = HiddenStateDataset(str(cold_path))
    before = data[0]["last_hidden_states"].clone()
    (directory,) = [path for path in cold_path.iterdir() if path.is_dir()]
    for path in list(directory.glob("??/*.safetensors")):
        to = directory / "archive" / path.parent.name / path.name
        to.parent.mkdir(parents=True, exist_ok=True)
        path.rename(to)
    assert torch.equal(data[0]["last_hidden_states"], before)
    for path in list(directory.glob("archive/??/*.safetensors")):
        path.unlink()
    with pytest.raises(RowRejected, match="was deleted"):
        data[0]


def test_forked_workers_of_a_data_loader_read_for_themselves(cold_path: Path) -> None:
    """Four processes that were forked after their parent had read: heads of files went into memory that they shared."""
    with Writer(cold_path) as writer:
        for seed in range(40):
            writer.put(ids_of(160, seed=seed))
    data = HiddenStateDataset(str(cold_path))
    expected = [data[number]["input_ids"].tolist() for number in range(len(data))]
    loader = DataLoader(data, batch_size=None, num_workers=4, multiprocessing_context="fork")
    for _ in range(5):
        assert [item["input_ids"].tolist() for item in loader] == expected


# -- masks and norms ---------------------------------------------------------------------------------------


def test_what_a_tool_answers_is_not_trained_on(tmp_path: Path) -> None:
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
    words = ["assistant", "ipython", "call", "result", "answer", "\n\n", "[UNK]"]
    vocabulary = {word: number for number, word in enumerate([*marks, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n\n", "isolated")
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    begin, end, eot, eom = (vocabulary[mark] for mark in marks)
    turn = lambda who, *words: [begin, vocabulary[who], end, vocabulary["\n\n"], *(vocabulary[w] for w in words)]  # noqa: E731
    mask = LossMask("llama3", str(tmp_path))
    for stop in ([eom], []):  # a tool call ends with its own mark, or was cut
        ids = turn("assistant", "call") + stop + turn("ipython", "result") + [eot] + turn("assistant", "answer") + [eot]
        trained = [ids[n] for n in mask.make(Sample("x", 0, len(ids)), torch.tensor(ids)).nonzero().flatten().tolist()]
        assert trained == [vocabulary["call"], *stop, vocabulary["answer"], eot]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "vaultgemma", "recurrent_gemma"])
def test_norms_that_multiply_by_one_plus_their_weight(tmp_path: Path, kind: str) -> None:
    plain = FinalNorm.load(str(save_norm(tmp_path / "a")))
    other = FinalNorm.load(str(save_norm(tmp_path / "b", model_type=kind)))
    torch.testing.assert_close(other.weight, plain.weight + 1)


def test_a_layer_norm_without_a_bias_is_one_where_the_model_is_known_for_it(tmp_path: Path) -> None:
    folder = save_norm(tmp_path / "m", model_type="cohere2", rms_norm_eps=None, layer_norm_eps=1e-5)
    norm = FinalNorm.load(str(folder))
    rows = rows_of(PROMPTS[0], 8)
    weight = norm.weight
    save_file({"model.norm.weight": weight}, folder / "model.safetensors")
    expected = torch.nn.functional.layer_norm(rows.float(), (len(weight),), weight, None, 1e-5)
    torch.testing.assert_close(norm(rows), expected)
    assert norm.looks_normed(expected)
