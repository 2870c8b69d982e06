"""The OpenAI server with the connector: parameters in and out, many clients, a rude one, a forbidden path."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.processes import takes_sigint
from tests.support.waiting import wait_until
from tests.vllm.english import different
from tests.vllm.reference import ColdPath, HuggingFace
from tests.vllm.vllm_run import CONNECTOR, LAYERS, environment, run

MODEL = "smollm2"


class Server:
    def __init__(self, port: int, directory: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.directory = directory
        self.log = log

    def complete(self, prompt: str, kv: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **more}
        if kv is not None:
            body["kv_transfer_params"] = kv
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
    }  # fmt: skip
    connector = {
        "kv_connector": "HSTieredConnector", "kv_connector_module_path": CONNECTOR, "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "cold_path": str(directory / "cold"), "chunk_size": 64, "hot_size": 0.0625, "max_cold_size": 2,
            "emit": "both", "shared_storage_path": str(directory / "files"),
        },
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model_dir, "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "bfloat16",
        "--max-model-len", "1024", "--max-num-seqs", "8",
        "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector),
    ]  # fmt: skip
    log = directory / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment(True), start_new_session=True,
            preexec_fn=takes_sigint,
        )  # fmt: skip
    found = Server(port, directory, log)
    try:
        wait_until(lambda: found.is_up() or process.poll() is not None, 240)
        assert process.poll() is None, log.read_text()[-5000:]
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def test_concurrent_clients_get_their_own_rows_in_files_that_are_whole(server: Server, truth: HuggingFace) -> None:
    prompts = different(8)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: server.complete(p, {"include_output_tokens": True}), prompts))
    for answer in answers:
        choice = answer["choices"][0]
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        path = answer["kv_transfer_params"]["hidden_states_path"]
        wait_until(lambda path=path: os.path.exists(path))
        data = load_file(path)  # published by rename: whole as soon as it is there
        assert data["token_ids"].tolist() == ids[:-1]
        want = truth.rows(ids[:-1])[LAYERS[0]].float()
        assert ((data["hidden_states"][:, 0].float() - want).norm(dim=1) / want.norm(dim=1)).max() < 0.2


def test_speculators_own_transfer_reads_an_answer_as_soon_as_it_comes(server: Server) -> None:
    transfer = pytest.importorskip("hs_connectors.transfer", reason="scripts/test_vllm.sh installs hs-connectors")
    answer = server.complete("Why is the sea salty?")
    data = transfer.FileTransfer(server.directory / "files").get_generated(answer["kv_transfer_params"])
    assert data is not None
    assert data["token_ids"].tolist() == answer["choices"][0]["prompt_token_ids"]
    assert data["hidden_states"].shape == (len(data["token_ids"]), len(LAYERS), 576)


def test_a_client_that_asks_for_a_path_of_its_own_gets_the_servers(server: Server) -> None:
    asked = str(server.directory / "stolen.safetensors")
    answer = server.complete("The tide", {"hidden_states_path": asked})
    given = answer["kv_transfer_params"]["hidden_states_path"]
    assert os.path.dirname(given) == str(server.directory / "files")
    wait_until(lambda: os.path.exists(given))
    assert not os.path.exists(asked)
    assert "hidden_states_path is ignored" in server.log.read_text()


def test_a_request_id_with_slashes_stays_inside_the_files_folder(server: Server) -> None:
    body = json.dumps({"model": MODEL, "prompt": "The moon", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": "../../../outside"}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        path = json.load(answer)["kv_transfer_params"]["hidden_states_path"]
    assert os.path.dirname(path) == str(server.directory / "files")
    wait_until(lambda: os.path.exists(path))


def test_a_client_that_disconnects_leaves_no_lock_and_the_server_goes_on(server: Server) -> None:
    files = server.directory / "files"
    before = {path.name for path in files.glob("*.safetensors")}
    request = {"model": MODEL, "prompt": different(9)[-1], "max_tokens": 600, "stream": True, "ignore_eos": True}
    body = json.dumps(request)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        assert b"data:" in client.recv(65536) + client.recv(65536)
    wait_until(lambda: not any(orphan(lock) for lock in files.glob("*.lock")), 60)
    # What the model had computed until then is kept: the prompt, and the answer as far as it got.
    wait_until(lambda: bool(aborted(server)), 60)
    (record,) = aborted(server)
    assert record["num_tokens"] == record["expected_tokens"] >= record["prompt_tokens"]
    assert {path.name for path in files.glob("*.safetensors")} == before
    answer = server.complete("Bread rises because")
    wait_until(lambda: os.path.exists(answer["kv_transfer_params"]["hidden_states_path"]))


def aborted(server: Server) -> list[dict[str, Any]]:
    """The records of requests whose clients have gone."""
    records = ColdPath(str(server.directory / "cold")).records()
    return [record for record in records if record["finish_reason"] == "abort"]


def orphan(lock: Path) -> bool:
    """Whether a lock has no file beside it."""
    return not Path(str(lock).removesuffix(".lock")).exists()


def test_a_dataset_is_captured_through_a_server_and_only_once(server: Server, model_dir: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in different(12)[9:]]
    rows.append(
        {"messages": [{"role": "user", "content": "What is a tide?"}, {"role": "assistant", "content": "Water."}]}
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    script = Path(__file__).resolve().parents[2] / "scripts" / "capture.sh"
    command = [str(script), model_dir, str(data), "--server", server.url, "--max-tokens", "4"]
    command += ["--cold-path", str(server.directory / "cold")]

    def capture() -> str:
        environ = {**environment(True), "PYTHON": sys.executable}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True)
        return next(line for line in done.stderr.splitlines() if "different rows" in line)

    assert capture() == "4 different rows, 0 done already"
    records = [r for r in ColdPath(str(server.directory / "cold")).records() if "hs" in r["request_id"]]
    assert len(records) == 4
    assert capture() == "4 different rows, 4 done already"


def test_a_server_that_is_killed_in_the_middle_leaves_nothing_wrong_and_its_successor_goes_on(
    model_dir: str, truth: HuggingFace, tmp_path: Path
) -> None:
    cold, prompts = tmp_path / "cold", different(24)
    spec = {
        "llm": {"model": model_dir, "max_num_batched_tokens": 128},
        "connector": {"cold_path": str(cold), "chunk_size": 32, "hot_size": 0.0625, "max_cold_size": 2},
        "batches": [{"prompts": prompts, "sampling": {"max_tokens": 64, "ignore_eos": True}}],
    }
    (tmp_path / "spec").write_text(json.dumps({**spec, "out": str(tmp_path / "none")}))
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.vllm_run", str(tmp_path / "spec")],
            stdout=log, stderr=subprocess.STDOUT, env=environment(True), start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: len(list(cold.glob("*/??/*.safetensors"))) >= 20 or process.poll() is not None, 240)
        assert process.poll() is None, (tmp_path / "log").read_text()[-5000:]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "none").exists(), "it was over before it was killed"
    survivors = ColdPath(str(cold))
    by_hash = {chunk.chunk_hash for chunk in survivors.chunks}
    for record in survivors.records():  # what is recorded is on disk
        assert record["last_chunk"] in by_hash

    result = run(tmp_path, spec)
    stored = ColdPath(str(cold))
    print(f"killed with {len(survivors.chunks)} chunks on disk, {len(stored.chunks)} after the second run")
    for request in result["batches"][0]["requests"][::4]:
        ids = request["ids"][:-1]
        want = truth.rows(ids)
        for layer in LAYERS[:3]:
            got = stored.rows(ids, layer)
            assert len(got) == len(ids)
            assert ((got.float() - want[layer].float()).norm(dim=1) / want[layer].float().norm(dim=1)).max() < 0.2
