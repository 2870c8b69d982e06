"""``lmcache-hs-inspect report``: one page about a cold path, to be opened in any browser."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lmcache_hs_backend import __version__
from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.arguments import at_least
from lmcache_hs_backend.cli.console import CommandError, Output, add_output_options, bytes_text, printable
from lmcache_hs_backend.cli.inspect.figures.sampling import ChunkSample
from lmcache_hs_backend.cli.inspect.figures.stats import collect
from lmcache_hs_backend.cli.inspect.opened_paths import add_path_arguments, open_paths

if TYPE_CHECKING:
    from lmcache_hs_backend.cli.inspect.figures.charts import Spread
    from lmcache_hs_backend.cli.inspect.figures.survey import Survey

HELP = "write a page with charts: occupancy, ages, dedup, norms of rows, anomalies"
EXAMPLE = """\
The page is one file that fetches nothing. Rows are read of a sample of chunks only. Needs Jinja2 and matplotlib:
pip install 'lmcache-hs-backend[report]'.

example:
  lmcache-hs-inspect report /mnt/nvme/hs --out report.html --sample 500
  lmcache-hs-inspect report /data/node1/hs /data/node2/hs s3://my-bucket/hs     # one page of all, as with stats
"""

#: What the page is made with → the module that is imported.
_LIBRARIES = {"Jinja2": "jinja2", "matplotlib": "matplotlib"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    add_path_arguments(parser, several=True)
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default: report.html)")
    parser.add_argument(
        "--sample", metavar="N", type=at_least(0), default=200, help="chunks whose rows are read (default: 200)"
    )
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Write the page, and print what is strange; the exit status."""
    _need_libraries()
    sources = open_paths(args)
    sample = ChunkSample(args.sample)
    figures = collect(sources, sample.watch)
    from lmcache_hs_backend.cli.inspect.figures.survey import Survey  # imports torch

    survey = Survey(sources.files, sample.chunks)
    _save(args.out, _page(figures, sample, survey))
    with Output(args) as output:
        if output.json:
            anomalies = [
                {"model": layer.model, "layer": layer.layer, "what": what} for layer, what in survey.anomalies()
            ]
            layers = survey.as_json()
            head = sources.head() if sources.several else {}
            output.dump({**head, "out": args.out, "sampled": survey.sampled, "layers": layers, "anomalies": anomalies})
        else:
            for layer, what in survey.anomalies():
                output.show(f"{printable(layer.model)} layer {layer.layer}: {what}", style="red")
            output.listed([f"wrote {args.out}, with the rows of {survey.sampled:,} chunks", *sources.missing()])
    return sources.status(exit_status.DONE)


