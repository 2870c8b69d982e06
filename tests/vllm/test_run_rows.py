"""Rows of real requests through real vLLM, compared with a Hugging Face forward of the same tokens."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.english import different, sharing
from tests.vllm.reference import ColdPath, HuggingFace, relative_error
from tests.vllm.vllm_run import LAYERS, run

CHUNK = 64


def settings(cold: Path, **changes: Any) -> dict[str, Any]:
    return {"cold_path": str(cold), "chunk_size": CHUNK, "hot_size": 0.0625, "max_cold_size": 2, **changes}


def check_rows(
    cold: ColdPath, truth: HuggingFace, sequences: Sequence[Sequence[int]], title: str, most: float = 0.01
) -> None:
    """Every row of every sequence is there and is the model's, up to bfloat16 noise: ``most`` of a prompt's layer.

    The last layer is compared after the norm, and held to 5 %. Any single row must be within 20 %: rows of
    different tokens differ by far more. (All prompts begin with the same token on purpose. The first token's
    activations are a hundred times larger than any other row's, and for some tokens bfloat16 alone moves
    them by 4 % between two correct implementations.)
    """
    errors: dict[int, list[float]] = {layer: [] for layer in LAYERS}
    for ids in sequences:
        want = truth.rows(ids)
        for layer in LAYERS:
            got = cold.rows(ids, layer)
            assert len(got) == len(ids), f"{len(got)} of {len(ids)} rows of layer {layer}"
            right = want[layer]
            if layer == truth.num_layers:
                got, right = truth.norm(got), truth.norm(right)
            errors[layer].append(relative_error(got, right))
            per_row = (got.float() - right.float()).norm(dim=1) / right.float().norm(dim=1)
            assert per_row.max() < 0.2, f"row {int(per_row.argmax())} of layer {layer} is another token's"
    for layer, found in errors.items():
        print(f"{title}: layer {layer}: relative error median {statistics.median(found):.4f}, worst {max(found):.4f}")
        assert max(found) < (0.05 if layer == truth.num_layers else most)


@pytest.fixture(scope="module")
def fifty(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Fifty prompts with answers, many at once, in pieces of 128 tokens; vLLM has processes of its own."""
    directory = tmp_path_factory.mktemp("fifty")
    result = run(
        directory,
        {
            "llm": {"model": model_dir, "max_num_batched_tokens": 128, "max_num_seqs": 16},
            "connector": settings(directory / "cold"),
            "batches": [{"prompts": different(50), "sampling": {"max_tokens": 16}}],
        },
    )
    return directory / "cold", result["batches"][0]


def test_rows_of_fifty_prompts_and_answers_are_the_models(fifty: Any, truth: HuggingFace) -> None:
    cold, batch = fifty
    check_rows(ColdPath(str(cold)), truth, [r["ids"][:-1] for r in batch["requests"]], "50 prompts, 16 at once")


def test_every_request_is_recorded_with_its_lengths_and_its_last_chunk(fifty: Any) -> None:
    cold = ColdPath(str(fifty[0]))
    records = {record["num_tokens"]: record for record in cold.records()}
    assert len(cold.records()) == 50
    hashes = {chunk.chunk_hash for chunk in cold.chunks}
    for request in fifty[1]["requests"]:
        record = records[len(request["ids"]) - 1]
        assert record["expected_tokens"] == record["num_tokens"]
        assert record["prompt_tokens"] + record["generated_tokens"] == record["num_tokens"] + 1
        assert record["last_chunk"] in hashes
        assert record["capture"]["layer_ids"] == "vllm"
    assert {record["finish_reason"] for record in cold.records()} <= {"stop", "length"}
    answered = {request["kv"]["hidden_states_last_chunk"] for request in fifty[1]["requests"]}
    assert answered == {record["last_chunk"] for record in cold.records()}


def test_from_vllm_through_the_tiers_and_the_extraction_into_the_trainers_reader(
    fifty: Any, truth: HuggingFace, tmp_path: Path
) -> None:
    """speculators' own reader gets every request: its ids, its rows, and a mask over its answer alone."""
    datasets = pytest.importorskip("datasets", reason="scripts/test_vllm.sh installs it")
    transfer = pytest.importorskip("hs_connectors.transfer", reason="scripts/test_vllm.sh installs hs-connectors")
    out = tmp_path / "set"
    command = [sys.executable, "-m", "lmcache_hs_backend.cli.extract", str(fifty[0]), "--out", str(out)]
    subprocess.run([*command, "--format", "speculators", "--sequences", "requests", "--quiet"], check=True, timeout=300)
    assert all(len(request["ids"]) - len(request["prompt_ids"]) > 1 for request in fifty[1]["requests"])
    rows, reader = datasets.load_from_disk(str(out)), transfer.FileTransfer(out / "hidden_states")
    requests = {tuple(request["ids"][:-1]): request for request in fifty[1]["requests"]}
    assert len(rows) == len(requests) == 50
    for number, row in enumerate(rows):
        ids = row["input_ids"].tolist()
        request = requests.pop(tuple(ids))
        prompt = len(request["prompt_ids"])
        assert row["loss_mask"].tolist() == [0] * prompt + [1] * (len(ids) - prompt)
        data = reader.get_cached(number)
        assert data["token_ids"].tolist() == ids
        assert data["hidden_states"].shape == (len(ids), len(LAYERS), 576)
        if number % 10 == 0:
            want = truth.rows(ids)
            for position, layer in enumerate(LAYERS):
                assert relative_error(data["hidden_states"][:, position], want[layer]) < 0.05


