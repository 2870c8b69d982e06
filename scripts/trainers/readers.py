"""Every extracted sample through the real reader of its trainer, each run in that trainer's own environment.

    python readers.py speculators|fp8|specforge|modelopt OUT DATA.jsonl
    python readers.py specforge-family OUT DATA.jsonl dflash|domino|dspark SPECFORGE_OUT
    python readers.py deepspec OUT DATA.jsonl SPECFORGE_OUT
    python readers.py torchspec OUT DATA.jsonl SPECFORGE_OUT [DATASET_PY]

DATA.jsonl has the token ids and loss masks that were asked for, SPECFORGE_OUT SpecForge's files for eagle3, whose rows
the others must have too. DeepSpec and TorchSpec are not on PyPI: their folders are read as the formats are described,
TorchSpec's also by its own ``offline/dataset.py`` where DATASET_PY names it. Needs nothing of lmcache-hs-backend.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HIDDEN, AUX = 576, 3


def speculators(out: Path, transfer: Any = None) -> list[tuple[list[int], list[int]]]:
    from hs_connectors import FileTransfer
    from speculators.data_generation.offline import (
        check_hidden_states,
        find_corrupt_hidden_state_indices,
        get_existing_hidden_state_indices,
    )
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    folder = out / "hidden_states"
    transfer = transfer or FileTransfer(folder)
    rows = ArrowDataset(max_len=4096, datapath=str(out), transfer=transfer, on_missing="raise")
    assert get_existing_hidden_state_indices(folder) == list(range(len(rows)))
    assert find_corrupt_hidden_state_indices(folder, list(range(len(rows)))) == {}
    seen = []
    for number in range(len(rows)):
        row = rows[number]
        check_hidden_states(transfer.get_cached(number), row["input_ids"].tolist())
        assert row["hidden_states"].shape == (len(row["input_ids"]), AUX * HIDDEN)
        assert row["hidden_states"].dtype == row["verifier_last_hidden_states"].dtype == torch.bfloat16
        seen.append((row["input_ids"].tolist(), row["loss_mask"].tolist()))
    batch = CollateFn(4096, HIDDEN, num_target_layers=AUX, preprocess=shift_batch)([rows[0], rows[1]])
    assert batch["hidden_states"].shape == (1, 4096, AUX * HIDDEN)
    assert bool(batch["hidden_states"].isfinite().all())
    return seen


def fp8(out: Path) -> list[tuple[list[int], list[int]]]:
    from hs_connectors.transfer import FP8Transfer

    return speculators(out, FP8Transfer(out / "hidden_states"))


def specforge(out: Path) -> list[tuple[list[int], list[int]]]:
    from specforge.algorithms.eagle3.data import build_offline_normalizer
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    refs = OfflineManifestReader(str(out), run_id="check", ttt_length=7, max_len=4096, validate_files=True).read()
    loader = FeatureDataLoader(
        LocalFeatureStore(), refs=refs, batch_size=1, per_sample_transform=build_offline_normalizer(4096),
        collate_fn=lambda features: {key: torch.cat([f[key] for f in features]) for key in features[0]},
        strategy="eagle3",
    )  # fmt: skip
    seen = []
    for batch in loader:
        tensors = batch.tensors
        ids = tensors["input_ids"].flatten()
        assert tensors["target"].shape == (1, len(ids), HIDDEN)
        assert tensors["hidden_state"].shape == (1, len(ids), AUX * HIDDEN)
        seen.append((ids.tolist(), tensors["loss_mask"].flatten().tolist()))
    return seen


def specforge_family(out: Path, algorithm: str, eagle3_out: str) -> list[tuple[list[int], list[int]]]:
    """By the reader, normaliser and collator that SpecForge registers for the algorithm."""
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    registration = importlib.import_module(f"specforge.algorithms.{algorithm}.providers").create_registration()
    (provider,) = registration.providers.offline
    reader = provider.build_reader(str(out), run_id="check", ttt_length=7, max_len=4096)
    reader.validate_files = True
    loader = FeatureDataLoader(
        LocalFeatureStore(), refs=reader.read(), batch_size=1, strategy=algorithm,
        per_sample_transform=provider.build_normalizer(4096), collate_fn=provider.build_collator(),
    )  # fmt: skip
    seen = []
    for batch, path in zip(loader, sorted(Path(eagle3_out).rglob("*.ckpt")), strict=True):
        tensors, same = batch.tensors, torch.load(path, weights_only=True)
        assert torch.equal(tensors["hidden_states"], same["aux_hidden_state"])
        if algorithm == "dspark":
            assert torch.equal(tensors["target_last_hidden_states"], same["hidden_state"])
        seen.append((tensors["input_ids"].flatten().tolist(), tensors["loss_mask"].flatten().tolist()))
    return seen


def modelopt(out: Path) -> list[tuple[list[int], list[int]]]:
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    rows = OfflineSupervisedDataset([str(path) for path in sorted(out.rglob("*.pt"))], answer_only_loss=True)
    seen = []
    for number in range(len(rows)):
        row = rows[number]
        batch = EagleOfflineDataCollator(train_len=4096)([row])
        outputs = batch["base_model_outputs"]
        assert outputs["base_model_hidden_states"].shape == (1, 4096, HIDDEN)
        assert outputs["aux_hidden_states"].shape == (1, 4096, AUX * HIDDEN)
        stored = torch.load(sorted(out.rglob("*.pt"))[number], weights_only=True)
        seen.append((row["input_ids"].flatten().tolist(), stored["loss_mask"].tolist()))
    return seen


def target_cache(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The samples of a DeepSpec target cache, version 2."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 2
    assert manifest["target_layer_ids"] == sorted(manifest["target_layer_ids"])
    assert (manifest["hidden_dtype"], manifest["token_dtype"], manifest["mask_dtype"]) == ("bfloat16", "int32", "uint8")
    assert len(manifest["shards"]) == manifest["num_shards"]
    shards = {}
    for shard in manifest["shards"]:
        with open(folder / shard["file_name"], "rb") as file:
            shards[shard["shard_id"]] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    record = struct.Struct("<QIIQQQQQ")
    index = (folder / "samples.idx").read_bytes()
    assert manifest["index_record_size"] == record.size
    assert len(index) == record.size * manifest["num_samples"]
    hidden, layers = manifest["hidden_size"], len(manifest["target_layer_ids"])
    fields = {
        "input_ids": (torch.int32, ()), "attention_mask": (torch.uint8, ()), "loss_mask": (torch.uint8, ()),
        "target_hidden_states": (torch.bfloat16, (layers * hidden,)),
        "target_last_hidden_states": (torch.bfloat16, (hidden,)),
    }  # fmt: skip
    for number, (sample_id, shard_id, tokens, *offsets) in enumerate(record.iter_unpack(index)):
        assert sample_id == number
        sample = {}
        for (name, (dtype, shape)), offset in zip(fields.items(), offsets, strict=True):
            count = tokens * (shape[0] if shape else 1) * dtype.itemsize
            data = bytearray(shards[shard_id][offset : offset + count])
            sample[name] = torch.frombuffer(data, dtype=dtype).view(tokens, *shape)
        yield sample


def deepspec(out: Path, specforge_out: str) -> list[tuple[list[int], list[int]]]:
    seen = []
    files = sorted(Path(specforge_out).rglob("*.ckpt"))
    for sample, path in zip(target_cache(out), files, strict=True):
        same = torch.load(path, weights_only=True)
        assert sample["input_ids"].tolist() == same["input_ids"].tolist()
        assert torch.equal(sample["target_hidden_states"], same["aux_hidden_state"][0])
        assert torch.equal(sample["target_last_hidden_states"], same["hidden_state"][0])
        assert bool((sample["attention_mask"] == 1).all())
        seen.append((sample["input_ids"].tolist(), sample["loss_mask"].tolist()))
    return seen


def torchspec(out: Path, eagle3_out: str, dataset_py: str = "") -> list[tuple[list[int], list[int]]]:
    assert json.loads((out / "dataset.json").read_text()) == {"version": 1, "last_hidden_states_prenorm": False}
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert {row["split"] for row in rows} == {"train"}
    records = [torch.load(out / row["file"], weights_only=True, mmap=True) for row in rows]
    assert [record["data_id"] for record in records] == [row["data_id"] for row in rows]
    if dataset_py:
        spec = importlib.util.spec_from_file_location("torchspec_dataset", dataset_py)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        own = module.OfflineDataset(out)
        assert [own.load(row)["data_id"] for row in own.rows("train")] == [row["data_id"] for row in rows]
    seen = []
    for record, path in zip(records, sorted(Path(eagle3_out).rglob("*.ckpt")), strict=True):
        same = torch.load(path, weights_only=True)
        assert torch.equal(record["hidden_states"], same["aux_hidden_state"])
        assert torch.equal(record["last_hidden_states"], same["hidden_state"])
        mask: list[int] = []
        for number, length in enumerate(record["packed_loss_mask"].split(",")):
            mask += [number % 2] * int(length)
        seen.append((record["input_ids"][0].tolist(), mask))
    return seen


READERS = {
    "speculators": speculators, "fp8": fp8, "specforge": specforge, "specforge-family": specforge_family,
    "modelopt": modelopt, "deepspec": deepspec, "torchspec": torchspec,
}  # fmt: skip


def main(kind: str, out: str, data: str, *more: str) -> None:
    seen = READERS[kind](Path(out), *more)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    assert len(seen) == len(rows), (len(seen), len(rows))
    for (ids, mask), row in zip(seen, rows, strict=True):
        assert ids == row["input_ids"]
        # SpecForge's normaliser takes the last position out of the loss, which has nothing to predict.
        assert mask == row["loss_mask"] or mask == [*row["loss_mask"][:-1], 0]
    name, tokens = more[0] if kind == "specforge-family" else kind, sum(len(ids) for ids, _ in seen)
    print(f"{name}: {len(seen)} samples read, {tokens} tokens, ids and masks as asked for")


if __name__ == "__main__":
    main(*sys.argv[1:])
