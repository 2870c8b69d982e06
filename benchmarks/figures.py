"""What a subject finds out: figures with a bound, tables, series for plots, and notes. Plain data, JSON and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measuring import Spread, Times, median, spread


class WrongRows(AssertionError):
    """Rows that came back are not those that went in: the only result that makes a benchmark fail."""


@dataclass
class Figure:
    """One number that is to reach a bound. ``low`` and ``high`` are the quartiles of the rounds."""

    name: str
    text: str
    value: float
    low: float
    high: float
    unit: str = "×"
    at_least: float | None = None
    at_most: float | None = None

    @property
    def reached(self) -> bool | None:
        """None where no bound is set."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g} {self.unit}"
        return "" if self.at_most is None else f"≤ {self.at_most:g} {self.unit}"


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass
class Series:
    """Lines for one plot: ``lines[label]`` has a y for each x; None where there is none."""

    title: str
    x_label: str
    y_label: str
    x: list[float]
    lines: dict[str, list[float | None]]
    log_x: bool = True
    log_y: bool = False


@dataclass
class Result:
    """What one subject found out."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def figure(self, name: str, text: str, values: Sequence[float] | Spread, **bound: Any) -> Figure:
        """Add a figure: the median of ``values``, or a spread that is known already."""
        found = values if isinstance(values, Spread) else spread(values)
        figure = Figure(name, text, found.median, found.low, found.high, **bound)
        self.figures.append(figure)
        return figure

    def to_json(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        for figure, entry in zip(self.figures, record["figures"], strict=True):
            entry["reached"] = figure.reached
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Result:
        figures = [Figure(**{k: v for k, v in entry.items() if k != "reached"}) for entry in record["figures"]]
        tables = [Table(**entry) for entry in record["tables"]]
        series = [Series(**entry) for entry in record["series"]]
        return cls(record["title"], figures, tables, series, record["notes"])


def times_table(title: str, times: Times, nbytes: dict[str, int] | int | None = None) -> Table:
    """Medians and quartiles in ms, and GB/s (10⁹ bytes) where the number of bytes is given."""
    rows = []
    for name, values in times.items():
        found = spread(values)
        size = nbytes.get(name) if isinstance(nbytes, dict) else nbytes
        rate = f"{size / median(values) / 1e9:.2f}" if size else ""
        milliseconds = (f"{seconds * 1e3:.3g}" for seconds in (found.median, found.low, found.high))
        rows.append([name, *milliseconds, rate])
    return Table(title, ["step", "median ms", "lower quartile", "upper quartile", "GB/s"], rows)
