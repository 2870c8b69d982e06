"""The real ``lmcache server`` with our module, as a process that tests start, stop and kill.

It is forked from a process that has imported it; test_mp_server.py starts it as an operator does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient
from lmcache_hs_backend.integrations.lmcache_mp.wire import name_for_port
from tests.support.forked import Forked, with_lmcache_server
from tests.support.processes import stop_process
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MODEL = "org/test-model"
CHUNK = 256


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MpServer:
    """One server on one cold path. Use as a context manager; ``start`` again after ``stop`` or ``kill``."""

    def __init__(self, cold_path: Path, log: Path, arguments: Sequence[str] = (), **config: Any) -> None:
        """``arguments``: further ones for the command. ``config``: of our module."""
        self.port = free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.cold_path = cold_path
        self.config = {"cold_path": str(cold_path), "hot_size": 0.25, "max_cold_size": 1, "min_free_disk": 0, **config}
        self.log = log
        self.arguments = arguments
        self.process: Forked | None = None

    def __enter__(self) -> MpServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait until clients can connect."""
        modules = [
            {"module_path": "lmcache_hs_backend.integrations.lmcache_mp", "config": self.config},
            {"module_path": "tests.support.mp_kv_module"},
        ]
        command = [
            "server", "--host", "127.0.0.1", "--port", str(self.port),
            "--http-port", str(free_port()), "--l1-size-gb", "0.1", "--eviction-policy", "LRU",
            "--disable-observability", "--chunk-size", str(CHUNK), "--server-module", json.dumps(modules),
            *self.arguments,
        ]  # fmt: skip
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "HS_STRICT": "1"}
        code = "from lmcache.cli.main import main; main()"
        with self.log.open("ab") as log:
            self.process = with_lmcache_server().start(code, *command, env=environment, stdout=log, stderr=log)
        try:
            wait_until(self.answers, 240)
        except BaseException:
            print(self.log.read_text()[-4000:])
            self.kill()
            raise

    def answers(self) -> bool:
        """Whether a client can connect."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(name_for_port(self.port))
            except OSError:
                return False
        return True

    def stop(self) -> None:
        """As an operator does: Ctrl-C."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """It takes calls and answers nothing."""
        assert self.process is not None
        stop_process(self.process)

    def resume(self) -> None:
        """It goes on, with what was called meanwhile."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> HiddenStateClient:
        """A client of this server."""
        return HiddenStateClient(self.url, **{"model": MODEL, **options})

    def call(self, method: str, payload: Any = None) -> bytes:
        """Call a module through LMCache's own RPC."""
        client = RequestClientFactory.create(self.url)
        try:
            call = ServerModuleCallRequest(method=method, payload=json.dumps(payload).encode())
            reply = client.server_module_call(call).result(30)
        finally:
            with contextlib.suppress(Exception):
                client.close()
        assert reply.success, reply.error
        return bytes(reply.payload)

    def status(self) -> dict[str, Any]:
        """The module's own report."""
        report: dict[str, Any] = json.loads(self.call("lmcache_hs.stats"))
        return report["hs_tiered"]

    def put_kv(self, tokens: list[int], nbytes: int = 65536) -> int:
        """Store KV for a prompt. How many chunks of it were stored."""
        return int(self.call("kv_of_tests.put", {"model": MODEL, "tokens": tokens, "bytes": nbytes}))

    def delete_kv_from_l2(self, tokens: list[int], chunks: list[int]) -> None:
        """Delete the KV of some chunks from the L2 adapters."""
        self.call("kv_of_tests.delete_from_l2", {"model": MODEL, "tokens": tokens, "chunks": chunks})

    def delete_kv(self, tokens: list[int], chunks: list[int]) -> None:
        """Delete the KV of some chunks."""
        self.call("kv_of_tests.delete", {"model": MODEL, "tokens": tokens, "chunks": chunks})
