"""Three kinds of chart as HTML with inline SVG: bars, areas over time, and lines with bands over positions.

Nothing is fetched and nothing is scripted. Colours and type come from the page's style sheet, by class
(``s0`` to ``s5`` for series), so that the same chart can be read in the dark and on paper.
"""

from __future__ import annotations

import html
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lmcache_hs_backend.cli.console import bytes_text, printable

#: So many series have a colour of their own.
COLOURS = 6

_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 14, 12, 30

NOTHING = "<p>Nothing to show.</p>"


class Spread(NamedTuple):
    """What a line with a band shows at one position."""

    position: int
    low: float
    middle: float
    high: float


def bars(values: Mapping[str, float], title: str, text: Callable[[float], str]) -> str:
    """Horizontal bars from 0, one for each value, with its name before and its figure behind it."""
    most = max([*values.values(), 1e-300])
    rows = "".join(
        f"<span>{_esc(name)}</span>"
        f'<svg aria-hidden="true" class="bar"><rect class="s0" width="{100 * value / most:.2f}%" height="100%"/></svg>'
        f'<span class="n">{_esc(text(value))}</span>'
        for name, value in values.items()
    )
    return f'<figure>{_caption(title)}<div class="bars">{rows}</div></figure>'


def areas(series: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """Bytes over time, piled on each other: ``(seconds since the epoch, bytes)``, each until the next."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return f"<figure>{_caption(title)}{NOTHING}</figure>"
    times = sorted({moment for points in series.values() for moment, _ in points})
    piled = [0.0] * len(times)
    levels = []
    for points in series.values():
        piled = [below + value for below, value in zip(piled, _sampled(points, times), strict=True)]
        levels.append(piled)
    x, y = _time_axis(times[0], times[-1]), _byte_axis(max(piled))
    parts = [_grid(x, y)]
    floor = [0.0] * len(times)
    for number, level in enumerate(levels):
        outline = [*_steps(times, level), *reversed(_steps(times, floor))]
        corners = " ".join(_place(x.at(moment), y.at(value)) for moment, value in outline)
        parts.append(f'<polygon class="s{number % COLOURS}" points="{corners}"/>')
        floor = level
    return _figure(title, parts, list(series))


def lines(series: Mapping[str, Sequence[Spread]], title: str) -> str:
    """Norms by position, on scales of powers: a line through the middles, a band from low to high."""
    values = [value for points in series.values() for point in points for value in point[1:] if value > 0]
    if not values:
        return f"<figure>{_caption(title)}{NOTHING}</figure>"
    x = _position_axis(max(point.position for points in series.values() for point in points))
    y = _log_axis(min(values), max(values))
    parts = [_grid(x, y)]
    for number, points in enumerate(series.values()):
        colour = f"s{number % COLOURS}"
        outline = [(p.position, p.high) for p in points] + [(p.position, p.low) for p in reversed(points)]
        corners = " ".join(_place(x.at(position), y.at(value)) for position, value in outline)
        middle = [_place(x.at(p.position), y.at(p.middle)) for p in points]
        parts.append(
            f'<polygon class="band {colour}" points="{corners}"/>'
            f'<polyline class="line {colour}" points="{" ".join(middle)}"/>'
        )
        parts.extend(
            f'<circle class="{colour}" cx="{cx}" cy="{cy}" r="3"/>' for cx, cy in (place.split(",") for place in middle)
        )
    return _figure(title, parts, list(series))


# -- axes ----------------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """``at`` gives where a value lies, 0 to 1; ticks are ``(value, label)``."""

    at: Callable[[float], float]
    ticks: list[tuple[float, str]]


def _byte_axis(top: float) -> _Axis:
    """From 0 to a round number of bytes, kilobytes, …, at or above ``top``."""
    top = max(top, 1.0)
    unit = 1024.0 ** int(math.log(top, 1024))
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 256, 512) if s * 4 >= top / unit) * unit
    count = math.ceil(top / step)
    labels = [bytes_text(number * step).replace(".00 ", " ") for number in range(count + 1)]
    return _Axis(lambda v: v / (count * step), [(number * step, label) for number, label in enumerate(labels)])


_DAY = 86400
_TIME_STEPS = (60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, _DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY, 30 * _DAY)


def _time_axis(low: float, high: float) -> _Axis:
    """UTC. The end is the last moment; one moment alone lies in the middle."""
    if high <= low:
        return _Axis(lambda v: 0.5 + (v - low) / 4, [(low, time.strftime("%Y-%m-%d %H:%M", time.gmtime(low)))])
    step = next((s for s in _TIME_STEPS if (high - low) / s <= 4), math.ceil((high - low) / 4 / _DAY) * _DAY)
    form = (
        "%Y-%m-%d" if step > 30 * _DAY else "%m-%d" if step >= _DAY else "%m-%d %H:%M" if high - low > _DAY else "%H:%M"
    )
    first = math.ceil(low / step)
    ticks = [(n * step, time.strftime(form, time.gmtime(n * step))) for n in range(first, int(high // step) + 1)]
    return _Axis(lambda v: (v - low) / (high - low), [(float(moment), label) for moment, label in ticks])


def _log_axis(low: float, high: float) -> _Axis:
    """From a round number below to one above. What is 0 or less lies at the bottom."""
    exponents = range(math.floor(math.log10(low * 0.95)), math.ceil(math.log10(high * 1.05)) + 1)
    ticks: list[float] = []
    for factors in ((1, 2, 5), (1,)):
        rungs = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        bottom = max(rung for rung in rungs if rung <= low * 0.95)
        top = min(rung for rung in rungs if rung >= high * 1.05)
        ticks = [rung for rung in rungs if bottom <= rung <= top]
        if len(ticks) <= 7:
            break
    ticks = ticks[:: math.ceil(len(ticks) / 7)]

    def at(value: float) -> float:
        share = math.log(max(value, bottom) / bottom) / math.log(top / bottom)
        return min(share, 1.0)

    return _Axis(at, [(tick, f"{tick:,g}") for tick in ticks])


def _position_axis(last: int) -> _Axis:
    """0, then 1, 2, 4, 8, … at equal distances."""
    steps = last.bit_length()
    apart = max(1, math.ceil(steps / 7))
    positions = [0 if n == 0 else 1 << (n - 1) for n in range(0, steps + 1, apart)]

    def at(position: float) -> float:
        return (0.0 if position < 1 else math.log2(position) + 1) / max(steps, 1)

    return _Axis(at, [(float(position), f"{position:,}") for position in positions])


def _sampled(points: Sequence[tuple[float, float]], times: Sequence[float]) -> list[float]:
    """The value at each of the times: that of the last point until then, 0 before the first."""
    values = []
    value, waiting = 0.0, list(reversed(points))
    for moment in times:
        while waiting and waiting[-1][0] <= moment:
            value = waiting.pop()[1]
        values.append(value)
    return values


def _steps(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of a staircase."""
    if len(times) == 1:  # a moment has no width: show it as a block
        return [(times[0] - 1, values[0]), (times[0] + 1, values[0])]
    before = list(zip(times, values, strict=True))
    corners = [corner for (a, b) in itertools.pairwise(before) for corner in (a, (b[0], a[1]))]
    return [*corners, before[-1]]


# -- drawing -------------------------------------------------------------------------------------------


def _place(across: float, up: float) -> str:
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return f"{_LEFT + width * across:.1f},{_TOP + height * (1 - up):.1f}"


def _grid(x: _Axis, y: _Axis) -> str:
    parts = []
    for value, label in y.ticks:
        left, height = _place(0, y.at(value)).split(",")
        parts.append(
            f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{height}" y2="{height}"/>'
            f'<text x="{_LEFT - 8}" y="{float(height) + 5:.1f}" text-anchor="end">{_esc(label)}</text>'
        )
    for value, label in x.ticks:
        across, bottom = _place(x.at(value), 0).split(",")
        anchor = "end" if x.at(value) > 0.93 else "start" if x.at(value) < 0.04 else "middle"
        parts.append(
            f'<line class="tick" x1="{across}" x2="{across}" y1="{bottom}" y2="{float(bottom) + 5:.1f}"/>'
            f'<text x="{across}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{_esc(label)}</text>'
        )
    return "".join(parts)


def _figure(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    legend = "".join(
        f'<span><svg aria-hidden="true"><rect class="s{number % COLOURS}" width="100%" height="100%"/></svg>'
        f"{_esc(name)}</span>"
        for number, name in enumerate(names)
    )
    return (
        f'<figure>{_caption(title)}<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{_esc(title)}">{"".join(parts)}</svg><p class="legend">{legend}</p></figure>'
    )


def _caption(title: str) -> str:
    return f"<figcaption>{_esc(title)}</figcaption>"


def _esc(text: str) -> str:
    return html.escape(printable(text))
