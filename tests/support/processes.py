"""Starting programs from tests."""

from __future__ import annotations

import signal


def takes_sigint() -> None:
    """For ``preexec_fn`` of a process that a test interrupts: Ctrl-C reaches it, however the tests were started.

    A command in the background of a script (``nohup scripts/test.sh &``) ignores SIGINT, and so does everything that
    it starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
