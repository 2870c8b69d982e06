"""The machinery around the code names things that exist: workflows, forms, hooks, the version."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import lmcache_hs_backend

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def commands(entry: Any) -> list[str]:
    """Every ``run`` of a workflow, those of its matrix included."""
    if isinstance(entry, dict):
        own = entry.get("run", [])
        texts = [own] if isinstance(own, str) else [text for text in own if isinstance(text, str)]
        return texts + [text for value in entry.values() if not isinstance(value, str) for text in commands(value)]
    if isinstance(entry, list):
        return [text for value in entry for text in commands(value)]
    return []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_scripts_that_exist_with_options_that_they_have(path: Path) -> None:
    runs = commands(yaml.safe_load(path.read_text())["jobs"])
    found = [match for text in runs for match in re.finditer(r"(scripts/[\w.]+)([^&|]*)", text)]
    assert found
    for match in found:
        script = ROOT / match[1]
        assert script.is_file(), match[1]
        text = script.read_text()
        if match[1] == "scripts/bench.sh":
            text += (ROOT / "benchmarks/__main__.py").read_text()
        for option in re.findall(r"(--[a-z]+)", match[2].partition(" -- ")[0]):
            assert option in text, f"{match[1]} has no {option}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_version(path: Path) -> None:
    for action in re.findall(r"uses: (\S+)", path.read_text()):
        assert re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", action), action


def test_the_matrix_is_what_the_project_says_it_supports() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    readme = (ROOT / "README.md").read_text()
    assert all(version in readme for version in matrix["lmcache"])
    assert f"{matrix['python'][0]} to {matrix['python'][-1]}" in readme


def test_the_version_is_written_in_one_place() -> None:
    version = lmcache_hs_backend.__version__
    files = subprocess.run(["git", "ls-files", "*.py", "*.toml", "*.cff"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    found = [
        file
        for file in files.stdout.split()
        if re.search(rf"version[\"']?\s*[:=]\s*[\"']{re.escape(version)}[\"']", (ROOT / file).read_text())
    ]
    assert found in ([], ["lmcache_hs_backend/__init__.py"]), found
    assert f'__version__ = "{version}"' in (ROOT / "lmcache_hs_backend/__init__.py").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_forms_and_configurations_load(path: Path) -> None:
    loaded = yaml.safe_load(path.read_text())
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert {"name", "description", "body"} <= set(loaded)
        for field in loaded["body"]:
            assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
            assert field["attributes"].get("label") or field["type"] == "markdown"
