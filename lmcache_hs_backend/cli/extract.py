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
from contextlib import closing, contextmanager, suppress
from typing import Any

from rich import progress as bars
from rich.console import Console

from lmcache_hs_backend.cli import show_sample
from lmcache_hs_backend.cli.console import CommandError, bytes_text, duration_text, run
from lmcache_hs_backend.cli.extract_options import PROGRAM, extract_parser
from lmcache_hs_backend.dataset import chains, parts
from lmcache_hs_backend.dataset.chains import Sample, read_once
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
from lmcache_hs_backend.dataset.formats import FORMATS, format_of
from lmcache_hs_backend.dataset.formats.base import Format, Job
from lmcache_hs_backend.dataset.journal import STATE, Rejected, read_head, read_plan
from lmcache_hs_backend.dataset.plan import Choice, NormPlan, Plan, make_plan, plan_norm, planned
from lmcache_hs_backend.format.url_files import is_url, url_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and give its exit status: 0, 1 on an error, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["show"]:
        return show_sample.main(arguments[1:])
    return run(PROGRAM, lambda: _extract(extract_parser().parse_args(arguments)))


def _extract(args: argparse.Namespace) -> int:
    one_thread_per_row()
    args.out = os.path.expanduser(args.out)
    try:
        kind = format_of(args.format, args.algorithm)
    except DatasetError as error:
        raise CommandError(str(error)) from None
    if args.dtype not in kind.dtypes:
        raise CommandError(f"--dtype {args.dtype}: --format {args.format} is read in {' or '.join(kind.dtypes)} only")
    choice = _choice(args, kind)
    say: Callable[[str], None] = (lambda text: None) if args.quiet else print
    out = os.path.realpath(args.out)
    paths = [path.removeprefix("file://") for path in args.cold_path if not is_url(path)]
    for cold_path in (os.path.realpath(os.path.expanduser(path)) for path in paths):
        if os.path.commonpath((out, cold_path)) == cold_path:
            raise CommandError(f"--out {args.out} lies in the cold path {cold_path}, in which nothing is to be changed")
    if args.workers is None:
        args.workers = 1 if args.ray is not None else min(4, os.cpu_count() or 1)
    try:
        in_parts = args.plan or args.part or args.finish or args.ray is not None
        if (args.resume or in_parts) and _is_complete(args):
            say(f"{args.out} is complete; nothing to resume")
            return 0
        if in_parts:
            return _in_parts(choice, args, kind, say)
        if args.resume and (head := read_head(args.out)):
            choice = _as_planned(choice, head, args)
        with _counting(args.quiet) as looked_at:
            plan = make_plan(choice, looked_at)
        with plan:
            _check_plan(plan, args, kind)
            norm = plan_norm(plan, kind.wants_normed, args.final_norm, args.norm_kind)
            _describe(plan, args, say)
            if args.dry_run:
                return _dry_run(plan, norm, args, kind, say)
            return _write(plan, norm, args, kind, say)
    except DatasetError as error:
        raise CommandError(str(error)) from None


def _choice(args: argparse.Namespace, kind: type[Format]) -> Choice:
    return Choice(
        cold_paths=tuple(args.cold_path), model=args.model, layers=args.layers, last_layer=args.last_layer,
        sequences=args.sequences, loss_mask=args.loss_mask, tokenizer=args.tokenizer, min_tokens=args.min_tokens,
        max_tokens=args.max_tokens, shard=args.shard, limit=args.limit, chunk_size=args.chunk_size,
        uses_last=kind.uses_last, urls=url_options(args.shared_options, args.cache_dir, args.cache_size),
    )  # fmt: skip


def _check_plan(plan: Plan, args: argparse.Namespace, kind: type[Format]) -> None:
    if not plan.layers.aux and not kind.aux_optional:
        raise DatasetError(f"--format {args.format} needs auxiliary layers; name them with --layers")
    _check_split(len(plan.samples), args.val_fraction)


