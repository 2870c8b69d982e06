"""``lmcache-hs-capture``: chats, prompts or token ids → hidden states in the tiers, by vLLM.

Parses and prints; the work is in ``lmcache_hs_backend.capture``. Needs transformers, and vLLM unless it only counts
(``--dry-run``) or a server has it (``--server``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console

from lmcache_hs_backend.cli.console import CommandError, bytes_text, duration_text, run

if TYPE_CHECKING:
    from lmcache_hs_backend.capture.capture_settings import Settings
    from lmcache_hs_backend.capture.flow import CaptureJob, CaptureProgress, Summary
    from lmcache_hs_backend.capture.vllm_backends import Backend

PROGRAM = "lmcache-hs-capture"

_LINE_EVERY_SEC = 30.0
_SHOWN_BAD = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Run a model over every row of a data set and keep the hidden states in the tiers. Running the "
        "same command again goes on where it ended.",
        epilog="Arguments after -- go to vLLM: lmcache-hs-capture MODEL DATA.jsonl -- --gpu-memory-utilization 0.8",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="model directory or name, as for vLLM")
    add(
        "data", metavar="DATA", nargs="*",
        help="JSONL, a JSON array, either gzipped, Parquet, a folder of datasets, or one of such files; rows with "
        "'messages' or 'conversations' (turns; one that ends with the assistant is only read, any other is answered), "
        "'input_ids', or 'prompt' (text, given to the model as it is, without the chat template)",
    )  # fmt: skip
    add(
        "--config", metavar="YAML", help="layers, sampling, engine, connector (configs/vllm_capture.yaml: the defaults)"
    )
    add("--cold-path", metavar="DIR", help="where the chunks go (default: ./hidden-states)")
    add("--max-cold-size", type=float, metavar="GB", help="most that may be there (default: 100)")
    add("--layers", type=_layers, metavar="A,B,C", help="vLLM's layer ids (default: EAGLE-3's three, and the last)")
    add = parser.add_argument_group("rows").add_argument
    add("--column", metavar="NAME", help="use this column, whatever else a row has")
    add(
        "--text-as", choices=("raw", "turn"), default="raw",
        help="a text 'prompt' is the model's input as it is, or a user's turn (default: raw)",
    )  # fmt: skip
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    add(
        "--chat-template-kwargs", type=_mapping, metavar="JSON",
        help="for the template, such as '{\"enable_thinking\": false}'; a row's own win",
    )  # fmt: skip
    add(
        "--tool-arguments", choices=("given", "parsed"), default="given",
        help="arguments of tool calls that are JSON text reach the template as they are, or as what they say, which is "
        "how vLLM's server has them (default: given)",
    )  # fmt: skip
    add(
        "--date", type=_date, metavar="YYYY-MM-DD",
        help="what a chat template has for the date that writes it (default: today)",
    )  # fmt: skip
    add("--max-tokens", type=_count, metavar="N", help="longest answer (default: 512)")
    add(
        "--too-long", choices=("skip", "cut"), default="skip",
        help="a row longer than the model's context is a bad row, or cut to it (default: skip)",
    )  # fmt: skip
    add("--limit", type=_count, metavar="N", help="only the first N different rows")
    add("--rejected", metavar="FILE", help="the bad rows, as JSONL (default: rejected.jsonl in the cold path)")
    add = parser.add_argument_group("running").add_argument
    add("--dry-run", action="store_true", help="only count: rows, tokens, bytes, bad rows; needs no vLLM")
    add(
        "--server", metavar="URL",
        help="send the rows to this vLLM server, whose cold path must be readable here; VLLM_API_KEY is sent to it",
    )  # fmt: skip
    add("--concurrency", type=_count, default=32, metavar="N", help="requests at once to a server (default: 32)")
    add("--serve-command", action="store_true", help="print the command that starts such a server")
    add("--format", choices=("terminal", "json"), default="terminal", help="how to print the result")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of the process by default. What comes after ``--`` goes to vLLM.

    Returns:
        The exit status: 0; 1 when rows are bad or missing, and on an error; 130 on Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    mine, theirs = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = _parser()
    args = parser.parse_intermixed_args(mine)  # files may come after options
    if not args.data and not args.serve_command:
        parser.error("DATA is missing")
    if args.server and theirs:
        parser.error(
            "--server: arguments after -- are for a vLLM that this command starts, and with --server it starts none"
        )
    return run(PROGRAM, lambda: _capture(args, theirs))


def program() -> None:
    """The installed command: ``main``, and an exit that does not wait for vLLM's threads after Ctrl-C."""
    status = main()
    if status == 130:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _capture(args: argparse.Namespace, vllm_words: list[str]) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time; and forks of vLLM's would warn
    from lmcache_hs_backend.capture.capture_settings import CaptureError, load
    from lmcache_hs_backend.capture.flow import Interrupted
    from lmcache_hs_backend.capture.sources import SourceError

    names = ("cold_path", "max_cold_size", "max_tokens", "layers", "chat_template_kwargs")
    try:
        settings = load(
            args.model,
            config_path=args.config,
            overrides={name: getattr(args, name) for name in names},
            vllm_words=vllm_words,
        )
        if args.serve_command:
            from lmcache_hs_backend.capture.serve_command import serve_command

            print(serve_command(settings))
            return 0
        with _view(args.format) as view:
            return _run(args, settings, view)
    except (CaptureError, SourceError) as error:
        raise CommandError(str(error)) from None
    except Interrupted as stop:
        print(f"{PROGRAM}: {stop}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped before the first row; nothing was captured by this run", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, settings: Settings, view: _View) -> int:
    from lmcache_hs_backend.capture import flow

    for text in settings.warnings():
        view.warn(f"warning: {text}")
    job = flow.CaptureJob(
        settings, _encoder(args, settings), args.data, view, args.limit, args.rejected, bool(args.server)
    )
    estimate = flow.survey(job)
    if args.date is None and job.encoder.writes_date:
        view.warn(
            f"warning: the chat template writes the date into every row; --date {datetime.now():%Y-%m-%d} goes on with "
            f"the same rows on another day"
        )
    said = flow.figures(job, estimate)
    if args.dry_run:
        path = flow.write_rejected(job) if args.rejected else None
        _print(said, args.format, _figure_lines(said, path))
        return 0 if said["fits"] and not job.bad else 1
    for line in _figure_lines(said, None):
        view.say(line)
    if not said["fits"]:
        view.warn("warning: the rows may not fit; the capture will stop before it evicts any of them")

    def start() -> Backend:
        if args.server:
            from lmcache_hs_backend.capture.server import Server

            return Server(args.server, settings, args.concurrency)
        from lmcache_hs_backend.capture.engine import Engine

        rows = f"{estimate.done} of {estimate.different} rows are in {settings.cold_path}"
        return Engine(settings, f"{PROGRAM}: stopped: {rows}; the same command goes on")

    summary = flow.run(job, estimate, start)
    view.close()
    _print({**said, **_outcome(summary)}, args.format, _summary_lines(summary, job))
    return summary.status


