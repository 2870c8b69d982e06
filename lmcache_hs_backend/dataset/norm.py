"""The final norm of a model, read from its checkpoint, and the check that tells normed rows from others.

Trainers disagree on whether the last hidden state is stored before or after the model's final norm, and
none notices the wrong one. Only the norm's own weights and the config are read, never the model.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lmcache_hs_backend.dataset.errors import DatasetError

#: Where models keep their final norm, by what the name ends in; vision towers have norms of their own.
_NAMES = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|gpt_neox|decoder|backbone|llm)\.)*"
    r"(?:norm|ln_f|final_layernorm|final_layer_norm|final_norm|norm_f)\.weight"
)
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_epsilon")
#: Model types (without ``_text``) whose norm multiplies by one plus its weight.
_PLUS_ONE = (
    "gemma", "gemma2", "gemma3", "vaultgemma", "recurrent_gemma", "t5gemma", "nemotron", "qwen3_next", "qwen3_5",
    "qwen3_5_moe",
)  # fmt: skip
#: Model types whose norm is LayerNorm though it has no bias.
_LAYER_NORM = ("cohere", "cohere2", "dbrx", "mpt")

#: Normed rows, divided by the weight, have a mean square of 1 up to rounding; others have anything else.
_TOLERANCE = 0.05


class FinalNorm:
    """RMSNorm over ``[..., hidden_size]``; LayerNorm where the checkpoint has a bias, or the model is known for it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight = weight.float()
        self.bias = None if bias is None else bias.float()
        self.eps = eps

    @classmethod
    def load(cls, path: str) -> FinalNorm:
        """From a model directory with config.json and safetensors. Raises DatasetError."""
        config = _config(path)
        text: dict[str, Any] = config.get("text_config") or config
        name, file = _find(path)
        try:
            with safe_open(file, framework="pt") as tensors:
                weight = tensors.get_tensor(name).float()
                bias_name = name.removesuffix("weight") + "bias"
                bias = tensors.get_tensor(bias_name).float() if bias_name in tensors.keys() else None  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DatasetError(f"--final-norm {path}: {file} cannot be read: {error}") from None
        eps = next((text[key] for key in _EPS if isinstance(text.get(key), float)), None)
        if eps is None:
            raise DatasetError(f"--final-norm {path}: config.json has none of {', '.join(_EPS)}")
        kind = str(text.get("model_type", config.get("model_type"))).removesuffix("_text")
        if kind in _PLUS_ONE:
            weight = weight + 1
        if kind in _LAYER_NORM and bias is None:
            bias = torch.zeros_like(weight)
        return cls(weight, bias, eps)

    @property
    def hidden_size(self) -> int:
        return len(self.weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The normed rows, in float32."""
        rows = rows.float()
        if self.bias is not None:
            return torch.nn.functional.layer_norm(rows, (self.hidden_size,), self.weight, self.bias, self.eps)
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps) * self.weight

    def looks_normed(self, rows: torch.Tensor) -> bool:
        """Whether ``[S, hidden_size]`` rows have been through this norm already: judged by most of them."""
        return 2 * self.count_normed(rows) > len(rows)

    def count_normed(self, rows: torch.Tensor) -> int:
        """How many of ``[S, hidden_size]`` rows look as if they had been through this norm."""
        used = self.weight.abs() > 1e-3
        plain = rows.float()[:, used]
        if self.bias is not None:
            plain = plain - self.bias[used]
        mean_square = (plain / self.weight[used]).square().mean(-1)
        return int(((mean_square - 1).abs() < _TOLERANCE).sum())


def _config(path: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise DatasetError(f"--final-norm {path} is not a model directory: config.json: {error}") from None
    if not isinstance(config, dict):
        raise DatasetError(f"--final-norm {path} is not a model directory: config.json is not an object")
    return config


def _find(path: str) -> tuple[str, str]:
    """The name of the norm's weight, and the file it lies in."""
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            where: dict[str, str] = json.load(file)["weight_map"]
    else:
        single = os.path.join(path, "model.safetensors")
        if not os.path.isfile(single):
            raise DatasetError(f"--final-norm {path}: there is no model.safetensors and no index of several")
        with safe_open(single, framework="pt") as tensors:
            where = dict.fromkeys(tensors.keys(), "model.safetensors")
    names = sorted((name for name in where if _NAMES.fullmatch(name)), key=len)
    if len(names) != 1:
        raise DatasetError(f"--final-norm {path}: {len(names)} tensors look like a final norm: {', '.join(names)}")
    return names[0], os.path.join(path, where[names[0]])
