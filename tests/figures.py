"""What the long tests have to say, printed once at the end of the run (see conftest.py)."""

from __future__ import annotations

LINES: list[str] = []


def tell(line: str) -> None:
    """A line for the summary of the run."""
    LINES.append(line)
