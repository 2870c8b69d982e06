"""What the rows should be: a Hugging Face forward of the same tokens, and a plain reader of chunk files.

Neither uses the connector or the tiers: chunk files are read with safetensors, chunks are found by their
parent and their token ids.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from safetensors import safe_open


class ChunkFile(NamedTuple):
    path: str
    chunk_hash: str
    parent: str
    start: int
    token_ids: list[int]


class ColdPath:
    """All chunk files of one cold path."""

    def __init__(self, cold_path: str) -> None:
        self.chunks: list[ChunkFile] = []
        self._children: dict[str, list[ChunkFile]] = {}
        for path in sorted(glob.glob(os.path.join(cold_path, "*", "[0-9a-f][0-9a-f]", "*.safetensors"))):
            with safe_open(path, "pt") as file:
                info, token_ids = file.metadata(), file.get_tensor("token_ids").tolist()
            chunk = ChunkFile(path, info["chunk_hash"], info["parent"], int(info["start"]), token_ids)
            self.chunks.append(chunk)
            self._children.setdefault(chunk.parent, []).append(chunk)

    @property
    def tokens(self) -> int:
        """Tokens stored, each chunk once."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def rows(self, token_ids: Sequence[int], layer: int) -> torch.Tensor:
        """The rows of a sequence, as far as there are any: ``[num_tokens, hidden_dim]``."""
        found, parent, done = [torch.empty(0, 0)], "", 0
        while done < len(token_ids):
            best, common = None, 0
            for chunk in self._children.get(parent, ()):
                here = token_ids[done : done + len(chunk.token_ids)]
                if chunk.token_ids[: len(here)] == list(here) and len(here) > common:
                    best, common = chunk, len(here)
            if best is None:
                break
            with safe_open(best.path, "pt") as file:
                found.append(file.get_tensor(f"layer.{layer}")[:common])
            parent, done = best.chunk_hash, done + common
        return torch.cat(found[1:]) if len(found) > 1 else found[0]

    def rows_of(self, chunk: ChunkFile, layer: int) -> torch.Tensor:
        """The rows of one chunk."""
        with safe_open(chunk.path, "pt") as file:
            return file.get_tensor(f"layer.{layer}")

    def records(self) -> list[dict[str, Any]]:
        """All request records, oldest file first."""
        paths = sorted(glob.glob(os.path.join(os.path.dirname(self.chunks[0].path), "..", "sequences", "*.jsonl")))
        return [json.loads(line) for path in paths for line in open(path)]


class HuggingFace:
    """The same model in transformers."""

    def __init__(self, model_dir: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
        self.num_layers = self.model.config.num_hidden_layers

    @torch.inference_mode()
    def rows(self, token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
        """vLLM's layer id → rows. Id k is the stream after k layers; the last one is taken before the norm."""
        before: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
        try:
            out = self.model.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        finally:
            hook.remove()
        rows = {k: states[0] for k, states in enumerate(out.hidden_states[:-1])}
        return {**rows, self.num_layers: before[0][0]}

    @torch.inference_mode()
    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        """The model's final norm."""
        return self.model.model.norm(rows)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference by the norm of what is wanted, over all rows."""
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm())
