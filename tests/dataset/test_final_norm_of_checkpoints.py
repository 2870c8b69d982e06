"""``--final-norm`` on checkpoints as they lie on disks: composite models, cut downloads, kinds that the user forces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmcache_hs_backend.dataset import final_norm
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.final_norm import FinalNorm, check_kind

TEXT = {"hidden_size": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-6}
STORED = torch.tensor([-0.5, 0, 0.25, 1])


@pytest.fixture(params=["with transformers", "by the list"], autouse=True)
def _knowledge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by the list":
        monkeypatch.setattr(final_norm, "_of_transformers", lambda path: "transformers is not installed")
    else:
        pytest.importorskip("transformers")


def checkpoint(folder: Path, config: dict[str, Any], **tensors: torch.Tensor) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_minimax_m3_multiplies_by_one_plus_its_weight(tmp_path: Path) -> None:
    config = {"model_type": "minimax_m3_vl", "text_config": {"model_type": "minimax_m3_vl_text", **TEXT}}
    path = checkpoint(tmp_path / "m", config, **{"model.language_model.norm.weight": STORED})
    torch.testing.assert_close(FinalNorm.load(path)(torch.ones(4)), torch.tensor([0.5, 1, 1.25, 2]), atol=1e-6, rtol=0)


def test_a_thinkers_norm_is_taken_and_the_talkers_is_not(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_omni_moe_text", **TEXT}
    config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": text}}
    norms = {"talker.model.norm.weight": torch.full((4,), 9.0), "thinker.model.norm.weight": STORED + 1}
    norm = FinalNorm.load(checkpoint(tmp_path / "m", config, **norms))
    torch.testing.assert_close(norm(torch.ones(4)), torch.tensor([0.5, 1, 1.25, 2]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("key", ["text_config", "language_config", "llm_config", "language_model"])
def test_nested_configs_are_looked_into(tmp_path: Path, key: str) -> None:
    config = {"model_type": "some_vision_model", key: {"model_type": "qwen2", **TEXT, "num_attention_heads": 2}}
    path = checkpoint(tmp_path / "m", config, **{"language_model.model.norm.weight": STORED + 1})
    assert FinalNorm.load(path)(torch.ones(4)).tolist() == pytest.approx([0.5, 1, 1.25, 2])


def test_a_download_that_broke_off_is_one_line(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m", {"model_type": "llama", **TEXT}, **{"model.norm.weight": torch.ones(4)})
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DatasetError, match=r"^--final-norm \S+: model.safetensors cannot be read: [^\n]+$"):
        FinalNorm.load(path)


def test_a_shard_that_is_missing_is_one_line(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m", {"model_type": "llama", **TEXT}, x=torch.ones(1))
    where = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(where))
    with pytest.raises(DatasetError, match=r"^--final-norm \S+: model-00002-of-00002.safetensors cannot be read: "):
        FinalNorm.load(path)


@pytest.mark.parametrize("eps", ["1e-6", True, -1, 2])
def test_an_epsilon_that_is_none_is_named(tmp_path: Path, eps: object) -> None:
    config = {"model_type": "some_new_type", **TEXT, "rms_norm_eps": eps}
    path = checkpoint(tmp_path / "m", config, **{"model.norm.weight": torch.ones(4)})
    with pytest.raises(DatasetError, match=rf"rms_norm_eps is {eps!r} in config.json.*--norm-kind rms:EPS"):
        FinalNorm.load(path, "rms")
    assert FinalNorm.load(path, "rms:1e-6")(torch.ones(4)).tolist() == pytest.approx([1] * 4)


def test_an_epsilon_may_be_a_whole_number(tmp_path: Path) -> None:
    config = {"model_type": "some_new_type", **TEXT, "rms_norm_eps": 0}
    path = checkpoint(tmp_path / "m", config, **{"model.norm.weight": torch.ones(4)})
    assert FinalNorm.load(path, "rms")(torch.ones(4)).tolist() == [1] * 4


def test_a_norm_with_a_nan_in_it_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    weight = torch.tensor([1, float("nan"), 1, 1])
    path = checkpoint(tmp_path / "m", {"model_type": "llama", **TEXT}, **{"model.norm.weight": weight})
    with pytest.raises(DatasetError, match=r"model\.norm\.weight has NaN or infinity: the checkpoint is damaged"):
        FinalNorm.load(path)


def test_a_type_that_nobody_knows_is_an_error_until_its_kind_is_forced(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m", {"model_type": "brand_new", **TEXT}, **{"model.norm.weight": STORED})
    with pytest.raises(DatasetError, match=r"'brand_new' .*--norm-kind KIND"):
        FinalNorm.load(path)
    for kind, expected in {"rms": STORED, "rms+1": STORED + 1, "rms:0": STORED, "rms-no-weight": torch.ones(4)}.items():
        torch.testing.assert_close(FinalNorm.load(path, kind)(torch.ones(4)), expected, atol=1e-6, rtol=0)
    row = torch.tensor([1.0, 2, 3, 4])
    plain = torch.nn.functional.layer_norm(row, (4,), eps=1e-6)
    for kind, weight in {"layer": STORED, "layer+1": STORED + 1, "layer-no-weight": torch.ones(4)}.items():
        torch.testing.assert_close(FinalNorm.load(path, kind)(row), plain * weight)


def test_a_weight_of_another_size_or_more_than_one_norm_is_an_error(tmp_path: Path) -> None:
    config = {"model_type": "llama", **TEXT, "num_attention_heads": 2}
    both = {"model.norm.weight": torch.ones(4), "language_model.norm.weight": torch.ones(4)}
    with pytest.raises(DatasetError, match=r"2 tensors look like a final norm: model\.norm.weight, language_model"):
        FinalNorm.load(checkpoint(tmp_path / "a", config, **both))
    with pytest.raises(DatasetError, match="not a vector"):
        FinalNorm.load(checkpoint(tmp_path / "b", config, **{"model.norm.weight": torch.ones(2, 2)}))


@pytest.mark.parametrize("size", [3, 4, 31, 32])
def test_what_a_norm_does_to_a_row_is_told_from_the_norm_itself(tmp_path: Path, size: int) -> None:
    weight, bias = torch.rand(size) + 0.5, torch.rand(size)
    config = {"model_type": "brand_new", "hidden_size": size}
    path = checkpoint(tmp_path / "m", config, **{"ln_f.weight": weight, "ln_f.bias": bias})
    norm = FinalNorm.load(path, "layer:1e-5")
    torch.testing.assert_close(norm.weight, weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.bias, bias)
    assert norm.hidden_size == size


@pytest.mark.parametrize("text", ["root", "rms:x", "rms:-1", "rms:2", ""])
def test_a_kind_that_there_is_not_is_named(text: str) -> None:
    with pytest.raises(ValueError):
        check_kind(text)
