"""lmcache-hs-capture without vLLM: what it counts and prints, and how it talks to servers that are none of ours."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_hs_backend.capture.capture_settings import DEFAULTS, load, load_tokenizer
from lmcache_hs_backend.capture.encode import RowEncoder
from lmcache_hs_backend.capture.sources import read_rows
from lmcache_hs_backend.cli.capture import main
from lmcache_hs_backend.format.namespace import local_model_revision
from tests.capture import templates
from tests.capture.conftest import CASES, LARGEST_ID, ROOT
from tests.support.cold_paths import add_prompt, namespace
from tests.support.processes import takes_sigint
from tests.support.waiting import wait_until


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main([*words, "--dry-run", "--format", "json"])
    return status, json.loads(capsys.readouterr().out)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def test_the_defaults_are_those_of_the_commented_file() -> None:
    assert yaml.safe_load((ROOT / "configs" / "vllm_capture.yaml").read_text()) == DEFAULTS


def test_a_dry_run_counts_everything_and_writes_nothing(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    long = "The tide comes in and goes out. " * 40
    data = write(tmp_path / "a.jsonl", [chat(long, "Yes."), chat(long, "No."), chat(long, "No."), chat(long), {"x": 1}])
    status, said = dry(
        capsys, smollm2, data, "--cold-path", str(tmp_path / "cold"), "--max-tokens", "9", "--layers", "2,30"
    )
    assert status == 1
    assert (said["rows"], said["different"], said["bad"], said["done"]) == (5, 3, 1, 0)
    assert (said["complete"], said["answered"], said["most_answer_tokens"]) == (2, 1, 8)
    assert said["bytes_per_token"] == 2 * 576 * 2
    assert said["stored_tokens"] < said["tokens"] + 8 - 256, "the shared first chunk counts once"
    assert said["stored_tokens"] * said["bytes_per_token"] <= said["bytes"] <= said["limit_bytes"]
    assert said["columns"] == {"messages": 4}
    assert said["rejected"] == [{"file": data, "line": 5, "reason": said["rejected"][0]["reason"]}]
    assert [layer["purpose"] for layer in said["layers"]] == ["auxiliary", "the last one, before the final norm"]
    assert not (tmp_path / "cold").exists()
    assert main([smollm2, data, "--dry-run", "--cold-path", str(tmp_path / "cold"), "--max-cold-size", "0.00001"]) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert f"{data}, line 5: none of the columns" in text


def test_chunks_that_are_there_are_not_needed_again_also_those_of_rows_that_are_not_done(
    smollm2: str, tmp_path: Path, capsys: Any
) -> None:
    """An earlier run ended in the middle of a row: no row is done, and half of what is needed is there."""
    cold = tmp_path / "cold"
    data = write(tmp_path / "a.jsonl", [chat("The tide comes in and goes out. " * 60, f"Answer {n}.") for n in (1, 2)])
    words = [smollm2, data, "--cold-path", str(cold)]
    fresh = dry(capsys, *words)[1]
    settings = load(smollm2, overrides={"cold_path": str(cold)})
    row = RowEncoder(load_tokenizer(settings), max_id=LARGEST_ID).encode(next(iter(read_rows([data]))).value)
    size = settings.tiers.chunk_size
    revision = local_model_revision(smollm2)
    directory = namespace(cold, smollm2, kv_dtype=settings.facts.dtype, chunk_size=size, model_revision=revision)
    made = {"layers": settings.layers, "hidden": 576, "chunk": size, "model": smollm2}
    whole_chunks = len(row.token_ids) // size
    add_prompt(directory, row.token_ids[: whole_chunks * size], **made)
    half = dry(capsys, *words)[1]
    assert (half["done"], half["bytes"]) == (0, fresh["bytes"])
    # A chunk's header is a little shorter or longer than the estimate's; the rows are the rest.
    assert half["used_bytes"] + half["needed_bytes"] == pytest.approx(fresh["needed_bytes"], rel=0.01)
    assert half["used_bytes"] > 0.4 * fresh["needed_bytes"]
    limit = 1.1 * fresh["needed_bytes"] / 1024**3
    assert dry(capsys, *words, "--max-cold-size", str(limit))[1]["fits"]
    for path in directory.rglob("*.safetensors"):
        path.unlink()
    add_prompt(directory, row.token_ids[: whole_chunks * size], **{**made, "layers": settings.layers[:-1]})
    assert dry(capsys, *words)[1]["needed_bytes"] == fresh["needed_bytes"], "a chunk without the last layer is no use"


def test_every_row_is_counted_once_and_what_a_template_leaves_out_is_said(
    smollm2: str, tmp_path: Path, capsys: Any
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [chat("a", "b"), chat("a", "b"), chat("c"), {**chat("d", "e"), "tools": tools}, {"x": 1}]
    data = write(tmp_path / "a.jsonl", rows)
    words = [smollm2, data, "--cold-path", str(tmp_path / "cold")]
    _, said = dry(capsys, *words)
    parts = [said[name] for name in ("complete", "answered", "repeated", "bad")]
    assert (parts, sum(parts)) == ([2, 1, 1, 1], said["rows"])
    assert said["left_out"] == {"tools": 1}
    main([*words, "--dry-run"])
    text = capsys.readouterr().out
    assert "5 rows: 2 complete (only read), 1 to be answered, 1 repeated, 1 bad" in text
    assert "in 1 rows the chat template does not show the row's tools to the model" in text


def test_data_without_a_row_is_an_error(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    empty = tmp_path / "a.jsonl"
    empty.write_text("\n")
    assert main([smollm2, str(empty), "--dry-run", "--cold-path", str(tmp_path / "cold")]) == 1
    assert f"error: there is no row in {empty}" in capsys.readouterr().err


def test_a_date_that_the_template_writes_is_said_and_can_be_given(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    data = write(tmp_path / "a.jsonl", [chat("a", "b")])
    template = tmp_path / "template"
    template.write_text(templates.DATED)
    words = [smollm2, data, "--cold-path", str(tmp_path / "cold"), "--chat-template", str(template), "--dry-run"]
    assert main(words) == 0
    assert "the chat template writes the date into every row; --date " in capsys.readouterr().err
    for given in (["--date", "2026-01-31"], ["--chat-template-kwargs", '{"date_string": "31 Jan 2026"}']):
        assert main([*words, *given]) == 0
        assert "writes the date" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--date", "31.1."])
    assert "'31.1.' is no date, such as 2026-01-31" in capsys.readouterr().err


def test_rejected_rows_go_to_the_file_that_is_named(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    names = ["bad_latin1.jsonl", "bad_empty_conversation.jsonl", "bad_empty_ids.jsonl"]
    out = tmp_path / "rejected"
    assert main([smollm2, *(str(CASES / n) for n in names), "--dry-run", "--rejected", str(out)]) == 1
    assert "the bad rows are in" in capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(Path(line["file"]).name, line["line"]) for line in lines] == [(name, 2) for name in names]
    assert all(line["reason"] for line in lines)


def test_ten_thousand_rows_are_counted_in_half_a_minute_with_flat_memory(smollm2: str, tmp_path: Path) -> None:
    """CPU seconds: the machine may be busy with other things."""
    figures = {}
    for count in (1000, 10_000):
        rows = [
            chat(f"Row {n}: when is high water?", "At six. " * 40, "And then?", "Low water. " * 40)
            for n in range(count)
        ]
        data = write(tmp_path / f"{count}.jsonl", rows)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = (
            "import sys, resource; from lmcache_hs_backend.cli.capture import main; main(sys.argv[1:]);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        words = [smollm2, data, "--dry-run", "--cold-path", str(tmp_path / "cold")]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=ROOT
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert f"{count:,} different rows" in done.stdout
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        figures[count] = seconds, int(done.stdout.split()[-1]) / 1024
    print(", ".join(f"{n} rows: {s:.1f} s of CPU, {mib:.0f} MiB" for n, (s, mib) in figures.items()))
    assert figures[10_000][0] < 30
    assert figures[10_000][1] < figures[1000][1] + 64


def test_the_serve_command_gives_every_word_back(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    config = str(CASES / "serve_false_flag_and_blank.yaml")
    words = [smollm2, "--serve-command", "--config", config, "--cold-path", "/tmp/it's here", "--", "--port", "8123"]
    assert main(words) == 0
    line = capsys.readouterr().out
    found = shlex.split(line)
    assert {"--no-enable-prefix-caching", "--enforce-eager", "harbour model"} <= set(found)
    assert found[-4:] == ["--shutdown-timeout", "30", "--port", "8123"]
    transfer = json.loads(found[found.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["cold_path"] == "/tmp/it's here"
    echoed = subprocess.run(["bash", "-c", f'printf "%s\\0" {line}'], capture_output=True, text=True, check=True).stdout
    assert echoed.split("\0")[:-1] == found


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["/nowhere", "x.jsonl"], "model /nowhere: its config cannot be read"),
        (["MODEL", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read: No such file"),
        (["MODEL", "x", "--layers", "2,31"], "layer 31 does not exist: the model has 30 layers"),
        (["MODEL", "x", "--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read"),
        (["MODEL", "x", "--max-cold-size", "0"], "max_cold_size"),
        (["MODEL", "x", "--config", "BAD"], "sampling.max_tokens is 'many', but must be a number of tokens"),
        (["MODEL", "x", "--chat-template", "/nowhere"], "--chat-template /nowhere cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    smollm2: str, tmp_path: Path, capsys: Any, words: list[str], reason: str
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("sampling: {max_tokens: many}")
    names = {"MODEL": smollm2, "BAD": str(bad)}
    assert main([*(names.get(word, word) for word in words), "--dry-run"]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert error.startswith("lmcache-hs-capture: error: ")
    assert "Traceback" not in error


def test_a_last_layer_that_is_missing_is_warned_of_before_anything_is_loaded(
    smollm2: str, tmp_path: Path, capsys: Any
) -> None:
    data = write(tmp_path / "a.jsonl", [chat("a", "b")])
    config = str(CASES / "capture_last_layer_one_short.yaml")
    assert main([smollm2, data, "--dry-run", "--config", config, "--cold-path", str(tmp_path / "c")]) == 0
    assert "the model's last layer, 30, is not captured (layers: 2, 15, 27, 29)" in capsys.readouterr().err


def test_a_template_argument_of_the_config_is_taken(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    data = write(tmp_path / "a.jsonl", [chat("a", "b")])
    template = tmp_path / "template"
    template.write_text("{% if enable_thinking is false %}off off off{% endif %}{{ messages[0].content }}")
    words = [smollm2, data, "--config", str(CASES / "capture_thinking_off.yaml"), "--cold-path", str(tmp_path / "c")]
    _, said = dry(capsys, *words, "--chat-template", str(template), "--text-as", "turn")
    # Which text is the answer cannot be told from this template: the row is bad, and says what would help.
    assert "{% generation %}" in said["rejected"][0]["reason"]
    asked = write(tmp_path / "b.jsonl", [chat("a")])
    words[1] = asked
    off = dry(capsys, *words, "--chat-template", str(template))[1]["tokens"]
    on = dry(capsys, *words, "--chat-template", str(template), "--chat-template-kwargs", '{"enable_thinking": true}')[1]
    assert off > on["tokens"] == 1


# -- servers ---------------------------------------------------------------------------------------------


@contextmanager
def server(model: str, completions: Any) -> Iterator[str]:
    """An HTTP server that is no vLLM: ``completions(handler, body)`` gives status and JSON for every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": model, "max_model_len": 512}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*completions(self, body))

        def reply(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # its client has been stopped
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1/"
    finally:
        running.shutdown()


def test_a_server_without_the_connector_is_found_out_with_one_request(
    smollm2: str, tmp_path: Path, capsys: Any
) -> None:
    asked: list[Any] = []

    def complete(handler: Any, body: Any) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"usage": {"total_tokens": 9}, "kv_transfer_params": None}

    data = write(tmp_path / "a.jsonl", [chat(f"a{n}", "b") for n in range(20)])
    with server(smollm2, complete) as url:
        assert main([smollm2, data, "--server", url, "--cold-path", str(tmp_path / "c")]) == 1
    assert "it runs without HSTieredConnector" in capsys.readouterr().err
    assert len(asked) == 1
    assert asked[0]["max_tokens"] == 1
    assert asked[0]["kv_transfer_params"]["hidden_states_record"]["loss_spans"]


