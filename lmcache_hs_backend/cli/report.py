"""``lmcache-hs-inspect report``: one page about a cold path, to be opened in any browser."""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_hs_backend.cli.charts import bars, lines
from lmcache_hs_backend.cli.chunks import add_path_arguments, open_path
from lmcache_hs_backend.cli.console import CommandError, Screen, add_output_options, bytes_text, printable, time_text
from lmcache_hs_backend.cli.stats import collect

if TYPE_CHECKING:
    from lmcache_hs_backend.cli.survey import LayerSurvey, Survey

HELP = "write a page with charts: occupancy, ages, dedup, norms of rows, anomalies"
EXAMPLE = """\
The page is one file that fetches nothing. Rows are read of a sample of chunks only.

example:
  lmcache-hs-inspect report /mnt/nvme/hs --out report.html --sample 500
"""

#: The browser itself refuses to fetch anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.figures { display: flex; flex-wrap: wrap; gap: .5rem 2rem; padding: 0; }
.figures li { list-style: none; } .figures b { display: block; font-size: 1.35rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.grid { stroke: var(--line); } .legend span { margin-right: 1.2rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.bad { color: #b3261e; font-weight: 600; } .path { overflow-wrap: anywhere; }
@media print {
  body { max-width: none; font-size: 11pt; } section { break-inside: avoid; } .scroll { overflow: visible; }
}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path_arguments(parser)
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default: report.html)")
    parser.add_argument(
        "--sample", metavar="N", type=int, default=200, help="chunks whose rows are read (default: 200)"
    )
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    if args.sample < 0:
        raise CommandError(f"--sample is {args.sample}, but must be at least 0")
    where = open_path(args)
    from lmcache_hs_backend.cli.survey import Survey, as_json  # takes torch along

    survey = Survey(args.sample)
    figures = collect(where, survey.watch)
    layers = survey.layers()
    _save(args.out, _page(figures, survey, layers))
    with Screen(args) as screen:
        if screen.json:
            anomalies = [
                {"model": layer.model, "layer": layer.layer, "what": what}
                for layer in layers
                for what in layer.anomalies()
            ]
            screen.dump({"out": args.out, "sampled": survey.sampled, "layers": as_json(layers), "anomalies": anomalies})
        else:
            for layer in layers:
                for what in layer.anomalies():
                    screen.show(f"{printable(layer.model)} layer {layer.layer}: {what}", style="red")
            screen.show(f"wrote {args.out}, with the rows of {survey.sampled:,} chunks")
    return 0


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


def _page(figures: dict[str, Any], survey: Survey, layers: list[LayerSurvey]) -> str:
    total = figures["total"]
    numbers = {
        "chunks": f"{total['chunks']:,}",
        "tokens": f"{total['tokens']:,}",
        "on disk": bytes_text(total["bytes"]),
        "sequences": f"{total['sequences']:,}",
        "dedup factor": "-" if total["dedup_factor"] is None else f"{total['dedup_factor']:.2f}",
        "archived": f"{total['archived_chunks']:,}",
        "bad files set aside": f"{total['quarantined_files']:,}",
        "free on that disk": bytes_text(figures["free_bytes"]),
    }
    if figures["limit_bytes"]:
        used = (total["bytes"] + total["quarantined_bytes"]) / figures["limit_bytes"]
        numbers["of the limit"] = f"{used:.1%} of {bytes_text(figures['limit_bytes'])}"
    if figures["skipped"]:
        numbers["could not be read"] = f"{sum(figures['skipped'].values()):,}"
    items = "".join(f"<li><b>{_esc(value)}</b>{_esc(name)}</li>" for name, value in numbers.items())
    sections = [
        ("Occupancy over time", _occupancy(survey)),
        ("By model", bars({m["model"]: m["bytes"] for m in figures["models"]}, "bytes by model", bytes_text)),
        ("Namespaces and dedup", _namespaces(figures["namespaces"])),
        ("Layers", _layers(figures["namespaces"])),
        ("Ages: chunks by last use", _histogram(figures["age_sec"], "chunks by last use")),
        ("Sizes of chunk files", _histogram(figures["chunk_bytes"], "chunks by size")),
        ("Anomalies", _anomalies(survey, layers)),
        ("Norms of rows by layer and position", _norms(survey, layers)),
    ]
    body = "".join(f"<section><h2>{_esc(title)}</h2>{content}</section>" for title, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>Hidden states in {_esc(figures["cold_path"])}</title>'
        f"<style>{_STYLE}</style></head><body><h1>Hidden states on disk</h1>"
        f'<p class="path">{_esc(figures["cold_path"])}, {time_text(time.time_ns())}</p>'
        f'<ul class="figures">{items}</ul>{body}</body></html>\n'
    )


def _occupancy(survey: Survey) -> str:
    grown = {model: points for model, points in survey.occupancy().items() if points}
    chart = lines(grown, "bytes over time", lambda x: time_text(int(x * 1e9))[:16], bytes_text, steps=True)
    return "<p>What is here now, by the time it was first stored.</p>" + chart


def _namespaces(namespaces: Iterable[dict[str, Any]]) -> str:
    return _table(
        ("namespace", "model", "in use"),
        ("chunks", "tokens", "bytes", "sequences", "tokens if each had its own", "dedup"),
        [
            (
                each["namespace"], each["model"], "yes" if each["in_use"] else "no", f"{each['chunks']:,}",
                f"{each['tokens']:,}", bytes_text(each["bytes"]), f"{each['sequences']:,}",
                f"{each['sequence_tokens']:,}", "-" if each["dedup_factor"] is None else f"{each['dedup_factor']:.2f}",
            )
            for each in namespaces
        ],
    )  # fmt: skip


def _layers(namespaces: Iterable[dict[str, Any]]) -> str:
    return _table(
        ("namespace", "dtype"),
        ("layer", "hidden size", "chunks", "tokens", "bytes"),
        [
            (
                each["namespace"], layer["dtype"], str(layer["layer"]), str(layer["hidden_dim"]),
                f"{layer['chunks']:,}", f"{layer['tokens']:,}", bytes_text(layer["bytes"]),
            )
            for each in namespaces
            for layer in each["layers"]
        ],
    )  # fmt: skip


def _histogram(spread: dict[str, Any], title: str) -> str:
    return bars(spread["histogram"], title, lambda count: f"{count:,.0f}") if spread else "<p>Nothing to show.</p>"


def _anomalies(survey: Survey, layers: list[LayerSurvey]) -> str:
    found = [
        f'<li class="bad">{_esc(layer.model)}, layer {layer.layer}: {_esc(what)}</li>'
        for layer in layers
        for what in layer.anomalies()
    ]
    looked = f"<p>In the rows of {survey.sampled:,} chunks.</p>"
    return looked + (f"<ul>{''.join(found)}</ul>" if found else "<p>None: no NaN, no dead layer, no constant row.</p>")


def _norms(survey: Survey, layers: list[LayerSurvey]) -> str:
    parts = [
        f"<p>Median and 5 to 95 % of the norms of rows of {survey.sampled:,} chunks. "
        "Positions are on a scale of powers of two.</p>"
    ]
    for model in dict.fromkeys(layer.model for layer in layers):
        parts.append(f"<h3>{_esc(model)}</h3>")
        for layer in (layer for layer in layers if layer.model == model):
            points = layer.norms_by_position()
            name = f"layer {layer.layer}"
            parts.append(
                lines(
                    {name: [(_scale(position), median) for position, _, median, _ in points]},
                    f"norms of {model}, {name}",
                    lambda x: f"token {0 if x == 0 else 2 ** (x - 1):.0f}",
                    lambda y: f"{y:.4g}",
                    bands={name: [(_scale(position), low, high) for position, low, _, high in points]},
                )
            )
    return "".join(parts)


def _scale(position: int) -> float:
    return float(position.bit_length())


def _table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first columns are text, the others numbers."""
    head = "".join(f"<th>{_esc(name)}</th>" for name in texts)
    head += "".join(f'<th class="n">{_esc(name)}</th>' for name in numbers)
    body = []
    for row in rows:
        cells = "".join(f"<td>{_esc(value)}</td>" for value in row[: len(texts)])
        body.append(f"<tr>{cells}{''.join(f'<td class=n>{_esc(value)}</td>' for value in row[len(texts) :])}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _esc(text: str) -> str:
    return html.escape(printable(text))
