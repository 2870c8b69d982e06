"""The final norm of a model, taken from its own code, and the check that tells normed rows from others.

Trainers disagree on whether the last hidden state is stored before or after the model's final norm, and none notices
the wrong one. What a norm computes is decided, in this order, by

1. the kind that the user forces,
2. transformers' class of the model, where transformers is installed and has the model type: it is built on the meta
   device, so without weights and memory, and its norm is used as it is,
3. the list in ``norm_kinds``.

A model type that none of them has is an error: most norms are RMSNorm, and one that multiplies by one plus its weight
is 50 % wrong with it. Only config.json and the norm's own tensors are read, never the model, and no code that comes
with a checkpoint is run.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.norm_kinds import KIND_OF, KINDS

#: Where models keep their final norm, by what the name ends in. Vision towers and talkers have norms of their own.
_PARENTS = r"(?:(?:model|language_model|text_model|thinker|transformer|gpt_neox|decoder|backbone|llm|biogpt)\.)*"
_LEAVES = "norm|ln_f|final_layernorm|final_layer_norm|final_norm|norm_f|layer_norm|embedding_norm|out_norm|ln_out"
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_epsilon")
#: Where composite configs keep that of the language model.
_NESTED = ("thinker_config", "text_config", "language_config", "llm_config", "language_model", "decoder")

#: Norms of embeddings, which stand beside the layers as the final one does.
_EMBEDDING_NORMS = ("layernorm_embedding", "embeddings_layer_norm", "layer_norm_emb", "word_embeddings_layernorm")

#: Normed rows, divided by the weight, have a mean square of 1 up to rounding; others have anything else.
_TOLERANCE = 0.05


class _Choice(NamedTuple):
    """A norm without its weights. ``leaf``: the name of the norm in its model, or of every norm that is known."""

    module: torch.nn.Module | None
    leaf: str = _LEAVES
    kind: str = ""
    eps: float = 0.0


class FinalNorm:
    """A model's final norm over ``[..., hidden_size]``, in float32. Picklable and thread-safe.

    ``weight`` and ``bias``, float32 ``[hidden_size]``, are what it does to a row of mean 0 and mean square 1: multiply,
    then add.
    """

    def __init__(self, module: torch.nn.Module, hidden_size: int) -> None:
        self._module = module.float().eval().requires_grad_(False)
        probe = _probe(hidden_size)
        self.bias = self._module(torch.zeros(hidden_size))
        self.weight = (self._module(probe) - self.bias) / (probe / 1000)

    @classmethod
    def load(cls, path: str, kind: str | None = None) -> FinalNorm:
        """The norm of the model in a directory with config.json and safetensors.

        Args:
            path: The model's directory, as ``--final-norm`` has it.
            kind: ``KIND`` or ``KIND:EPS`` with a kind of ``norm_kinds.KINDS``, in place of what the model type says.

        Raises:
            DatasetError: The directory, or a file in it, is none that can be used, or the kind of norm is not known.
        """
        config = _config(path)
        choice = _forced(path, config, kind) if kind else _known(path, config)
        if choice.kind.endswith("-no-weight") or (choice.module is not None and not choice.module.state_dict()):
            size = _hidden_size(path, config)
            return cls(choice.module or _without_weight(choice, size), size)
        tensors = _Checkpoint(path).norm(choice.leaf)
        module = _of_kind(choice, tensors) if choice.module is None else _filled(path, choice.module, tensors)
        return cls(module, len(tensors["weight"]))

    @property
    def hidden_size(self) -> int:
        """Values of a row."""
        return len(self.weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The normed rows, in float32."""
        result: torch.Tensor = self._module(rows.float())
        return result

    def looks_normed(self, rows: torch.Tensor) -> bool:
        """Whether ``[S, hidden_size]`` rows have been through this norm already: judged by most of them."""
        return 2 * self.count_normed(rows) > len(rows)

    def count_normed(self, rows: torch.Tensor) -> int:
        """How many of ``[S, hidden_size]`` rows look as if they had been through this norm."""
        used = self.weight.abs() > 1e-3
        plain = rows.float()[:, used] - self.bias[used]
        mean_square = (plain / self.weight[used]).square().mean(-1)
        return int(((mean_square - 1).abs() < _TOLERANCE).sum())


def layers_of(path: str) -> int | None:
    """How many decoder layers the model in a directory has; None where its config.json does not say."""
    text = _text_config(_config(path))
    found = [text[key] for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in text]
    return found[0] if found and type(found[0]) is int else None


def check_kind(text: str) -> str:
    """A value of ``--norm-kind``. Raises ValueError."""
    kind, _, eps = text.partition(":")
    if kind not in KINDS or (eps and not 0 <= float(eps) < 1):
        raise ValueError(f"{text!r} is not KIND or KIND:EPS with KIND one of {', '.join(KINDS)}")
    return text


# -- which norm ----------------------------------------------------------------------------------------------


