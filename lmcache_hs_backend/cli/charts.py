"""Two kinds of chart as SVG text: bars, and lines with bands. Everything inline, nothing is fetched."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from lmcache_hs_backend.cli.console import printable

COLOURS = ("#2f6f9f", "#c0562f", "#4d8a43", "#8a5aa8", "#a8892c", "#4a8f94")

_WIDTH, _HEIGHT = 640, 240
_MOST_CHARACTERS = 22  # of a name in front of a bar
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 40

Point = tuple[float, float]
Band = tuple[float, float, float]  # x, low, high
Text = Callable[[float], str]


def bars(values: Mapping[str, float], title: str, text: Text) -> str:
    """Horizontal bars, one for each value, with its name before and its figure behind it."""
    step, most = 26, max([*values.values(), 1e-300])
    height = step * len(values) + 8
    parts = []
    for number, (name, value) in enumerate(values.items()):
        y = 4 + number * step
        width = 380 * value / most
        parts.append(
            f'<text x="140" y="{y + 16}" text-anchor="end">{_esc(_short(name))}</text>'
            f'<rect x="150" y="{y + 3}" width="{width:.1f}" height="18" fill="{COLOURS[0]}"/>'
            f'<text x="{156 + width:.1f}" y="{y + 16}">{_esc(text(value))}</text>'
        )
    return _svg(height, title, parts)


def lines(
    series: Mapping[str, Sequence[Point]],
    title: str,
    x_text: Text,
    y_text: Text,
    *,
    bands: Mapping[str, Sequence[Band]] | None = None,
    steps: bool = False,
) -> str:
    """Lines by name, each with a band around it where ``bands`` has one. y starts at 0."""
    bands = bands or {}
    points = [point for each in series.values() for point in each]
    if not points:
        return "<p>Nothing to show.</p>"
    tops = [y for _, y in points] + [high for each in bands.values() for _, _, high in each]
    x_low, x_high, y_high = min(x for x, _ in points), max(x for x, _ in points), _round_up(max(tops))
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> str:
        share = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return f"{_LEFT + across * share:.1f},{_TOP + up * (1 - y / y_high):.1f}"

    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + up * (1 - share)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_esc(y_text(y_high * share))}</text>'
        )
    for x, anchor in {x_low: "start", x_high: "end"}.items():
        place = at(x, 0).split(",")[0]
        parts.append(f'<text x="{place}" y="{_HEIGHT - 18}" text-anchor="{anchor}">{_esc(x_text(x))}</text>')
    for number, (name, drawn) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        band = bands.get(name, ())
        if band:
            outline = [at(x, high) for x, _, high in band] + [at(x, low) for x, low, _ in reversed(band)]
            parts.append(f'<polygon points="{" ".join(outline)}" fill="{colour}" opacity="0.18"/>')
        path = list(drawn)
        if steps:
            path = [p for before, after in itertools.pairwise(drawn) for p in (before, (after[0], before[1]))]
            path.append(drawn[-1])
        drawn_path = " ".join(at(*point) for point in path)
        parts.append(f'<polyline points="{drawn_path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(
            f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in (at(*p).split(",") for p in drawn[-60:])
        )
    legend = "".join(
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{_esc(name)}</span>'
        for number, name in enumerate(series)
    )
    return _svg(_HEIGHT, title, parts) + f'<p class="legend">{legend}</p>'


def _short(name: str) -> str:
    return name if len(name) <= _MOST_CHARACTERS else "…" + name[-_MOST_CHARACTERS + 1 :]


def _round_up(value: float) -> float:
    if value <= 0 or not math.isfinite(value):
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * size >= value * 0.999999)


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_esc(title)}"><title>{_esc(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _esc(text: str) -> str:
    return html.escape(printable(text))
