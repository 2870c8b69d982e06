"""TorchSpec's offline folder, version 1 (its pull request 143): one ``torch.save`` file per sample, and a manifest.

``dataset.json`` says whether the last layer is before the final norm, ``manifest.jsonl`` has one line per sample, and
``samples/{n}.pt`` holds ``input_ids`` int64 ``[1, S]``, ``hidden_states`` bf16 ``[1, S, n_aux * H]``,
``last_hidden_states`` bf16 ``[1, S, H]``, ``data_id``, ``packed_loss_mask`` and ``metadata``. A packed mask is text:
the lengths of runs, of zeros first (``"2,3,1"``: 0 0 1 1 1 0). Validation samples are the split ``eval``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
import xxhash

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.formats.base import VAL, Encoded, Entry, Format, bytes_of, save_torch
from lmcache_hs_backend.dataset.masks import spans
from lmcache_hs_backend.dataset.rows import Rows

VERSION = 1


class TorchSpec(Format):
    """For ``eagle3``, whose trainer applies the norm where ``dataset.json`` says so."""

    wants_normed: bool | None = None

    def nbytes(self, tokens: int) -> int:
        """About how many bytes a sample of so many tokens takes."""
        return tokens * (len(self.job.layers.slots) * self.job.hidden_size * 2 + 8) + 2048

    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        """Save a sample to ``temporary``. Raises OSError."""
        digest = xxhash.xxh3_64(bytes_of(rows.ids))
        digest.update(bytes_of(mask))
        data_id = f"{sample.id}-{digest.hexdigest()}"
        value = {
            "input_ids": rows.ids.unsqueeze(0),
            "hidden_states": rows.aux.flatten(1).unsqueeze(0),
            **self._last(rows),
            "data_id": data_id,
            "packed_loss_mask": packed(mask),
            "metadata": {},
        }
        return save_torch(value, temporary)._replace(facts={"data_id": data_id})

    def _last(self, rows: Rows) -> dict[str, torch.Tensor]:
        return {"last_hidden_states": rows.last.unsqueeze(0)}

    def place_of(self, split: str, number: int) -> str:
        """A file for each sample; the manifest says which split it is in."""
        return os.path.join("samples", f"{split}-{number:09d}.pt")

    def finish(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """``manifest.jsonl``, then ``dataset.json``, without which the folder is no dataset to its reader."""
        temporary = os.path.join(self.job.state, "manifest.jsonl")
        seen: set[str] = set()  # its reader refuses a folder with an id twice; equal ids are equal samples
        with open(temporary, "w", encoding="utf-8") as file:
            for entry in entries:
                data_id = entry.facts["data_id"]
                if data_id in seen:
                    continue
                seen.add(data_id)
                line = {"split": "eval" if entry.split == VAL else "train", "data_id": data_id, "file": entry.file}
                file.write(json.dumps(line) + "\n")
        os.replace(temporary, os.path.join(self.job.out, "manifest.jsonl"))
        head = {"version": VERSION, "last_hidden_states_prenorm": not self.job.normed}
        temporary = os.path.join(self.job.state, "dataset.json")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(head, file, indent=2)
        os.replace(temporary, os.path.join(self.job.out, "dataset.json"))
        return {"last_hidden_states_prenorm": not self.job.normed}


class TorchSpecDFlash(TorchSpec):
    """For ``dflash`` and ``domino``, which have no use for the last layer."""

    uses_last = False

    def _last(self, rows: Rows) -> dict[str, torch.Tensor]:
        return {}


class TorchSpecDSpark(TorchSpec):
    """For ``dspark``, whose trainer applies no norm, whatever the folder says."""

    wants_normed = True


def packed(mask: torch.Tensor) -> str:
    """A mask as the lengths of its runs, zeros first."""
    lengths, at = [], 0
    for begin, end in spans(mask):
        lengths += [begin - at, end - begin]
        at = end
    if at < len(mask):
        lengths.append(len(mask) - at)
    return ",".join(map(str, lengths))
