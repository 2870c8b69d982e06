"""Checks of served.sh: that the training set is what the server said, and that what was trained is a drafter.

python served.py epochs URL COLD TURNS.jsonl MODEL   rows that are missing are generated in the first epoch only
python served.py rows MODEL DATA TURNS.jsonl         rows and masks against the server's own tokens and text
python served.py drafters FROM_FILES FROM_CHUNKS     both checkpoints load again, are the same, and have learnt
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

FIRST_TOKENS_LEFT_OUT = int(os.environ.get("FIRST_TOKENS_LEFT_OUT", "5"))


def epochs(url: str, cold: str, turns: str, model: str) -> None:
    """Two epochs of speculators' own reader over rows that the server never saw; counted by the server itself.

    Rows that another one begins with are left out. Such a row's last, short chunk is replaced by the longer one's,
    whose rows vLLM has computed again, in a batch of another shape: equal up to bfloat16's rounding only.
    """
    import argparse
    import shutil
    import urllib.request

    import datasets
    from hs_connectors import HiddenStatesBackend
    from speculators.train.data import ArrowDataset

    import lmcache_hs_backend.integrations.speculators as tiered

    def answered() -> int:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:request_success_total"))

    said = [json.loads(line)["input_ids"] for line in Path(turns).read_text().splitlines()]
    said = [row for row in said if not any(other[: len(row)] == row for other in said if other is not row)]
    ids = [row[FIRST_TOKENS_LEFT_OUT:] for row in said]  # other prefixes: no chunk of theirs is there
    table = datasets.Dataset.from_dict(
        {"input_ids": ids, "loss_mask": [[1] * len(row) for row in ids], "seq_len": [len(row) for row in ids]}
    )
    table.set_format("torch")
    shutil.rmtree("new-rows", ignore_errors=True)
    table.save_to_disk("new-rows")
    parser = argparse.ArgumentParser()
    backend = HiddenStatesBackend.registry[tiered.NAME]
    backend.add_train_args(parser)
    options = parser.parse_args(["--hs-cold-path", cold, "--hs-final-norm", model])
    options.on_missing = "generate"
    transfer = backend.from_train_args(options, "new-rows")
    reader = ArrowDataset(4096, "new-rows", transfer=transfer, vllm_endpoint=f"{url}/v1", on_missing="generate")
    passes, requests = [], [answered()]
    for _ in range(2):
        passes.append([reader[number] for number in range(len(reader))])
        requests.append(answered())
    first, second = (after - before for before, after in itertools.pairwise(requests))
    print(f"{len(ids)} rows that were not there: {first} requests in the first epoch, {second} in the second")
    assert (first, second) == (len(ids), 0)
    one, two = passes
    assert all(torch.equal(one[row][key], two[row][key]) for row in range(len(ids)) for key in one[row])
    print("the second epoch's tensors equal the first's to the bit")


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
    {"epochs": epochs, "rows": rows, "drafters": drafters}[sys.argv[1]](*sys.argv[2:])
