"""speculators 0.9: an Arrow dataset of ids and masks, and one safetensors file of rows per sample.

``hidden_states/hs_{row}.safetensors`` holds ``hidden_states`` ``[S, n_aux + 1, H]``, ascending layers, the
last one before the final norm, and ``token_ids`` int64 ``[S]``. The number is that of the Arrow row and is
never padded. ``dtype`` fp8: float8_e4m3fn with ``hidden_states_scales`` float32 ``[S, n_aux + 1, 1]``, which
its fp8 backend multiplies back; a scale per layer, because the last one is often ten times the first.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.formats.base import Encoded, Entry, Format, HashingFile, Job, bytes_of, save_torch
from lmcache_hs_backend.dataset.masks import from_spans
from lmcache_hs_backend.dataset.prepared import needs_extra
from lmcache_hs_backend.dataset.rows import Rows
from lmcache_hs_backend.format.pages import ALIGN, align

FOLDER = "hidden_states"
_FP8_MAX = 448.0
_NAMES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}


class Speculators(Format):
    """For every algorithm of speculators; MTP needs the last layer only."""

    wants_normed = False
    stacked = True
    aux_optional = True  # MTP is trained on the last layer alone
    dtypes = ("bf16", "fp8")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if importlib.util.find_spec("datasets") is None:
            raise needs_extra("datasets", "--format speculators")
        # Importing it takes a second, and is wanted at the end: the disk has the time meanwhile.
        threading.Thread(target=importlib.import_module, args=("datasets",)).start()

    def nbytes(self, tokens: int) -> int:
        """About how many bytes a sample of so many tokens takes."""
        width = len(self.job.layers.slots)
        per_token = width * (self.job.hidden_size + 4 if self.job.dtype == "fp8" else self.job.hidden_size * 2)
        return tokens * (per_token + 8 + 20) + ALIGN  # and the ids and masks of the Arrow table

    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        """Save a sample, in fp8 with its scales and errors, to ``temporary``. Raises OSError."""
        assert rows.stacked is not None
        tensors = {"token_ids": rows.ids}
        facts: dict[str, Any] = {}
        if self.job.dtype == "fp8":
            quantised, scales = quantise(rows.stacked)
            tensors |= {"hidden_states_scales": scales, "hidden_states": quantised}
            facts["fp8"] = _errors(rows.stacked, quantised, scales)
        else:
            tensors["hidden_states"] = rows.stacked
        with HashingFile(temporary, direct=True) as file:
            file.write(_head(tensors))
            file.write(bytes_of(tensors["hidden_states"]))
        return Encoded(file.nbytes, file.checksum, temporary, facts=facts)

    def place_of(self, split: str, number: int) -> str:
        """The file that the reader looks for: the number of the Arrow row, unpadded."""
        return os.path.join(FOLDER, f"hs_{number}.safetensors")

    def folder(self, split: str) -> str:
        """One folder: the trainer splits by row number, the validation rows being the last."""
        return ""

    def finish(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """The Arrow dataset, saved with its torch format, and ``token_freq.pt``."""
        import datasets
        import pyarrow

        columns = ("input_ids", "loss_mask", "seq_len")
        lists, number = datasets.Sequence(datasets.Value("int64")), datasets.Value("int64")
        schema = datasets.Features(dict(zip(columns, (lists, lists, number), strict=True))).arrow_schema
        frequencies: Counter[int] = Counter()
        splits: Counter[str] = Counter()
        fp8 = _Fp8Error()
        digest = xxhash.xxh3_64()
        scratch = os.path.join(self.job.state, "arrow")
        shutil.rmtree(scratch, ignore_errors=True)
        os.mkdir(scratch)
        stream = os.path.join(scratch, "rows.arrow")
        with pyarrow.OSFile(stream, "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as batches:
            for entry in entries:
                with safe_open(os.path.join(self.job.out, entry.file), framework="pt") as file:
                    ids = file.get_tensor("token_ids")
                mask = from_spans(entry.loss, entry.tokens)
                values = ([ids.tolist()], [mask.tolist()], [entry.tokens])
                batches.write_batch(pyarrow.record_batch(dict(zip(columns, values, strict=True)), schema=schema))
                frequencies.update(ids[mask.bool()].tolist())
                splits[entry.split] += 1
                fp8.add(entry.facts.get("fp8"))
                digest.update(entry.checksum.encode())
        shown = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            table = datasets.Dataset.from_file(stream)
            table.set_format("torch")  # the reader computes with the columns as they come
            saved = os.path.join(scratch, "saved")
            table.save_to_disk(saved)
        finally:
            if shown:
                datasets.enable_progress_bars()
        _settle(saved, digest.hexdigest())
        for name in sorted(os.listdir(saved)):
            os.replace(os.path.join(saved, name), os.path.join(self.job.out, name))
        frequency = os.path.join(scratch, "token_freq.pt")
        save_torch(dict(sorted(frequencies.items())), frequency)
        os.replace(frequency, os.path.join(self.job.out, "token_freq.pt"))
        shutil.rmtree(scratch)
        fields: dict[str, Any] = {"train_ratio": _ratio(splits["train"], splits.total())}
        return fields | ({"fp8_relative_error": fp8.per_layer()} if fp8.layers else {})


def _settle(folder: str, fingerprint: str) -> None:
    """Make the files that describe a saved dataset depend on its contents alone, not on when or where."""
    path = os.path.join(folder, "state.json")
    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    state["_fingerprint"] = fingerprint
    with open(path, "w", encoding="utf-8") as file:
        json.dump(state, file, indent=2, sort_keys=True)
    path = os.path.join(folder, "dataset_info.json")
    with open(path, encoding="utf-8") as file:
        info = json.load(file)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"features": info["features"], "citation": "", "description": ""}, file, indent=2, sort_keys=True)


def _ratio(train: int, total: int) -> float:
    """A float that speculators' ``int(total * ratio)`` turns back into ``train``."""
    ratio = train / total if total else 1.0
    while int(total * ratio) < train:
        ratio = torch.nextafter(torch.tensor(ratio, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)).item()
    return ratio