def _job(plan: Plan, norm: NormPlan, args: argparse.Namespace, out: str, state: str) -> Job:
    return Job(
        out=out, state=state, model=str(plan.index.namespaces[0].get("model", "")), layers=plan.layers,
        hidden_size=norm.reader.hidden_size(), dtype=args.dtype, normed=norm.normed, split=args.val_fraction > 0,
    )  # fmt: skip


def _write(plan: Plan, norm: NormPlan, args: argparse.Namespace, kind: type[Format], say: Callable[[str], None]) -> int:
    out = os.path.abspath(args.out)
    writer = kind(_job(plan, norm, args, out, os.path.join(out, STATE)))
    with Extraction(args.out, resume=args.resume) as extraction:
        if extraction.journal.has_plan():
            head, samples = extraction.journal.read_plan(plan.index)
            _check_options(head["options"], args)
        else:
            head, samples = _file_plan(extraction, plan, norm, args, writer), plan.samples
        norm.reader.reads_once(read_once(plan.index, samples))
        encoder = Encoder(norm.reader, plan, writer)
        started = time.monotonic()
        with _bar(writer, samples, args.quiet) as show:
            done = extraction.run(samples, _val_from(samples, args), encoder, writer, args.workers, show)
        return _end(extraction, writer, head, done, started, args, say)


def _val_from(samples: Sequence[Sample], args: argparse.Namespace) -> int:
    for_validation: int = round(len(samples) * args.val_fraction)
    return len(samples) - for_validation


def _file_plan(
    extraction: Extraction, plan: Plan, norm: NormPlan, args: argparse.Namespace, writer: Format
) -> dict[str, Any]:
    """File the samples before the first is written. Gives the head of the manifest."""
    journal, head = extraction.journal, _head(plan, norm, args)
    _check_room(args, sum(writer.nbytes(sample.tokens) for sample in plan.samples), extraction.out)
    bad_rows = [Rejected(f"row-{number}", 0, why.reason, str(why)) for number, why in plan.report.bad_rows]
    with extraction.writing():
        if plan.report.coverage:
            _write_coverage(plan, journal.directory, journal.temporary)
        if args.plan or args.ray is not None:
            parts.write_index(extraction.out, plan.index, plan.samples, norm.stored_normed)
        journal.write_plan(head, plan.samples, plan.index, bad_rows)
    return head


def _end(
    extraction: Extraction, writer: Format, head: dict[str, Any], done: Progress, started: float,
    args: argparse.Namespace, say: Callable[[str], None],
) -> int:  # fmt: skip
    """Every sample has its place: describe the set, and say what became of it. Gives the exit status."""
    with extraction.writing(), suppress(FileNotFoundError):  # the plan's, whatever the cold path has by now
        os.replace(os.path.join(extraction.journal.directory, COVERAGE), os.path.join(extraction.out, COVERAGE))
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
            f"{slot}: {error:.4f}"
            for slot, error in zip(head["layers"]["slots"], head["fp8_relative_error"], strict=True)
        )
        say(f"relative error of fp8 by layer: {errors}")
    return _status(args, head)


# -- many machines -------------------------------------------------------------------------------------------


def _in_parts(choice: Choice, args: argparse.Namespace, kind: type[Format], say: Callable[[str], None]) -> int:
    """``--plan``, ``--part``, ``--finish`` or ``--ray``. Gives the exit status. Raises DatasetError."""
    if args.resume or args.dry_run:
        raise DatasetError("--plan, --part, --finish and --ray go on by themselves: leave out --resume and --dry-run")
    head = read_head(args.out)
    if head is not None:
        _check_options(head["options"], args)
    elif args.plan or args.ray is not None:
        _plan_parts(choice, args, kind, say)
    else:
        raise DatasetError(f"{args.out} has no plan; run the same command line with --plan first")
    if args.plan and head is not None:
        say(f"{args.out} is planned; go on with --part")
    if args.ray is not None:
        from lmcache_hs_backend.cli.ray_tasks import run_tasks

        run_tasks(args, write_part, say)
    elif args.part:
        done = write_part(args)
        number, of = args.part
        say(f"part {number} of {of}: {done.published} samples, {bytes_text(done.nbytes)}, {done.rejected} rejected")
    return _finish_parts(args, kind, say) if args.finish or args.ray is not None else 0