def test_the_servers_own_words_are_shown(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    def complete(handler: Any, body: Any) -> tuple[int, Any]:
        return 500, {"error": {"message": "EngineCore encountered an issue."}}

    data = write(tmp_path / "a.jsonl", [chat("a", "b")])
    with server(smollm2, complete) as url:
        assert main([smollm2, data, "--server", url, "--cold-path", str(tmp_path / "c")]) == 1
    assert f"{data}, line 1, failed: HTTP 500: EngineCore encountered an issue." in capsys.readouterr().err


def test_rows_are_cut_to_what_the_server_takes_not_to_what_the_config_says(
    smollm2: str, tmp_path: Path, capsys: Any
) -> None:
    asked: list[Any] = []

    def complete(handler: Any, body: Any) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"usage": {"total_tokens": 9}}

    data = write(tmp_path / "a.jsonl", [chat("The tide comes in. " * 200, "b")])
    with server(smollm2, complete) as url:
        main([smollm2, data, "--server", url, "--cold-path", str(tmp_path / "c"), "--too-long", "cut"])
        assert "max_model_len 512; the rows are counted again" in capsys.readouterr().err
        assert len(asked[0]["prompt"]) == 511
        assert asked[0]["kv_transfer_params"]["hidden_states_record"]["cut_from"] > 511
        main([smollm2, data, "--server", url, "--cold-path", str(tmp_path / "c")])
    assert len(asked) == 1
    assert "max_model_len 512" in (tmp_path / "c" / "rejected.jsonl").read_text()


