"""``format`` and the commands that browse start without torch, which alone takes 1.5 s and 230 MB."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_hs_backend.format as package

DATA = Path(__file__).parent / "data" / "cold_path"

ALL = [
    "lmcache_hs_backend.format",
    *(f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)),
]


@pytest.mark.parametrize("module", [*ALL, "lmcache_hs_backend.chunk", "lmcache_hs_backend.tiers.disk.owned_namespace"])
def test_importing_it_imports_no_torch(module: str) -> None:
    run(f"import {module}")


@pytest.mark.parametrize(
    "command",
    [
        ["list", str(DATA)],
        ["list", str(DATA), "--format", "json"],
        ["tree", str(DATA)],
        ["stats", str(DATA)],
        ["verify", str(DATA)],
        ["gc", str(DATA), "--expired", "1d", "--dry-run"],
        ["rm", str(DATA), "--model", "*", "--dry-run"],
        ["check-config"],
    ],
    ids=" ".join,
)
def test_a_command_that_browses_imports_no_torch(command: list[str]) -> None:
    run(f"from lmcache_hs_backend.cli.inspect import main\nprint(main({command!r}))")


def test_deleting_imports_no_torch(tmp_path: Path) -> None:
    cold = shutil.copytree(DATA, tmp_path / "cold")
    command = ["rm", str(cold), "--model", "*", "--yes"]
    run(f"from lmcache_hs_backend.cli.inspect import main\nassert main({command!r}) == 0")
    assert len(list(Path(cold).rglob("*.safetensors"))) == 1, "of the quarantine"


def run(code: str) -> None:
    code += "\nimport sys\nassert 'torch' not in sys.modules, sorted(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