def _plan_parts(choice: Choice, args: argparse.Namespace, kind: type[Format], say: Callable[[str], None]) -> None:
    with _counting(args.quiet) as looked_at:
        plan = make_plan(choice, looked_at)
    with plan:
        _check_plan(plan, args, kind)
        norm = plan_norm(plan, kind.wants_normed, args.final_norm, args.norm_kind)
        _describe(plan, args, say)
        with Extraction(args.out, resume=True) as extraction:
            writer = kind(_job(plan, norm, args, extraction.out, extraction.journal.directory))
            _file_plan(extraction, plan, norm, args, writer)
    say(f"{len(plan.samples)} samples are planned in {args.out}; go on with --part 1/N to N/N, then --finish")


def write_part(args: argparse.Namespace) -> Progress:
    """Write the part that the arguments name, on whatever machine. Raises DatasetError."""
    one_thread_per_row()
    kind = format_of(args.format, args.algorithm)
    urls = url_options(args.shared_options, args.cache_dir, args.cache_size)
    index, stored_normed = parts.read_index(args.out, urls)
    out = os.path.abspath(args.out)
    with closing(index):
        head, samples = read_plan(args.out, index.chunks)
        plan = planned(_as_planned(_choice(args, kind), head, args), index, samples)
        norm = plan_norm(plan, kind.wants_normed, args.final_norm, args.norm_kind, stored_normed=stored_normed)
        norm.reader.reads_once(read_once(index, samples))
        writer = kind(_job(plan, norm, args, out, os.path.join(out, STATE)))
        places = parts.places_of(index, samples, *args.part)
        run = parts.PartRun(out, *args.part)
        with _bar(writer, [samples[place] for place in places], args.quiet) as show:
            return run.run(samples, places, Encoder(norm.reader, plan, writer), args.workers, show)


def _finish_parts(args: argparse.Namespace, kind: type[Format], say: Callable[[str], None]) -> int:
    index, stored_normed = parts.read_index(args.out, None)
    head, samples = read_plan(args.out, index.chunks)
    plan = planned(_as_planned(_choice(args, kind), head, args), index, samples)
    norm = plan_norm(plan, kind.wants_normed, args.final_norm, args.norm_kind, stored_normed=stored_normed)
    with Extraction(args.out, resume=True) as extraction:
        writer = kind(_job(plan, norm, args, extraction.out, extraction.journal.directory))
        started = time.monotonic()
        outcomes = parts.outcomes(extraction.out, samples, writer.in_shards)
        with _bar(writer, samples, args.quiet) as show:
            done = extraction.publish(samples, _val_from(samples, args), writer, outcomes, show)
        return _end(extraction, writer, head, done, started, args, say)


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
        "plan", "part", "finish", "ray", "ray_parts",
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
        head["coverage"]["bad"] = plan.report.unreadable()
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
        bad = plan.report.unreadable()
        say(
            f"rows of the dataset: {full} covered, {partly} partly covered, {missing} missing"
            f"{f', {bad} that cannot be read' if bad else ''}"
        )
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
            state = "covered" if covered == tokens else "missing" if not covered else "partly" if covered > 0 else "bad"
            record = {"row": row, "tokens": tokens, "covered": max(0, covered), "state": state}
            file.write(json.dumps(record) + "\n")
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
def _bar(writer: Format, samples: Sequence[Sample], quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Rows, tokens, GB/s and time left on standard error, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda progress: None
        return
    text_column = bars.TextColumn("{task.fields[text]}")
    columns = (bars.BarColumn(), text_column, bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(writer.nbytes(sample.tokens) for sample in samples), text="")

        def show(progress: Progress) -> None:
            text = f"{progress.published + progress.rejected}/{len(samples)} rows, {progress.tokens} tokens"
            bar.update(task, completed=progress.nbytes, text=text)

        yield show


if __name__ == "__main__":
    raise SystemExit(main())
