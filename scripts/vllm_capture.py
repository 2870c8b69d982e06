"""Fill the tiers with the hidden states of a dataset: see capture.sh.

Every row becomes one request whose id is a hash of its tokens and of how it is sampled. The connector
writes a request record once the rows are on disk, so a row whose record is there is done, and running
the same command again goes on where the last run ended, however that ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lmcache_hs_backend.format.layout import SEQUENCES
from lmcache_hs_backend.format.namespace import namespaces

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "vllm_capture.yaml"
CONNECTOR = "lmcache_hs_backend.integrations.vllm.connector"

_SERVER_SEC = 10
_ROW_ID = re.compile(r"hs([0-9a-f]{32})")


class Row(NamedTuple):
    """One request: its id, its tokens, and how many to sample."""

    row_id: str
    token_ids: list[int]
    max_tokens: int


class BadInput(Exception):
    """The command cannot be carried out; the text says why."""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        config = load_config(options)
        if options.serve_command:
            print(serve_command(options.model, config))
            return 0
        return capture(options, config)
    except BadInput as error:
        print(f"capture: {error}", file=sys.stderr)
        return 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("capture.sh", description="Fill the tiers with the hidden states of a dataset.")
    parser.add_argument("model", metavar="MODEL", help="model directory or name, as for vLLM")
    parser.add_argument(
        "data", metavar="DATA.jsonl", nargs="?", type=Path,
        help="rows with 'prompt' (text), 'messages' or 'conversations' (turns), or 'input_ids'",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML (default: configs/vllm_capture.yaml)")
    parser.add_argument("--cold-path", help="where the chunks go (default: the config's)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: the config's)")
    parser.add_argument("--limit", type=int, help="only so many rows")
    parser.add_argument(
        "--server", metavar="URL", help="send the rows to this server; its cold path must be readable here"
    )
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once to a server (default 32)")
    parser.add_argument("--serve-command", action="store_true", help="print the command that starts such a server")
    options = parser.parse_args(arguments)
    if options.data is None and not options.serve_command:
        parser.error("DATA.jsonl is missing")
    return options


def load_config(options: argparse.Namespace) -> dict[str, Any]:
    """The YAML, with what the command line says instead."""
    try:
        config = yaml.safe_load(options.config.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(f"{options.config}: {error}") from None
    unknown = set(config) - {"layers", "sampling", "engine", "connector"}
    if unknown:
        raise BadInput(f"{options.config}: {', '.join(sorted(unknown))}: not layers, sampling, engine or connector")
    config = {"layers": "eagle3", "sampling": {}, "engine": {}, "connector": {}, **config}
    if options.cold_path:
        config["connector"]["cold_path"] = options.cold_path
    if "cold_path" not in config["connector"]:
        raise BadInput(f"{options.config}: connector.cold_path is missing; name it there or with --cold-path")
    config["connector"]["cold_path"] = os.path.abspath(os.path.expanduser(config["connector"]["cold_path"]))
    if options.max_tokens is not None:
        config["sampling"]["max_tokens"] = options.max_tokens
    return config


def engine_arguments(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    layers = config["layers"]
    if layers == "eagle3":
        from transformers import AutoConfig

        count = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
        layers = sorted({2, count // 2, count - 3, count})
    return {
        "model": model,
        **config["engine"],
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "HSTieredConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": config["connector"],
        },
    }


def serve_command(model: str, config: dict[str, Any]) -> str:
    """The shell command of a server that captures the same."""
    words = ["vllm", "serve", model]
    for name, value in engine_arguments(model, config).items():
        if name == "model":
            continue
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        else:
            words += [option, f"'{json.dumps(value)}'" if isinstance(value, dict) else str(value)]
    return " ".join(words)


# -- rows ------------------------------------------------------------------------------------------------


def read_rows(path: Path, tokenizer: Any, config: dict[str, Any]) -> Iterator[Row]:
    """The rows of a dataset as requests. Raises BadInput with the line that is none."""
    answer = int(config["sampling"].get("max_tokens", 512))
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                token_ids, complete = tokens_of(json.loads(line), tokenizer)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadInput(f"{path}, line {number}: {error}") from None
            max_tokens = 1 if complete else answer
            key = array("q", [max_tokens, *token_ids]).tobytes() + repr(sorted(config["sampling"].items())).encode()
            yield Row(f"hs{xxhash.xxh3_128_hexdigest(key)}", token_ids, max_tokens)


def tokens_of(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], bool]:
    """The tokens of a row, and whether it has its answer already."""
    if "input_ids" in row:
        return [int(token) for token in row["input_ids"]], True
    if "prompt" in row:
        return list(tokenizer(row["prompt"])["input_ids"]), False
    turns = row.get("messages", row.get("conversations"))
    if not turns:
        raise ValueError("a row needs 'prompt', 'messages', 'conversations' or 'input_ids'")
    names = {"human": "user", "gpt": "assistant"}
    messages = [
        {"role": names.get(role, role), "content": turn.get("content", turn.get("value"))}
        for turn in turns
        for role in [turn.get("role", turn.get("from"))]
    ]
    complete = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not complete)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]), complete


def rows_done(cold_path: str) -> set[str]:
    """The rows whose record says that all they had is on disk."""
    done = set()
    found = namespaces(cold_path) if os.path.isdir(cold_path) else ()
    for directory, _ in found:
        for path in sorted(Path(directory, SEQUENCES).glob("*.jsonl")):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    record = json.loads(line)
                    match = _ROW_ID.search(record["request_id"])
                    whole = record["num_tokens"] == record["expected_tokens"] and record["finish_reason"] != "abort"
                except (ValueError, KeyError, TypeError):  # cut short when the process died
                    continue
                if match and whole:
                    done.add(match[0])
    return done


# -- running ---------------------------------------------------------------------------------------------


def capture(options: argparse.Namespace, config: dict[str, Any]) -> int:
    """All rows that are not done yet. The exit status."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = {row.row_id: row for row in read_rows(options.data, tokenizer, config)}
    if options.limit is not None:
        rows = dict(list(rows.items())[: options.limit])
    cold_path = config["connector"]["cold_path"]
    done = rows_done(cold_path)
    todo = [row for row in rows.values() if row.row_id not in done]
    console = Console(stderr=True)
    console.print(f"{len(rows)} different rows, {len(rows) - len(todo)} done already")
    if todo:
        columns = (
            TextColumn("rows"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]:,} tokens, {task.fields[failed]} failed"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(todo), tokens=0, failed=0)
            totals = {"tokens": 0, "failed": 0}

            def finished(tokens: int, problem: str | None) -> None:
                totals["tokens"] += tokens
                totals["failed"] += problem is not None
                if problem is not None:
                    progress.console.print(f"[yellow]{problem}", highlight=False)
                progress.update(task, advance=1, **totals)

            if options.server:
                send(options, config, todo, finished)
            else:
                generate(options, config, todo, finished)
    missing = {row.row_id for row in todo} - rows_done(cold_path)
    deadline = time.monotonic() + (_SERVER_SEC if options.server else 0)
    while missing and time.monotonic() < deadline:  # a server writes records a moment after its answers
        time.sleep(0.2)
        missing -= rows_done(cold_path)
    console.print(f"{len(rows) - len(missing)} of {len(rows)} rows are in {cold_path}")
    return 1 if missing else 0


