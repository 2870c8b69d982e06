"""Starting programs from tests."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.support.waiting import wait_until


def takes_sigint() -> None:
    """For ``preexec_fn`` of a process that a test interrupts: Ctrl-C reaches it, however the tests were started.

    A command in the background of a script (``nohup scripts/test.sh &``) ignores SIGINT, and so does everything that
    it starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def become_nobody() -> str:
    """This process, which root has started, becomes a user that may do nothing: a new directory that it may write."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o777)
    os.setgid(54321)
    os.setuid(54321)
    return folder


class Process(Protocol):
    """What is needed of a process that is stopped."""

    pid: int

    def send_signal(self, sig: int, /) -> None: ...


def stop_process(process: Process) -> None:
    """SIGSTOP that has taken effect when this returns: a thread that runs on another core gets it a moment later."""

    def stopped() -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile: look again
            states = [(task / "status").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()]
            return all("(stopped)" in state for state in states)
        return False

    process.send_signal(signal.SIGSTOP)
    wait_until(stopped)
