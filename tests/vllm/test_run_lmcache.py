"""Real vLLM with a real LMCache engine in the same process: rows live in the engine's store, with their KV.

LMCache's own connector runs, from its lookups to its engine; see lmcache_on_cpu.py for what it lacks on a CPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from tests.vllm.english import different
from tests.vllm.lmcache_on_cpu import CONNECTOR as LMCACHE_LINE
from tests.vllm.reference import ColdPath, HuggingFace, relative_error
from tests.vllm.vllm_run import LAYERS, environment, run

#: Where scripts/test_vllm.sh has put versions of LMCache: outside vLLM's environment, because the connector must run
#: without.
FOLDERS = list(filter(None, os.environ.get("HS_VLLM_LMCACHE", "").split(os.pathsep)))
pytestmark = pytest.mark.skipif(not FOLDERS, reason="HS_VLLM_LMCACHE does not name a folder with LMCache")
CHUNK = 64


def version(folder: str) -> str:
    return next(iter(Path(folder).glob("lmcache-*.dist-info"))).name.removeprefix("lmcache-").removesuffix(".dist-info")


@pytest.fixture(params=FOLDERS, ids=version)
def lmcache(request: pytest.FixtureRequest) -> str:
    """A folder with one version of LMCache."""
    return str(request.param)


def lmcache_run(
    lmcache: str, directory: Path, model: str, batches: list[dict[str, Any]], *, last: bool = False, **settings: Any
) -> dict[str, Any]:
    """One vLLM with both connectors. ``own`` is where our connector would store if it found no engine."""
    plugin = {
        "module_path": "lmcache_hs_backend", "class_name": "HSTieredBackend", "cold_path": str(directory / "cold"),
        "max_cold_size": 1, "write_back_sec": 0,
    }  # fmt: skip
    config = {
        "chunk_size": CHUNK, "local_cpu": True, "max_local_cpu_size": 0.5, "enable_hidden_state_cache": True,
        "max_hidden_state_cpu_size": 0.05, "storage_plugins": ["hs_tiered"], "save_decode_cache": True,
        "extra_config": {f"storage_plugin.hs_tiered.{name}": value for name, value in plugin.items()}, **settings,
    }  # fmt: skip
    (directory / "lmcache.yaml").write_text(yaml.safe_dump(config))
    spec = {
        "llm": {"model": model, "max_model_len": 1024, "block_size": CHUNK},
        "beside": [LMCACHE_LINE["kv_connector_module_path"], LMCACHE_LINE["kv_connector"]],
        "before": ["tests.vllm.lmcache_on_cpu", "install"],
        "beside_last": last,
        "connector": {"cold_path": str(directory / "own"), "chunk_size": CHUNK, "hot_size": 0.0625, "max_cold_size": 1},
        "batches": batches,
    }
    environ = {
        "LMCACHE_CONFIG_FILE": str(directory / "lmcache.yaml"), "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    environ["PYTHONPATH"] = os.pathsep.join([environment(False)["PYTHONPATH"], lmcache])
    return run(directory, spec, own_process=False, environ=environ)


def test_rows_lie_in_the_engines_store_under_its_keys_and_leave_with_their_kv(
    lmcache: str, model_dir: str, truth: HuggingFace, tmp_path: Path
) -> None:
    prompts, tags = different(4), {"lmcache.tag.user": "a"}
    short = {"max_tokens": 4, "ignore_eos": True}
    result = lmcache_run(
        lmcache,
        tmp_path,
        model_dir,
        [
            {"prompts": prompts[:3], "sampling": short, "probe": ["tests.vllm.lmcache_probe", "look"]},
            # vLLM has forgotten them, so their KV comes from LMCache and no forward computes those rows.
            {"prompts": prompts[:3], "sampling": short, "reset": True, "probe": ["tests.vllm.lmcache_probe", "look"]},
            {
                "prompts": prompts[3:],
                "sampling": short,
                "kv": tags,
                "probe": ["tests.vllm.lmcache_probe", "look_for_tagged"],
            },
            {"prompts": prompts[:1], "sampling": short, "probe": ["tests.vllm.lmcache_probe", "forget"]},
        ],
        last=True,
    )
    first, second, tagged, forgotten = result["batches"]
    print(f"beside LMCache: {[(batch['figures'], batch['probe']) for batch in result['batches']]}")
    assert not list((tmp_path / "own").glob("*"))
    for request, seen in zip(first["requests"], first["probe"], strict=True):
        assert seen["chunks"] == (len(request["ids"]) - 1) // CHUNK > 1
        assert seen["kv"] == seen["rows"] == seen["chunks"]
        assert seen["served"] == seen["chunks"] * CHUNK
    loaded = [int(tokens) for tokens in re.findall(r"LMCache hit tokens: (\d+), need to load: [1-9]", result["log"])]
    assert len(loaded) == 3
    assert sum(loaded) == sum(len(request["prompt_ids"]) // CHUNK * CHUNK for request in second["requests"])
    assert second["probe"] == first["probe"]
    assert second["figures"]["taken"] == first["figures"]["taken"]
    assert "not_computed" not in second["figures"]
    (with_tag,), (without,) = tagged["probe"]["tagged"], tagged["probe"]["untagged"]
    assert with_tag["rows"] == with_tag["kv"] == with_tag["chunks"] > 1
    assert without["rows"] == without["kv"] == 0
    assert forgotten["probe"]["before"] > 0
    assert all(seen["rows"] == seen["served"] == 0 for seen in forgotten["probe"]["after"])


def test_rows_that_lmcaches_store_has_written_are_the_models_and_only_of_the_layers_it_allows(
    lmcache: str, model_dir: str, truth: HuggingFace, tmp_path: Path
) -> None:
    result = lmcache_run(
        lmcache,
        tmp_path,
        model_dir,
        [{"prompts": different(3), "sampling": {"max_tokens": 4, "ignore_eos": True}}],
        hidden_state_layers=[LAYERS[0], LAYERS[2]],
        save_unfull_chunk=True,
    )
    cold = ColdPath(str(tmp_path / "cold"))
    for request in result["batches"][0]["requests"]:
        ids = request["ids"][:-1]
        want = truth.rows(ids)
        for layer in (LAYERS[0], LAYERS[2]):
            rows = cold.rows(ids, layer)
            assert len(rows) == len(ids)
            assert relative_error(rows, want[layer]) < 0.05
    with safe_open(cold.chunks[0].path, "pt") as file:
        assert set(file.keys()) == {"token_ids", f"layer.{LAYERS[0]}", f"layer.{LAYERS[2]}"}
    lengths = sorted(len(request["ids"]) - 1 for request in result["batches"][0]["requests"])
    assert sorted(record["num_tokens"] for record in cold.records()) == lengths
