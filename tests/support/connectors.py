"""speculators' package of readers, for the tests that compare with them; a skip where it cannot be installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest


def hs_connectors(module: str = "hs_connectors") -> Any:
    """A module of it, or of ours that needs it. On Python 3.11 and later it has to be there."""
    if sys.version_info < (3, 11):
        pytest.skip("hs-connectors 0.9 and speculators 0.9 need Python 3.11")
    return importlib.import_module(module)
