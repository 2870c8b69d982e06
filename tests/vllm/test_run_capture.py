"""lmcache-hs-capture with vLLM in its own process: data sets in, tiers filled; killed, stopped, full, and gone on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from tests.support.processes import takes_sigint
from tests.support.waiting import wait_until
from tests.vllm.english import different
from tests.vllm.reference import ColdPath, HuggingFace, relative_error
from tests.vllm.vllm_run import LAYERS, environment

ROOT = Path(__file__).resolve().parents[2]
ROWS = 12


def test_a_capture_that_is_killed_goes_on_where_it_was(model_dir: str, truth: HuggingFace, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs" / "vllm_capture.yaml").read_text())
    config["layers"] = list(LAYERS)
    # Two at a time, so that some rows are done while others wait.
    config["engine"] = {"max_num_seqs": 2, "max_model_len": 1024, "enforce_eager": True, "dtype": "bfloat16"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    prompts = different(ROWS)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    cold = tmp_path / "cold"
    command = [str(ROOT / "scripts" / "capture.sh"), model_dir, str(tmp_path / "data.jsonl")]
    command += ["--config", str(tmp_path / "config.yaml"), "--cold-path", str(cold), "--max-tokens", "48"]
    environ = {**environment(True), "PYTHON": sys.executable}

    def recorded() -> int:
        return sum(len(path.read_text().splitlines()) for path in cold.glob("*/sequences/*.jsonl"))

    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: recorded() >= 3 or process.poll() is not None, 240)
        assert process.poll() is None, (tmp_path / "log").read_text()[-5000:]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def again() -> tuple[int, str]:
        """How many rows were done before, and what the command says at the end."""
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
        found = re.search(rf"{ROWS} different rows, (\d+) done already", done.stderr)
        assert found is not None
        return int(found[1]), " ".join(done.stdout.split())[-200:]

    before, last = again()
    print(f"killed with {before} of {ROWS} rows done")
    assert 3 <= before < ROWS
    assert f"{ROWS} of {ROWS} rows are in" in last
    assert again()[0] == ROWS
    stored = ColdPath(str(cold))
    assert len({record["request_id"] for record in stored.records()}) == ROWS
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for prompt in prompts[::4]:
        ids = tokenizer(prompt)["input_ids"]
        want = truth.rows(ids)
        for layer in LAYERS[:3]:
            got = stored.rows(ids, layer)
            assert len(got) == len(ids)
            assert relative_error(got, want[layer]) < 0.01


CASES = ROOT / "tests" / "capture" / "cases"


def capture(model: str, *words: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "lmcache_hs_backend.cli.capture", model, *words]
    return subprocess.run(command, env=environment(True), capture_output=True, text=True, timeout=timeout, check=False)


def small(directory: Path, **connector: Any) -> str:
    """A config for a CPU: few requests at once, so that some wait while others run."""
    config = {
        "layers": list(LAYERS),
        "sampling": {"max_tokens": 8, "temperature": 0},
        "engine": {"max_num_seqs": 2, "max_model_len": 512, "enforce_eager": True, "dtype": "bfloat16"},
        "connector": {"hot_size": 0.05, "chunk_size": 16, "max_cold_size": 2, "min_free_disk": 0, **connector},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def recorded_ids(cold: Path) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Every record with the token ids of its chunks, by row."""
    stored = ColdPath(str(cold))
    by_hash = {chunk.chunk_hash: chunk for chunk in stored.chunks}
    found = {}
    for record in stored.records():
        ids: list[int] = []
        chunk = by_hash.get(record["last_chunk"])
        while chunk is not None:
            ids = [*chunk.token_ids, *ids]
            chunk = by_hash.get(chunk.parent)
        found[record["request_id"][:34]] = ids[: record["num_tokens"]], record
    return found


