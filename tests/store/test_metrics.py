"""Figures: one set of names for stats(), Prometheus and the dashboard, also across processes."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest

from lmcache_hs_backend import metrics
from tests.support.prompts import CHUNK, opened, prompt, rows
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


MODEL = "org/only-in-these-tests"  # the registry is the process's, and other tests leave their figures in it


def exported() -> dict[str, float]:
    """The samples of MODEL in the process's own registry, without labels."""
    found: dict[str, float] = {}
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(metrics.PREFIX) and sample.labels.get("model_name") == MODEL:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_stats_has_every_counter_gauge_and_histogram(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        figures = store.stats()
    names = {*metrics.COUNTERS, *metrics.GAUGES} | {
        f"{h}_{part}" for h in metrics.HISTOGRAMS for part in ("sum", "count")
    }
    assert names | {"cold_state"} <= set(figures)
    assert all(isinstance(value, int | float | str) for value in figures.values()), "flat"


def test_what_is_counted_is_there_at_once_and_does_not_pile_up_where_nobody_reads_it() -> None:
    figures = metrics.Metrics({"model_name": MODEL})
    longest = 0
    for _ in range(25_000):
        figures.add("stored_chunks")
        longest = max(longest, len(figures._notes))
    figures.observe("store_seconds", 0.5, hits_hot=3)
    figures.add_all({"hits_hot": 2, "hits_cold": 1})
    now = figures.snapshot()
    assert (now["stored_chunks"], now["hits_hot"], now["hits_cold"]) == (25_000, 5, 1)
    assert (now["store_seconds_sum"], now["store_seconds_count"]) == (0.5, 1)
    assert longest <= 10_000


def test_prometheus_follows_within_moments_and_survives_a_second_store(tmp_path: Path) -> None:
    before = exported().get("lmcache:hs_stored_chunks_total", 0.0)
    for number in range(2):
        with opened(tmp_path / str(number), labels={"model_name": MODEL}) as store:
            p = prompt(3)
            store.store(p.refs, p.bytes, {0: rows(3 * CHUNK)})
            store.retrieve(p.refs, [0])
            wait_until(lambda: exported().get("lmcache:hs_hot_chunks") == 3)
    after = exported()
    assert after["lmcache:hs_stored_chunks_total"] - before == 6
    assert after["lmcache:hs_retrieve_seconds_count"] >= 2
    for name in metrics.COUNTERS:
        assert f"{metrics.PREFIX}{name}_total" in after
    for name in metrics.GAUGES:
        assert metrics.PREFIX + name in after


def test_all_processes_are_seen_in_multi_process_mode(tmp_path: Path) -> None:
    show = """
import prometheus_client
from prometheus_client import multiprocess
registry = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
text = prometheus_client.generate_latest(registry).decode()
"""
    code = f"""
import re, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.support.prompts import *
with opened(Path({str(tmp_path / "cold")!r})) as store:
    p = prompt(3)
    store.store(p.refs, p.bytes, {{0: rows(3 * CHUNK)}})
    assert store.flush(10) == 0
    store.debug.run_chores()
    {show.replace(chr(10), chr(10) + "    ")}
    assert re.search(r"^lmcache:hs_capacity_bytes\\{{.*\\}} 65536\\.0$", text, re.MULTILINE), text
"""
    folder = tmp_path / "multiproc"
    folder.mkdir()
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", show + "print(text)"], env=env, check=True, capture_output=True, text=True
    )
    for figure in ("stored_chunks_total 6", "written_chunks_total 3", "store_seconds_count 2", "capacity_bytes 0"):
        name, value = figure.split()
        assert re.search(rf"^lmcache:hs_{name}\{{.*\}} {value}\.0$", done.stdout, re.MULTILINE), figure


def test_losses_are_logged_once_in_a_while_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    figures = metrics.Metrics()
    with caplog.at_level(logging.INFO, logger="lmcache_hs_backend"):
        figures.loss("no_room", 3)
        figures.report_losses()
        for _ in range(100):
            figures.loss("no_room")
            figures.report_losses()
        figures.loss("cold_limit")
        figures.report_losses()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "3 chunk(s)" in caplog.messages[0]
    assert "drops_no_room" in caplog.messages[0]
    assert figures.snapshot()["drops_no_room"] == 103


def test_the_dashboard_and_the_operators_page_name_metrics_that_exist() -> None:
    known = {metrics.PREFIX + name for name in metrics.GAUGES}
    known |= {f"{metrics.PREFIX}{name}_total" for name in metrics.COUNTERS}
    known |= {f"{metrics.PREFIX}{n}_{part}" for n in metrics.HISTOGRAMS for part in ("bucket", "sum", "count")}
    dashboard = json.loads((ROOT / "configs/grafana_dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 10
    for text in [*expressions, (ROOT / "docs/how-to/operating.md").read_text()]:
        for name in re.findall(r"lmcache:hs_\w+", text):
            assert name in known, name
    assert all(re.search(r"lmcache:hs_\w+", expression) for expression in expressions)
