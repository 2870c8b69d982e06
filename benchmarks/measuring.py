"""Timing: steps that take turns, round after round, and what their times say.

Whatever is compared is measured side by side: each round runs every step once, and a ratio is taken within a round,
so that a machine that slows down for a minute slows both sides. Nothing here knows what is measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

#: Seconds by step, one entry per round.
Times = dict[str, list[float]]


class Step(NamedTuple):
    """Something to time. ``prepare`` runs before it, untimed; ``own_clock``: the call returns its seconds itself."""

    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    own_clock: bool = False

    def seconds(self) -> float:
        if self.prepare is not None:
            self.prepare()
        if self.own_clock:
            measured = self.call()
            assert isinstance(measured, float)
            return measured
        started = time.perf_counter()
        result = self.call()
        elapsed = time.perf_counter() - started
        del result  # outside the clock: giving memory back is not part of getting it
        return elapsed


class Spread(NamedTuple):
    """The median of some values, with its quartiles."""

    median: float
    low: float
    high: float


def interleaved(steps: Mapping[str, Step], rounds: int, *, warmups: int = 2) -> Times:
    """Run all steps in turn, ``rounds`` times after ``warmups`` rounds that touch fresh memory and do not count.

    A step runs twice in a row, and the second time counts. A virtual machine can be slow to touch memory again that it
    has left alone while its processors were idle: 13 ms of ``copy_`` took 150 after half a second. What came before a
    step shall not decide how fast it is.
    """
    times: Times = {name: [] for name in steps}
    gc.collect()
    for number in range(-warmups, rounds):
        for name, step in steps.items():
            step.seconds()
            elapsed = step.seconds()
            if number >= 0:
                times[name].append(elapsed)
    return times


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """``above ÷ below`` round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def fastest(times: Times, names: Sequence[str]) -> str:
    """Of some steps that do the same, the one with the best median."""
    return min(names, key=lambda name: median(times[name]))


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