def _head(tensors: dict[str, torch.Tensor]) -> memoryview:
    """What stands before the last of these tensors in a safetensors file: whole pages, for direct writing."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    small = b"".join(bytes_of(tensor) for tensor in list(tensors.values())[:-1])
    total = align(8 + len(text) + len(small))
    text = text.ljust(total - 8 - len(small))  # the format allows spaces there
    head = memoryview(mmap.mmap(-1, total))
    head[:] = len(text).to_bytes(8, "little") + text + small
    return head


# -- fp8 -------------------------------------------------------------------------------------------------


def quantise(stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[S, L, H]`` → float8_e4m3fn and float32 scales ``[S, L, 1]``, one for each token and layer."""
    rows = stacked.float()
    scales = (rows.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp(min=1e-12)
    return (rows / scales).to(torch.float8_e4m3fn), scales


def _errors(stacked: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor) -> list[list[float]]:
    """Per layer, the sums of squares of the error and of the rows, as the reader restores them in bf16."""
    restored = (quantised.to(torch.bfloat16) * scales.to(torch.bfloat16)).double()
    rows = stacked.double()
    return [
        (restored - rows).square().sum((0, 2)).tolist(),
        rows.square().sum((0, 2)).tolist(),
    ]


class _Fp8Error:
    """The relative error of each layer over many samples."""

    def __init__(self) -> None:
        self.layers: list[list[float]] = []

    def add(self, sums: list[list[float]] | None) -> None:
        if sums is None:
            return
        error, rows = sums
        if not self.layers:
            self.layers = [[0.0, 0.0] for _ in error]
        for layer, e, r in zip(self.layers, error, rows, strict=True):
            layer[0] += e
            layer[1] += r

    def per_layer(self) -> list[float]:
        return [round((e / r) ** 0.5, 6) if r else 0.0 for e, r in self.layers]
