"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # programs that tests start import this module, and need no pytest
    import pytest


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as ``condition()`` holds; fail when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def hold_up(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> threading.Event:
    """From now on a method of a class waits for the event that is returned, and does its work then."""
    gate, real = threading.Event(), getattr(owner, method)

    def later(*args: Any) -> Any:
        assert gate.wait(20), f"nobody lets {method} go on"
        return real(*args)

    monkeypatch.setattr(owner, method, later)
    return gate


class Stalls:
    """For ``with``: the longest time for which a thread of this process that could run had to wait for a core.

    A test that bounds a time allows for it: on a machine with other work, the thread that is measured waits as well.
    """

    _LOOK_SEC = 0.001

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self._LOOK_SEC):
            now = time.monotonic()
            self.longest = max(self.longest, now - before - self._LOOK_SEC)
            before = now
