"""The settings of a capture, checked before anything slow happens: from the YAML, the options, and the model's config.

Needs transformers for the config, not vLLM. Where vLLM will decide for itself (``max_model_len`` on a small GPU), what
is here is what the configs say; the capture goes by vLLM's own answer once it runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from lmcache_hs_backend.chunk import ITEM_BYTES
from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings

CONNECTOR = "lmcache_hs_backend.integrations.vllm.connector"

#: What holds without ``--config``; ``configs/vllm_capture.yaml`` is the same with comments, to be copied and changed.
DEFAULTS: dict[str, Any] = {
    "layers": "eagle3",
    "sampling": {"max_tokens": 512, "temperature": 0},
    "engine": {"max_num_seqs": 64},
    "connector": {
        "cold_path": "./hidden-states",
        "max_cold_size": 100,
        "hot_size": 0.25,
        "chunk_size": 256,
        "store_wait_ms": 60000,
        "fsync": False,
    },
}
_SECTIONS = ("layers", "sampling", "engine", "connector", "chat_template_kwargs")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}


class CaptureError(Exception):
    """The capture cannot be carried out as asked. The text is for the user, and says what to do."""


class ModelFacts(NamedTuple):
    """What the model's config says. ``dtype`` as vLLM names it (``bfloat16``); sizes are per token and layer."""

    num_layers: int
    hidden_size: int
    dtype: str
    vocab_size: int
    max_positions: int | None

    @property
    def safetensors_dtype(self) -> str:
        """The dtype of rows in a chunk file."""
        return _DTYPES.get(self.dtype, "BF16")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row of one layer."""
        return self.hidden_size * ITEM_BYTES[self.safetensors_dtype]


@dataclass(frozen=True)
class Settings:
    """Everything chosen. ``vllm_words`` are arguments for vLLM as they stood on the command line."""

    model: str
    layers: tuple[int, ...]
    sampling: dict[str, Any]
    engine: dict[str, Any]
    connector: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    vllm_words: tuple[str, ...]
    facts: ModelFacts
    tiers: ConnectorSettings

    @property
    def cold_path(self) -> str:
        """Where the chunks go, as an absolute path."""
        return str(self.connector["cold_path"])

    @property
    def answer_tokens(self) -> int:
        """The longest answer, in tokens."""
        return int(self.sampling["max_tokens"])

    @property
    def max_model_len(self) -> int | None:
        """As configured, else the model's own; None where neither says."""
        given = self.engine.get("max_model_len")
        return int(given) if isinstance(given, int) else self.facts.max_positions

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``, ``vllm_words`` not included."""
        return {
            "model": self.model,
            **self.engine,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)}},
            },
            "kv_transfer_config": {
                "kv_connector": "HSTieredConnector",
                "kv_connector_module_path": CONNECTOR,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": self.connector,
            },
        }

    def warnings(self) -> list[str]:
        """What is allowed, and probably not meant."""
        last = self.facts.num_layers
        if last in self.layers:
            return []
        stored = ", ".join(map(str, self.layers))
        return [
            f"the model's last layer, {last}, is not captured (layers: {stored}): no EAGLE-3, DFlash or MTP set can be "
            f"made of these rows; add {last} to the layers"
        ]

    def layer_purposes(self) -> list[tuple[int, str]]:
        """Each layer, and what it is for."""
        last = self.facts.num_layers
        return [
            (k, "the last one, before the final norm" if k == last else "the embeddings" if k == 0 else "auxiliary")
            for k in self.layers
        ]


def load(
    model: str,
    *,
    config_path: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    vllm_words: Sequence[str] = (),
) -> Settings:
    """The settings of a capture.

    ``overrides``: options of the command line that are not None: ``cold_path``, ``max_cold_size``, ``max_tokens``,
    ``layers`` (a list), ``chat_template_kwargs`` (added to the YAML's). Raises CaptureError.
    """
    config = _with_defaults(_yaml(config_path) if config_path is not None else {})
    where = config_path or "the defaults"
    options = {name: value for name, value in (overrides or {}).items() if value is not None}
    for name in ("cold_path", "max_cold_size"):
        if name in options:
            config["connector"][name] = options[name]
    if "max_tokens" in options:
        config["sampling"]["max_tokens"] = options["max_tokens"]
    most = config["sampling"]["max_tokens"]
    if type(most) is not int or most < 1:
        raise CaptureError(f"{where}: sampling.max_tokens is {most!r}, but must be a number of tokens, at least 1")
    config["connector"]["cold_path"] = os.path.abspath(os.path.expanduser(str(config["connector"]["cold_path"])))
    try:
        tiers = ConnectorSettings.from_connector(config["connector"])
    except ConfigError as error:
        raise CaptureError(str(error)) from None
    if tiers.emit == "files":
        raise CaptureError(f"{where}: connector.emit is 'files', but a capture needs chunks: 'tiers' or 'both'")
    engine = {**config["engine"], **_known_words(vllm_words)}
    facts = model_facts(model, engine)
    return Settings(
        model=model,
        layers=_layers(options.get("layers", config["layers"]), facts, where),
        sampling=config["sampling"],
        engine=config["engine"] | {k: v for k, v in engine.items() if k == "max_model_len"},
        connector=config["connector"],
        chat_template_kwargs={**config["chat_template_kwargs"], **options.get("chat_template_kwargs", {})},
        vllm_words=tuple(vllm_words),
        facts=facts,
        tiers=tiers,
    )


def model_facts(model: str, engine: Mapping[str, Any]) -> ModelFacts:
    """The model's config, read by transformers. Raises CaptureError."""
    from transformers import AutoConfig

    trust = bool(engine.get("trust_remote_code", False))
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust).get_text_config()
        count, hidden, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CaptureError(f"model {model}: its config cannot be read: {_first_line(error)}") from None
    dtype = str(engine.get("dtype", "auto"))
    if dtype == "auto":
        dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
        dtype = "bfloat16" if dtype == "float32" else dtype  # vLLM's "auto" runs float32 checkpoints in half the width
    positions = getattr(config, "max_position_embeddings", None)
    return ModelFacts(count, hidden, dtype, vocabulary, positions if isinstance(positions, int) else None)


