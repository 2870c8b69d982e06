"""Hidden states in LMCache's MP mode, on the real ``lmcache server``: service, restarts, a killed client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.forked import PIPE, with_lmcache_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
LMCACHE = Path(sys.executable).parent / "lmcache"
IDS = list(range(1024))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """The real server of the installed LMCache, with our module."""

    def __init__(self, cold_path: Path) -> None:
        self.port, self.http_port = free_port(), free_port()
        self._config = {"cold_path": str(cold_path), "hot_size": 0.05, "max_cold_size": 1}
        self._log = cold_path.parent / "server.log"

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        module = {"module_path": "lmcache_hs_backend.integrations.lmcache_mp", "config": self._config}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_LOG_LEVEL": "INFO"}
        self._log.write_text("")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(LMCACHE), "server", "--host", "127.0.0.1", "--port", str(self.port), "--l1-size-gb", "0.1",
                 "--http-port", str(self.http_port), "--eviction-policy", "LRU", "--server-module", json.dumps(module)],
                env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=self._log.parent,
            )  # fmt: skip
        wait_until(lambda: "hs_tiered loaded" in self._log.read_text() or self._process.poll() is not None, 90)
        assert self._process.poll() is None, self._log.read_text()[-3000:]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "cold")
    server.start()
    yield server
    server.stop()


def test_rows_come_back_and_survive_a_killed_client_and_a_restart_of_the_server(server: Server) -> None:
    from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient

    x, y = torch.randn(1024, 256).bfloat16(), torch.randn(1024, 256).bfloat16()
    client = HiddenStateClient(server.url, model="org/model", read_timeout_sec=2)
    assert client.store_layers(IDS, {0: x, 7: y}) == 4
    got = client.retrieve_layers(IDS, [0, 7], dtype=None)
    assert torch.equal(got[0], x)
    assert torch.equal(got[7], y)
    assert client.coverage(IDS, [0, 7]) == 1024
    assert client.coverage(IDS, [1]) == 0

    # Another worker dies in the middle of storing again and again: no pin and no memory of it is left.
    code = f"""
import torch
from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient
client = HiddenStateClient({server.url!r}, model="org/model")
rows = torch.randn(4096, 256)
print("storing", flush=True)
number = 0
while True:
    number += 1
    client.store_hidden_states([number, *range(4095)], rows)
"""
    dying = with_lmcache_server().start(code, stdout=PIPE)
    assert dying.stdout is not None
    while b"storing" not in dying.stdout.readline():
        pass
    time.sleep(0.3)  # it is somewhere within a call
    dying.kill()
    dying.wait()
    got = client.retrieve_layers(IDS, [0], dtype=None)
    assert torch.equal(got[0], x)
    wait_until(lambda: client.flush(1) == 0, 20)

    server.stop()
    started = time.monotonic()
    assert client.retrieve_hidden_states(IDS) is None
    assert client.store_hidden_states(IDS, x) == 0
    assert time.monotonic() - started < 6
    server.start()
    wait_until(lambda: client.coverage(IDS, [0, 7]) == 1024, 20)
    again = client.retrieve_hidden_states(IDS, layer_idx=7)
    assert again is not None
    assert torch.equal(again, y.float())
    client.close()
    assert client.retrieve_hidden_states(IDS) is None
