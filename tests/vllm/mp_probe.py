"""Ends and restarts LMCache's server while vLLM runs; called in the process of vLLM for test_run_mp.py.

The server is a child of the test, which starts it again when a file appears. Environment: ``HS_TEST_SERVER_PID``,
``HS_TEST_SERVER_URL``, ``HS_TEST_MODEL``, ``HS_TEST_RESTART`` (that file).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient
from tests.support.waiting import wait_until

_killed_at: list[float] = []


def _client() -> HiddenStateClient:
    return HiddenStateClient(os.environ["HS_TEST_SERVER_URL"], model=os.environ["HS_TEST_MODEL"])


def kill_in_the_next_batch(requests: list[dict[str, Any]]) -> None:
    """SIGKILL as soon as rows of the next batch are in the server."""

    def watch() -> None:
        client = _client()
        before = client.num_cached_chunks()
        wait_until(lambda: client.num_cached_chunks() > before, 300)
        os.kill(int(os.environ["HS_TEST_SERVER_PID"]), signal.SIGKILL)
        _killed_at.append(time.monotonic())

    threading.Thread(target=watch, daemon=True).start()


def restart(requests: list[dict[str, Any]]) -> dict[str, float]:
    """Have the server started again, and wait for it. How long ago it was killed."""
    ago = time.monotonic() - _killed_at[0]
    Path(os.environ["HS_TEST_RESTART"]).touch()
    client = _client()
    wait_until(lambda: client.chunk_size() > 0, 240)
    client.close()
    return {"killed_sec_ago": ago}
