"""Running ``lmcache-hs-extract``, and looking at what it wrote."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lmcache_hs_backend.cli.extract import main

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "lmcache_hs_backend.cli.extract"]


def manifest_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def extract(stored: Path, out: Path, *options: str) -> dict[str, Any]:
    """Extract a cold path within this process; its manifest."""
    assert main([str(stored), "--out", str(out), "-q", *options]) == 0
    return manifest_of(out)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def environment() -> dict[str, str]:
    """For ``COMMAND`` in a process of its own."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