def _forced(path: str, config: dict[str, Any], text: str) -> _Choice:
    kind, _, eps = text.partition(":")
    return _Choice(None, kind=kind, eps=float(eps) if eps else _eps(path, config, kind))


def _known(path: str, config: dict[str, Any]) -> _Choice:
    """As transformers has it, else as our list has it."""
    name = _model_type(_text_config(config)) or _model_type(config)
    if not name:
        raise DatasetError(f"--final-norm {path}: config.json names no model_type; {_FORCE}")
    found = _of_transformers(path)
    if isinstance(found, _Choice):
        return found
    kind = KIND_OF.get(name) or KIND_OF.get(f"{name}_text") or KIND_OF.get(name.removesuffix("_text"))
    if kind is None:
        raise DatasetError(
            f"--final-norm {path}: how models of type {name!r} norm their last layer is not known ({found}); {_FORCE}"
        )
    return _Choice(None, kind=kind, eps=_eps(path, config, kind))


_FORCE = f"name it with --norm-kind KIND[:EPS], one of {', '.join(KINDS)}"


def _of_transformers(path: str) -> _Choice | str:
    """The norm of transformers' own model, without weights; or why there is none, in a few words."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed"
    try:
        config: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        text = config.get_text_config(decoder=True)
        with torch.device("meta"):
            model = _build(transformers, text)
    except Exception as error:  # noqa: BLE001 - a config of any shape meets the code of any of 200 models
        return f"transformers {transformers.__version__}: {_first_line(error)}"
    return _norm_of(model) or f"transformers {transformers.__version__}: {type(model).__name__} has no final norm"


def _build(transformers: Any, text: Any) -> torch.nn.Module:
    """The model without its head. Composite models register only the whole: their language model is looked for."""
    try:
        return transformers.AutoModel.from_config(text)  # type: ignore[no-any-return]
    except ValueError as error:
        module = __import__(type(text).__module__.replace(".configuration_", ".modeling_"), fromlist=["_"])
        for name, value in vars(module).items():
            of_text = isinstance(value, type) and getattr(value, "config_class", None) is type(text)
            if of_text and name.endswith("Model") and not name.endswith("PreTrainedModel"):
                return value(text)  # type: ignore[no-any-return]
        raise error from None


def _norm_of(model: torch.nn.Module) -> _Choice | None:
    """The norm that stands beside a model's layers, and its name: the first one after them, or else before."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    if not lists:
        return None
    layers = min(lists, key=lambda name: (name.count("."), "encoder" in name, -len(lists[name])))
    trunk = model.get_submodule(layers.rpartition(".")[0])
    before: list[tuple[str, torch.nn.Module]] = []
    after: list[tuple[str, torch.nn.Module]] = []
    seen = before
    for name, module in trunk.named_children():
        if module is lists[layers]:
            seen = after
        elif "norm" in type(module).__name__.lower() and name not in _EMBEDDING_NORMS:
            seen.append((name, module))
    if not before and not after:
        return None
    name, module = after[0] if after else before[-1]
    return _Choice(module, re.escape(name))


def _eps(path: str, config: dict[str, Any], kind: str) -> float:
    """The norm's epsilon. A LayerNorm whose config has none has the one that torch gives it."""
    text = _text_config(config)
    keys = sorted(_EPS, key=lambda key: key.startswith("layer") != kind.startswith("layer"))
    key = next((key for key in keys if text.get(key) is not None), None)
    if key is None and kind.startswith("layer"):
        return 1e-5
    if key is None:
        raise DatasetError(
            f"--final-norm {path}: config.json has none of {', '.join(_EPS)}; --norm-kind {kind}:EPS gives it"
        )
    value = text[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise DatasetError(
            f"--final-norm {path}: {key} is {value!r:.40} in config.json, not a number from 0 to below 1; --norm-kind "
            f"{kind}:EPS gives it"
        )
    return float(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:160] or type(error).__name__


# -- its weights ---------------------------------------------------------------------------------------------


def _without_weight(choice: _Choice, size: int) -> torch.nn.Module:
    kind = torch.nn.RMSNorm if choice.kind.startswith("rms") else torch.nn.LayerNorm
    return kind(size, choice.eps, elementwise_affine=False)


def _of_kind(choice: _Choice, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    weight, bias = tensors["weight"].float(), tensors.get("bias")
    if choice.kind.endswith("+1"):
        weight = weight + 1
    if choice.kind.startswith("rms"):
        module: torch.nn.Module = torch.nn.RMSNorm(len(weight), choice.eps)
        if bias is not None:
            raise DatasetError(
                "--final-norm: the checkpoint's final norm has a bias, which an RMSNorm has not; see --norm-kind layer"
            )
    else:
        module = torch.nn.LayerNorm(len(weight), choice.eps, bias=bias is not None)
    module.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias.float()}))
    return module


