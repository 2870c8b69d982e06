"""Running things side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def side_by_side(work: Callable[[T], object], each: Iterable[T]) -> None:
    """Call ``work`` for each of these in a thread of its own, all at once, and return when all have ended."""
    threads = [threading.Thread(target=work, args=(one,)) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
