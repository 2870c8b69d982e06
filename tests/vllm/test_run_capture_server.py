"""lmcache-hs-capture through a server that its own --serve-command started: proof, key, bad rows, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from transformers import AutoTokenizer

from tests.capture import templates
from tests.support.processes import takes_sigint
from tests.support.waiting import wait_until
from tests.vllm.english import different
from tests.vllm.reference import ColdPath
from tests.vllm.test_run_capture import CASES, recorded_ids
from tests.vllm.vllm_run import environment

KEY = "a key of the harbour"


class Served(NamedTuple):
    url: str
    cold: Path
    config: str
    log: Path


@pytest.fixture(scope="module")
def served(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """vLLM's server as the printed command starts it, with a flag that is off and a name with a blank."""
    directory = tmp_path_factory.mktemp("served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = yaml.safe_load((CASES / "serve_false_flag_and_blank.yaml").read_text())
    config["engine"] |= {"dtype": "bfloat16", "max_num_seqs": 4}
    config["connector"] |= {"chunk_size": 16, "hot_size": 0.05, "min_free_disk": 0}
    path, cold, log = directory / "config.yaml", directory / "it's cold", directory / "log"
    path.write_text(yaml.safe_dump(config))
    words = [model_dir, "--serve-command", "--config", str(path), "--cold-path", str(cold), "--", "--port", str(port)]
    printed = subprocess.run(
        [sys.executable, "-m", "lmcache_hs_backend.cli.capture", *words], env=environment(True), capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    environ = {**environment(True), "VLLM_API_KEY": KEY}
    environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{environ['PATH']}"  # the command's python is ours
    with open(log, "w") as file:
        process = subprocess.Popen(["bash", "-c", f"exec {printed}"], env=environ, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or is_up(url), 240)
        assert process.poll() is None, log.read_text()[-5000:]
        yield Served(url, cold, str(path), log)
    finally:
        process.terminate()
        process.wait(60)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def command(model: str, served: Served, data: Path, *words: str) -> list[str]:
    words = (model, str(data), "--server", served.url, "--config", served.config, *words)
    return [sys.executable, "-m", "lmcache_hs_backend.cli.capture", *words]


def records(served: Served) -> list[dict[str, Any]]:
    """All records there are, also when there is no chunk yet."""
    stored = ColdPath(str(served.cold))
    return stored.records() if stored.chunks else []


def capture(words: list[str], key: str | None = KEY) -> subprocess.CompletedProcess[str]:
    environ = environment(True) | ({"VLLM_API_KEY": key} if key else {})
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=200, check=False)


def test_the_printed_command_gave_vllm_what_the_yaml_says(served: Served) -> None:
    request = urllib.request.Request(f"{served.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        [card] = json.load(answer)["data"]
    assert (card["id"], card["max_model_len"]) == ("harbour model", 1024)
    text = served.log.read_text()
    assert "enable_prefix_caching=False" in text
    assert "enforce_eager=True" in text


def test_a_server_is_proved_before_the_data_set_goes_to_it(model_dir: str, served: Served, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in different(12)))
    words = command(model_dir, served, data, "--cold-path", str(served.cold), "--max-tokens", "2")
    for key, reason in ((None, "wants an API key: set VLLM_API_KEY"), ("x", "did not take the key in VLLM_API_KEY")):
        done = capture(words, key)
        assert done.returncode == 1
        assert reason in done.stderr
    other = command(
        model_dir, served, data, "--cold-path", str(served.cold), "--max-tokens", "2", "--layers", "2,16,30"
    )
    done = capture(other)
    assert done.returncode == 1
    assert "the server captures layers 2, 15, 27, 30, but the layers here are 2, 16, 30" in done.stderr
    done = capture(command(model_dir, served, data, "--cold-path", str(tmp_path / "elsewhere"), "--max-tokens", "2"))
    assert done.returncode == 1
    assert f"wrote no record under {tmp_path / 'elsewhere'}" in done.stderr
    assert len([r for r in ColdPath(str(served.cold)).records() if "hs" in r["request_id"]]) == 2


def test_rows_with_bad_ones_among_them_go_through_a_server_once(model_dir: str, served: Served, tmp_path: Path) -> None:
    files = [str(CASES / name) for name in ("bad_latin1.jsonl", "bad_content_parts.jsonl", "bad_empty_ids.jsonl")]
    words = command(model_dir, served, Path(files[0]), *files[1:], "--cold-path", str(served.cold))
    words += ["--rejected", str(tmp_path / "rejected")]
    before = len(records(served))
    done = capture(words)
    assert done.returncode == 1
    assert "3 of 3 rows are in" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "rejected").read_text().splitlines()]
    assert [(line["file"], line["line"]) for line in lines] == [(files[0], 2), (files[2], 2)]
    added = records(served)[before:]
    assert sorted(record["num_tokens"] for record in added) == [39, 44, 44]
    assert sorted(map(str, (record["loss_spans"] for record in added))) == ["[[35, 38]]", "[[37, 43]]", "[[37, 43]]"]
    again = capture(words)
    assert "3 different rows, 3 done already" in again.stderr
    assert len(records(served)) == before + 3
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    turns = json.loads((CASES / "bad_bom.jsonl").read_text(encoding="utf-8-sig").splitlines()[0])["messages"]
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert len(ColdPath(str(served.cold)).rows(ids, 30)) == len(ids)


