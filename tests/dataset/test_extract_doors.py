"""What people bring to ``lmcache-hs-extract``: datasets of several shapes, records with spans, contradictions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmcache_hs_backend import HiddenStateDataset, __version__
from lmcache_hs_backend.chunk import prefix_digests, token_bytes
from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.masks import LossMask, spans
from lmcache_hs_backend.format.request_log import RecordWriter
from tests.support.dataset_capture import AUX, LAST, NUM_LAYERS, VLLM, Writer, ids_of, save_norm

ROWS = [json.loads(line) for line in (Path(__file__).parent / "three_conversations.jsonl").read_text().splitlines()]
SPANS = [[[35, 41], [54, 66]], [[34, 44]], [[33, 38]]]


@pytest.fixture
def stored(cold_path: Path) -> Path:
    with Writer(cold_path) as writer:
        for row in ROWS:
            writer.put(row["input_ids"])
    return cold_path


def samples(out: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(out.glob("*.pt"))]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def extract(stored: Path, out: Path, *options: str) -> int:
    return main([str(stored), "--out", str(out), "--format", "modelopt", "-q", *options])


# -- prepared datasets -----------------------------------------------------------------------------------


def shapes(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    ids, mask = row["input_ids"], row["loss_mask"]
    return {
        "flat": row,
        "1xN": {"input_ids": [ids], "loss_mask": [mask]},
        "labels": {"input_ids": ids, "labels": [token if m else -100 for token, m in zip(ids, mask, strict=True)]},
        "assistant_masks": {"input_ids": ids, "assistant_masks": mask, "attention_mask": [1] * len(ids)},
        "completion_mask": {"input_ids": ids, "completion_mask": mask, "labels": ids},
        "padded right": {
            "input_ids": [*ids, 0, 0],
            "loss_mask": [*mask, 0, 0],
            "attention_mask": [1] * len(ids) + [0, 0],
        },
        "padded left": {
            "input_ids": [[0, 0, *ids]],
            "labels": [[-100, -100, *(t if m else -100 for t, m in zip(ids, mask, strict=True))]],
            "attention_mask": [[0, 0] + [1] * len(ids)],
        },
        "booleans": {"input_ids": ids, "loss_mask": [bool(m) for m in mask]},
    }


@pytest.mark.parametrize("kind", ["jsonl", "folder", "parquet"])
@pytest.mark.parametrize("shape", list(shapes(ROWS[0])))
def test_every_shape_of_a_dataset_gives_the_same_samples(stored: Path, tmp_path: Path, shape: str, kind: str) -> None:
    rows = [shapes(row)[shape] for row in ROWS]
    path = tmp_path / f"rows.{kind}"
    table = datasets.Dataset.from_list(rows)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "folder":
        table.save_to_disk(str(path))
    else:
        table.to_parquet(str(path))
    assert extract(stored, tmp_path / "out", "--sequences", f"dataset:{path}", "--strict") == 0
    made = samples(tmp_path / "out")
    assert [sample["input_ids"].tolist() for sample in made] == [row["input_ids"] for row in ROWS]
    assert [spans(sample["loss_mask"]) for sample in made] == SPANS
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["tokens"], manifest["coverage"]["covered"]) == (151, 3)


GOOD = ROWS[0]
BAD: dict[str, tuple[Any, str]] = {
    "null": ({"input_ids": None, "loss_mask": None}, "row"),
    "text": ({"input_ids": "no ids", "loss_mask": [1]}, "row"),
    "fractions": ({**GOOD, "input_ids": [0.5] * len(GOOD["input_ids"])}, "row"),
    "two rows in one": ({**GOOD, "input_ids": [[1], [2]]}, "row"),
    "no object": ("text", "row"),
    "mask too short": ({**GOOD, "loss_mask": [1]}, "mask"),
    "padding within": ({**GOOD, "attention_mask": [1, 0] * (len(GOOD["input_ids"]) // 2) + [1]}, "row"),
    "mask of twos": ({**GOOD, "loss_mask": [2] * len(GOOD["input_ids"])}, "mask"),
    "mask of zeros": ({**GOOD, "loss_mask": [0] * len(GOOD["input_ids"])}, "no_loss"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_row_loses_itself_only(stored: Path, tmp_path: Path, fault: str, capsys: Any) -> None:
    row, reason = BAD[fault]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[0], row, ROWS[2])))
    options = ["--sequences", f"dataset:{path}"]
    assert extract(stored, tmp_path / "dry", *options, "--dry-run") == 0
    assert f"1 samples would be rejected (1 {reason})" in capsys.readouterr().err
    assert extract(stored, tmp_path / "out", *options) == 0
    assert [sample["input_ids"].tolist() for sample in samples(tmp_path / "out")] == [
        ROWS[0]["input_ids"],
        ROWS[2]["input_ids"],
    ]
    (rejected,) = lines(tmp_path / "out" / "rejected.jsonl")
    assert (rejected["id"], rejected["reason"]) == ("row-1", reason)
    assert rejected["detail"]
    assert [row["row"] for row in lines(tmp_path / "out" / "coverage.jsonl")] == [0, 1, 2]
    assert extract(stored, tmp_path / "strict", *options, "--strict") == 1
    assert "--strict: 1 rejected" in capsys.readouterr().err


def test_a_row_that_cannot_be_read_is_counted_as_such(stored: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    twice = json.dumps(ROWS[1])[:-1] + ', "input_ids": [1]}'
    path.write_text("".join(line + "\n" for line in (json.dumps(ROWS[0]), twice, json.dumps(ROWS[2]))))
    assert (
        main([str(stored), "--out", str(tmp_path / "out"), "--format", "modelopt", "--sequences", f"dataset:{path}"])
        == 0
    )
    assert "2 covered, 0 partly covered, 0 missing, 1 that cannot be read" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["coverage"] == {"covered": 2, "partly": 0, "missing": 0, "bad": 1}
    assert [row["state"] for row in lines(tmp_path / "out" / "coverage.jsonl")] == ["covered", "bad", "covered"]
    (rejected,) = lines(tmp_path / "out" / "rejected.jsonl")
    assert "the key 'input_ids' stands twice" in rejected["detail"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no row"),
        (gzip.compress(b"{}"), "is gzipped, and rows are read in any order: unpack it first (gunzip)"),
        (b'\xef\xbb\xbf[{"input_ids": [1]}]', "is one JSON array, but has to have an object in each line"),
        (b"PAR1 and nothing else", "is not a Parquet file"),
    ],
)
def test_a_dataset_of_another_kind_says_which(
    stored: Path, tmp_path: Path, content: bytes, reason: str, capsys: Any
) -> None:
    path = tmp_path / "rows.data"
    path.write_bytes(content)
    assert extract(stored, tmp_path / "out", "--sequences", f"dataset:{path}") == 1
    error = capsys.readouterr().err
    assert f"{path} {reason}" in error
    assert not (tmp_path / "out").exists()


def test_a_damaged_table_is_named_and_leaves_nothing(stored: Path, tmp_path: Path, capsys: Any) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "rows.parquet")
    whole = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(whole[:20] + bytes(80) + whole[100:])
    table.save_to_disk(tmp_path / "rows")
    (arrow,) = (tmp_path / "rows").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-600])
    for name in ("rows.parquet", "rows"):
        assert extract(stored, tmp_path / "out", "--sequences", f"dataset:{tmp_path / name}") == 1
        line = capsys.readouterr().err.strip().splitlines()[-1]  # datasets has bars of its own
        assert line.startswith(f"lmcache-hs-extract: error: {tmp_path / name} ")
        assert not (tmp_path / "out").exists()


def test_a_folder_of_one_split_needs_no_name(stored: Path, tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "rows")
    assert extract(stored, tmp_path / "out", "--sequences", f"dataset:{tmp_path / 'rows'}", "--strict") == 0


def test_a_damaged_plan_is_one_line(stored: Path, tmp_path: Path, capsys: Any) -> None:
    assert extract(stored, tmp_path / "out", "--plan") == 0
    plan = tmp_path / "out" / ".lmcache-hs-extract" / "plan.jsonl"
    plan.write_bytes(plan.read_bytes()[:40])
    for option in (["--resume"], ["--part", "1/1"], ["--finish"]):
        assert extract(stored, tmp_path / "out", *option) == 1
        assert "plan.jsonl is damaged" in capsys.readouterr().err


def test_labels_that_are_moved_by_one_are_no_mask(stored: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [shapes(row)["labels"] for row in ROWS]
    path.write_text("".join(json.dumps({**row, "labels": [*row["labels"][1:], -100]}) + "\n" for row in rows))
    assert extract(stored, tmp_path / "out", "--sequences", f"dataset:{path}") == 1
    assert "no sample passed its checks (3 mask)" in capsys.readouterr().err


def test_a_dataset_without_any_mask_is_refused_with_what_it_could_be(stored: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": ROWS[0]["input_ids"], "mask": []}) + "\n")
    assert extract(stored, tmp_path / "out", "--sequences", f"dataset:{path}") == 1
    error = capsys.readouterr().err
    assert "has no column loss_mask or assistant_masks or assistant_mask or labels" in error
    assert "--loss-mask" in error
    assert extract(stored, tmp_path / "out", "--sequences", f"dataset:{path}", "--loss-mask", "all") == 0


# -- request records -------------------------------------------------------------------------------------


def write_records(stored: Path, *changes: dict[str, Any]) -> None:
    """One record for each row, as the connector writes them, which was only read: one token was sampled."""
    (directory,) = [path.parent for path in stored.glob("*/namespace.json")]
    log = RecordWriter(str(directory), 0o700)
    for number, (row, change) in enumerate(zip(ROWS, changes, strict=True)):
        ids = row["input_ids"]
        before = len(ids) - 1 - (len(ids) - 1) % 16
        parent, prefix = prefix_digests(token_bytes(ids), [before, len(ids)])
        record = {
            "request_id": f"r{number}", "prompt_tokens": len(ids), "num_tokens": len(ids), "prefix": prefix.hex(),
            "parent_prefix": parent.hex(),
        }  # fmt: skip
        log.append({**record, **change})
    log.close()


def test_the_spans_of_a_record_are_the_mask(stored: Path, tmp_path: Path) -> None:
    write_records(stored, *({"loss_spans": pairs} for pairs in SPANS))
    assert extract(stored, tmp_path / "out", "--sequences", "requests", "--strict") == 0
    assert [spans(sample["loss_mask"]) for sample in samples(tmp_path / "out")] == SPANS
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["loss_mask"] == "recorded"
    live = HiddenStateDataset(str(stored), sequences="requests")
    assert [spans(item["loss_mask"]) for item in live] == SPANS  # type: ignore[attr-defined]
    assert extract(stored, tmp_path / "cut", "--sequences", "requests", "--max-tokens", "40") == 0
    assert [spans(sample["loss_mask"]) for sample in samples(tmp_path / "cut")] == [[[35, 40]], [[34, 40]], [[33, 38]]]


def test_records_without_spans_are_trained_on_behind_their_prompts(stored: Path, tmp_path: Path, capsys: Any) -> None:
    write_records(stored, {"loss_spans": SPANS[0]}, {"prompt_tokens": 30}, {})
    assert extract(stored, tmp_path / "dry", "--sequences", "requests", "--dry-run") == 0
    assert "1 samples would be rejected (1 no_loss)" in capsys.readouterr().err
    assert extract(stored, tmp_path / "out", "--sequences", "requests") == 0
    assert "1 samples rejected (1 no_loss)" in capsys.readouterr().err
    assert [spans(sample["loss_mask"]) for sample in samples(tmp_path / "out")] == [SPANS[0], [[30, 45]]]


def test_generated_looks_at_prompts_only(stored: Path, tmp_path: Path) -> None:
    write_records(stored, *({"loss_spans": pairs, "prompt_tokens": 30} for pairs in SPANS))
    assert extract(stored, tmp_path / "out", "--sequences", "requests", "--loss-mask", "generated") == 0
    assert [spans(sample["loss_mask"]) for sample in samples(tmp_path / "out")] == [[[30, 67]], [[30, 45]], [[30, 39]]]


@pytest.mark.parametrize("bad", [[[3, 2]], [[0, 0]], [[-1, 4]], [[5, 9], [1, 2]], "text", [[1]], 3])
def test_spans_that_are_none_make_no_record(stored: Path, tmp_path: Path, bad: Any) -> None:
    write_records(stored, {"loss_spans": bad}, {"loss_spans": SPANS[1]}, {"loss_spans": SPANS[2]})
    assert extract(stored, tmp_path / "out", "--sequences", "requests") == 0
    assert [spans(sample["loss_mask"]) for sample in samples(tmp_path / "out")] == SPANS[1:]
    left_out = json.loads((tmp_path / "out" / "manifest.json").read_text())["left_out"]
    assert left_out == {"unreadable request record": 1}
    assert extract(stored, tmp_path / "strict", "--sequences", "requests", "--strict") == 1


def test_when_nothing_is_trained_on_the_error_names_what_to_do(stored: Path, tmp_path: Path, capsys: Any) -> None:
    write_records(stored, {}, {}, {})
    out = tmp_path / "out"
    for options in (["--dry-run"], []):
        assert extract(stored, out, "--sequences", "requests", *options) == 1
        error = capsys.readouterr().err
        assert "(3 no_loss)" in error
        assert "--loss-mask chatml or llama3 and --tokenizer DIR" in error
        assert "lmcache-hs-capture" in error
    assert [path.name for path in out.iterdir()] == ["rejected.jsonl"]
    assert extract(stored, out, "--sequences", "requests", "--loss-mask", "all") == 0  # the same folder, other options
    assert len(samples(out)) == 3


# -- marks -----------------------------------------------------------------------------------------------


def tokenizer(folder: Path) -> str:
    """Byte-level BPE as real models have it: newlines in a row are one token, up to three."""
    newline = "Ċ"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*letters, newline * 2, newline * 3])}
    made = Tokenizer(models.BPE(vocabulary, [(newline, newline), (newline * 2, newline)]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
    )
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


ANSWERS = [
    "\n\ndef ring():\n    return 2",
    "\n",
    "",
    " spaces",
    "it rings",
    "\ttab",
    "\n\n\n\n",
    "\r\nreturn",
    "é",
    "<b>",
]


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_marks_find_answers_whatever_they_begin_with(tmp_path: Path, kind: str, answer: str) -> None:
    loaded = Tokenizer.from_file(str(Path(tokenizer(tmp_path)) / "tokenizer.json"))
    header, end = {
        "chatml": ("<|im_start|>{}\n", "<|im_end|>"),
        "llama3": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    }[kind]
    turns = [("user", "Ring the bell."), ("assistant", answer), ("user", "Again."), ("assistant", "Done.")]
    text, trained = "", []
    for role, said in turns:
        text += header.format(role)
        if role == "assistant":
            trained.append((len(text), len(text) + len(said + end)))
        text += said + end
    encoded = loaded.encode(text, add_special_tokens=False)
    # A token is trained on when it ends in an answer or its mark: one that also holds the header's newline does.
    expected = [int(any(begin < stop <= until for begin, until in trained)) for _, stop in encoded.offsets]
    mask = LossMask(kind, str(tmp_path)).make(Sample("s", 0, len(encoded.ids)), torch.tensor(encoded.ids))
    assert mask.tolist() == expected
    assert len(spans(mask)) == 2


# -- options that contradict the capture -----------------------------------------------------------------


def refuses(stored: Path, tmp_path: Path, capsys: Any, *options: str) -> str:
    out = tmp_path / "out"
    assert extract(stored, out, *options) == 1
    assert not out.exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    return str(line)


@pytest.mark.parametrize("options", [[], ["--layers", "2,4", "--last-layer", "7"], ["--layers", "2,4"]])
def test_a_last_layer_that_was_not_captured_is_an_error(
    cold_path: Path, tmp_path: Path, capsys: Any, options: list[str]
) -> None:
    with Writer(cold_path) as writer:
        writer.put(ids_of(40), slots=(2, 4, 7))
    assert f"the last layer, {LAST}, was not captured (stored 2, 4, 7)" in refuses(
        cold_path, tmp_path, capsys, *options
    )


def test_another_layer_than_the_models_last_is_not_taken_for_it(stored: Path, tmp_path: Path, capsys: Any) -> None:
    error = refuses(stored, tmp_path, capsys, "--layers", "2,4", "--last-layer", "5")
    assert f"--last-layer 5: the last layer of these captures is {LAST} (stored 2, 4, 5, 8)" in error
    assert "layer 3 was not captured" in refuses(stored, tmp_path, capsys, "--layers", "2,3", "--last-layer", "8")


def test_the_norm_of_a_model_with_other_layers_is_refused(stored: Path, tmp_path: Path, capsys: Any) -> None:
    other = save_norm(tmp_path / "other", num_hidden_layers=NUM_LAYERS + 4)
    error = refuses(stored, tmp_path, capsys, "--final-norm", str(other))
    assert "is of a model with 12 layers; the rows were captured from one with 8" in error
    assert extract(stored, tmp_path / "out", "--final-norm", str(save_norm(tmp_path / "own", num_hidden_layers=8))) == 0


def test_a_last_layer_that_is_not_known_wants_a_name(cold_path: Path, tmp_path: Path, capsys: Any) -> None:
    with Writer(cold_path, capture={**VLLM, "num_layers": None}) as writer:
        writer.put(ids_of(40))
    assert "name it with --last-layer" in refuses(cold_path, tmp_path, capsys)
    options = ["--layers", ",".join(map(str, AUX)), "--last-layer", str(LAST)]
    assert extract(cold_path, tmp_path / "out", *options) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--format", "specforge"], ["--format", "deepspec"], ["--norm-kind", "rms", "--final-norm", "/nowhere"],
        ["--sequences", "requests"], ["--loss-mask", "chatml", "--tokenizer", "/nowhere"], ["--model", "other"],
    ],
)  # fmt: skip
def test_a_run_that_refuses_leaves_nothing(stored: Path, tmp_path: Path, capsys: Any, options: list[str]) -> None:
    refuses(stored, tmp_path, capsys, *options)
    (tmp_path / "out").mkdir()
    assert extract(stored, tmp_path / "out", *options) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_the_kind_of_norm_is_checked_with_the_options(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["cold", "--out", "out", "--format", "modelopt", "--norm-kind", "square"])
    assert "one of rms, rms+1" in capsys.readouterr().err


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lmcache-hs-extract {__version__}\n"
