"""``lmcache-hs-extract``: rows of cold paths → a training set in the format of one trainer.

Reads beside a running engine, and writes nothing but the output folder. Needs neither LMCache nor vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich import progress as bars
from rich.console import Console

from lmcache_hs_backend import __version__
from lmcache_hs_backend.cli import show_sample
from lmcache_hs_backend.cli.arguments import Parser, add_shared_options, at_least, fraction, size
from lmcache_hs_backend.cli.console import CommandError, bytes_text, duration_text, run
from lmcache_hs_backend.dataset import chains
from lmcache_hs_backend.dataset.chains import read_once
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected
from lmcache_hs_backend.dataset.export import (
    COVERAGE,
    MANIFEST,
    REJECTED,
    Encoder,
    Extraction,
    Progress,
    counts_text,
    one_thread_per_row,
    remedy,
    trial,
)
from lmcache_hs_backend.dataset.final_norm import check_kind
from lmcache_hs_backend.dataset.formats import FORMATS, format_of
from lmcache_hs_backend.dataset.formats.base import Format, Job
from lmcache_hs_backend.dataset.journal import STATE, Rejected, read_head
from lmcache_hs_backend.dataset.masks import KINDS
from lmcache_hs_backend.dataset.norm_kinds import KINDS as NORM_KINDS
from lmcache_hs_backend.dataset.plan import Choice, NormPlan, Plan, make_plan, plan_norm
from lmcache_hs_backend.format.url_files import DEFAULT_CACHE_GB, is_url, url_options

PROGRAM = "lmcache-hs-extract"


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Write the hidden states of cold paths as a training set. Several cold paths (nodes, ranks) are "
        "merged; the same chunk found twice counts once. `show SET [N]` shows a sample of what was written.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument(
        "cold_path", nargs="+", metavar="COLD_PATH",
        help="as in the setting cold_path; or the URL of a shared tier, as in shared_url, which is read as it is",
    )  # fmt: skip
    add_shared_options(parser)
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where objects that several samples share are kept (default: the user's cache)",
    )
    parser.add_argument(
        "--cache-size", metavar="SIZE", type=size, default=int(DEFAULT_CACHE_GB * 2**30),
        help=f"how much of them, in GB or with a unit; 0: none (default: {DEFAULT_CACHE_GB:g})",
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--format", required=True, choices=sorted(FORMATS), help="the trainer that will read it")
    parser.add_argument(
        "--algorithm", metavar="NAME", choices=sorted({name for known in FORMATS.values() for name in known}),
        help="what it will be trained as, which decides the tensors for specforge and torchspec: eagle3 (the default), "
        "dflash, domino or dspark",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="NAME[@REVISION][/KV_DTYPE]", help="which rows, where there are several models"
    )
    parser.add_argument(
        "--chunk-size", type=at_least(1), metavar="N", help="which chunks, where there are several sizes"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but warnings and errors")
    what = parser.add_argument_group("samples")
    what.add_argument(
        "--sequences", default="leaves", metavar="leaves|requests|dataset:PATH",
        help="every maximal chain of chunks; what request records say; or the rows of a prepared dataset with "
        "input_ids and loss_mask, assistant_masks or labels: a datasets folder, JSONL or Parquet (default: leaves)",
    )  # fmt: skip
    what.add_argument(
        "--loss-mask", choices=KINDS,
        help="tokens to train on (default: dataset with a dataset; recorded with requests: the spans in the request "
        "record, or else what follows the prompt; else all)",
    )  # fmt: skip
    what.add_argument("--tokenizer", metavar="DIR", help="where tokenizer.json is, for --loss-mask chatml and llama3")
    what.add_argument("--min-tokens", type=at_least(1), default=1, metavar="N", help="leave out shorter samples")
    what.add_argument("--max-tokens", type=at_least(1), metavar="N", help="cut longer samples")
    what.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N shares, from 1/N to N/N"
    )
    what.add_argument("--limit", type=at_least(1), metavar="N", help="the first N samples only")
    what.add_argument("--val-fraction", type=fraction, default=0.0, metavar="F", help="share of samples for validation")
    rows = parser.add_argument_group("hidden states")
    rows.add_argument(
        "--layers",
        type=_slots,
        metavar="A,B,C",
        help="storage slots of the auxiliary layers (default: all but the last)",
    )
    rows.add_argument(
        "--last-layer", type=int, metavar="Z", help="storage slot of the last layer (default: as captured)"
    )
    rows.add_argument(
        "--final-norm", metavar="MODEL_DIR",
        help="the model whose final norm the rows are checked against; applied where the format wants them after it",
    )  # fmt: skip
    rows.add_argument(
        "--norm-kind", type=_norm_kind, metavar="KIND[:EPS]",
        help=f"how that norm computes, where the model's type is not known: {', '.join(NORM_KINDS)}",
    )  # fmt: skip
    rows.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="fp8: speculators only (default: bf16)")
    how = parser.add_argument_group("running")
    how.add_argument(
        "--workers", type=at_least(1), default=min(4, os.cpu_count() or 1), metavar="N",
        help="threads, each with one sample in memory (default: the number of CPUs, at most 4)",
    )  # fmt: skip
    how.add_argument("--resume", action="store_true", help="go on where an earlier run with the same options ended")
    how.add_argument("--dry-run", action="store_true", help="say what would be written, and how long it would take")
    how.add_argument(
        "--strict", action="store_true",
        help="end with 1 when a sample was rejected, or a request, row or chunk file could not be used",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and give its exit status: 0, 1 on an error, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["show"]:
        return show_sample.main(arguments[1:])
    return run(PROGRAM, lambda: _extract(_parser().parse_args(arguments)))


def _extract(args: argparse.Namespace) -> int:
    one_thread_per_row()
    args.out = os.path.expanduser(args.out)
    try:
        kind = format_of(args.format, args.algorithm)
    except DatasetError as error:
        raise CommandError(str(error)) from None
    if args.dtype not in kind.dtypes:
        raise CommandError(f"--dtype {args.dtype}: --format {args.format} is read in {' or '.join(kind.dtypes)} only")
    choice = Choice(
        cold_paths=tuple(args.cold_path), model=args.model, layers=args.layers, last_layer=args.last_layer,
        sequences=args.sequences, loss_mask=args.loss_mask, tokenizer=args.tokenizer, min_tokens=args.min_tokens,
        max_tokens=args.max_tokens, shard=args.shard, limit=args.limit, chunk_size=args.chunk_size,
        uses_last=kind.uses_last, urls=url_options(args.shared_options, args.cache_dir, args.cache_size),
    )  # fmt: skip
    say: Callable[[str], None] = (lambda text: None) if args.quiet else print
    out = os.path.realpath(args.out)
    paths = [path.removeprefix("file://") for path in args.cold_path if not is_url(path)]
    for cold_path in (os.path.realpath(os.path.expanduser(path)) for path in paths):
        if os.path.commonpath((out, cold_path)) == cold_path:
            raise CommandError(f"--out {args.out} lies in the cold path {cold_path}, in which nothing is to be changed")
    try:
        if args.resume and _is_complete(args):
            say(f"{args.out} is complete; nothing to resume")
            return 0
        if args.resume and (planned := read_head(args.out)):
            choice = _as_planned(choice, planned, args)
        with _counting(args.quiet) as looked_at:
            plan = make_plan(choice, looked_at)
        if not plan.layers.aux and not kind.aux_optional:
            raise DatasetError(f"--format {args.format} needs auxiliary layers; name them with --layers")
        _check_split(len(plan.samples), args.val_fraction)
        norm = plan_norm(plan, kind.wants_normed, args.final_norm, args.norm_kind)
        _describe(plan, args, say)
        if args.dry_run:
            return _dry_run(plan, norm, args, kind, say)
        return _write(plan, norm, args, kind, say)
    except DatasetError as error:
        raise CommandError(str(error)) from None


def _job(plan: Plan, norm: NormPlan, args: argparse.Namespace, out: str, state: str) -> Job:
    return Job(
        out=out, state=state, model=str(plan.index.namespaces[0].get("model", "")), layers=plan.layers,
        hidden_size=norm.reader.hidden_size(), dtype=args.dtype, normed=norm.normed, split=args.val_fraction > 0,
    )  # fmt: skip


def _write(plan: Plan, norm: NormPlan, args: argparse.Namespace, kind: type[Format], say: Callable[[str], None]) -> int:
    out = os.path.abspath(args.out)
    writer = kind(_job(plan, norm, args, out, os.path.join(out, STATE)))
    with Extraction(args.out, resume=args.resume) as extraction:
        journal = extraction.journal
        head = _head(plan, norm, args)
        if journal.has_plan():
            planned, samples = journal.read_plan(plan.index)
            _check_options(planned["options"], args)
            head = planned
        else:
            samples = plan.samples
            _check_room(args, sum(writer.nbytes(sample.tokens) for sample in samples), extraction.out)
            bad_rows = [Rejected(f"row-{number}", 0, why.reason, str(why)) for number, why in plan.report.bad_rows]
            with extraction.writing():
                if plan.report.coverage:
                    _write_coverage(plan, journal.directory, journal.temporary)
                journal.write_plan(head, samples, plan.index, bad_rows)
        norm.reader.reads_once(read_once(plan.index, samples))
        encoder = Encoder(norm.reader, plan, writer)
        val_from = len(samples) - round(len(samples) * args.val_fraction)
        started = time.monotonic()
        total = sum(writer.nbytes(sample.tokens) for sample in samples)
        with _bar(total, len(samples), args.quiet) as show:
            done = extraction.run(samples, val_from, encoder, writer, args.workers, show)
        with extraction.writing(), suppress(FileNotFoundError):  # the plan's, whatever the cold path has by now
            os.replace(os.path.join(journal.directory, COVERAGE), os.path.join(extraction.out, COVERAGE))
        head = extraction.finish(writer, head)
    seconds = max(1e-3, time.monotonic() - started)
    say(
        f"{done.published} samples, {done.tokens} tokens, {bytes_text(done.nbytes)} in {duration_text(seconds)} "
        f"({done.nbytes / seconds / 1e9:.2f} GB/s) → {args.out}"
    )
    if head["rejected"]:
        rejected = head["rejected"]
        print(
            f"{sum(rejected.values())} samples rejected ({counts_text(rejected)}); see "
            f"{os.path.join(args.out, REJECTED)}{remedy(rejected)}",
            file=sys.stderr,
        )
    if "fp8_relative_error" in head:
        errors = ", ".join(
            f"{slot}: {error:.4f}" for slot, error in zip(plan.layers.slots, head["fp8_relative_error"], strict=True)
        )
        say(f"relative error of fp8 by layer: {errors}")
    return _status(args, head)


def _status(args: argparse.Namespace, head: dict[str, Any]) -> int:
    """1 with ``--strict`` when not everything that could have been a sample is one; the set is there all the same."""
    coverage = head.get("coverage", {})
    lost = {
        "rejected": sum(head["rejected"].values()),
        "left out": sum(count for text, count in head["left_out"].items() if text not in chains.ASKED_FOR),
        "partly covered": coverage.get("partly", 0),
        "chunk files not usable": sum(head["unusable_chunks"].values()) + sum(head["unreadable_files"].values()),
    }
    if not args.strict or not any(lost.values()):
        return 0
    print(
        f"{PROGRAM}: --strict: {', '.join(f'{count} {what}' for what, count in lost.items() if count)}", file=sys.stderr
    )
    return 1


def _check_room(args: argparse.Namespace, needed: int, folder: str) -> None:
    """Raises DatasetError when the disk of a folder that is there has too little left."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DatasetError(f"{args.out} needs {bytes_text(needed)}, but its disk has {bytes_text(free)} left")


