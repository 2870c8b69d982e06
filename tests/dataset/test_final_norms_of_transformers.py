"""The final norm of every text model that transformers can build small is its own, with and without transformers.

The model is run: the module whose output is the last hidden state is the final norm, whatever it is called, and what
goes into it is a row before the norm. ``FinalNorm.load`` of the saved checkpoint must make the one of the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.dataset import final_norm
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.final_norm import FinalNorm
from lmcache_hs_backend.dataset.norm_kinds import KIND_OF, KINDS
from tests.support.figures import LINES

transformers = pytest.importorskip("transformers")

_IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "model_dim", "word_embed_proj_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
_WIDTHS = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_SMALL: dict[str, Any] = {
    **dict.fromkeys(_HIDDEN, 32), **dict.fromkeys(_LAYERS, 2), **dict.fromkeys(_HEADS, 4), **dict.fromkeys(_WIDTHS, 32),
    "vocab_size": 99, "vocab_size_per_layer_input": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_key_value_heads": 2, "num_kv_heads": 2, "n_kv_heads": 2, "head_dim": 8, "kv_channels": 8, "rotary_dim": 4,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "n_positions": 64,
    "use_cache": False,
}  # fmt: skip
#: Low-rank attention, where the sizes of heads hang together.
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
    "num_key_value_heads": 4, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 4,
}  # fmt: skip
#: Sizes tried in turn, as no set of them suits the constraints of every model.
_TRIES: tuple[dict[str, Any], ...] = (
    {}, _LATENT, _SMALL, {**_SMALL, **_LATENT}, {**_SMALL, "layer_types": ["full_attention", "conv"]},
    {**_SMALL, "n_shared_experts": 1}, {"attention_types": [[["global", "local"], 1]]},
    {"hidden_size_per_layer_input": 0}, {"head_dim": None}, {"head_dim": None, "num_experts_per_tok": 1},
    {"num_attention_heads": None},
    {"layer_types": ["full_attention", "linear_attention"]}, {"layer_types": ["linear_attention", "full_attention"]},
    {"layer_types": ["full_attention", "full_attention"]}, {"num_hidden_layers": None, "layer_types": None},
    {"hidden_size": 64, "head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "num_heads": 8},
    {"hidden_size": 128, "num_attention_heads": None, "num_heads": None, "head_dim": None, "num_key_value_heads": None},
)  # fmt: skip
_LARGEST = 40e6  # parameters
#: Registered for causal language models, but without a norm after the last layer, or no text model at all.
_NOT_OURS = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
    "ctrl", "data2vec-text", "electra", "ernie", "git", "marian", "mbart", "megatron-bert", "musicgen",
    "musicgen_melody", "mvp", "openai-gpt", "pegasus", "plbart", "prophetnet", "reformer", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet",
    "xmod",
}  # fmt: skip


def value_of(config: Any, key: str, missing: object = None) -> object:
    try:
        return getattr(config, key, missing)
    except Exception:  # a value that may differ from layer to layer: left to the config
        return missing


def small_model(name: str) -> Any:
    """A model of the type with a few thousand parameters. Raises ValueError with what every try said."""
    said, missing = [], object()
    for changes in _TRIES:
        try:
            text = transformers.CONFIG_MAPPING[name]().get_text_config(decoder=True)
            sizes = {key: value for key, value in _SMALL.items() if value_of(text, key) is not None}
            sizes |= {key: value for key, value in changes.items() if value_of(text, key, missing) is not missing}
            config = type(text)(**{key: value for key, value in sizes.items() if value is not None})
            with torch.device("meta"):
                parameters = sum(p.numel() for p in final_norm._build(transformers, config).parameters())
            if parameters > _LARGEST:
                raise ValueError(f"{parameters / 1e6:.0f}M parameters")
            torch.manual_seed(0)
            model = final_norm._build(transformers, config).float().eval()
            for module in model.modules():  # else a forgotten "plus one" would not show
                if "norm" in type(module).__name__.lower():
                    for parameter in module.parameters():
                        torch.nn.init.uniform_(parameter, 0.5, 1.5)
            return model, run(model)
        except Exception as error:  # a hundred models, each with constraints of its own
            said.append(f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}")
    raise ValueError(" | ".join(dict.fromkeys(said)))


def run(model: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows before and after the last module: its input and its output, which is the last hidden state."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(module: torch.nn.Module, given: tuple[Any, ...], made: Any) -> None:
        if isinstance(made, torch.Tensor) and given and isinstance(given[0], torch.Tensor):
            calls.append((given[0], made))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(see)
    with torch.no_grad():
        last = model(input_ids=_IDS, use_cache=False)[0]
    last_calls = [c for c in calls if c[1].data_ptr() == last.data_ptr() and c[1].shape == last.shape]
    return (last_calls[-1][0].clone(), last.clone()) if last_calls else None


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_final_norm_is_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as registry

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    equal, unlisted, wrong, no_last_module = [], [], [], []
    not_built, refused = {}, {}
    for name in sorted(set(registry) - _NOT_OURS):
        try:
            model, rows = small_model(name)
        except (ValueError, KeyError) as error:
            not_built[name] = str(error)
            continue
        if rows is None:
            no_last_module.append(name)
            continue
        before, after = rows
        folder = tmp_path / name
        model.save_pretrained(folder)
        kind = model.config.model_type
        try:
            if not same(FinalNorm.load(str(folder))(before), after):
                wrong.append(name)
        except DatasetError as error:
            refused[name] = str(error)
            continue
        equal.append(name)
        with monkeypatch.context() as without:
            without.setattr(final_norm, "_of_transformers", lambda path: "transformers is not installed")
            try:
                listed = FinalNorm.load(str(folder))
            except DatasetError:
                unlisted.append(kind)
            else:
                if not same(listed(before), after):
                    wrong.append(f"{name} by the list")
    LINES.append(
        f"final norms: {len(equal)} model types equal transformers' own, {len(equal) - len(unlisted)} of them by the "
        f"list too (not listed: {', '.join(unlisted) or 'none'}); without a last module: "
        f"{', '.join(no_last_module) or 'none'}; not built small: {', '.join(not_built) or 'none'}"
    )
    for name, why in {**not_built, **refused}.items():
        LINES.append(f"  {name}: {why}")
    assert not wrong
    assert not refused
    assert len(equal) >= 140


def test_the_list_has_every_type_once_and_no_other_kind() -> None:
    assert set(KIND_OF.values()) == set(KINDS)
    assert len(KIND_OF) > 180