def load_tokenizer(settings: Settings) -> Any:
    """The model's tokenizer. Raises CaptureError."""
    from transformers import AutoTokenizer

    engine = settings.engine
    name = engine.get("tokenizer", settings.model)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=bool(engine.get("trust_remote_code", False)))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CaptureError(f"model {name}: its tokenizer cannot be read: {_first_line(error)}") from None


def _yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file) or {}
    except OSError as error:
        raise CaptureError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CaptureError(f"--config {path} is no YAML: {error}") from None
    if not isinstance(config, dict):
        raise CaptureError(f"--config {path} must be a mapping with {', '.join(_SECTIONS)}")
    unknown = config.keys() - set(_SECTIONS)
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        raise CaptureError(f"--config {path}: {names}: not one of {', '.join(_SECTIONS)}")
    for name in _SECTIONS[1:]:
        if not isinstance(config.get(name) or {}, dict):
            raise CaptureError(f"--config {path}: {name} must be a mapping")
    return config


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Every section, with the defaults for what it leaves out."""
    sections = {name: {**DEFAULTS.get(name, {}), **(config.get(name) or {})} for name in _SECTIONS[1:]}
    return {"layers": config.get("layers") or DEFAULTS["layers"], **sections}


def _layers(chosen: Any, facts: ModelFacts, where: str) -> tuple[int, ...]:
    count = facts.num_layers
    if chosen == "eagle3":
        return tuple(sorted({k for k in (2, count // 2, count - 3, count) if 0 < k <= count}))
    if not isinstance(chosen, list | tuple) or not chosen or any(type(k) is not int for k in chosen):
        raise CaptureError(f"{where}: layers is {chosen!r}, but must be 'eagle3' or a list of layer ids")
    missing = sorted({k for k in chosen if not 0 <= k <= count})
    if missing:
        raise CaptureError(
            f"layer {', '.join(map(str, missing))} does not exist: the model has {count} layers, whose ids are 1 to "
            f"{count} (0: the embeddings)"
        )
    return tuple(sorted(set(chosen)))


def _known_words(words: Sequence[str]) -> dict[str, Any]:
    """What the arguments for vLLM say that matters before it runs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-model-len", type=_human_count)
    parser.add_argument("--dtype")
    parser.add_argument("--tokenizer")
    parser.add_argument("--trust-remote-code", action="store_true", default=None)
    known, _ = parser.parse_known_args(list(words))
    return {name: value for name, value in vars(known).items() if value is not None}


def _human_count(text: str) -> int | None:
    """vLLM's ``4096``, ``4k`` (4000) or ``4K`` (4096); ``auto`` and other values are left to vLLM."""
    scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    try:
        return int(float(digits) * scale) if float(digits) > 0 else None
    except ValueError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0][:300]
