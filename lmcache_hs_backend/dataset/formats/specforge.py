"""SpecForge 0.2: one ``torch.save`` file per sample, 2,000 to a folder.

``rows_{g}-{g+2000}/data_{i}.ckpt``: ``input_ids`` and ``loss_mask`` int64 ``[S]``, ``aux_hidden_state``
``[1, S, n_aux * H]``, ``hidden_state`` ``[1, S, H]``, the last layer after the final norm. Numbers are padded
with zeros, because the reader sorts names as text.
"""

from __future__ import annotations

import os

import torch

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.formats.base import Encoded, Format, save_torch
from lmcache_hs_backend.dataset.rows import Rows

GROUP = 2000


class SpecForge(Format):
    wants_normed = True

    def nbytes(self, tokens: int) -> int:
        return tokens * (len(self.job.layers.slots) * self.job.hidden_size * 2 + 16) + 2048

    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        value = {
            "input_ids": rows.ids,
            "loss_mask": mask,
            "hidden_state": rows.last.unsqueeze(0),
            "aux_hidden_state": rows.aux.flatten(1).unsqueeze(0),
        }
        return save_torch(value, temporary)

    def place_of(self, split: str, number: int) -> str:
        group = number // GROUP * GROUP
        name = os.path.join(f"rows_{group:09d}-{group + GROUP:09d}", f"data_{number:09d}.ckpt")
        return os.path.join(self.folder(split), name)
