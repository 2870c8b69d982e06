"""Plots of what was measured, as PNG files. Needs matplotlib (the ``bench`` extra); without it there are none."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Series


def names(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """The files that ``draw`` makes, by subject."""
    found = {
        name: [_file(name, series["title"]) for series in entry["series"]]
        for name, entry in record["subjects"].items()
        if entry["series"]
    }
    if _bound(record):
        found["summary"] = ["bounds.png"]
    return found


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Draw every series, and how far each bound is reached."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install 'lmcache-hs-backend[bench]')")
        return
    import matplotlib

    matplotlib.use("Agg")
    for name, entry in record["subjects"].items():
        for fields in entry["series"]:
            series = Series(**fields)
            _lines(series, folder / _file(name, series.title))
    if bound := _bound(record):
        _bounds(bound, folder / "bounds.png")


def _file(name: str, title: str) -> str:
    return f"{name}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.png"


def _bound(record: Mapping[str, Any]) -> list[Figure]:
    figures = [
        Figure(**{key: value for key, value in figure.items() if key != "reached"})
        for entry in record["subjects"].values()
        for figure in entry["figures"]
    ]
    return [figure for figure in figures if figure.reached is not None]


def _lines(series: Series, path: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, line in series.lines.items():
        points = [(x, y) for x, y in zip(series.x, line, strict=True) if y is not None]
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    if series.log_x:
        axes.set_xscale("log", base=2 if max(series.x) <= 1024 else 10)
    if series.log_y:
        axes.set_yscale("log")
    elif max(series.x) <= 1024:
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if not series.log_y:
        axes.set_ylim(bottom=0)
    axes.set(title=series.title, xlabel=series.x_label, ylabel=series.y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _bounds(figures: list[Figure], path: Path) -> None:
    """A bar per figure: how far it is from its bound, 1 being just there and more being better."""
    from matplotlib import pyplot

    shares, labels = [], []
    for figure in reversed(figures):
        if figure.at_least is not None:
            share = figure.value / figure.at_least
        else:
            assert figure.at_most is not None
            share = figure.at_most / max(figure.value, figure.at_most / 4)
        shares.append(min(share, 4.0))
        labels.append(f"{figure.text} ({figure.bound})")
    canvas, axes = pyplot.subplots(figsize=(11, 0.32 * len(figures) + 1.2))
    axes.barh(labels, shares, color=["tab:blue" if share >= 1 else "tab:orange" for share in shares])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set(title="Reached, in shares of the bound (cut at 4)")
    axes.tick_params(axis="y", labelsize="small")
    canvas.tight_layout()
    canvas.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(canvas)
