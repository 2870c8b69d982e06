"""The benchmarks run: every subject at its tiniest size, started as a user does, with the figures of the docs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = (
    "callers", "hot", "cold", "cold_cases", "demotion", "first_row", "overhead", "opening", "zipf", "latency", "layers",
    "threads", "space", "cost",
)  # fmt: skip
#: Figures that the size decides: how many files, how large a prompt.
FIGURES = {
    "callers.store.idle.p50", "callers.store.busy.p90", "callers.retrieve.idle.p50", "callers.retrieve.busy.p90",
    "hot.store_vs_upstream", "hot.store_vs_copy", "hot.retrieve_vs_upstream", "hot.retrieve_vs_copy",
    "hot.native_vs_copy", "hot.kept_vs_upstream", "cold.retrieve_vs_raw", "cold.worst_vs_disk_backend",
    "cold.worst_vs_disk_backend_direct", "cold.worst_vs_load_file", "cold.mixed", "cold_cases.vs_limit",
    "demotion.vs_raw",
    "demotion.stream_vs_raw", "first_row.hot", "first_row.cold", "overhead.retrieve", "overhead.again",
    "overhead.growth", "overhead.ram_per_cold_chunk", "open.vs_scan", "zipf.hit_rate", "zipf.hits_vs_upstream",
    "zipf.restore", "latency.p99", "layers.2x128", "threads.1", "threads.2", "space.ram", "space.disk",
    "space.metadata", "cost.store", "cost.retrieve", "cost.demotion", "cost.cold",
}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench")
    done = run("benchmarks", "--tiny", "--out", str(out), "--dir", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(out.glob("hs-bench-*")), "data was left behind"
    found: dict[str, Any] = json.loads((out / "performance.json").read_text())
    return found


@pytest.mark.slow
def test_every_subject_runs_and_its_figures_are_written_down(record: dict[str, Any]) -> None:
    assert tuple(record["subjects"]) == SUBJECTS
    figures = {figure["name"]: figure for entry in record["subjects"].values() for figure in entry["figures"]}
    assert figures.keys() >= FIGURES
    for figure in figures.values():
        assert figure["low"] <= figure["value"] <= figure["high"], figure


@pytest.mark.slow
def test_what_does_not_depend_on_the_clock_is_reached(record: dict[str, Any]) -> None:
    figures = {figure["name"]: figure for entry in record["subjects"].values() for figure in entry["figures"]}
    for name in ("space.ram", "space.metadata", "zipf.hit_rate", "zipf.hits_vs_upstream"):
        assert figures[name]["reached"], figures[name]


def test_a_subject_that_does_not_exist_is_named_with_those_that_do() -> None:
    done = run("benchmarks", "--tiny", "--only", "hot,warm")
    assert done.returncode == 2
    assert "warm is not a subject" in done.stderr
    assert "demotion" in done.stderr


def test_the_page_has_a_place_for_what_is_generated() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    for name in ("machine", "summary"):
        assert len(re.findall(f"<!-- bench:{name} -->.*?<!-- /bench:{name} -->", text, re.DOTALL)) == 1, name


def test_the_page_and_its_appendix_say_what_was_measured(tmp_path: Path) -> None:
    """Of every subject, and as the code writes it today; the plots that it names are there."""
    from benchmarks import plots, report

    folder = ROOT / "docs" / "performance"
    measured = json.loads((folder / "performance.json").read_text())
    assert set(measured["subjects"]) == set(SUBJECTS)
    names = plots.names(measured)
    assert (folder / "measured.md").read_text() == report.appendix(measured, names)
    for files in names.values():
        assert all((folder / file).is_file() for file in files)
    copy = tmp_path / "performance.md"
    copy.write_text((ROOT / "docs" / "performance.md").read_text())
    report.fill(copy, measured)
    assert copy.read_text() == (ROOT / "docs" / "performance.md").read_text()
