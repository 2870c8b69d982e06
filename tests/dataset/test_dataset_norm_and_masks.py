"""The final norm is the model's own, its side is told from the rows; and masks mark what is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected
from lmcache_hs_backend.dataset.final_norm import FinalNorm
from lmcache_hs_backend.dataset.masks import LossMask, from_spans, spans
from lmcache_hs_backend.dataset.plan import Choice, Plan, make_plan, plan_norm
from lmcache_hs_backend.dataset.prepared import given_mask
from tests.support.dataset_capture import HIDDEN, LAST, VLLM, Writer, ids_of, rows_of, save_norm

IDS = ids_of(40)


def plan_of(cold_path: Path, capture: dict[str, object], *, normed_by: FinalNorm | None = None) -> Plan:
    def make(ids: list[int], slot: int) -> torch.Tensor:
        rows = rows_of(ids, slot)
        return rows if normed_by is None or slot != LAST else normed_by(rows).bfloat16()

    with Writer(cold_path, capture=capture) as writer:
        writer.put(IDS, make=make)
    return make_plan(Choice(cold_paths=(str(cold_path),), layers=(2,), last_layer=LAST))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_norm(tmp_path / "model"))


def test_rms_norm_is_torchs(model: str) -> None:
    norm = FinalNorm.load(model)
    rows = rows_of(IDS, LAST)
    expected = torch.nn.functional.rms_norm(rows.float(), (HIDDEN,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(rows), expected)


def test_a_checkpoint_with_a_bias_has_a_layer_norm(tmp_path: Path) -> None:
    folder = save_norm(tmp_path / "m", model_type="gpt2", n_embd=HIDDEN, n_head=4, layer_norm_epsilon=1e-5)
    weight, bias = torch.rand(HIDDEN), torch.rand(HIDDEN)
    save_file({"transformer.ln_f.weight": weight, "transformer.ln_f.bias": bias}, folder / "model.safetensors")
    norm = FinalNorm.load(str(folder))
    rows = rows_of(IDS, LAST)
    torch.testing.assert_close(norm(rows), torch.nn.functional.layer_norm(rows.float(), (HIDDEN,), weight, bias, 1e-5))
    assert norm.looks_normed(norm(rows))
    assert not norm.looks_normed(rows)


def test_gemma_multiplies_by_one_plus_its_weight(tmp_path: Path) -> None:
    plain = FinalNorm.load(str(save_norm(tmp_path / "a")))
    gemma = FinalNorm.load(str(save_norm(tmp_path / "b", model_type="gemma3_text")))
    torch.testing.assert_close(gemma.weight, plain.weight + 1)


def test_the_norm_is_found_in_a_sharded_checkpoint_beside_those_of_the_layers(tmp_path: Path) -> None:
    folder = save_norm(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-00002.safetensors")
    where = {"model.norm.weight": "model-00002.safetensors", "model.layers.0.input_layernorm.weight": "gone"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert FinalNorm.load(str(folder)).hidden_size == HIDDEN


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda m: (m / "config.json").unlink(), "config.json"),
        (lambda m: (m / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda m: save_file({"x": torch.zeros(1)}, m / "model.safetensors"), "0 tensors look like a final norm"),
        (lambda m: (m / "config.json").write_text("{}"), "names no model_type; name it with --norm-kind"),
        (lambda m: (m / "config.json").write_text('{"model_type": "internlm2"}'), "has none of rms_norm_eps"),
        (lambda m: (m / "config.json").write_text('{"model_type": "new"}'), "type 'new' .* not known .*--norm-kind"),
        (lambda m: (m / "config.json").write_bytes(b"\xff"), "config.json cannot be read"),
        (lambda m: (m / "model.safetensors.index.json").write_text("{"), "index.json cannot be read"),
        (lambda m: (m / "model.safetensors.index.json").write_text("{}"), "index.json has no weight_map"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\x00" * 40), "model.safetensors cannot be read"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, spoil: object, text: str) -> None:
    folder = save_norm(tmp_path / "m")
    spoil(folder)
    with pytest.raises(DatasetError, match=f"--final-norm .*{text}"):
        FinalNorm.load(str(folder))


# -- which side of it ------------------------------------------------------------------------------------


def test_rows_before_the_norm_are_normed_where_a_format_wants_it(cold_path: Path, model: str) -> None:
    plan = plan_of(cold_path, VLLM)
    planned = plan_norm(plan, True, model)
    rows = planned.reader.read(plan.samples[0], stacked=False)
    assert planned.normed
    assert torch.equal(rows.last, FinalNorm.load(model)(rows_of(IDS, LAST)).bfloat16())


def test_rows_before_the_norm_stay_there_where_a_format_wants_that(cold_path: Path, model: str) -> None:
    plan = plan_of(cold_path, VLLM)
    planned = plan_norm(plan, False, model)
    assert not planned.normed
    assert torch.equal(planned.reader.read(plan.samples[0], stacked=False).last, rows_of(IDS, LAST))


def test_the_norm_must_be_named_where_it_is_needed(cold_path: Path) -> None:
    with pytest.raises(DatasetError, match="--final-norm MODEL_DIR"):
        plan_norm(plan_of(cold_path, VLLM), True, None)


def test_what_is_after_the_norm_cannot_go_back(cold_path: Path) -> None:
    with pytest.raises(DatasetError, match="captured after it"):
        plan_norm(plan_of(cold_path, VLLM | {"last_layer": "post-norm"}), False, None)


@pytest.mark.parametrize("normed", [True, False])
def test_a_capture_that_lies_about_the_norm_is_caught(cold_path: Path, model: str, normed: bool) -> None:
    capture = VLLM | {"last_layer": "pre-norm" if normed else "post-norm"}
    plan = plan_of(cold_path, capture, normed_by=FinalNorm.load(model) if normed else None)
    planned = plan_norm(plan, True, model)
    with pytest.raises(RowRejected) as caught:
        planned.reader.read(plan.samples[0], stacked=False)
    assert caught.value.reason == "norm"


@pytest.mark.parametrize("normed", [True, False])
def test_where_nothing_was_captured_the_rows_themselves_tell(cold_path: Path, model: str, normed: bool) -> None:
    norm = FinalNorm.load(model)
    plan = plan_of(cold_path, {}, normed_by=norm if normed else None)
    planned = plan_norm(plan, True, model)
    rows = planned.reader.read(plan.samples[0], stacked=False)
    torch.testing.assert_close(rows.last, norm(rows_of(IDS, LAST)).bfloat16())
    assert f"{'after' if normed else 'before'} the final norm" in plan.warnings[-1]


# -- masks -----------------------------------------------------------------------------------------------

CHATML = ["<|im_start|>", "assistant", "\n", "user", "<|im_end|>"]
LLAMA3 = ["<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n", "<|eot_id|>"]


def tokenizer(folder: Path, special: list[str]) -> str:
    words = {text: number for number, text in enumerate([*special, *(f"w{n}" for n in range(50))])}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    made.add_special_tokens([text for text in special if text.startswith("<")])
    if "\n\n" in special:
        made.pre_tokenizer = pre_tokenizers.Split("\n\n", "isolated")
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_chatml_marks_every_answer_and_its_end(tmp_path: Path) -> None:
    mask = LossMask("chatml", tokenizer(tmp_path, CHATML))
    ids = [0, 3, 2, 9, 9, 4, 2, 0, 1, 2, 10, 11, 4, 2, 0, 3, 2, 9, 4, 2, 0, 1, 2, 12, 13]
    made = mask.make(Sample("s", 0, len(ids)), torch.tensor(ids))
    assert spans(made) == [[10, 13], [23, 25]]  # the second answer was cut


def test_llama3_marks_answers_too(tmp_path: Path) -> None:
    mask = LossMask("llama3", tokenizer(tmp_path, LLAMA3))
    ids = torch.tensor([0, 1, 2, 3, 20, 21, 4, 0])
    assert spans(mask.make(Sample("s", 0, 8), ids)) == [[4, 7]]


def test_generated_tokens_are_those_behind_the_prompt() -> None:
    made = LossMask("generated").make(Sample("s", 0, 5, prompt_tokens=3), torch.arange(5))
    assert made.tolist() == [0, 0, 0, 1, 1]


def test_a_template_without_a_tokenizer_or_of_another_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="--tokenizer DIR"):
        LossMask("chatml")
    with pytest.raises(DatasetError, match=r"there is no tokenizer\.json"):
        LossMask("chatml", str(tmp_path))
    with pytest.raises(DatasetError, match="chat template is another one"):
        LossMask("llama3", tokenizer(tmp_path, CHATML))


@pytest.mark.parametrize("given", [None, [1, 1], [1, 0, 2]])
def test_a_mask_that_does_not_fit_is_refused(given: list[int] | None) -> None:
    def make() -> None:
        LossMask("dataset").make(Sample("s", 0, 3, row=0), torch.arange(3), given_mask({"loss_mask": given}, range(3)))

    with pytest.raises(RowRejected) as caught:
        make()
    assert caught.value.reason == "mask"


@pytest.mark.parametrize("mask", [[0], [1], [1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1]])
def test_runs_of_a_mask_give_the_mask_back(mask: list[int]) -> None:
    assert from_spans(spans(torch.tensor(mask)), len(mask)).tolist() == mask
