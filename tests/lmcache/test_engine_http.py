"""LMCache's internal API server beside an engine with our plugin: docs/how-to/operating.md, "Turning metrics on".

The real server on a real port: worker i is at internal_api_server_port_start + 1 + i, /metrics has our figures,
DELETE /cache/clear empties both tiers, and GET /backends lists the plugin.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines import CHUNK, make_config, make_metadata, rows_of, tokens_of
from tests.support.waiting import wait_until

try:
    from lmcache.v1.internal_api_server.api_server import InternalAPIServer
except ModuleNotFoundError:  # lmcache 0.5.7rc2 has moved the in-process engine
    from lmcache.inprocess.v1.internal_api_server.api_server import InternalAPIServer

pytestmark = pytest.mark.engine

WORKER = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def served(start: Callable[..., Any], cold_path: Path) -> Iterator[tuple[Any, str]]:
    """An engine of worker 1, and the address of its server."""
    port_start = free_port() - 1 - WORKER
    config = make_config(cold_path, internal_api_server_enabled=True, internal_api_server_port_start=port_start)
    engine = start(config=config, metadata=make_metadata(worker_id=WORKER, local_worker_id=WORKER, world_size=2))
    server = InternalAPIServer(SimpleNamespace(lmcache_engine=engine.engine, config=config))
    assert server.port == port_start + 1 + WORKER
    server.start()
    try:
        wait_until(lambda: server.server.started)
        yield engine, f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


def get(url: str, method: str = "GET") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=20) as answer:
        return str(answer.read().decode())


def test_a_workers_metrics_are_on_its_own_port(served: tuple[Any, str]) -> None:
    engine, url = served
    engine.store_both(tokens_of(3), rows_of(3 * CHUNK))

    def shown() -> list[str]:
        return [line for line in get(url + "/metrics").splitlines() if line.startswith("lmcache:hs_hot_chunks{")]

    engine.wait(lambda: any(line.endswith(" 3.0") for line in shown()))
    assert any('worker_id="1"' in line for line in shown())


def test_clearing_over_http_empties_both_tiers(served: tuple[Any, str]) -> None:
    engine, url = served
    tokens = tokens_of(4)
    engine.store_both(tokens, rows_of(4 * CHUNK))
    assert engine.store.flush(10) == 0
    answer = json.loads(get(url + "/cache/clear", "DELETE"))
    assert answer["status"] == "success"
    assert engine.served(tokens) == 0
    assert engine.store.num_cached_chunks() == 0
    engine.wait(lambda: not engine.files)


def test_the_plugin_is_listed_among_the_backends(served: tuple[Any, str]) -> None:
    _, url = served
    assert "hs_tiered" in get(url + "/backends")


def test_with_one_directory_for_all_processes_vllms_own_page_has_the_figures_too(tmp_path: Path) -> None:
    """What vLLM does at /metrics when PROMETHEUS_MULTIPROC_DIR is set: collect what all processes have left there."""
    store = """
import os, sys, torch
from lmcache_hs_backend import TieredStore
with TieredStore.open(sys.argv[1], model="m", hot_size=0.01, max_cold_size=1, min_free_disk=0) as store:
    store.store(*store.prompt(range(600)), {0: torch.zeros(600, 8)})
"""
    page = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
    (tmp_path / "metrics").mkdir()
    subprocess.run([sys.executable, "-c", store, str(tmp_path / "cold")], env=environment, check=True)
    done = subprocess.run([sys.executable, "-c", page], env=environment, check=True, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("lmcache:hs_stored_chunks_total{")]
    assert [line.split()[-1] for line in lines] == ["3.0"]
