"""Programs that are forked from a process which has imported what they need.

torch takes two seconds of CPU to import, LMCache's server ten: longer than most programs of tests then run. One process
per set of imports does it once, has one thread, and forks a child for each program. The child runs it as
``python -c`` would: with its own arguments, environment, directory and files, and to the interpreter's end.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
PIPE = subprocess.PIPE
_MOST_BYTES = 1 << 17


class Forked:
    """A program that was started. As much of ``subprocess.Popen`` as tests need."""

    def __init__(self, parent: Forks, pid: int, stdout: IO[bytes] | None) -> None:
        self._parent = parent
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.status_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"the forked program {self.pid}", timeout)
            time.sleep(0.002)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """One process that has imported some modules, and starts programs. Ends with the process that made it."""

    def __init__(self, imports: Sequence[str]) -> None:
        """``imports``: what cannot be imported is left to the programs."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        # LMCache points Prometheus to a directory of this process's user, which programs of another one cannot write.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PROMETHEUS_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked", str(theirs.fileno()), *imports],
                pass_fds=[theirs.fileno()], env=environment, cwd=ROOT,
            )  # fmt: skip

    def start(
        self,
        code: str,
        *args: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | None = None,
    ) -> Forked:
        """Start a program. ``stdout`` PIPE: what it prints can be read from the result's ``stdout``."""
        request = {
            "code": code, "args": [str(arg) for arg in args], "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env), "path": [part for part in sys.path if part],
        }  # fmt: skip
        reading, writing = os.pipe() if stdout == PIPE else (-1, -1)
        out = writing if stdout == PIPE else getattr(stdout, "fileno", lambda: 1)()
        with open(os.devnull) as nothing, self._lock:
            files = [nothing.fileno(), out, 2 if stderr is None else stderr.fileno()]
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            while "started" not in (message := self._receive()):
                pass
        if writing >= 0:
            os.close(writing)
        return Forked(self, message["started"], os.fdopen(reading, "rb", 0) if reading >= 0 else None)

    def run(self, code: str, *args: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as ``subprocess.run`` does with ``capture_output`` and ``text``."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            program = self.start(code, *args, stdout=out, stderr=err, **options)
            try:
                status = program.wait(timeout)
            except BaseException:
                program.kill()
                raise
            texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        return subprocess.CompletedProcess([str(arg) for arg in args], status, *texts)

    def status_of(self, pid: int) -> int | None:
        """The exit status of a program, None while it runs."""
        with self._lock:
            while pid not in self._statuses and select.select([self._channel], [], [], 0)[0]:
                self._receive()
            return self._statuses.get(pid)

    def _receive(self) -> dict[str, int]:
        """The next message. Statuses are kept."""
        message = self._channel.recv(_MOST_BYTES)
        assert message, "the process that forks programs has ended"
        found: dict[str, int] = json.loads(message)
        if "ended" in found:
            self._statuses[found["ended"]] = found["status"]
        return found


@functools.cache
def forks(*imports: str) -> Forks:
    """The process that has imported these, for the whole test run."""
    return Forks(imports)


def with_tiers() -> Forks:
    """For programs that use the tiers: torch, and what tests of a store have at hand."""
    return forks("torch", "lmcache_hs_backend.tiered", "tests.support.prompts", "tests.support.disks")


def with_lmcache_server() -> Forks:
    """For LMCache's server with our module, and for its clients."""
    return forks(
        "lmcache.cli.main", "lmcache.v1.distributed.config", "lmcache.v1.mp_observability.config",
        "lmcache.v1.multiprocess.config", "lmcache.v1.multiprocess.http_server", "lmcache.v1.multiprocess.server",
        "lmcache_hs_backend.integrations.lmcache_mp", "lmcache_hs_backend.tiered", "tests.support.mp_kv_module",
        "tests.support.mp_server",
    )  # fmt: skip


# -- in the process that forks ------------------------------------------------------------------------------------


def _fork_programs(channel: socket.socket) -> dict[str, Any]:
    """Fork a child for each request. Returns in the children, with the request."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([channel.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _tell_who_has_ended(channel)
        if channel.fileno() in ready:
            message, files, _, _ = socket.recv_fds(channel, _MOST_BYTES, 3)
            if not message:
                os._exit(0)  # the tests are over
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for target, file in enumerate(files):
                    os.dup2(file, target)
                for file in (*files, woken, wake, channel.detach()):
                    os.close(file)
                request: dict[str, Any] = json.loads(message)
                return request
            for file in files:
                os.close(file)
            channel.send(json.dumps({"started": pid}).encode())


def _tell_who_has_ended(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        channel.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name} is left to the programs: {error}", file=sys.stderr)
    request = _fork_programs(channel)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["-c", *request["args"]]
    sys.path[:] = request["path"]
    exec(compile(request["code"], "<the program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main()