def _as_planned(choice: Choice, planned: dict[str, Any], args: argparse.Namespace) -> Choice:
    """The same choice, of what the cold path had when the plan was made: an engine may have added to it since."""
    _check_options(planned["options"], args)
    last = planned["layers"]["last"]
    aux = tuple(slot for slot in planned["layers"]["slots"] if slot != last)
    return dataclasses.replace(choice, model=planned["model"], layers=aux, last_layer=last)


def _is_complete(args: argparse.Namespace) -> bool:
    """Whether the output folder was finished, with the same options. Raises DatasetError when with others."""
    path = os.path.join(args.out, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            options = json.load(file)["options"]
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path} is no manifest of ours: {error!r}") from None
    _check_options(options, args)
    shutil.rmtree(os.path.join(args.out, STATE), ignore_errors=True)  # it was killed between the two
    return True


def _check_options(former: dict[str, Any], args: argparse.Namespace) -> None:
    changed = [name for name, value in _options(args).items() if former.get(name) != value]
    if changed:
        names = ", ".join("--" + name.replace("_", "-") for name in changed)
        raise DatasetError(f"{args.out} was begun with another {names}; --resume goes on with the same options")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what is written, as JSON has them."""
    beside = (
        "out", "workers", "resume", "dry_run", "quiet", "strict", "shared_options", "cache_dir", "cache_size",
    )  # fmt: skip
    options = {name: value for name, value in vars(args).items() if name not in beside}
    return json.loads(json.dumps(options))  # type: ignore[no-any-return]


def _check_split(samples: int, fraction: float) -> None:
    """Raises DatasetError when no sample would be left to train on."""
    for_validation = round(samples * fraction)
    if for_validation == samples:
        raise DatasetError(f"--val-fraction {fraction:g} of {samples} samples leaves none to train on")
    if fraction and not for_validation:
        print(f"warning: --val-fraction {fraction:g} of {samples} samples is none to validate with", file=sys.stderr)


def _head(plan: Plan, norm: NormPlan, args: argparse.Namespace) -> dict[str, Any]:
    """The part of the manifest that is known before the first sample; it is filed with the plan."""
    layers, capture = plan.layers, plan.layers.capture
    head = {
        "trainer_format": args.format,
        "algorithm": args.algorithm or next(iter(FORMATS[args.format])),
        "model": plan.index.model,
        "namespaces": plan.index.namespaces,
        "layers": {
            "slots": list(layers.slots), "convention": layers.convention, "vllm_ids": layers.vllm_ids(),
            "output_ids": layers.output_ids(), "last": layers.last, "num_layers": capture.num_layers,
        },
        "last_layer": "none" if layers.last is None else "post-norm" if norm.normed else "pre-norm",
        "hidden_size": norm.reader.hidden_size(),
        "dtype": args.dtype,
        "loss_mask": plan.choice.mask_kind,
        "captured_by": capture.source,
        "chunks": {"files": plan.index.num_files, "chunks": len(plan.index), "stored_tokens": plan.stored_tokens()},
        "sample_tokens": plan.tokens,
        "dedup_factor": round(plan.tokens / plan.stored_tokens(), 3),
        "left_out": dict(plan.report.left_out),
        "unusable_chunks": plan.unusable,
        "unreadable_files": dict(plan.index.problems),
        "options": _options(args),
    }  # fmt: skip
    if plan.report.coverage:
        head["coverage"] = dict(zip(("covered", "partly", "missing"), plan.report.covered(), strict=True))
    return json.loads(json.dumps(head))  # type: ignore[no-any-return]


def _describe(plan: Plan, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    index, layers = plan.index, plan.layers
    last = "no last one" if layers.last is None else f"last {layers.last}"
    say(
        f"{index.model}: {len(index)} chunks in {index.num_files} files, layers "
        f"{', '.join(map(str, layers.aux)) or 'none'} and {last} ({layers.convention})"
    )
    for text, count in (*plan.unusable.items(), *index.problems.items()):
        say(f"  {count} chunks not used: {text}")
    if plan.report.coverage:
        full, partly, missing = plan.report.covered()
        say(f"rows of the dataset: {full} covered, {partly} partly covered, {missing} missing")
    stored = plan.stored_tokens()
    say(
        f"{len(plan.samples)} samples of {plan.report.sequences} sequences, {plan.tokens} tokens; stored once: "
        f"{stored} tokens, dedup factor {plan.tokens / stored:.2f}"
    )
    for text, count in plan.report.left_out.items():
        say(f"  {count} left out: {text}")


def _dry_run(
    plan: Plan, norm: NormPlan, args: argparse.Namespace, kind: type[Format], say: Callable[[str], None]
) -> int:
    """What a run would keep, by every check but those of the rows themselves. Gives the exit status."""
    out = os.path.abspath(args.out)
    writer = kind(_job(plan, norm, args, out, ""))
    rejected = Counter(why.reason for _, why in plan.report.bad_rows)
    kept = []
    for sample in plan.samples:
        try:
            writer.promise(sample, plan.promise(sample))
        except RowRejected as why:
            rejected[why.reason] += 1
        else:
            kept.append(sample)
    if not kept:
        raise DatasetError(f"no sample would pass its checks ({counts_text(rejected)}){remedy(rejected)}")
    needed = sum(writer.nbytes(sample.tokens) for sample in kept)
    folder = out
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    _check_room(args, needed, folder)
    rate = trial(Encoder(norm.reader, plan, writer), kept, args.out)
    text = "unknown" if not rate else duration_text(needed / (rate * min(args.workers, os.cpu_count() or 1)))
    tokens = sum(sample.tokens for sample in kept)
    say(f"would write {len(kept)} rows, {tokens} tokens, {bytes_text(needed)} in about {text}")
    if rejected:
        print(
            f"{rejected.total()} samples would be rejected ({counts_text(rejected)}){remedy(rejected)}", file=sys.stderr
        )
    say("not looked at: whether the rows themselves are whole and finite, and on their side of the norm")
    return _status(args, {**_head(plan, norm, args), "rejected": rejected})


def _write_coverage(plan: Plan, out: str, temporary: str) -> None:
    """Which rows of the prepared dataset the chunks cover, beside the plan that is made of it."""
    path = os.path.join(temporary, COVERAGE)
    with open(path, "w", encoding="utf-8") as file:
        for row, tokens, covered in plan.report.coverage:
            state = "covered" if covered == tokens else "partly" if covered else "missing"
            file.write(json.dumps({"row": row, "tokens": tokens, "covered": covered, "state": state}) + "\n")
    os.replace(path, os.path.join(out, COVERAGE))


# -- progress ------------------------------------------------------------------------------------------------


@contextmanager
def _counting(quiet: bool) -> Iterator[Callable[[int], None]]:
    """A count of chunks on standard error while headers are read, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (bars.SpinnerColumn(), bars.TextColumn("reading headers: {task.completed} chunks"))
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda count: bar.advance(task, count)


@contextmanager
def _bar(nbytes: int, samples: int, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Rows, tokens, GB/s and time left on standard error, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda progress: None
        return
    text_column = bars.TextColumn("{task.fields[text]}")
    columns = (bars.BarColumn(), text_column, bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=nbytes, text="")

        def show(progress: Progress) -> None:
            text = f"{progress.published + progress.rejected}/{samples} rows, {progress.tokens} tokens"
            bar.update(task, completed=progress.nbytes, text=text)

        yield show


# -- arguments -----------------------------------------------------------------------------------------------


def _norm_kind(text: str) -> str:
    try:
        return check_kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _slots(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text != "none" else ()
    except ValueError:
        raise argparse.ArgumentTypeError("must be storage slots such as 2,15,27, or none") from None


def _shard(text: str) -> tuple[int, int]:
    try:
        number, of = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError("must be I/N, such as 1/4") from None
    if not 1 <= number <= of:
        raise argparse.ArgumentTypeError("must be I/N with I from 1 to N")
    return number, of


if __name__ == "__main__":
    raise SystemExit(main())