def test_another_model_is_refused(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    data = write(tmp_path / "a.jsonl", [chat("a", "b")])
    with server("some/other-model", None) as url:
        assert main([smollm2, data, "--server", url, "--cold-path", str(tmp_path / "c")]) == 1
    assert "serves some/other-model, not " in capsys.readouterr().err


def test_no_server_is_one_line(smollm2: str, tmp_path: Path, capsys: Any) -> None:
    data = write(tmp_path / "a.jsonl", [chat("a", "b")])
    assert main([smollm2, data, "--server", "http://127.0.0.1:9", "--cold-path", str(tmp_path / "c")]) == 1
    assert "--server http://127.0.0.1:9: cannot be reached" in capsys.readouterr().err


def test_ctrl_c_does_not_wait_for_a_server(smollm2: str, tmp_path: Path) -> None:
    asked, release = threading.Event(), threading.Event()

    def complete(handler: Any, body: Any) -> tuple[int, Any]:
        asked.set()
        release.wait(60)
        return 200, {}

    data = write(tmp_path / "a.jsonl", [chat(f"a{n}", "b") for n in range(20)])
    with server(smollm2, complete) as url:
        command = [sys.executable, "-m", "lmcache_hs_backend.cli.capture", smollm2, data, "--server", url]
        command += ["--cold-path", str(tmp_path / "c")]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=takes_sigint,
        )  # fmt: skip
        try:
            wait_until(asked.is_set, 60)
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, text = process.communicate(timeout=30)
            seconds = time.monotonic() - started
        finally:
            process.kill()
            release.set()
    assert process.returncode == 130
    assert seconds < 2
    assert "Traceback" not in text
    assert "stopped: 0 of 20 rows are in" in text
