"""The command as a user runs it: killed and resumed, refused, limited, and never with anything half-written."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.dataset.journal import STATE
from tests.support.dataset_capture import AUX, LAST, VLLM, Writer, ids_of, rows_of, save_norm, store_prompts
from tests.support.extracting import COMMAND, contents, environment, manifest_of
from tests.support.processes import takes_sigint
from tests.support.terminals import on_a_terminal, without_escapes
from tests.support.waiting import wait_until

PROMPTS = [ids_of(30, seed=seed) for seed in range(40)]
FORMATS = ["speculators", "specforge", "modelopt", "deepspec"]


def nan_in(ids: list[int], slot: int) -> torch.Tensor:
    """Rows as ever, except that those of two prompts are spoilt."""
    rows = rows_of(ids, slot)
    if ids[0] in (PROMPTS[7][0], PROMPTS[20][0]):
        rows[5] = float("nan")
    return rows


@pytest.fixture
def stored(cold_path: Path) -> Path:
    return store_prompts(cold_path, PROMPTS, make=nan_in)


@pytest.fixture
def norm(tmp_path: Path) -> str:
    return str(save_norm(tmp_path / "model"))


# -- killed and resumed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", FORMATS)
def test_killed_anywhere_and_resumed_it_ends_with_the_same_bytes(
    stored: Path, norm: str, tmp_path: Path, format_: str
) -> None:
    options = ["--format", format_, "--final-norm", norm, "--val-fraction", "0.2", "-q"]
    assert main([str(stored), "--out", str(tmp_path / "unbroken"), *options]) == 0
    out = tmp_path / "killed"
    journal = out / STATE / "journal.jsonl"
    for reached in (1, 17):
        # A pipe that nobody empties stops the run soon after the journal has grown this far.
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPING, str(reached), str(stored), "--out", str(out), "--resume", *options],
            env=environment(),
        )
        wait_until(lambda: process.poll() is not None or _lines(journal) >= reached, 60)  # noqa: B023
        process.kill()
        process.wait()
        assert _lines(journal) >= reached
        assert not (out / "manifest.json").exists()
    with open(journal, "ab") as file:
        file.write(b'["ok","a line cut sho')
    assert main([str(stored), "--out", str(out), "--resume", *options]) == 0
    assert contents(out) == contents(tmp_path / "unbroken")


#: Runs the command, and stops for good when the journal has so many lines.
STOPPING = """
import signal, sys
from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.journal import Journal
append, lines = Journal.append, []
def stopping(self, result):
    append(self, result)
    lines.append(result)
    if sum(1 for _ in self.results()) >= int(sys.argv[1]):
        signal.pause()