def generate(
    options: argparse.Namespace, config: dict[str, Any], rows: list[Row], finished: Callable[[int, str | None], None]
) -> None:
    """Run the rows through vLLM, and end it, so that everything is on disk."""
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "120")  # else vLLM kills a worker after 5
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(options.model, config))
    engine = llm.llm_engine
    longest = engine.model_config.max_model_len
    waiting = iter(rows)
    running = 0
    try:
        while True:
            while running < 4 * engine.vllm_config.scheduler_config.max_num_seqs:
                row = next(waiting, None)
                if row is None:
                    break
                room = longest - len(row.token_ids)
                if room < 1:
                    finished(0, f"{row.row_id}: {len(row.token_ids)} tokens do not fit max_model_len")
                    continue
                sampling = {**config["sampling"], "max_tokens": min(row.max_tokens, room)}
                engine.add_request(row.row_id, {"prompt_token_ids": row.token_ids}, SamplingParams(**sampling))
                running += 1
            if not running:
                break
            for output in engine.step():
                if output.finished:
                    running -= 1
                    finished(len(output.prompt_token_ids) + len(output.outputs[0].token_ids), None)
    finally:
        engine.engine_core.shutdown()


def send(
    options: argparse.Namespace, config: dict[str, Any], rows: list[Row], finished: Callable[[int, str | None], None]
) -> None:
    """Send the rows to a server."""
    url = options.server.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            model = json.load(answer)["data"][0]
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{options.server} is no vLLM server: {error}") from None
    longest = model.get("max_model_len", sys.maxsize)

    def complete(row: Row) -> tuple[int, str | None]:
        room = longest - len(row.token_ids)
        if room < 1:
            return 0, f"{row.row_id}: {len(row.token_ids)} tokens do not fit max_model_len"
        body = {
            "model": model["id"], "prompt": row.token_ids, **config["sampling"],
            "max_tokens": min(row.max_tokens, room),
        }  # fmt: skip
        headers = {"Content-Type": "application/json", "X-Request-Id": row.row_id}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=3600) as answer:
                return int(json.load(answer)["usage"]["total_tokens"]), None
        except (OSError, ValueError, KeyError) as error:
            return 0, f"{row.row_id}: {error}"

    with ThreadPoolExecutor(options.concurrency) as pool:
        for tokens, problem in pool.map(complete, rows):
            finished(tokens, problem)


if __name__ == "__main__":
    sys.exit(main())
