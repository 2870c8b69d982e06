"""Real vLLM with LMCache's MP connector and ours side by side: KV and hidden states in one ``lmcache server``.

Collected where vLLM and LMCache are both there: scripts/test_vllm.sh puts LMCache on the path. On a CPU LMCache has
the worker copy KV (its "engine-driven" transfer), and the server has to be told that it may; by default it copies
itself, and does not answer such a worker.
"""

from __future__ import annotations

import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="scripts/test_vllm.sh runs this with LMCache on the path")

from tests.support.mp_server import MpServer
from tests.support.waiting import wait_until
from tests.vllm.english import different
from tests.vllm.reference import ColdPath
from tests.vllm.vllm_run import LAYERS, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        metadata.version("lmcache").startswith("0.5.6"),
        reason="there 'engine-driven transfer does not support multiple KV transfer groups now', so not with our cache",
    ),
]

CHUNK = 64
SHORT = {"max_tokens": 4, "ignore_eos": True}
#: One request at a time: a row then depends on nothing but its prompt, and two runs are equal bit by bit.
ONE_BY_ONE = {"max_num_seqs": 1, "max_model_len": 1024, "block_size": CHUNK}


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """A server that takes KV from workers on a CPU."""
    arguments = ["--supported-transfer-mode", "auto", "--chunk-size", str(CHUNK), "--l1-size-gb", "0.5"]
    with MpServer(tmp_path / "cold", tmp_path / "server.log", arguments, write_back_sec=0) as server:
        yield server


def beside(
    server: MpServer, directory: Path, model: str, batches: list[dict[str, Any]], **environ: str
) -> dict[str, Any]:
    """One vLLM, in processes of its own as in service, with both connectors on the server."""
    spec = {
        "llm": {"model": model, **ONE_BY_ONE},
        # A store that is under way when the server dies holds up the worker for mq_timeout, 300 s by default.
        "beside": [None, "LMCacheMPConnector", {"lmcache.mp.port": server.port, "lmcache.mp.mq_timeout": 30}],
        "connector": {"mp_server_url": server.url, "chunk_size": CHUNK},
        "batches": batches,
    }
    return run(directory, spec, environ={"LMCACHE_TRACK_USAGE": "false", **environ})


def whole(ids: list[int]) -> int:
    """Tokens in whole chunks."""
    return len(ids) // CHUNK * CHUNK


def test_rows_are_those_of_our_connector_alone_and_kv_and_rows_outlive_vllm(
    server: MpServer, model_dir: str, tmp_path: Path
) -> None:
    prompts = different(4)
    batch = {"prompts": prompts, "sampling": SHORT}
    alone = run(
        tmp_path,
        {
            "llm": {"model": model_dir, **ONE_BY_ONE},
            "connector": {"cold_path": str(tmp_path / "own"), "chunk_size": CHUNK, "hot_size": 0.0625,
                          "max_cold_size": 1},
            "batches": [batch],
        },
    )  # fmt: skip
    first = beside(server, tmp_path, model_dir, [batch])
    own, client = ColdPath(str(tmp_path / "own")), server.client(model=model_dir, read_timeout_sec=60)
    for request, with_lmcache in zip(alone["batches"][0]["requests"], first["batches"][0]["requests"], strict=True):
        ids = request["ids"][:-1]
        assert with_lmcache["ids"] == request["ids"]
        assert with_lmcache["cached"] == 0
        found = client.retrieve_layers(ids, LAYERS, None)
        for layer in LAYERS:
            assert torch.equal(found[layer], own.rows(ids, layer)[: whole(ids)])
    stored = client.stats()["stored_chunks"]

    # Another vLLM: nothing of the prompts is in its own prefix cache.
    second = beside(server, tmp_path, model_dir, [batch])
    for request in second["batches"][0]["requests"]:
        hit = whole(request["prompt_ids"][:-1])
        assert request["cached"] == hit > 0, "KV does not come from the server"
        assert client.coverage(request["ids"][:-1], LAYERS) == whole(request["ids"][:-1])
    assert [r["ids"] for r in second["batches"][0]["requests"]] == [r["ids"] for r in first["batches"][0]["requests"]]
    # Rows of tokens that no forward has computed are stored by nobody, so the first run's are still there, unchanged.
    for request in alone["batches"][0]["requests"]:
        ids = request["ids"][:-1]
        assert torch.equal(client.retrieve_layers(ids, LAYERS, None)[30], own.rows(ids, 30)[: whole(ids)])
    print(
        f"beside LMCache MP: {stored} layers of chunks, {client.stats()['stored_chunks'] - stored} more by the second"
    )
    client.close()


def test_a_server_that_is_killed_in_the_middle_costs_rows_and_no_request(
    server: MpServer, model_dir: str, tmp_path: Path
) -> None:
    prompts = different(12)
    restart, ended = tmp_path / "restart", threading.Event()

    def start_again() -> None:
        wait_until(lambda: restart.exists() or ended.is_set(), 600)
        if not ended.is_set():
            assert server.process is not None
            server.process.wait()
            server.start()

    helper = threading.Thread(target=start_again)
    helper.start()
    assert server.process is not None
    probes = "tests.vllm.mp_probe"
    try:
        result = beside(
            server, tmp_path, model_dir,
            [
                {"prompts": prompts[:2], "sampling": SHORT, "probe": [probes, "kill_in_the_next_batch"]},
                {"prompts": prompts[2:10], "sampling": SHORT, "probe": [probes, "restart"]},
                {"prompts": prompts[10:], "sampling": SHORT},
            ],
            HS_TEST_SERVER_PID=str(server.process.pid), HS_TEST_SERVER_URL=server.url, HS_TEST_MODEL=model_dir,
            HS_TEST_RESTART=str(restart),
        )  # fmt: skip
    finally:
        ended.set()
        helper.join(300)
    _, during, after = result["batches"]
    assert during["probe"]["killed_sec_ago"] > 0
    for request in during["requests"]:
        assert request["finish"] == "length"
    client = server.client(model=model_dir, read_timeout_sec=60)
    for request in after["requests"]:
        ids = request["ids"][:-1]
        assert client.coverage(ids, LAYERS) == whole(ids)
    kept = sum(client.coverage(request["ids"][:-1], LAYERS) for request in during["requests"])
    assert kept < sum(whole(request["ids"][:-1]) for request in during["requests"]), "it was killed too late"
    print(
        f"killed {during['probe']['killed_sec_ago']:.1f} s before the batch ended, in {during['seconds']:.1f} s of it"
    )
    client.close()
