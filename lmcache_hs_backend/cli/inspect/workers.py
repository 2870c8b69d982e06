"""Doing the same to many files: with threads where the disk is waited for, with processes where Python is.

Results come in the order of the items. Only a few items are taken ahead, so memory does not grow with their number,
and a caller that stops asking stops the work.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from lmcache_hs_backend.cli.console import CommandError

T = TypeVar("T")
R = TypeVar("R")

_MOST_PROCESSES = 4


def in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """``map`` with several threads."""
    with ThreadPoolExecutor(threads) as pool:
        yield from _in_order(pool, function, iter(items), 4 * threads)


def in_processes(function: Callable[[T], list[R]], items: Iterable[T]) -> Iterator[R]:
    """The results for the first item, then for the second, and so on, by one process for each CPU.

    The processes are forked, so call this before there are threads; ``function`` is one of a module. What it raises is
    raised here. Raises CommandError when a process dies.
    """
    count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if count < 2:
        yield from itertools.chain.from_iterable(map(function, items))
        return
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(count, mp_context=context, initializer=_begin) as pool:
            for batch in _in_order(pool, function, iter(items), 4 * count):
                yield from batch
    except BrokenProcessPool:
        raise CommandError("a process that was reading files has died; was there enough memory?") from None


def _in_order(pool: Executor, function: Callable[[T], R], items: Iterator[T], ahead: int) -> Iterator[R]:
    waiting: deque[Future[R]] = deque()
    # The first call makes the processes. A Ctrl-C before they have learned to ignore it would print a traceback each.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        waiting.extend(pool.submit(function, item) for item in itertools.islice(items, 1))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    try:
        waiting.extend(pool.submit(function, item) for item in itertools.islice(items, ahead))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in itertools.islice(items, 1))
    finally:
        for future in waiting:
            future.cancel()


def _begin() -> None:
    """Prepare a new process: it ignores Ctrl-C, which its parent handles, and ends when its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
