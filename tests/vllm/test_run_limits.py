"""Rows that vLLM never computed are not stored, and nothing is read from what lies in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.vllm.english import different
from tests.vllm.reference import ColdPath, HuggingFace
from tests.vllm.vllm_run import LAYERS, run

CHUNK = 16
EARLY = LAYERS[:3]


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "cold_path": str(directory / "cold"), "chunk_size": CHUNK, "hot_size": 0.0625, "max_cold_size": 2, **changes,
    }  # fmt: skip


def check_every_chunk(cold: ColdPath, truth: HuggingFace, sequences: list[list[int]]) -> None:
    """Whatever is stored of these sequences, reachable or behind a hole, is the model's."""
    checked = set()
    for ids in sequences:
        want = truth.rows(ids)
        for chunk in cold.chunks:
            end = chunk.start + len(chunk.token_ids)
            if ids[chunk.start : end] != chunk.token_ids:
                continue
            checked.add(chunk.path)
            for layer in EARLY:
                right = want[layer][chunk.start : end].float()
                errors = (cold.rows_of(chunk, layer).float() - right).norm(dim=1) / right.norm(dim=1)
                assert errors.max() < 0.2, f"token {chunk.start + int(errors.argmax())} of layer {layer}"
    assert checked == {chunk.path for chunk in cold.chunks}


def test_steps_without_hidden_states_leave_no_wrong_rows(model_dir: str, truth: HuggingFace, tmp_path: Path) -> None:
    """vLLM leaves them out for a whole batch when one request is too long for its drafter."""
    texts = sorted(different(40), key=len)
    result = run(
        tmp_path,
        {
            "llm": {"model": model_dir, "max_model_len": 256, "block_size": 32},
            "connector": settings(tmp_path),
            "drafter_limit": 220,
            "batches": [
                {"prompts": [texts[5], texts[24]], "sampling": {"max_tokens": 60, "ignore_eos": True}},
                # vLLM's prefix cache hands the blocks with the hole to a request that begins alike.
                {
                    "prompts": [{"batch": 0, "request": 0, "tokens": 196}],
                    "sampling": {"max_tokens": 2, "ignore_eos": True},
                },
            ],
        },
        own_process=False,
    )
    assert "without their hidden states" in result["log"]
    short, long = (request["ids"][:-1] for request in result["batches"][0]["requests"])
    first = result["batches"][0]["requests"]
    hole = len(first[0]["prompt_ids"]) + 220 - len(first[1]["prompt_ids"])
    assert 140 < hole < 192, "choose other prompts"
    records = {record["expected_tokens"]: record for record in ColdPath(str(tmp_path / "cold")).records()}
    # Two tokens per step are in question at the limit: the sampled one, and the one proposed after it.
    assert hole - 3 <= records[len(short)]["num_tokens"] + CHUNK - 1
    assert records[len(short)]["num_tokens"] <= hole
    assert records[len(long)]["num_tokens"] <= 220
    assert records[197]["num_tokens"] == records[len(short)]["num_tokens"]
    assert result["batches"][1]["figures"]["not_computed"] > result["batches"][0]["figures"]["not_computed"]
    sequences = [r["ids"][:-1] for batch in result["batches"] for r in batch["requests"]]
    check_every_chunk(ColdPath(str(tmp_path / "cold")), truth, sequences)


def test_rows_whose_kv_another_connector_brought_are_marked_or_come_from_the_tiers(
    model_dir: str, truth: HuggingFace, tmp_path: Path
) -> None:
    first, second = different(2)
    pretend, common = {"pretend": True}, {"sampling": {"max_tokens": 2, "ignore_eos": True}}
    llm = {"model": model_dir, "block_size": 32}
    spec = {"llm": llm, "beside": ["tests.vllm.pretend_loader", "PretendLoader"]}
    connector = settings(tmp_path, emit="both", shared_storage_path=str(tmp_path / "files"))
    result = run(
        tmp_path,
        {
            **spec,
            "connector": connector,
            "batches": [
                {"prompts": [first], "kv": pretend, **common},
                {"prompts": [first], **common},  # vLLM's prefix cache has the same blocks now
                {"prompts": [second], **common},
            ],
        },
        own_process=False,
    )
    for batch in result["batches"][:2]:
        path = Path(batch["requests"][0]["kv"]["hidden_states_path"])
        assert not path.exists()
        assert "not covered" in json.loads(Path(f"{path}.error").read_text())["error"]
    good = result["batches"][2]["requests"][0]
    cold = ColdPath(str(tmp_path / "cold"))
    assert [record["prompt_tokens"] for record in cold.records()] == [len(good["prompt_ids"])]
    assert all(chunk.start >= 128 for chunk in cold.chunks if chunk.token_ids[0] not in good["ids"])

    again = run(
        tmp_path,
        {**spec, "connector": connector, "batches": [{"prompts": [second], "kv": pretend, **common}]},
    )
    served = load_file(again["batches"][0]["requests"][0]["kv"]["hidden_states_path"])
    before = load_file(good["kv"]["hidden_states_path"])
    assert torch.equal(served["token_ids"], before["token_ids"])
    # The last, shorter chunk is this run's own, and nothing was really loaded before it; the rest is the tiers'.
    rows = len(good["prompt_ids"]) // CHUNK * CHUNK
    assert rows > 128
    assert torch.equal(served["hidden_states"][:rows], before["hidden_states"][:rows])
    want = truth.rows(good["prompt_ids"])[LAYERS[0]][:rows].float()
    errors = (served["hidden_states"][:rows, 0].float() - want).norm(dim=1) / want.norm(dim=1)
    assert errors.max() < 0.2
