"""``lmcache-hs-inspect report``: one page about a cold path, to be opened in any browser."""

from __future__ import annotations

import argparse
import contextlib
import html
import itertools
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_hs_backend import __version__
from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.arguments import at_least
from lmcache_hs_backend.cli.console import CommandError, Output, add_output_options, bytes_text, printable
from lmcache_hs_backend.cli.inspect.figures.plots import COLOURS, NOTHING, areas, bars, lines
from lmcache_hs_backend.cli.inspect.figures.sampling import ChunkSample
from lmcache_hs_backend.cli.inspect.figures.stats import collect
from lmcache_hs_backend.cli.inspect.selection import add_path_arguments, open_path

if TYPE_CHECKING:
    from lmcache_hs_backend.cli.inspect.figures.survey import LayerSurvey, Survey

HELP = "write a page with charts: occupancy, ages, dedup, norms of rows, anomalies"
EXAMPLE = """\
The page is one file that fetches nothing. Rows are read of a sample of chunks only.

example:
  lmcache-hs-inspect report /mnt/nvme/hs --out report.html --sample 500
"""

#: The browser itself refuses to fetch anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

#: Colours that differ for the colour-blind too, for a light ground and for a dark one.
_LIGHT = ("#0072b2", "#d55e00", "#00855f", "#a4507f", "#b07a00", "#4a4a8a")
_DARK = ("#56b4e9", "#ff9248", "#3fcf9f", "#e79bc6", "#f0c04a", "#b0b0f0")


def _palette(name: str) -> str:
    inks = {
        "light": "--ground: #fff; --ink: #1b1d20; --soft: #5a6067; --line: #d5d9de; --bad: #b3261e; --good: #1c6b3c;",
        "dark": "--ground: #15181c; --ink: #e8eaed; --soft: #a9b0b8; --line: #3a4048; --bad: #ff8f85; --good: #74d99f;",
    }
    colours = _LIGHT if name == "light" else _DARK
    return inks[name] + "".join(f"--s{number}: {colour};" for number, colour in enumerate(colours))


