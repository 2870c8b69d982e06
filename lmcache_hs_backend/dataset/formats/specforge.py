"""SpecForge 0.2: one ``torch.save`` file per sample, 2,000 to a folder, with the tensors that one algorithm reads.

``rows_{g}-{g+2000}/data_{i}.ckpt`` holds ``input_ids`` and ``loss_mask`` int64 ``[S]`` and, bf16:

===============  =========================================================================================
eagle3           ``aux_hidden_state`` ``[1, S, n_aux * H]``, ``hidden_state`` ``[1, S, H]``
dflash, domino   ``hidden_states`` ``[S, n_aux * H]``; no last layer
dspark           the same, and ``target_last_hidden_states`` ``[S, H]``
===============  =========================================================================================

The last layer is after the final norm: the trainer applies ``lm_head`` to it. Numbers are padded with zeros, because
the reader sorts names as text. Its peagle trains online only.
"""

from __future__ import annotations

import os

import torch

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import RowRejected
from lmcache_hs_backend.dataset.formats.base import Encoded, Format, save_torch
from lmcache_hs_backend.dataset.rows import Rows

GROUP = 2000


class SpecForge(Format):
    """For ``eagle3``."""

    wants_normed: bool | None = True

    def nbytes(self, tokens: int) -> int:
        """About how many bytes a sample of so many tokens takes."""
        return tokens * (len(self.job.layers.slots) * self.job.hidden_size * 2 + 16) + 2048

    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        """Save a sample to ``temporary``. Raises OSError."""
        return save_torch({"input_ids": rows.ids, "loss_mask": mask, **self._tensors(rows)}, temporary)

    def _tensors(self, rows: Rows) -> dict[str, torch.Tensor]:
        return {"hidden_state": rows.last.unsqueeze(0), "aux_hidden_state": rows.aux.flatten(1).unsqueeze(0)}

    def place_of(self, split: str, number: int) -> str:
        """A file for each sample, ``GROUP`` to a folder."""
        group = number // GROUP * GROUP
        name = os.path.join(f"rows_{group:09d}-{group + GROUP:09d}", f"data_{number:09d}.ckpt")
        return os.path.join(self.folder(split), name)


class SpecForgeDFlash(SpecForge):
    """For ``dflash`` and ``domino``. Their reader stops at a sample without two trained tokens in a row."""

    wants_normed: bool | None = None
    uses_last = False

    def promise(self, sample: Sample, mask: torch.Tensor) -> None:
        """Raises RowRejected when no two trained tokens follow each other."""
        if not bool((mask[1:] & mask[:-1]).any()):
            raise RowRejected("no_loss", "the algorithm needs two tokens in a row that are trained on")

    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        """Save a sample to ``temporary``. Raises OSError, and RowRejected as ``promise`` does."""
        self.promise(sample, mask)
        return super().encode(sample, rows, mask, temporary)

    def _tensors(self, rows: Rows) -> dict[str, torch.Tensor]:
        return {"hidden_states": rows.aux.flatten(1)}


class SpecForgeDSpark(SpecForgeDFlash):
    """For ``dspark``."""

    wants_normed = True
    uses_last = True

    def _tensors(self, rows: Rows) -> dict[str, torch.Tensor]:
        return {**super()._tensors(rows), "target_last_hidden_states": rows.last}
