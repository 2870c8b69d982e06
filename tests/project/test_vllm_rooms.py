"""The rooms of ``integrations/vllm`` follow vLLM's processes, and imports between them point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[2] / "lmcache_hs_backend" / "integrations" / "vllm"
NAME = "lmcache_hs_backend.integrations.vllm."
MODULES = sorted(ROOM.rglob("*.py"))
#: What each room may import of the others. The files beside ``connector.py`` are below both sides.
MAY_IMPORT = {
    "connector.py": {"", "scheduler_side", "worker_side"},
    "scheduler_side": {"", "scheduler_side"},
    "worker_side": {"", "worker_side"},
    "": {""},
}


def room_of(parts: tuple[str, ...]) -> str:
    return parts[0] if len(parts) > 1 or parts[0] == "connector.py" else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOM)))
def test_neither_side_imports_the_other_nor_the_connector(path: Path) -> None:
    allowed = MAY_IMPORT[room_of(path.relative_to(ROOM).parts)]
    for node in ast.walk(ast.parse(path.read_text())):
        module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
        if module.startswith(NAME):
            parts = tuple(module.removeprefix(NAME).split("."))
            assert parts != ("connector",), f"{path} imports the connector"
            assert room_of((*parts[:-1], f"{parts[-1]}.py")) in allowed, f"{path} imports {module}"


def test_only_one_module_imports_vllm() -> None:
    naming = {
        str(path.relative_to(ROOM))
        for path in MODULES
        if any(
            isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "vllm"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert naming == {"vllm_api.py"}
