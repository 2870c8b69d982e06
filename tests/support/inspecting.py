"""Running ``lmcache-hs-inspect`` as its users do: as a program, in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(sysconfig.get_path("scripts")) / "lmcache-hs-inspect"

#: The installed program; the same by its module where the package is only on the path.
PROGRAM = [str(INSTALLED)] if INSTALLED.exists() else [sys.executable, "-m", "lmcache_hs_backend.cli.inspect"]

#: Makes the import of these fail, as where they are not installed; read by the interpreter at its start.
_BLOCKER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)
sys.meta_path.insert(0, Blocked())
"""


def blocking(folder: Path, *modules: str) -> dict[str, str]:
    """The environment in which these modules cannot be imported."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_BLOCKER.format(blocked=set(modules)))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def environment(**changes: str) -> dict[str, str]:
    """The present environment without LMCache's variables, and with ``changes``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", **changes}


def as_any_user() -> None:
    """For ``preexec_fn``: permissions count, as they do not for root, whose files they may still be."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: gone after the exec; refused where there is none to drop


def inspect(
    *args: object, env: dict[str, str] | None = None, stdin: str | None = None, root: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a sub-command to its end. ``root`` False: without root's right to look everywhere."""
    return subprocess.run(
        [*PROGRAM, *map(str, args)], capture_output=True, text=True, timeout=120, env=environment(**(env or {})),
        preexec_fn=None if root else as_any_user,
        **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
    )  # fmt: skip


def inspect_json(*args: object, env: dict[str, str] | None = None, status: int = 0) -> Any:
    """Run a sub-command with ``--format json`` and give what it printed."""
    done = inspect(*args, "--format", "json", env=env)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def fails(*args: object, env: dict[str, str] | None = None) -> str:
    """Run a sub-command that must end with status 1 and one line on standard error: that line."""
    done = inspect(*args, env=env)
    assert done.returncode == 1, (done.stdout, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("lmcache-hs-inspect: error: ")
    return lines[0]
