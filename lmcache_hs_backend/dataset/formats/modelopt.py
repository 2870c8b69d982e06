"""NVIDIA Model-Optimizer 0.47: one ``torch.save`` file per sample, named after the conversation.

``input_ids`` and ``loss_mask`` int64 ``[S]``, ``aux_hidden_states`` ``[S, n_aux * H]``, ``hidden_states``
``[S, H]``, ``conversation_id``, and ``hidden_states_prenorm``, which tells the trainer to apply the norm.
"""

from __future__ import annotations

import os

import torch

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.formats.base import Encoded, Format, save_torch
from lmcache_hs_backend.dataset.rows import Rows


class ModelOpt(Format):
    """For EAGLE-3, whose trainer applies the final norm where the file says so."""

    wants_normed = None

    def nbytes(self, tokens: int) -> int:
        """About how many bytes a sample of so many tokens takes."""
        return tokens * (len(self.job.layers.slots) * self.job.hidden_size * 2 + 16) + 2048

    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        """Save a sample to ``temporary``. Raises OSError."""
        value = {
            "input_ids": rows.ids,
            "hidden_states": rows.last,
            "aux_hidden_states": rows.aux.flatten(1),
            "loss_mask": mask,
            "conversation_id": sample.id,
            "hidden_states_prenorm": not self.job.normed,
        }
        return save_torch(value, temporary)

    def place_of(self, split: str, number: int) -> str:
        """A file for each sample; the reader does not care about names."""
        return os.path.join(self.folder(split), f"sample-{number:09d}.pt")
