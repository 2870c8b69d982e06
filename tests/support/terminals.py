"""Programs on a terminal, as a person runs them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence


def on_a_terminal(command: Sequence[str], env: Mapping[str, str], *, output: bool = True) -> tuple[int, str]:
    """The exit status of a program, and all that it shows on a terminal of 40 lines of 200 columns.

    ``output`` False: its standard output goes elsewhere, so that only its standard error is shown.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 200, 0, 0))
    process = subprocess.Popen(
        command, env={"TERM": "xterm", **env}, stdin=theirs, stdout=theirs if output else subprocess.DEVNULL,
        stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    return process.wait(60), shown.decode()


def without_escapes(shown: str) -> str:
    """The same text without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