def _encoder(args: argparse.Namespace, settings: Settings) -> Any:
    from lmcache_hs_backend.capture.capture_settings import CaptureError, load_tokenizer
    from lmcache_hs_backend.capture.encode import RowEncoder

    template = None
    if args.chat_template is not None:
        try:
            with open(args.chat_template, encoding="utf-8") as file:
                template = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise CaptureError(f"--chat-template {args.chat_template} cannot be read: {error}") from None
    longest = settings.max_model_len
    return RowEncoder(
        load_tokenizer(settings),
        max_id=settings.facts.vocab_size - 1,
        max_tokens=None if longest is None else longest - 1,
        cut=args.too_long == "cut",
        column=args.column,
        prompts_as_turns=args.text_as == "turn",
        chat_template=template,
        chat_template_kwargs=settings.chat_template_kwargs,
        parse_arguments=args.tool_arguments == "parsed",
        today=args.date,
    )


# -- printing --------------------------------------------------------------------------------------------


def _figure_lines(said: dict[str, Any], rejected: str | None) -> Iterator[str]:
    from lmcache_hs_backend.capture.left_out import REMARKS

    columns = ", ".join(f"{name} ({count:,} rows)" for name, count in said["columns"].items())
    beside = ", ".join(f"{name} (in {count:,} rows)" for name, count in said["beside"].items())
    if columns:
        yield f"column used: {columns}" + (f"; there as well, and not used: {beside}" if beside else "")
    if "prompt" in said["columns"] and said["answered"]:
        yield "a text prompt is answered as it is, without the chat template (--text-as turn puts it into one)"
    yield f"{said['different']:,} different rows, {said['done']:,} done already"
    parts = [
        f"{said['complete']:,} complete (only read)",
        f"{said['answered']:,} to be answered",
        f"{said['repeated']:,} repeated",
        f"{said['bad']:,} bad",
    ]
    if said["cut"]:
        parts.append(f"{said['cut']:,} cut to {said['max_model_len'] - 1:,} tokens")
    if said["without_loss"]:
        parts.append(f"{said['without_loss']:,} with no token to train on")
    yield f"{said['rows']:,} rows: {', '.join(parts)}"
    for name, count in said["left_out"].items():
        yield f"in {count:,} rows {REMARKS[name]}"
    answers = f" + at most {said['most_answer_tokens']:,} of answers" if said["most_answer_tokens"] else ""
    yield (
        f"{said['tokens']:,} tokens{answers}, {said['trained_tokens']:,} trained on; "
        f"{said['stored_tokens']:,} tokens after shared prefixes"
    )
    layers = "; ".join(f"{layer['id']}: {layer['purpose']}" for layer in said["layers"])
    yield f"layers {layers}; {bytes_text(said['bytes_per_token'])} a token"
    yield (
        f"disk: at most {bytes_text(said['needed_bytes'])} more, {bytes_text(said['used_bytes'])} there; "
        f"max_cold_size {bytes_text(said['limit_bytes'])}, free {bytes_text(said['free_bytes'])}: "
        f"{'fits' if said['fits'] else 'DOES NOT FIT'}"
    )
    for bad in said["rejected"]:
        yield f"bad row: {bad['file']}, line {bad['line']}: {bad['reason']}"
    if said["bad"] > len(said["rejected"]):
        yield f"… and {said['bad'] - len(said['rejected']):,} more bad rows"
    if rejected is not None:
        yield f"the bad rows are in {rejected}"