def _need_libraries() -> None:
    """Before the cold path is read, which may take minutes. Raises CommandError."""
    missing = [name for name, module in _LIBRARIES.items() if not _is_installed(module)]
    if missing:
        raise CommandError(
            f"report needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed: "
            "pip install 'lmcache-hs-backend[report]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _save(path: str, page: str) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(page)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise CommandError(f"--out {path} cannot be written: {error.strerror}") from None


def _page(figures: dict[str, Any], sample: ChunkSample, survey: Survey) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from lmcache_hs_backend.cli.inspect.figures import charts

    growth = {name: points for name, points in sample.occupancy().items() if points}
    not_seen = _not_seen(survey, figures)
    anomalies = [(layer.model, layer.layer, what) for layer, what in survey.anomalies()]
    by_model = {model["model"]: model["bytes"] for model in figures["models"]}
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    return environment.get_template("report.html.jinja").render(
        cold_paths=figures.get("cold_paths") or [figures["cold_path"]],
        host=socket.gethostname(),
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=__version__,
        colours=charts.COLOURS,
        numbers=_numbers(figures),
        sampled=survey.sampled,
        anomalies=anomalies,
        not_seen=not_seen,
        mood="bad" if anomalies else "open" if not_seen or not survey.sampled else "good",
        growth={"svg": Markup(charts.areas(growth)), "names": list(growth)},
        by_model=_bars(by_model, bytes_text),
        by_age=_histogram(figures["age_sec"], " ago"),
        by_size=_histogram(figures["chunk_bytes"], ""),
        norms=[
            (f"Norm of the rows, {model}", Markup(charts.lines(points)), names)
            for model, names, points in _norms(survey, charts.COLOURS)
        ],
        sources=_sources(figures),
        namespaces=_namespaces(figures["namespaces"]),
        layers=_layers(figures["namespaces"]),
    )


def _numbers(figures: dict[str, Any]) -> dict[str, str]:
    """The figures at the top, by what they are of."""
    total = figures["total"]
    files = {"files": f"{total['files']:,}"} if "files" in total else {}  # where a chunk may be in several places
    numbers = {
        "chunks": f"{total['chunks']:,}",
        **files,
        "tokens": f"{total['tokens']:,}",
        "on disk": bytes_text(total["bytes"]),
        "sequences": f"{total['sequences']:,}",
        "dedup factor": _factor(total["dedup_factor"]),
        "chunks archived": f"{total['archived_chunks']:,}",
        "files in quarantine": f"{total['quarantined_files']:,}",
        "could not be read": f"{sum(figures['skipped'].values()):,}",
    }
    if figures["limit_bytes"]:
        used = (total["bytes"] + total["quarantined_bytes"]) / figures["limit_bytes"]
        numbers[f"of the limit of {bytes_text(figures['limit_bytes'])}"] = f"{used:.1%}"
    if figures["free_bytes"] is not None:
        numbers["free on that disk"] = bytes_text(figures["free_bytes"])
    return numbers


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _sources(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each of several sources, and one for all of them together."""
    rows = [(each["source"], each, each["free_bytes"]) for each in figures.get("sources", ())]
    if rows:
        rows.append(("all, each chunk once", figures["total"], None))
    return [
        (
            name, f"{each['chunks']:,}", f"{each['tokens']:,}", bytes_text(each["bytes"]), f"{each['sequences']:,}",
            _factor(each["dedup_factor"]), "-" if free is None else bytes_text(free),
        )
        for name, each, free in rows
    ]  # fmt: skip


def _source(each: dict[str, Any]) -> tuple[str, ...]:
    """The first cell of a row, where there are several sources."""
    return (each["source"],) if "source" in each else ()


def _namespaces(namespaces: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            *_source(each), each["namespace"], each["model"], "yes" if each["in_use"] else "no", f"{each['chunks']:,}",
            f"{each['tokens']:,}", bytes_text(each["bytes"]), f"{each['sequences']:,}", f"{each['sequence_tokens']:,}",
            _factor(each["dedup_factor"]),
        )
        for each in namespaces
    ]  # fmt: skip


def _layers(namespaces: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            *_source(each), each["namespace"], layer["dtype"], str(layer["layer"]), str(layer["hidden_dim"]),
            f"{layer['chunks']:,}", f"{layer['tokens']:,}", bytes_text(layer["bytes"]),
        )
        for each in namespaces
        for layer in each["layers"]
    ]  # fmt: skip


#: Name, length as a share of the longest, figure.
_Bar = tuple[str, float, str]


def _bars(values: Mapping[str, float], text: Callable[[float], str]) -> list[_Bar]:
    most = max([*values.values(), 1])
    return [(name, value / most, text(value)) for name, value in values.items()]


def _histogram(spread: dict[str, Any], ago: str) -> list[_Bar]:
    """Bars named by their bounds: ``stats`` counts what is under each, but not under the one before."""
    if not spread:
        return []
    names = [name.removeprefix("under ") for name in spread["histogram"]]
    between = [f"under {names[0]}{ago}"]
    between += [f"{low} to {high}{ago}" for low, high in itertools.pairwise(names[:-1])]
    between += [f"{names[-2]}{ago} or more"]
    return _bars(dict(zip(between, spread["histogram"].values(), strict=True)), lambda count: f"{count:,.0f}")


def _norms(survey: Survey, colours: int) -> Iterator[tuple[str, list[str], list[list[Spread]]]]:
    """A chart for each model, more where it has more layers than there are colours: model, names, points."""
    for model, group in itertools.groupby(survey.layers, key=lambda layer: layer.model):
        every = list(group)
        for first in range(0, len(every), colours):
            layers = every[first : first + colours]
            names = [f"layer {layer.layer}" for layer in layers]
            yield model, names, [layer.norms_by_position() for layer in layers]


def _not_seen(survey: Survey, figures: dict[str, Any]) -> list[str]:
    """What was not looked into: left out, in quarantine, foreign, not readable. With any of it no page is green."""
    total, foreign = figures["total"], figures["foreign"]
    found = [f"could not be read: {each['why']}" for each in figures.get("not_read", ())]
    found += [f"left out: {why}" for why in figures["left_out"]]
    if total["quarantined_files"]:
        found.append(f"{total['quarantined_files']:,} files in quarantine, {bytes_text(total['quarantined_bytes'])}")
    if skipped := sum(figures["skipped"].values()):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(figures["skipped"].items()))
        found.append(f"{skipped:,} files or directories could not be read ({reasons})")
    if survey.unreadable:
        found.append(f"{survey.unreadable:,} sampled chunks could not be read again")
    if foreign["count"]:
        names = ", ".join(os.path.basename(path) for path in foreign["paths"][:3])
        found.append(f"{foreign['count']:,} foreign beside the namespaces, {bytes_text(foreign['bytes'])}: {names}")
    return found
