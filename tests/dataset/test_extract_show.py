"""``lmcache-hs-extract show``: the same sample in every format, with its text, its mask and its layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.written_set import WrittenSet
from tests.support.dataset_capture import AUX, HIDDEN, LAST, Writer, rows_of, save_norm

TEXT = "Ring é twice, 灯 once."
FORMATS = ["speculators", "speculators fp8", "specforge", "specforge dflash", "specforge dspark", "modelopt",
           "deepspec", "torchspec", "torchspec dflash"]  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Bytes for tokens: a character of several bytes is spread over several of them."""
    made = Tokenizer(models.BPE({text: n for n, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def write(tmp_path: Path, tokenizer: str, format_: str) -> tuple[Path, list[int]]:
    ids = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode(TEXT).ids
    with Writer(tmp_path / "cold") as writer:
        writer.put(ids)
        writer.put([*reversed(ids)])
    rows = [{"input_ids": row, "loss_mask": [0] * 5 + [1] * 4 + [0] * (len(ids) - 9)} for row in (ids, ids[::-1])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer, _, more = format_.partition(" ")
    options = ["--format", trainer, "--sequences", f"dataset:{tmp_path / 'rows.jsonl'}", "-q"]
    options += ["--dtype", "fp8"] if more == "fp8" else ["--algorithm", more] if more else []
    if more != "dflash":
        options += ["--final-norm", str(save_norm(tmp_path / "model"))]
    assert main([str(tmp_path / "cold"), "--out", str(tmp_path / "out"), *options]) == 0
    return tmp_path / "out", ids


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_shows_the_same_sample(tmp_path: Path, tokenizer: str, format_: str, capsys: Any) -> None:
    out, ids = write(tmp_path, tokenizer, format_)
    assert main(["show", str(out), "--tokenizer", tokenizer, "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["input_ids"] == ids
    assert (shown["loss_spans"], shown["tokens_trained"], shown["samples"]) == ([[5, 9]], 4, 2)
    assert "".join(shown["text"]) == TEXT
    assert [len(shown[name]) for name in ("text", "loss_mask")] == [len(ids)] * 2
    layers = {layer["slot"]: layer for layer in shown["layers"]}
    assert list(layers) == [*AUX, *([] if "dflash" in format_ else [LAST])]
    for slot in AUX:
        expected = torch.linalg.vector_norm(rows_of(ids, slot).float(), dim=-1)
        torch.testing.assert_close(torch.tensor(layers[slot]["norms"]), expected, rtol=0.05, atol=1e-3)
        assert layers[slot]["hidden_size"] == HIDDEN
        assert layers[slot]["finite"]
    assert main(["show", str(out), "1", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["input_ids"] == ids[::-1]


def test_what_a_person_sees(tmp_path: Path, tokenizer: str, capsys: Any) -> None:
    out, ids = write(tmp_path, tokenizer, "modelopt")
    assert main(["show", str(out), "0", "--tokenizer", tokenizer, "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert f"sample 0 of 2 (modelopt, train), sample-000000000.pt: {len(ids)} tokens, 4 trained on, in 1 spans" in shown
    assert "Ring ⟦é t⟧wice, 灯 once." in shown  # é has two bytes, the first of which is shown with the second
    assert "output of layer 1" in shown
    assert "last layer, post-norm" in shown
    assert len([line for line in shown.splitlines() if line.split()[1:3:2] and " yes " in line]) == 4
    assert main(["show", str(out)]) == 0
    assert " ".join(map(str, ids[:5])) in capsys.readouterr().out  # ids where there is no tokenizer


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, tokenizer: str, capsys: Any) -> None:
    out, _ = write(tmp_path, tokenizer, "modelopt")
    for arguments, text in (
        ([str(tmp_path / "nothing")], "is not a finished set"),
        ([str(out), "2"], "has the samples 0 to 1, and no 2"),
        ([str(out), "--tokenizer", "/nowhere"], "there is no tokenizer.json"),
    ):
        assert main(["show", *arguments]) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert text in line
    next(out.glob("*.pt")).write_bytes(b"cut")
    assert main(["show", str(out)]) == 1
    assert "sample-000000000.pt, of sample 0, cannot be read" in capsys.readouterr().err
    (out / "manifest.json").write_text("{}")
    assert main(["show", str(out)]) == 1
    assert "is no manifest of lmcache-hs-extract" in capsys.readouterr().err


def _drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.pop(name)


@pytest.mark.parametrize(
    "damage",
    [
        *map(_drop, ("trainer_format", "last_layer", "hidden_size", "layers", "samples")),
        lambda manifest: manifest.update(hidden_size=7),
        lambda manifest: manifest.update(hidden_size="x"),
        lambda manifest: manifest.update(samples="abc"),
        lambda manifest: manifest["layers"].update(slots=None),
        lambda manifest: manifest["layers"]["slots"].pop(0),
        lambda manifest: manifest["samples"][0].pop("file"),
        lambda manifest: manifest["samples"][0].pop("split"),
        lambda manifest: manifest["samples"][0].update(tokens=999),
    ],
)
@pytest.mark.parametrize("format_", ["speculators", "modelopt", "deepspec"])
def test_a_manifest_that_does_not_fit_is_one_line(
    tmp_path: Path, tokenizer: str, format_: str, damage: Callable[[dict[str, Any]], object], capsys: Any
) -> None:
    out, _ = write(tmp_path, tokenizer, format_)
    manifest = json.loads((out / "manifest.json").read_text())
    damage(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert main(["show", str(out)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("lmcache-hs-extract show: error: ")
    assert not captured.out


def test_a_file_of_a_sample_that_is_none_is_one_line(tmp_path: Path, tokenizer: str, capsys: Any) -> None:
    out, _ = write(tmp_path, tokenizer, "modelopt")
    for junk in (b"", b"junk", b"PK\x03\x04", b"\x80\x02"):
        next(out.glob("*000.pt")).write_bytes(junk)
        assert main(["show", str(out)]) == 1
        assert "of sample 0, cannot be read: it is not what torch.save writes" in capsys.readouterr().err


def test_a_set_counts_its_samples(tmp_path: Path, tokenizer: str) -> None:
    out, ids = write(tmp_path, tokenizer, "deepspec")
    written = WrittenSet(str(out))
    assert len(written) == 2
    assert written.sample(1).ids.tolist() == ids[::-1]
