"""The charts of a report: SVG by matplotlib, to stand in an HTML page whose style sheet gives them their colours.

Imports matplotlib, so only ``report`` imports this.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateFormatter, AutoDateLocator
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MultipleLocator, NullLocator

from lmcache_hs_backend.cli.console import bytes_text

# It would tell of its font cache and its configuration directory on standard error.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

#: So many series have a colour of their own.
COLOURS = 6

#: Stand-ins that matplotlib draws with, and what the page's style sheet calls the colour.
_SERIES = [f"#0000a{number}" for number in range(COLOURS)]
_LINE, _TEXT = "#0000b0", "#0000b1"
_VARIABLES = {colour: f"var(--s{number})" for number, colour in enumerate(_SERIES)} | {
    _LINE: "var(--line)",
    _TEXT: "var(--soft)",
}

_INCHES = (460 / 72, 250 / 72)  # an SVG has 72 units an inch
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same page from the same rows
    "font.size": 14,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "ytick.major.size": 0,
}


class Spread(NamedTuple):
    """What a line with a band shows at one position."""

    position: int
    low: float
    middle: float
    high: float


def areas(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Bytes over time, piled on each other.

    Args:
        series: Name → ``(seconds since the epoch, bytes)``, each until the next.

    Returns:
        An ``svg`` element, or nothing where there is nothing to show.
    """
    times = sorted({moment for points in series.values() for moment, _ in points})
    if not times:
        return ""
    levels = [_sampled(points, times) for points in series.values() if points]
    if len(times) == 1:  # a moment has no width: show it as a block of an hour
        times, levels = [times[0] - 1800, times[0] + 1800], [level * 2 for level in levels]
    dates = [datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=moment) for moment in times]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes()
        axes.stackplot(dates, levels, colors=_SERIES, step="post")
        axes.set_xlim(dates[0], dates[-1])
        locator = AutoDateLocator(tz=timezone.utc, minticks=3, maxticks=5)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(_date_formatter(locator, times[-1] - times[0]))
        top = max(map(sum, zip(*levels, strict=True)))
        step = _byte_step(top)
        axes.yaxis.set_major_locator(MultipleLocator(step))
        axes.yaxis.set_major_formatter(lambda value, _: bytes_text(value).replace(".00 ", " "))
        axes.set_ylim(0, math.ceil(max(top, 1) / step) * step)
        return _svg(figure)


def lines(series: Sequence[Sequence[Spread]]) -> str:
    """Norms by position, both by powers: a line through the middles, a band from low to high.

    Args:
        series: For each line its points. What is 0 or less lies at the bottom.

    Returns:
        An ``svg`` element, or nothing where there is nothing to show.
    """
    values = [value for points in series for point in points for value in point[1:] if value > 0]
    if not values:
        return ""
    bottom, top = _rung(min(values) * 0.95, up=False), _rung(max(values) * 1.05, up=True)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes()
        for points, colour in zip(series, _SERIES, strict=False):
            across = [_power(point.position) for point in points]
            low, middle, high = ([max(value, bottom) for value in part] for part in list(zip(*points, strict=True))[1:])
            axes.fill_between(across, low, high, color=colour, alpha=0.22, linewidth=0)
            axes.plot(across, middle, color=colour, linewidth=2, marker="o", markersize=5)
        axes.set_yscale("log")
        axes.set_ylim(bottom, top)
        decades = math.log10(top / bottom)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.4 else (1,), numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        last = max(_power(point.position) for points in series for point in points)
        ticks = range(0, last + 1, max(1, math.ceil(last / 7)))
        axes.set_xticks(list(ticks), [f"{0 if tick == 0 else 1 << (tick - 1):,}" for tick in ticks])
        return _svg(figure)


def _date_formatter(locator: AutoDateLocator, seconds: float) -> AutoDateFormatter:
    """UTC, as precise as the distance of ticks in days asks for."""
    formatter = AutoDateFormatter(locator, tz=timezone.utc)
    hours = "%m-%d %H:%M" if seconds > 86400 else "%H:%M"
    formatter.scaled = {365.0: "%Y", 31.0: "%Y-%m", 1.0: "%m-%d", 1 / 24: hours, 1 / 1440: hours, 1 / 86400: "%H:%M:%S"}
    return formatter


def _power(position: int) -> int:
    """Where a position lies: 0, 1, 2, 4, 8, … at equal distances."""
    return position.bit_length()


def _rung(value: float, *, up: bool) -> float:
    """The nearest of 1, 2 and 5 times a power of ten at or above a value, or at or below it."""
    exponent = math.floor(math.log10(value))
    rungs = [factor * 10.0**power for power in (exponent - 1, exponent, exponent + 1) for factor in (1, 2, 5)]
    return min(rung for rung in rungs if rung >= value) if up else max(rung for rung in rungs if rung <= value)


def _byte_step(top: float) -> float:
    """A round number of bytes, kilobytes, …, of which at most four reach the top."""
    top = max(top, 1.0)
    unit = 1024.0 ** int(math.log(top, 1024))
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 256, 512) if step * 4 >= top / unit) * unit


def _sampled(points: Sequence[tuple[float, float]], times: Sequence[float]) -> list[float]:
    """The value at each of the times: that of the last point until then, 0 before the first."""
    values = []
    value, waiting = 0.0, list(reversed(points))
    for moment in times:
        while waiting and waiting[-1][0] <= moment:
            value = waiting.pop()[1]
        values.append(value)
    return values


def _axes() -> tuple[Figure, Any]:
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.grid(axis="y")
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as an element of a page: its size, its colours and its type are the page's."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', _OPENING, svg, count=1)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)  # it would style the page
    svg = re.sub(r' id="[A-Za-z0-9.]+_[0-9]+"', "", svg)  # figure_1, axes_1, …: not unique in a page, not referred to
    svg = re.sub(r"font-family: [^;\"]*; ", "", re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", svg))
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], svg)


_OPENING = (
    r'<svg class="chart" viewBox="\1" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
)