_STYLE = f"""
:root {{ color-scheme: light dark; {_palette("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_palette("dark")} }} }}
@media print {{ :root {{ color-scheme: light; {_palette("light")} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem;
  background: var(--ground); color: var(--ink); }}
h1 {{ font-size: 1.6rem; margin: 0; }} h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .6rem; }}
p {{ margin: .4rem 0; }} .soft {{ color: var(--soft); }} .path {{ overflow-wrap: anywhere; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .9rem 1rem; padding: 0;
  margin: 1.4rem 0; }}
.figures li {{ list-style: none; color: var(--soft); line-height: 1.3; }}
.figures b {{ display: block; font-size: 1.4rem; color: var(--ink); }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem 2rem; }}
figure {{ margin: 0; min-width: 0; }} figcaption {{ font-weight: 600; margin-bottom: .5rem; }}
svg.chart {{ display: block; width: 100%; height: auto; }}
svg text {{ font: 14px system-ui, sans-serif; fill: var(--soft); }}
.grid, .tick {{ stroke: var(--line); }} .line {{ fill: none !important; stroke-width: 2; }} .band {{ opacity: .22; }}
.bars {{ display: grid; grid-template-columns: auto 1fr auto; gap: .35rem .7rem; align-items: center; }}
.bars span {{ overflow-wrap: anywhere; }} .bar {{ display: block; width: 100%; height: 1.1rem; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }}
.legend svg {{ width: .8rem; height: .8rem; margin-right: .4rem; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; width: 100%; font-size: .93rem; }}
th, td {{ text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th {{ vertical-align: bottom; font-weight: 600; white-space: normal; line-height: 1.25; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
th:last-child, td:last-child {{ padding-right: 0; }}
.verdict {{ border-left: .3rem solid var(--soft); padding: .1rem 0 .1rem .9rem; }}
.verdict.good {{ border-color: var(--good); }} .good b {{ color: var(--good); }}
.verdict.bad {{ border-color: var(--bad); }} .bad b {{ color: var(--bad); }}
.verdict ul {{ margin: .3rem 0; padding-left: 1.1rem; overflow-wrap: anywhere; }}
footer {{ margin-top: 2.5rem; font-size: .9rem; color: var(--soft); }}
@media print {{
  @page {{ margin: 14mm; }}
  body {{ max-width: none; padding: 0; font-size: 10pt; }} figure, tr, .verdict {{ break-inside: avoid; }}
  h2 {{ break-after: avoid; }} .charts {{ grid-template-columns: 1fr 1fr; gap: 1.2rem; }}
  .scroll {{ overflow: visible; }}
  table {{ font-size: 8.5pt; }} th, td {{ white-space: normal; overflow-wrap: anywhere; padding-right: .5rem; }}
  svg text {{ font-size: 16px; }}
}}
""" + "".join(f".s{n} {{ fill: var(--s{n}); stroke: var(--s{n}); }} " for n in range(COLOURS))
_STYLE += "rect, .band { stroke: none !important; }"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path_arguments(parser)
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default: report.html)")
    parser.add_argument(
        "--sample", metavar="N", type=at_least(0), default=200, help="chunks whose rows are read (default: 200)"
    )
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    opened = open_path(args)
    sample = ChunkSample(args.sample)
    figures = collect(opened, sample.watch)
    from lmcache_hs_backend.cli.inspect.figures.survey import Survey  # imports torch

    survey = Survey(opened.reader.files, sample.chunks)
    _save(args.out, _page(figures, sample, survey))
    with Output(args) as output:
        if output.json:
            anomalies = [
                {"model": layer.model, "layer": layer.layer, "what": what} for layer, what in survey.anomalies()
            ]
            layers = survey.as_json()
            output.dump({"out": args.out, "sampled": survey.sampled, "layers": layers, "anomalies": anomalies})
        else:
            for layer, what in survey.anomalies():
                output.show(f"{printable(layer.model)} layer {layer.layer}: {what}", style="red")
            output.show(f"wrote {args.out}, with the rows of {survey.sampled:,} chunks")
    return exit_status.DONE


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
    total = figures["total"]
    numbers = {
        "chunks": f"{total['chunks']:,}",
        "tokens": f"{total['tokens']:,}",
        "on disk": bytes_text(total["bytes"]),
        "sequences": f"{total['sequences']:,}",
        "dedup factor": _factor(total["dedup_factor"]),
        "chunks archived": f"{total['archived_chunks']:,}",
        "bad files set aside": f"{total['quarantined_files']:,}",
        "could not be read": f"{sum(figures['skipped'].values()):,}",
    }
    if figures["limit_bytes"]:
        used = (total["bytes"] + total["quarantined_bytes"]) / figures["limit_bytes"]
        numbers[f"of the limit of {bytes_text(figures['limit_bytes'])}"] = f"{used:.1%}"
    if figures["free_bytes"] is not None:
        numbers["free on that disk"] = bytes_text(figures["free_bytes"])
    items = "".join(f"<li><b>{_esc(value)}</b>{_esc(name)}</li>" for name, value in numbers.items())
    by_model = {model["model"]: model["bytes"] for model in figures["models"]}
    charts = (
        areas(sample.occupancy(), "Bytes by the time they were first stored (UTC)")
        + bars(by_model, "Bytes by model", bytes_text)
        + _histogram(figures["age_sec"], "Chunks by last use", " ago")
        + _histogram(figures["chunk_bytes"], "Chunks by size of file", "")
    )
    sections = [
        ("Values", _anomalies(survey, figures)),
        ("Occupancy", f'<p class="soft">Of what is here now.</p><div class="charts">{charts}</div>'),
        ("Namespaces", _namespaces(figures["namespaces"])),
        ("Norms of rows by layer and position", _norms(survey)),
        ("Layers", _layers(figures["namespaces"])),
    ]
    body = "".join(f"<section><h2>{_esc(title)}</h2>{content}</section>" for title, content in sections)
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>Hidden states in {_esc(figures["cold_path"])}</title>'
        f"<style>{_STYLE}</style></head><body><header><h1>Hidden states on disk</h1>"
        f'<p class="path soft">{_esc(figures["cold_path"])} on {_esc(socket.gethostname())}, {now}</p></header>'
        f'<ul class="figures">{items}</ul>{body}<footer>lmcache-hs-inspect {__version__}</footer></body></html>\n'
    )


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _namespaces(namespaces: Iterable[dict[str, Any]]) -> str:
    return _table(
        ("namespace", "model", "in use"),
        ("chunks", "tokens", "bytes", "sequences", "tokens if unshared", "dedup factor"),
        [
            (
                each["namespace"], each["model"], "yes" if each["in_use"] else "no", f"{each['chunks']:,}",
                f"{each['tokens']:,}", bytes_text(each["bytes"]), f"{each['sequences']:,}",
                f"{each['sequence_tokens']:,}", _factor(each["dedup_factor"]),
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


def _histogram(spread: dict[str, Any], title: str, ago: str) -> str:
    """Bars named by their bounds: ``stats`` counts what is under each, but not under the one before."""
    if not spread:
        return f"<figure><figcaption>{_esc(title)}</figcaption>{NOTHING}</figure>"
    names = [name.removeprefix("under ") for name in spread["histogram"]]
    between = [f"under {names[0]}{ago}"]
    between += [f"{low} to {high}{ago}" for low, high in itertools.pairwise(names[:-1])]
    between += [f"{names[-2]}{ago} or more"]
    return bars(dict(zip(between, spread["histogram"].values(), strict=True)), title, lambda count: f"{count:,.0f}")


def _not_seen(survey: Survey, figures: dict[str, Any]) -> list[str]:
    """What the page does not speak for: left out, set aside or not readable. All is not well while there is any."""
    total, foreign = figures["total"], figures["foreign"]
    found = [f"left out: {why}" for why in figures["left_out"]]
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


def _anomalies(survey: Survey, figures: dict[str, Any]) -> str:
    found = [
        f"<li><b>{_esc(layer.model)}, layer {layer.layer}</b>: {_esc(what)}</li>" for layer, what in survey.anomalies()
    ]
    looked = f"Looked for in the rows of {survey.sampled:,} chunks. Files were not verified: run verify."
    unseen = _not_seen(survey, figures)
    rest = f"<p>Not looked into:</p><ul>{''.join(f'<li>{_esc(what)}</li>' for what in unseen)}</ul>" if unseen else ""
    none = "<p><b>None</b>: no NaN, no dead layer, no constant row.</p>" if survey.sampled and not found else ""
    listed = f"<ul>{''.join(found)}</ul>" if found else ""
    mood = "bad" if found else "open" if unseen or not survey.sampled else "good"
    return f'<div class="verdict {mood}">{none}{listed}{rest}<p class="soft">{looked}</p></div>'


def _norms(survey: Survey) -> str:
    """A chart for each model, more where it has more layers than there are colours."""
    charts = []
    for model, group in itertools.groupby(survey.layers, key=lambda layer: layer.model):
        layers = list(group)
        for first in range(0, len(layers), COLOURS):
            charts.append(_norm_chart(model, layers[first : first + COLOURS]))
    return (
        '<p class="soft">Line: median. Band: 5 to 95 %. Across: position of the token in its sequence, by powers of '
        "two. Upwards: norm of the row, by powers of ten; what is 0 lies at the bottom. "
        f'Rows of {survey.sampled:,} chunks.</p><div class="charts">{"".join(charts) or NOTHING}</div>'
    )


def _norm_chart(model: str, layers: Sequence[LayerSurvey]) -> str:
    return lines({f"layer {layer.layer}": layer.norms_by_position() for layer in layers}, f"Norm of the rows, {model}")


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