Journal.append = stopping
main(sys.argv[2:])
"""


def _lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_a_published_file_that_was_lost_is_made_again(stored: Path, tmp_path: Path) -> None:
    options = ["--format", "speculators", "-q"]
    assert main([str(stored), "--out", str(tmp_path / "unbroken"), *options]) == 0
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING, "10", str(stored), "--out", str(out), *options], env=environment()
    )
    wait_until(lambda: _lines(out / STATE / "journal.jsonl") >= 10, 60)
    process.kill()
    process.wait()
    (out / "hidden_states" / "hs_4.safetensors").write_bytes(b"")
    assert main([str(stored), "--out", str(out), "--resume", *options]) == 0
    assert contents(out) == contents(tmp_path / "unbroken")


def test_a_finished_folder_is_not_taken_for_the_result_of_other_options(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = [str(stored), "--out", str(out), "--format", "speculators", "--resume"]
    assert main(options) == 0
    finished = contents(out)
    assert main(options) == 0
    assert "is complete; nothing to resume" in capsys.readouterr().out
    for other, name in ((["--min-tokens", "50"], "--min-tokens"), (["--format", "modelopt"], "--format")):
        assert main([*options, *other]) == 1
        assert f"was begun with another {name}; --resume goes on with the same options" in capsys.readouterr().err
    (out / "manifest.json").write_text("{}")
    assert main(options) == 1
    assert "is no manifest of ours" in capsys.readouterr().err
    assert contents(out).keys() == finished.keys()


def test_nothing_is_written_into_a_cold_path(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(stored)
    for out in (stored, stored / "sub"):
        assert main([str(stored), "--out", str(out), "--format", "speculators"]) == 1
        assert "lies in the cold path" in capsys.readouterr().err
    assert contents(stored) == before


def test_a_split_that_leaves_nothing_to_train_on_is_an_error_and_one_without_validation_a_warning(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(stored), "--format", "speculators", "--limit", "7"]
    assert main([*options, "--out", str(tmp_path / "a"), "--val-fraction", "0.99"]) == 1
    assert "--val-fraction 0.99 of 7 samples leaves none to train on" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main([*options, "--out", str(tmp_path / "b"), "--val-fraction", "0.01"]) == 0
    assert "--val-fraction 0.01 of 7 samples is none to validate with" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_can_be_resumed(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING.replace("main(", "sys.exit(main(") + ")", "5", str(stored), "--out", str(out),
         "--format", "modelopt", "-q"],
        env=environment(), preexec_fn=takes_sigint,
    )  # fmt: skip
    wait_until(lambda: _lines(out / STATE / "journal.jsonl") >= 5, 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not (out / STATE / "tmp").exists()
    assert main([str(stored), "--out", str(out), "--format", "modelopt", "-q", "--resume"]) == 0


def test_resuming_with_other_options_is_refused(stored: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING, "3", str(stored), "--out", str(out), "--format", "modelopt", "-q"],
        env=environment(),
    )
    wait_until(lambda: _lines(out / STATE / "journal.jsonl") >= 3, 60)
    assert main([str(stored), "--out", str(out), "--format", "modelopt", "--resume"]) == 1
    assert "another extraction is writing" in capsys.readouterr().err
    process.kill()
    process.wait()
    assert main([str(stored), "--out", str(out), "--format", "modelopt"]) == 1
    assert "is not empty; go on with --resume" in capsys.readouterr().err
    assert main([str(stored), "--out", str(out), "--format", "modelopt", "--resume", "--min-tokens", "5"]) == 1
    assert "another --min-tokens" in capsys.readouterr().err


def test_resuming_what_is_complete_changes_nothing(stored: Path, tmp_path: Path, capsys: Any) -> None:
    options = [str(stored), "--out", str(tmp_path / "out"), "--format", "modelopt"]
    assert main([*options, "-q"]) == 0
    before = contents(tmp_path / "out")
    assert main([*options, "--resume"]) == 0
    assert "is complete" in capsys.readouterr().out
    assert contents(tmp_path / "out") == before


# -- rows that fail --------------------------------------------------------------------------------------


def test_a_bad_row_is_in_rejected_and_nowhere_else(stored: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main([str(stored), "--out", str(out), "--format", "speculators"]) == 0
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in rejected] == ["non_finite", "non_finite"]
    assert all("token 5" in line["detail"] and line["tokens"] == 30 for line in rejected)
    manifest = manifest_of(out)
    assert (manifest["samples_published"], manifest["rejected"]) == (38, {"non_finite": 2})
    assert "2 samples rejected (2 non_finite)" in capsys.readouterr().err
    table = datasets.load_from_disk(str(out))
    files = sorted((out / "hidden_states").iterdir())
    assert len(table) == len(files) == 38
    for row in range(38):
        sample = load_file(out / "hidden_states" / f"hs_{row}.safetensors")
        assert torch.equal(sample["token_ids"], table[row]["input_ids"])
        assert bool(sample["hidden_states"].isfinite().all())


def test_when_every_row_fails_the_error_says_where_to_look(cold_path: Path, tmp_path: Path, capsys: Any) -> None:
    with Writer(cold_path) as writer:
        writer.put(PROMPTS[7], make=nan_in)
    assert main([str(cold_path), "--out", str(tmp_path / "out"), "--format", "modelopt", "-q"]) == 1
    assert "no sample passed its checks (1 non_finite)" in capsys.readouterr().err
    assert "NaN" in (tmp_path / "out" / "rejected.jsonl").read_text()


def test_the_manifest_says_what_is_there_and_what_it_was_made_of(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(stored), "--out", str(out), "--format", "speculators", "--min-tokens", "30", "-q"]) == 0
    manifest = manifest_of(out)
    for row in manifest["samples"]:
        data = (out / row["file"]).read_bytes()
        assert (row["bytes"], row["xxh3"]) == (len(data), xxhash.xxh3_64_hexdigest(data))
        assert (row["tokens"], row["tokens_trained"]) == (30, 30)
    assert manifest["model"].startswith("org/tiny")
    assert manifest["layers"]["slots"] == [*AUX, LAST]
    assert (manifest["layers"]["convention"], manifest["last_layer"], manifest["dtype"]) == ("vllm", "pre-norm", "bf16")
    assert manifest["options"]["cold_path"] == [str(stored)]
    assert manifest["chunks"]["files"] == 2 * len(PROMPTS)
    assert manifest["rejected"] == {"non_finite": 2}


def test_in_a_terminal_a_bar_shows_rows_tokens_speed_and_the_time_left(stored: Path, tmp_path: Path) -> None:
    command = [*COMMAND, str(stored), "--out", str(tmp_path / "out"), "--format", "modelopt"]
    status, shown = on_a_terminal(command, environment(), output=False)
    assert status == 0
    text = without_escapes(shown)
    assert "40/40 rows, 1140 tokens" in text
    assert re.search(r"\d B/s|\d [kM]B/s", text)
    assert re.search(r"\d:\d\d:\d\d", text)


# -- requests --------------------------------------------------------------------------------------------


def test_records_of_the_real_connector_give_each_turn_its_answer_to_train_on(cold_path: Path, tmp_path: Path) -> None:
    """dataset_requests.json: four turns that a vLLM server with the connector served; the rows here are made up."""
    served = json.loads((Path(__file__).parent / "dataset_requests.json").read_text())
    with Writer(cold_path, chunk=64) as writer:
        writer.put(served["input_ids"])  # the tails of the earlier turns were replaced, as the connector does
    folder = Path(writer.directory) / "sequences"
    folder.mkdir()
    (folder / "requests-000001.jsonl").write_text("\n".join(served["records"]) + "\n")
    out = tmp_path / "out"
    options = ["--format", "speculators", "--sequences", "requests", "--loss-mask", "generated", "-q"]
    assert main([str(cold_path), "--out", str(out), *options]) == 0
    rows = datasets.load_from_disk(str(out)).with_format(None)
    assert len(rows) == 4
    for row, said in zip(rows, served["requests"], strict=True):
        # The last token was sampled, but no forward has seen it.
        prompt, answer = said["prompt_tokens"], said["generated_tokens"] - 1
        assert row["input_ids"] == served["input_ids"][: prompt + answer]
        assert row["loss_mask"] == [0] * prompt + [1] * answer
    stored, asked = len(served["input_ids"]), sum(len(row["input_ids"]) for row in rows)
    assert manifest_of(out)["dedup_factor"] == pytest.approx(asked / stored, abs=1e-3)


# -- bad input -------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_left_alone(stored: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for options in ([], ["--resume"]):
        assert main([str(stored), "--out", str(out), "--format", "modelopt", *options]) == 1
        assert "is not empty; choose another folder" in capsys.readouterr().err
    assert contents(out) == {"mine.txt": b"mine"}


def test_a_full_disk_is_an_error_at_the_row_and_resumes(stored: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that has no room for a row."""
    out = tmp_path / "out"
    command = [*COMMAND, str(stored), "--out", str(out), "--format", "modelopt"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    result = subprocess.run(command, env=environment(), preexec_fn=limit, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("lmcache-hs-extract: error:")
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(out.glob("*.pt"))
    assert main([*command[3:], "-q", "--resume"]) == 0


def test_a_dataset_larger_than_the_disk_is_refused_at_once(
    stored: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(1000))
    assert main([str(stored), "--out", str(tmp_path / "out"), "--format", "modelopt"]) == 1
    assert "but its disk has 1000 B left" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--layers", "2,77", "--last-layer", "8"],
            "layer 77 was not captured (stored 2, 4, 5, 8)",
        ),
        (["--last-layer", "9"], "the last layer of these captures is 8"),
        (["--sequences", "all"], "must be leaves, requests or dataset:PATH"),
        (["--sequences", "requests"], "no request records"),
        (["--sequences", "dataset:/nowhere"], "does not exist"),
        (["--loss-mask", "chatml"], "--tokenizer DIR"),
        (["--loss-mask", "generated"], "needs prompt lengths"),
        (["--loss-mask", "dataset"], "needs --sequences dataset:PATH"),
        (["--min-tokens", "31"], "no sequence is left"),
        (["--model", "other"], "no readable chunk of 'other'"),
        (["--final-norm", "/nowhere"], "is not a model directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
    stored: Path, tmp_path: Path, capsys: Any, options: list[str], text: str
) -> None:
    assert main([str(stored), "--out", str(tmp_path / "out"), "--format", "modelopt", *options]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("lmcache-hs-extract: error:")
    assert text in error
    assert not (tmp_path / "out").exists()


def test_without_a_capture_the_slots_are_taken_as_given_with_a_warning(
    cold_path: Path, tmp_path: Path, capsys: Any
) -> None:
    with Writer(cold_path, capture={"source": "lmcache"}) as writer:
        writer.put(PROMPTS[0], (-1, 0, 24))
    options = ["--format", "speculators", "--layers", "0,24", "--last-layer", "-1", "-q"]
    assert main([str(cold_path), "--out", str(tmp_path / "out"), *options]) == 0
    warnings = capsys.readouterr().err
    assert "0, 24 and the last layer -1 are taken as given, in that order" in warnings
    assert "taken to be before the final norm" in warnings
    assert manifest_of(tmp_path / "out")["layers"]["vllm_ids"] is None


# -- what is extracted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "jsonl", "parquet"])
def test_a_prepared_dataset_gives_rows_and_masks(stored: Path, tmp_path: Path, kind: str) -> None:
    rows = [PROMPTS[3], PROMPTS[1][:20], PROMPTS[0][:16] + ids_of(5, seed=99), ids_of(9, seed=98), PROMPTS[2]]
    masks = [[0] * 10 + [1] * (len(row) - 10) for row in rows]
    masks[4] = [0] * 30  # nothing to train on
    path = tmp_path / f"data.{kind}"
    table = {"input_ids": rows, "loss_mask": masks}
    if kind == "folder":
        datasets.Dataset.from_dict(table).save_to_disk(str(path))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.table(table), path, row_group_size=2)
    else:
        lines = [json.dumps({"input_ids": i, "loss_mask": m}) for i, m in zip(rows, masks, strict=True)]
        path.write_text("\n".join(lines) + "\n\n")
    out = tmp_path / "out"
    assert (
        main([str(stored), "--out", str(out), "--format", "speculators", "--sequences", f"dataset:{path}", "-q"]) == 0
    )
    written = datasets.load_from_disk(str(out)).with_format(None)
    assert [row["input_ids"] for row in written] == [PROMPTS[3], PROMPTS[1][:20], PROMPTS[0][:16]]
    assert [row["loss_mask"] for row in written] == [masks[0], masks[1], masks[2][:16]]
    coverage = [json.loads(line) for line in (out / "coverage.jsonl").read_text().splitlines()]
    assert [line["state"] for line in coverage] == ["covered", "covered", "partly", "missing", "covered"]
    assert manifest_of(out)["rejected"] == {"no_loss": 1}


def test_a_mask_of_another_length_is_rejected(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [{"input_ids": PROMPTS[0], "loss_mask": [1] * 29}, {"input_ids": PROMPTS[1], "loss_mask": [1] * 30}]
    path.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    assert main([str(stored), "--out", str(out), "--format", "modelopt", "--sequences", f"dataset:{path}", "-q"]) == 0
    assert manifest_of(out)["rejected"] == {"mask": 1}


@pytest.mark.parametrize("text", ['{"messages": []}', "not json", '["list"]'])
def test_a_dataset_without_token_ids_is_named_with_what_to_do(
    stored: Path, tmp_path: Path, capsys: Any, text: str
) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    options = ["--format", "modelopt", "--sequences", f"dataset:{tmp_path / 'data.jsonl'}"]
    assert main([str(stored), "--out", str(tmp_path / "out"), *options]) == 1
    assert "no row is a JSON object with input_ids" in capsys.readouterr().err


def test_a_dataset_of_another_tokenizer_is_refused_before_the_first_row(
    stored: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "\n".join(json.dumps({"input_ids": [i + 1 for i in ids], "loss_mask": [1] * len(ids)}) for ids in PROMPTS)
    )
    options = ["--format", "modelopt", "--sequences", f"dataset:{path}"]
    assert main([str(stored), "--out", str(tmp_path / "out"), *options]) == 1
    assert "was the dataset tokenised with this model's tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shards_together_are_the_whole(stored: Path, tmp_path: Path) -> None:
    ids: list[tuple[int, ...]] = []
    for number in (1, 2, 3):
        out = tmp_path / str(number)
        assert main([str(stored), "--out", str(out), "--format", "modelopt", "--shard", f"{number}/3", "-q"]) == 0
        ids += [tuple(torch.load(path)["input_ids"].tolist()) for path in out.glob("*.pt")]
    assert len(ids) == len({*ids}) == 38


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(stored: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    options = [str(stored), "--out", str(out), "--format", "speculators", "--limit", "10"]
    assert main([*options, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "would write 10 rows, 300 tokens" in text
    assert " in about " in text
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cold"]


def test_conversations_of_many_turns_are_stored_once_and_the_factor_is_printed(
    cold_path: Path, tmp_path: Path, capsys: Any
) -> None:
    turns = [ids_of(40 * turn) for turn in range(1, 6)]
    rows = [turns[-1][:length] for length in (40, 80, 120, 160, 200)]
    with Writer(cold_path) as writer:
        for row in rows:
            writer.put(row)
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) for row in rows))
    out = tmp_path / "out"
    options = ["--format", "speculators", "--sequences", f"dataset:{path}"]
    assert main([str(cold_path), "--out", str(out), *options]) == 0
    # Whole chunks once, beside the five tails that were stored on the way: 600 tokens in place of 600 + 600 …
    stored_tokens = sum(chunk.num_tokens for chunk in ChunkIndex([str(cold_path)]).chunks)
    tails = sum(len(row) % 16 for row in rows)
    assert stored_tokens == 192 + tails
    factor = sum(map(len, rows)) / stored_tokens
    assert f"dedup factor {factor:.2f}" in capsys.readouterr().out
    assert manifest_of(out)["dedup_factor"] == pytest.approx(factor, abs=1e-3)


def test_the_number_of_threads_changes_nothing(stored: Path, tmp_path: Path) -> None:
    for workers in ("1", "4"):
        options = ["--format", "speculators", "--workers", workers, "-q"]
        assert main([str(stored), "--out", str(tmp_path / workers), *options]) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "4")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_sequences(cold_path: Path, tmp_path: Path) -> None:
    hidden, prompts = 1024, [ids_of(64, seed=seed) for seed in range(240)]
    noise = torch.randn(64, hidden).bfloat16()
    with Writer(cold_path) as writer:
        for ids in prompts:
            writer.put(ids, make=lambda ids, slot: noise)
    script = "import resource, sys; from lmcache_hs_backend.cli.extract import main; assert main(sys.argv[1:]) == 0; "
    script += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    peaks = []
    for limit in ("20", "240"):
        command = [str(cold_path), "--out", str(tmp_path / limit), "--format", "speculators", "--limit", limit, "-q"]
        result = subprocess.run(
            [sys.executable, "-c", script, *command], env=environment(), capture_output=True, check=True
        )
        peaks.append(int(result.stdout) * 1024)
    extracted = sum(row["bytes"] for row in manifest_of(tmp_path / "240")["samples"])
    assert extracted > 120e6
    assert peaks[1] - peaks[0] < 0.2 * extracted


def test_chosen_layers_are_written_in_the_order_of_their_numbers(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--format", "speculators", "--layers", "5,2", "--last-layer", str(LAST), "-q"]
    assert main([str(stored), "--out", str(out), *options]) == 0
    sample = load_file(out / "hidden_states" / "hs_0.safetensors")
    ids = sample["token_ids"].tolist()
    assert torch.equal(sample["hidden_states"], torch.stack([rows_of(ids, slot) for slot in (2, 5, LAST)], dim=1))
    assert set(AUX) > {2, 5}
    assert VLLM["num_layers"] == LAST


def test_extraction_needs_neither_lmcache_nor_vllm_nor_a_trainer() -> None:
    script = (
        "import sys; import lmcache_hs_backend.cli.extract, lmcache_hs_backend.dataset.torch; "
        "sys.exit(', '.join({'lmcache', 'vllm', 'datasets', 'speculators', 'hs_connectors'} & {*sys.modules}) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.strip()) == (0, "")