@pytest.mark.parametrize("name", ["LLAMA3", "QWEN3", "GEMMA", "tools and reasoning"])
def test_chunks_are_what_transformers_renders_with_other_templates(
    model_dir: str, served: Served, tmp_path: Path, name: str
) -> None:
    """Also with tools, calls and reasoning, where the family's template has them."""
    template = tmp_path / "template.jinja"
    template.write_text(
        getattr(templates, name) if name.isupper() else (CASES / "template_tools_reasoning.jinja").read_text()
    )
    ask, say = {"role": "user", "content": "Is it high water?"}, {"role": "assistant", "content": "Not before six."}
    rows: list[dict[str, Any]] = [{"messages": [ask, say, ask, say]}, {"messages": [ask]}]
    if name != "GEMMA":
        rows.append(json.loads((CASES / "rows_tools_reasoning.jsonl").read_text()))
        rows[-1]["messages"][1]["content"] = ""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = command(model_dir, served, data, "--cold-path", str(served.cold), "--max-tokens", "3")
    done = capture([*words, "--chat-template", str(template)])
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    found = {
        tokenizer.decode(ids[: record["prompt_tokens"]]): record.get("loss_spans")
        for ids, record in recorded_ids(served.cold).values()
    }
    for row in rows:
        text = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), chat_template=template.read_text(), tokenize=False,
            add_generation_prompt=row["messages"][-1]["role"] == "user",
        )  # fmt: skip
        answers = sum(turn["role"] == "assistant" for turn in row["messages"])
        assert len(found[text] or ()) == answers, (text, found)  # type: ignore[index]


def test_ctrl_c_ends_within_two_seconds_and_the_same_command_goes_on(
    model_dir: str, served: Served, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}. {text}"}) + "\n" for n, text in enumerate(different(24))))
    words = command(model_dir, served, data, "--cold-path", str(served.cold), "--max-tokens", "64")
    before = len(records(served))
    process = subprocess.Popen(
        words,
        env={**environment(True), "VLLM_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=takes_sigint,
    )
    wait_until(lambda: len(records(served)) >= before + 3 or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    seconds = time.monotonic() - started
    print(f"ended after {seconds:.2f} s: {text.strip().splitlines()[-1]}")
    assert (process.returncode, "Traceback" in text) == (130, False)
    assert seconds < 2
    assert re.search(r"stopped: \d+ of 24 rows are in .*; the same command goes on", text)
    done = capture(words)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"24 different rows, (\d+) done already", done.stderr)
    assert found is not None
    assert 3 <= int(found[1]) < 24
    assert f"24 of 24 rows are in {served.cold}" in done.stdout
