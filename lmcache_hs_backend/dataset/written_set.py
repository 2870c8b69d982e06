"""A training set that ``lmcache-hs-extract`` has written, read back sample by sample, whatever its format.

For people who look at samples; trainers have readers of their own. What a sample is stands in ``manifest.json``.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.export import MANIFEST


@dataclass(frozen=True)
class WrittenSample:
    """Ids and mask int64 ``[S]``; of each layer its storage slot and its rows ``[S, H]``, as trainers see them."""

    number: int
    file: str
    split: str
    ids: torch.Tensor
    mask: torch.Tensor
    layers: list[tuple[int, torch.Tensor]]


class WrittenSet:
    """One output folder. Raises DatasetError when it is none, or a sample cannot be read."""

    def __init__(self, path: str) -> None:
        self.path = os.path.expanduser(path)
        where = os.path.join(self.path, MANIFEST)
        try:
            with open(where, encoding="utf-8") as file:
                self.manifest: dict[str, Any] = json.load(file)
            self._entries: list[dict[str, Any]] = self.manifest["samples"]
            self._slots: list[int] = self.manifest["layers"]["slots"]
            self._last: int | None = self.manifest["layers"]["last"]
            self._read = _READERS[self.manifest["trainer_format"]]
            for wanted, values in (
                (int, [self.manifest["hidden_size"], *self._slots]),
                (str, [self.manifest["last_layer"], self.manifest["model"]]),
                (str, [entry[name] for entry in self._entries for name in ("file", "split")]),
                (int, [entry["tokens"] for entry in self._entries]),
            ):
                if not all(isinstance(value, wanted) for value in values):
                    raise ValueError(f"a value in it is no {wanted.__name__}")
        except FileNotFoundError:
            raise DatasetError(f"{path} is not a finished set of lmcache-hs-extract: there is no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{where} is no manifest of lmcache-hs-extract: {error!r}") from None

    def __len__(self) -> int:
        return len(self._entries)

    def sample(self, number: int) -> WrittenSample:
        """The sample in this place of the manifest, from 0 on."""
        if not 0 <= number < len(self):
            raise DatasetError(f"{self.path} has the samples 0 to {len(self) - 1}, and no {number}")
        entry = self._entries[number]
        path = os.path.join(self.path, entry["file"])
        try:
            ids, mask, aux, last = self._read(self, path, entry, number)
            if len(ids) != entry["tokens"] or len(mask) != len(ids):
                raise ValueError(
                    f"it has {len(ids)} token ids and a mask of {len(mask)}, but by {MANIFEST} {entry['tokens']} tokens"
                )
            slots = [slot for slot in self._slots if slot != self._last]
            hidden = self.manifest["hidden_size"]
            layers = list(zip(slots, aux.reshape(len(ids), len(slots), hidden).unbind(1), strict=True))
            if last is not None and self._last is not None:
                layers.append((self._last, last.reshape(len(ids), hidden)))
        except (OSError, SafetensorError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise DatasetError(f"{path}, of sample {number}, cannot be read: {error}") from None
        except ImportError as error:
            raise DatasetError(f"{path}, of sample {number}, needs {error.name}: {error}") from None
        return WrittenSample(number, entry["file"], entry["split"], ids, mask, layers)

    # -- one reader for each trainer: ids, mask, auxiliary layers, last layer ------------------------------

    def _speculators(self, path: str, entry: dict[str, Any], number: int) -> _Tensors:
        import datasets

        with safe_open(path, framework="pt") as file:
            ids, rows = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
            if "hidden_states_scales" in file.keys():  # noqa: SIM118 - not a dict
                rows = rows.to(torch.bfloat16) * file.get_tensor("hidden_states_scales").to(torch.bfloat16)
        mask = torch.tensor(datasets.load_from_disk(self.path).with_format(None)[number]["loss_mask"])
        return ids, mask, rows[:, :-1], rows[:, -1]

    def _specforge(self, path: str, entry: dict[str, Any], number: int) -> _Tensors:
        record = _load(path)
        aux = record["aux_hidden_state"] if "aux_hidden_state" in record else record["hidden_states"]
        last = record.get("hidden_state", record.get("target_last_hidden_states"))
        return record["input_ids"], record["loss_mask"], aux, last

    def _modelopt(self, path: str, entry: dict[str, Any], number: int) -> _Tensors:
        record = _load(path)
        return record["input_ids"], record["loss_mask"], record["aux_hidden_states"], record["hidden_states"]

    def _torchspec(self, path: str, entry: dict[str, Any], number: int) -> _Tensors:
        record = _load(path)
        runs = [int(length) for length in record["packed_loss_mask"].split(",")]
        mask = torch.cat([torch.full((length,), at % 2) for at, length in enumerate(runs)])
        return record["input_ids"][0], mask, record["hidden_states"], record.get("last_hidden_states")

    def _deepspec(self, path: str, entry: dict[str, Any], number: int) -> _Tensors:
        with open(path, "rb") as file:
            file.seek(entry["offset"])
            raw = bytearray(file.read(entry["bytes"]))
        count, hidden = entry["tokens"], self.manifest["hidden_size"]
        width = (len(self._slots) - 1) * hidden
        wanted = count * (torch.int32.itemsize + 2 + torch.bfloat16.itemsize * (width + hidden))
        if len(raw) != wanted:
            raise ValueError(f"{len(raw)} bytes where {wanted} should be")
        parts, at = [], 0
        for dtype, size in ((torch.int32, 1), (torch.uint8, 1), (torch.uint8, 1), (torch.bfloat16, width),
                            (torch.bfloat16, hidden)):  # fmt: skip
            parts.append(torch.frombuffer(raw, dtype=dtype, count=count * size, offset=at))
            at += count * size * dtype.itemsize
        return parts[0].long(), parts[2].long(), parts[3], parts[4]


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
_READERS = {
    "speculators": WrittenSet._speculators,
    "specforge": WrittenSet._specforge,
    "modelopt": WrittenSet._modelopt,
    "torchspec": WrittenSet._torchspec,
    "deepspec": WrittenSet._deepspec,
}


def _load(path: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, LookupError, ValueError, struct.error, pickle.UnpicklingError):  # of many lines
        raise ValueError("it is not what torch.save writes, or was cut short") from None
    return record
