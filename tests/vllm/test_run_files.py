"""One file per request, for clients that were written for vLLM's example connector."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.vllm.english import different
from tests.vllm.reference import ColdPath, HuggingFace, relative_error
from tests.vllm.vllm_run import LAYERS, run


@pytest.fixture(scope="module")
def both(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Chunks and files, the files' folder inside the cold path; clients name files of their own."""
    directory = tmp_path_factory.mktemp("both")
    mine = directory / "mine"
    result = run(
        directory,
        {
            "llm": {"model": model_dir, "max_num_batched_tokens": 128},
            "connector": {
                "cold_path": str(directory / "cold"), "chunk_size": 64, "hot_size": 0.0625, "max_cold_size": 2,
                "emit": "both", "shared_storage_path": str(directory / "cold" / "files"),
                "allow_custom_save_path": True, "custom_save_roots": [str(mine)],
            },
            "batches": [
                {"prompts": different(6), "sampling": {"max_tokens": 8}},
                {
                    "prompts": different(2), "sampling": {"max_tokens": 8},
                    "kv": {"include_output_tokens": True},
                },
                {
                    "prompts": different(1), "sampling": {"max_tokens": 4},
                    "kv": {"hidden_states_path": str(mine / "deep" / "a.safetensors")},
                },
                {
                    "prompts": different(1), "sampling": {"max_tokens": 4},
                    "kv": {"hidden_states_path": str(directory / "elsewhere.safetensors")},
                },
                {
                    "prompts": different(1), "sampling": {"max_tokens": 4},
                    "kv": {"hidden_states_path": str(mine / ".." / "above.safetensors")},
                },
            ],
        },
    )  # fmt: skip
    return directory, result


def files_of(result: dict[str, Any], batch: int) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Every request of a batch with its file, loaded by the example connector's own client function."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    requests = result["batches"][batch]["requests"]
    return [(request, load_hidden_states(request["kv"]["hidden_states_path"])) for request in requests]


def test_the_example_connectors_client_reads_prompt_rows_that_are_the_models(both: Any, truth: HuggingFace) -> None:
    for request, data in files_of(both[1], 0):
        assert data["token_ids"].tolist() == request["prompt_ids"]
        assert data["token_ids"].dtype == torch.int64
        assert data["hidden_states"].shape == (len(request["prompt_ids"]), len(LAYERS), 576)
        want = truth.rows(request["prompt_ids"])
        for number, layer in enumerate(LAYERS):
            assert relative_error(data["hidden_states"][:, number], want[layer]) < 0.05


def test_a_file_has_the_bytes_of_the_chunks(both: Any) -> None:
    cold = ColdPath(str(both[0] / "cold"))
    for _, data in files_of(both[1], 0):
        for number, layer in enumerate(LAYERS):
            assert torch.equal(data["hidden_states"][:, number], cold.rows(data["token_ids"].tolist(), layer))


def test_include_output_tokens_adds_all_but_the_last_token(both: Any) -> None:
    for request, data in files_of(both[1], 1):
        assert data["token_ids"].tolist() == request["ids"][:-1]
        assert len(data["hidden_states"]) == len(request["ids"]) - 1


def test_a_client_may_name_a_file_inside_the_roots_and_nowhere_else(both: Any) -> None:
    directory, result = both
    ((request, data),) = files_of(result, 2)
    assert request["kv"]["hidden_states_path"] == str(directory / "mine" / "deep" / "a.safetensors")
    assert data["token_ids"].tolist() == request["prompt_ids"]
    for batch in (3, 4):
        ((request, _),) = files_of(result, batch)
        assert os.path.dirname(request["kv"]["hidden_states_path"]) == str(directory / "cold" / "files")
    assert not (directory / "elsewhere.safetensors").exists()
    assert not (directory / "above.safetensors").exists()
    assert result["log"].count("hidden_states_path is ignored") == 2


def test_files_alone_are_complete_without_an_engine_process_and_without_locks(model_dir: str, tmp_path: Path) -> None:
    result = run(
        tmp_path,
        {
            "llm": {"model": model_dir},
            "connector": {
                "emit": "files", "shared_storage_path": str(tmp_path / "files"),
                "allow_custom_save_path": True, "custom_save_roots": [str(tmp_path)], "use_synchronization_lock": False,
            },
            "batches": [
                {"prompts": different(3), "sampling": {"max_tokens": 3}},
                {
                    "prompts": different(1), "sampling": {"max_tokens": 3},
                    "kv": {"hidden_states_path": str(tmp_path / "mine" / "b.safetensors")},
                },
            ],
        },
        own_process=False,
    )  # fmt: skip
    for request in result["batches"][0]["requests"]:
        data = load_file(request["kv"]["hidden_states_path"])
        assert data["token_ids"].tolist() == request["prompt_ids"]
        assert not os.path.exists(request["kv"]["hidden_states_path"] + ".lock")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["b.safetensors"]
    assert sorted(p.suffix for p in (tmp_path / "files").iterdir()) == [".safetensors"] * 3