def group_is_alive(group: int) -> bool:
    """Whether any process of a group is left. One that has ended, and that no parent has asked for, is none."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def test_what_is_captured_is_what_the_template_renders(model_dir: str, tmp_path: Path) -> None:
    """Rows of every kind in one run: bad ones are named, the others are in the chunks, with their spans."""
    cold = tmp_path / "cold"
    files = [
        "rows_ultrachat_like.jsonl", "rows_sharegpt_roles.jsonl", "rows_answer_begins_with_newlines.jsonl",
        "bad_empty_prompt.jsonl", "bad_id_outside_vocabulary.jsonl", "bad_lone_surrogate.jsonl", "bad_bom.jsonl",
        "bad_json_array.json", "rows_longer_than_context.jsonl",
    ]  # fmt: skip
    words = [*(str(CASES / name) for name in files), "--config", small(tmp_path), "--cold-path", str(cold)]
    words += ["--too-long", "cut", "--layers", "2,15,27"]
    done = capture(model_dir, *words, "--format", "json", "--", "--max-model-len", "64")
    assert done.returncode == 1, done.stderr[-3000:]
    assert "the model's last layer, 30, is not captured" in done.stderr
    said = json.loads(done.stdout)
    # A context of 64: two rows of 71 and 67 tokens, and the one of 210, are cut.
    assert (said["bad"], said["cut"], said["missing"], said["stopped"]) == (3, 3, 0, "")
    lines = [json.loads(line) for line in (cold / "rejected.jsonl").read_text().splitlines()]
    assert [(Path(line["file"]).name, line["line"]) for line in lines] == [(name, 2) for name in files[3:6]]

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    found = recorded_ids(cold)
    assert len(found) == said["different"] == said["captured"]
    texts = {tokenizer.decode(ids): record for ids, record in found.values()}
    for name in files[:3]:
        for line in (CASES / name).read_text().splitlines():
            row = json.loads(line)
            names = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
            turns = row.get("messages") or [
                {"role": names[turn["from"]], "content": turn["value"]} for turn in row["conversations"]
            ]
            if "system" in row:
                turns = [{"role": "system", "content": row["system"]}, *turns]
            want = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
            record = texts[tokenizer.decode(want[:63])]
            assert record["num_tokens"] == min(63, len(want))
            assert record.get("cut_from") == (len(want) if len(want) > 63 else None)
            assert record["loss_spans"]
    again = capture(model_dir, *words, "--", "--max-model-len", "64")
    assert f"{said['different']} different rows, {said['different']} done already" in again.stderr
    assert "INFO" not in again.stderr, "vLLM was started for nothing"


def test_a_full_capture_stops_loses_nothing_and_goes_on_with_more_room(model_dir: str, tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a pilot of long experience, and you answer in one short sentence."}
    rows = [
        {"messages": [system, {"role": "user", "content": text}, {"role": "assistant", "content": f"Number {n}."}]}
        for n, text in enumerate(different(24))
    ]
    data, cold = tmp_path / "data.jsonl", tmp_path / "cold"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(data), "--config", small(tmp_path), "--cold-path", str(cold)]
    counted = json.loads(capture(model_dir, *words, "--dry-run", "--format", "json").stdout)
    assert counted["fits"]
    limit = counted["bytes"] / 10
    done = capture(model_dir, *words, "--max-cold-size", str(limit / 2**30))
    assert done.returncode == 1, done.stderr[-3000:]
    said = re.search(r"full: (\d+) of 24 rows are done\. max_cold_size is", done.stdout)
    assert said is not None, done.stdout
    assert "raise max_cold_size" in done.stdout
    found = recorded_ids(cold)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    whole = {tokenizer.decode(ids) for ids, record in found.values() if len(ids) == record["expected_tokens"]}
    assert 1 <= int(said[1]) == len(whole) == len(found) < 24, "a row is said to be done whose chunks are not there"
    used = sum(path.stat().st_size for path in cold.rglob("*.safetensors"))
    print(f"{said[1]} rows in {used} of {limit:.0f} bytes")
    assert used <= limit
    more = capture(model_dir, *words)
    assert more.returncode == 0, more.stderr[-3000:]
    assert f"24 different rows, {said[1]} done already" in more.stderr
    assert "24 of 24 rows are in" in more.stdout
    want = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    assert sorted(tokenizer.decode(ids) for ids, _ in recorded_ids(cold).values()) == sorted(want)
    # What a user deletes is not done any more, whatever its record says.
    next(iter(cold.glob("*/??/*.safetensors"))).unlink()
    counted = json.loads(capture(model_dir, *words, "--dry-run", "--format", "json").stdout)
    assert counted["done"] < 24


@pytest.mark.parametrize("moment", ["starting", "running"])
def test_ctrl_c_ends_a_capture_within_two_seconds(model_dir: str, tmp_path: Path, moment: str) -> None:
    data, cold = tmp_path / "data.jsonl", tmp_path / "cold"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in different(40)))
    command = [sys.executable, "-m", "lmcache_hs_backend.cli.capture", model_dir, str(data), "--cold-path", str(cold)]
    command += ["--config", small(tmp_path), "--max-tokens", "64"]
    log = open(tmp_path / "log", "w")  # noqa: SIM115 - the process has it
    process = subprocess.Popen(
        command, env=environment(True), stdout=log, stderr=log, start_new_session=True, preexec_fn=takes_sigint
    )
    try:
        if moment == "running":
            wait_until(lambda: bool(list(cold.glob("*/sequences/*.jsonl"))) or process.poll() is not None, 240)
        else:
            wait_until(lambda: "Initializing a V1 LLM" in (tmp_path / "log").read_text(errors="replace"), 240)
        assert process.poll() is None, (tmp_path / "log").read_text()[-5000:]
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group
        status = process.wait(30)
        seconds = time.monotonic() - started
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()
    text = (tmp_path / "log").read_text()
    print(f"ended after {seconds:.2f} s: {text.strip().splitlines()[-1]}")
    assert status == 130
    assert seconds < 2
    assert "Traceback" not in text
    wait_until(lambda: not group_is_alive(process.pid), 10)
    assert re.search(r"stopped: \d+ of 40 rows are in .*; the same command goes on", text)