def _outcome(summary: Summary) -> dict[str, Any]:
    return {"captured": summary.captured, "missing": summary.rows - summary.captured, "stopped": summary.stopped}


def _summary_lines(summary: Summary, job: CaptureJob) -> Iterator[str]:
    if summary.stopped:
        yield summary.stopped
    yield f"{summary.captured:,} of {summary.rows:,} rows are in {job.settings.cold_path}"
    missing = summary.rows - summary.captured
    if missing and not summary.stopped:
        yield f"{missing:,} rows are missing; the same command tries them again"
    if summary.bad:
        from lmcache_hs_backend.capture.flow import REJECTED

        where = job.rejected_path or os.path.join(job.settings.cold_path, REJECTED)
        yield f"{summary.bad:,} bad rows were left out; {where} says which and why"


def _print(said: dict[str, Any], form: str, lines: Iterator[str]) -> None:
    if form == "json":
        print(json.dumps(said, indent=2, ensure_ascii=False))
    else:
        for line in lines:
            print(line)


class _View:
    """Progress and remarks, on standard error: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)
        self._last_line = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(text, markup=False, style="yellow")

    def reading(self, rows: int) -> None:
        if self._console.is_terminal:
            self._show("reading rows", None, rows, "")

    def running(self, progress: CaptureProgress) -> None:
        left = "" if progress.seconds_left is None else f", about {duration_text(progress.seconds_left)} left"
        text = f"{progress.tokens:,} tokens, {progress.tokens_per_sec:,.0f} tokens/s, {progress.failed} failed{left}"
        if self._console.is_terminal:
            self._show("rows", progress.of_rows, progress.rows, text)
        elif time.monotonic() > self._last_line + _LINE_EVERY_SEC:
            self._last_line = time.monotonic()
            self.say(f"{progress.rows:,} of {progress.of_rows:,} rows, {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, what: str, total: int | None, done: int, text: str) -> None:
        if self._bar is None:
            columns = (
                bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(),
                bars.TextColumn("{task.fields[text]}"),
            )  # fmt: skip
            self._bar = bars.Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(what, total=total, text=text)
        self._bar.update(self._task, description=what, total=total, completed=done, text=text)


@contextmanager
def _view(form: str) -> Iterator[_View]:
    view = _View()
    try:
        yield view
    finally:
        view.close()


# -- options ---------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layer ids, such as 2,15,27,30") from None


def _date(text: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date, such as 2026-01-31") from None


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


if __name__ == "__main__":
    program()