def test_a_second_run_over_the_same_tokens_copies_nothing_and_a_shared_prefix_is_stored_once(
    fifty: Any, model_dir: str, truth: HuggingFace, tmp_path: Path
) -> None:
    cold, first = fifty
    before = {chunk.path for chunk in ColdPath(str(cold)).chunks}
    again = [request["ids"][:-1] for request in first["requests"]]
    result = run(
        tmp_path,
        {
            "llm": {"model": model_dir, "max_num_batched_tokens": 256, "max_num_seqs": 1},
            "connector": settings(cold),
            "batches": [
                {"prompts": again, "sampling": {"max_tokens": 1}},
                {"prompts": sharing(10), "sampling": {"max_tokens": 16}},
            ],
        },
        own_process=False,
    )
    second, shared = result["batches"]
    print(f"second run: {second['figures']}")
    assert second["figures"].get("taken", 0) == 0
    assert second["figures"]["reused"] == sum(-(-len(ids) // CHUNK) for ids in again)

    stored = ColdPath(str(cold))
    new = [chunk for chunk in stored.chunks if chunk.path not in before]
    sequences = [request["ids"][:-1] for request in shared["requests"]]
    prefix = next(n for n in range(10_000) if len({tuple(ids[: n + 1]) for ids in sequences}) > 1)
    assert prefix > 1000
    ends = [chunk.start + len(chunk.token_ids) for chunk in new]
    assert sum(end <= prefix for end in ends) == prefix // CHUNK, "a shared chunk is stored more than once"
    tokens, rows = sum(len(chunk.token_ids) for chunk in new), sum(map(len, sequences))
    print(f"ten prompts that share {prefix} tokens: {rows} rows, {tokens} stored, dedup factor {rows / tokens:.2f}")
    assert shared["figures"]["taken"] == len(new)
    check_rows(stored, truth, sequences[::5], "1,000 shared tokens, 1 at once")


def test_requests_that_are_preempted_and_resumed_lose_no_row(
    model_dir: str, truth: HuggingFace, tmp_path: Path
) -> None:
    result = run(
        tmp_path,
        {
            "llm": {
                "model": model_dir,
                "max_num_batched_tokens": 64,
                "max_model_len": 512,
                "num_gpu_blocks_override": 16,
            },
            "connector": settings(tmp_path / "cold"),
            "batches": [{"prompts": different(10), "sampling": {"max_tokens": 100, "ignore_eos": True}}],
        },
        own_process=False,
    )
    (batch,) = result["batches"]
    print(f"preemptions: {batch['preemptions']:.0f}, {batch['figures']}")
    assert batch["preemptions"] > 0
    sequences = [request["ids"][:-1] for request in batch["requests"]]
    check_rows(ColdPath(str(tmp_path / "cold")), truth, sequences, "preempted")


def test_of_three_tensor_parallel_workers_one_takes_the_rows(
    model_dir: str, truth: HuggingFace, tmp_path: Path
) -> None:
    cores = len(os.sched_getaffinity(0))
    result = run(
        tmp_path,
        {
            "llm": {"model": model_dir, "max_num_batched_tokens": 128, "tensor_parallel_size": 3},  # it has 9 heads
            "connector": settings(tmp_path / "cold"),
            "batches": [{"prompts": different(6), "sampling": {"max_tokens": 8}}],
        },
        # By itself vLLM would want a NUMA node for each worker.
        environ={"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(n % cores) for n in range(3))},
    )
    workers = {
        line.split()[0] for line in result["log"].splitlines() if "Worker_TP" in line and "hidden states" in line
    }
    assert workers == {"(Worker_TP0"}
    assert len(list((tmp_path / "cold").iterdir())) == 1, "two workers would have two directories"
    cold = ColdPath(str(tmp_path / "cold"))
    assert len(cold.records()) == 6
    sequences = [request["ids"][:-1] for request in result["batches"][0]["requests"]]
    # More noise than elsewhere: every worker rounds its part of a sum to bfloat16 before they are added up.
    check_rows(cold, truth, sequences, "3 tensor-parallel workers", most=0.02)


def test_a_conversation_that_goes_on_replaces_its_tail_by_a_longer_chunk(model_dir: str, tmp_path: Path) -> None:
    prompt = different(1)[0]
    result = run(
        tmp_path,
        {
            "llm": {"model": model_dir},
            "connector": settings(tmp_path / "cold"),
            "batches": [
                {"prompts": [prompt], "sampling": {"max_tokens": 8}},
                {"prompts": [prompt + " Well, that is interesting; please go on."], "sampling": {"max_tokens": 8}},
            ],
        },
    )
    cold = ColdPath(str(tmp_path / "cold"))
    whole = [chunk.token_ids for chunk in cold.chunks]
    assert not any(len(a) < len(b) and b[: len(a)] == a for a in whole for b in whole), "a covered tail is still there"
    ids = result["batches"][1]["requests"][0]["ids"][:-1]
    assert len(cold.rows(ids, LAYERS[0])) == len(ids)
    prompt_ids = result["batches"][0]["requests"][0]["prompt_ids"]
    assert len(cold.rows(prompt_ids, LAYERS[0])) == len(prompt_ids)
