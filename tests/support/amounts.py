"""How much the long tests do: a little at each change, all of it at night (``scripts/test.sh --nightly``)."""

from __future__ import annotations

import os

NIGHTLY = os.environ.get("HS_NIGHTLY", "") not in ("", "0")


def amount(name: str, each_change: float, nightly: float) -> float:
    """Seconds, kills, examples …: what the environment says under this name, else one of the two."""
    return float(os.environ.get(name) or (nightly if NIGHTLY else each_change))
