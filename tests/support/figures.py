"""What the long tests have to say, printed once at the end of the run (see conftest.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

LINES: list[str] = []
DROPS: Counter[str] = Counter()  # chunks lost by reason, over the whole test run


def tell(line: str) -> None:
    """A line for the summary of the run."""
    LINES.append(line)


def count_drops(stats: Mapping[str, object]) -> None:
    """What one store has counted as lost, before it goes."""
    for name, value in stats.items():
        if name.startswith("drops_") and isinstance(value, int) and value:
            DROPS[name.removeprefix("drops_")] += value
