"""Checks of served.sh: that the training set is what the server said, and that what was trained is a drafter.

python served.py rows MODEL DATA TURNS.jsonl      rows and masks against the server's own tokens and text
python served.py drafters FROM_FILES FROM_CHUNKS  both checkpoints load again, are the same, and have learnt
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch


def rows(model: str, data: str, turns: str) -> None:
    """Every request is one row, with the server's tokens, and its mask is exactly the answer's text."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    said = {tuple(row["input_ids"]): row for row in map(json.loads, Path(turns).read_text().splitlines())}
    table = datasets.load_from_disk(data)
    assert len(table) == len(said)
    for row in table:
        request = said.pop(tuple(row["input_ids"].tolist()))
        assert row["loss_mask"].tolist() == request["loss_mask"]
        answer = tokenizer.decode(row["input_ids"][row["loss_mask"].bool()], skip_special_tokens=True)
        assert request["text"].startswith(answer.removesuffix("\ufffd"))  # type: ignore[union-attr]
        assert len(request["text"]) - len(answer) < 20, "all but the last token"
        prompt = tokenizer.decode(row["input_ids"][~row["loss_mask"].bool()])
        assert prompt.endswith("<|im_start|>assistant\n")  # type: ignore[union-attr]
    print(f"{len(table)} rows are the server's requests: the loss is on the answers' tokens and on nothing else")


def load(folder: Path) -> Any:
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(str(folder), config=config)


def drafters(files: str, live: str) -> None:
    epochs = sorted(int(path.name) for path in Path(files).iterdir() if path.name.isdigit() and not path.is_symlink())
    first, last = ({name: json.loads((Path(name) / str(epoch) / "val_metrics.json").read_text())["loss_epoch"]
                    for name in (files, live)} for epoch in (epochs[0], epochs[-1]))  # fmt: skip
    one, two = (load(Path(name) / str(epochs[-1])).state_dict() for name in (files, live))
    assert one.keys() == two.keys()
    apart = max(float((one[key].float() - two[key].float()).abs().max()) for key in one)
    for name in (files, live):
        print(f"{name}: validation loss {first[name]:.3f} after the first epoch, {last[name]:.3f} after {len(epochs)}")
    print(f"{len(one)} tensors of both checkpoints loaded; largest difference {apart:.1e}")
    assert all(last[name] < first[name] for name in (files, live))
    assert apart == 0, "the same rows in the same order"
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in one.values())


if __name__ == "__main__":
    {"rows": rows, "drafters": drafters}[sys.argv[1]](*sys.argv[2:])
