"""Results for people: on the terminal, in docs/performance.md, and in its appendix.

The page's own text is written by hand; only what is between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` is
replaced: the machine and the figures that have a bound. Everything else is in the appendix, which is written as a whole
(docs/performance/measured.md). Nothing is measured here.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.figures import Figure, Result, Table

_COLUMNS = ["figure", "measured", "quartiles", "bound", "reached"]


def show(name: str, result: Result, seconds: float) -> None:
    """One subject on the terminal."""
    console = _console()
    console.rule(f"{name}: {result.title} ({seconds:.0f} s)")
    for table in (*result.tables, _figures_table(result.figures)):
        _print(console, table)
    for note in result.notes:
        console.print(note, highlight=False)
    console.file.flush()  # a run takes long, and somebody may be reading along through a pipe


def show_summary(record: Mapping[str, Any], failed: Sequence[str], seconds: float) -> None:
    """What was missed and what failed."""
    console = _console()
    console.rule(f"{len(record['subjects'])} subjects in {seconds:.0f} s, size {record['size']}")
    bound = [figure for figure in _all_figures(record) if figure.reached is not None]
    missed = [figure for figure in bound if not figure.reached]
    console.print(f"{len(bound) - len(missed)} of {len(bound)} figures reach their bound", highlight=False)
    if record["size"] != "full":
        console.print("at this size the ratios are only a sign of life")
    for figure in missed:
        console.print(f"  missed: {figure.text}: {_number(figure.value)} ({figure.bound})", highlight=False)
    for failure in failed:
        console.print(f"  FAILED: {failure}", highlight=False)


def fill(page: Path, record: Mapping[str, Any]) -> None:
    """Replace what the page says between its markers."""
    text = page.read_text()
    text = _between(text, "machine", _machine(record))
    text = _between(text, "summary", _markdown(_figures_table(f for f in _all_figures(record) if f.bound)))
    page.write_text(text)


def appendix(record: Mapping[str, Any], plots: Mapping[str, Sequence[str]]) -> str:
    """The page of all tables; ``plots``: the files drawn for each subject. Introductions are the subjects' own."""
    parts = [
        "# Performance: everything measured",
        "<!-- Written by scripts/bench.sh --docs from performance.json. Edit benchmarks/, not this page. -->",
        "All tables and plots of the last run of each subject. What they mean, and how they are taken, is in "
        "[Performance](../performance.md).",
        _machine(record),
        *(f"![{_alt(file)}]({file})" for file in plots.get("summary", ())),
    ]
    for name, entry in record["subjects"].items():
        result = Result.from_json({key: entry[key] for key in ("title", "figures", "tables", "series", "notes")})
        module = importlib.import_module(f"benchmarks.subjects.{name}")
        parts += [f"## {result.title}", inspect.getdoc(module) or "", _markdown(_figures_table(result.figures))]
        for table in result.tables:
            parts += [f"{table.title}:", _markdown(table)]
        parts += result.notes
        parts += [f"![{_alt(file)}]({file})" for file in plots.get(name, ())]
        parts += [f"Taken {entry['taken']}."]
    return "\n\n".join(parts).replace("``", "`") + "\n"


def _alt(file: str) -> str:
    return Path(file).stem.replace("-", " ")


def _all_figures(record: Mapping[str, Any]) -> list[Figure]:
    return [
        Figure(**{key: value for key, value in figure.items() if key != "reached"})
        for entry in record["subjects"].values()
        for figure in entry["figures"]
    ]


def _figures_table(figures: Iterable[Figure]) -> Table:
    rows = []
    for figure in figures:
        reached = {None: "", True: "yes", False: "**no**"}[figure.reached]
        quartiles = "" if figure.low == figure.high else f"{_number(figure.low)} to {_number(figure.high)}"
        rows.append([figure.text, f"{_number(figure.value)} {figure.unit}", quartiles, figure.bound, reached])
    return Table("figures", _COLUMNS, rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _print(console: Console, table: Table) -> None:
    rich = RichTable(title=table.title, title_justify="left", box=box.SIMPLE)
    for number, column in enumerate(table.columns):
        rich.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        rich.add_row(*(cell.replace("**", "") for cell in row))
    console.print(rich)


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] + ["---:"] * (len(table.columns) - 1), *table.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _machine(record: Mapping[str, Any]) -> str:
    return "Measured on: " + ", ".join(f"{name} {value}" for name, value in record["machine"].items()) + "."


def _between(text: str, name: str, content: str) -> str:
    """Raises ValueError when the page has no such markers: a subject would go unnoticed."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"docs/performance.md has no {begin} … {end}")
    return re.sub(pattern, lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)