def _filled(path: str, module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """transformers' norm with the checkpoint's weights in it, which must be just those that it has."""
    kind = type(module).__name__
    wanted = module.state_dict()
    if wanted.keys() != tensors.keys() or {key for key, _ in module.named_buffers()} - wanted.keys():
        raise DatasetError(
            f"--final-norm {path}: the checkpoint's final norm has {' and '.join(sorted(tensors))}, but transformers' "
            f"{kind} wants {' and '.join(sorted(wanted))}; {_FORCE}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise DatasetError(
                f"--final-norm {path}: the final norm's {name} has the shape {list(tensor.shape)}, but by config.json "
                f"{list(wanted[name].shape)}"
            )
    module = module.to_empty(device="cpu").float()
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return module


class _Checkpoint:
    """The safetensors of a model directory: which tensor lies in which file."""

    def __init__(self, path: str) -> None:
        self._path = path
        index = os.path.join(path, "model.safetensors.index.json")
        if os.path.isfile(index):
            record = _json(path, "model.safetensors.index.json").get("weight_map")
            if not isinstance(record, dict) or not all(isinstance(value, str) for value in record.values()):
                raise DatasetError(f"--final-norm {path}: model.safetensors.index.json has no weight_map")
            self._where: dict[str, str] = record
        elif os.path.isfile(os.path.join(path, "model.safetensors")):
            self._where = dict.fromkeys(self._names("model.safetensors"), "model.safetensors")
        else:
            raise DatasetError(f"--final-norm {path}: there is no model.safetensors and no index of several")

    def norm(self, leaf: str) -> dict[str, torch.Tensor]:
        """The tensors of the final norm by what their names end in: ``weight``, and ``bias`` where there is one."""
        shape = re.compile(rf"{_PARENTS}(?:{leaf})\.weight")
        names = sorted((name for name in self._where if shape.fullmatch(name)), key=len)
        if not names and leaf != _LEAVES:
            return self.norm(_LEAVES)  # a checkpoint older than the name that transformers has for it
        if len(names) != 1:
            raise DatasetError(
                f"--final-norm {self._path}: {len(names)} tensors look like a final norm: {', '.join(names)}"
            )
        bias = names[0].removesuffix("weight") + "bias"
        found = {"weight": self._tensor(names[0])}
        if bias in self._where:
            found["bias"] = self._tensor(bias)
        if any(tensor.dim() != 1 or not tensor.is_floating_point() for tensor in found.values()):
            raise DatasetError(f"--final-norm {self._path}: {names[0]} is not a vector of floats")
        if not all(bool(torch.isfinite(tensor.float()).all()) for tensor in found.values()):
            raise DatasetError(f"--final-norm {self._path}: {names[0]} has NaN or infinity: the checkpoint is damaged")
        return found

    def _names(self, file: str) -> list[str]:
        try:
            with safe_open(os.path.join(self._path, file), framework="pt") as tensors:
                return list(tensors.keys())
        except (OSError, SafetensorError) as error:
            raise self._unreadable(file, error) from None

    def _tensor(self, name: str) -> torch.Tensor:
        file = self._where[name]
        try:
            with safe_open(os.path.join(self._path, file), framework="pt") as tensors:
                result: torch.Tensor = tensors.get_tensor(name)
                return result
        except (OSError, SafetensorError) as error:
            raise self._unreadable(file, error) from None

    def _unreadable(self, file: str, error: Exception) -> DatasetError:
        return DatasetError(f"--final-norm {self._path}: {file} cannot be read: {_first_line(error)}")


# -- config.json ---------------------------------------------------------------------------------------------


def _json(path: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, name), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"--final-norm {path}: {name} cannot be read: {_first_line(error)}") from None
    if not isinstance(record, dict):
        raise DatasetError(f"--final-norm {path}: {name} is not a JSON object")
    return record


def _config(path: str) -> dict[str, Any]:
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise DatasetError(f"--final-norm {path} is not a model directory: there is no config.json")
    return _json(path, "config.json")


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model, however deep a composite config has it."""
    for key in _NESTED:
        if isinstance(config.get(key), dict):
            return _text_config(config[key])
    return config


def _hidden_size(path: str, config: dict[str, Any]) -> int:
    size = _text_config(config).get("hidden_size")
    if type(size) is not int or size < 1:
        raise DatasetError(f"--final-norm {path}: config.json has no hidden_size, and the norm of its model no weight")
    return size


def _model_type(config: dict[str, Any]) -> str:
    name = config.get("model_type")
    return name if isinstance(name, str) else ""


def _probe(size: int) -> torch.Tensor:
    """A row of mean 0 and mean square 1000², without a zero: so large that no epsilon matters."""
    row = torch.ones(size)
    row[1::2] = -1
    if size % 2 and size >= 3:
        row[-3:] = torch.tensor([2**0.5, -(0.5**0.5), -(0.5**0.5)])
    return row * 1000
