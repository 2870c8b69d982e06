"""Doing the same to many files at once: with threads where the disk is waited for, with processes where Python is.

Results come in the order of the items, a little after they are asked for; nothing is done far ahead, so
memory does not grow with the number of items, and who stops asking stops the work.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, TypeVar

from lmcache_hs_backend.cli.console import CommandError

T = TypeVar("T")
R = TypeVar("R")

_MOST_PROCESSES = 4
_AT_A_TIME = 128
_PIPE_BYTES = 1 << 20


def in_threads(function: Callable[[T], R], items: Iterable[T], *, threads: int, in_a_row: int) -> Iterator[R]:
    """``map`` with several threads, each of which takes so many items in a row."""
    iterator = iter(items)
    rows = iter(lambda: list(itertools.islice(iterator, in_a_row)), [])

    def work(row: list[T]) -> list[R]:
        return [function(item) for item in row]

    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[list[R]]] = deque(pool.submit(work, row) for row in itertools.islice(rows, 2 * threads))
        try:
            while ahead:
                yield from ahead.popleft().result()
                ahead.extend(pool.submit(work, row) for row in itertools.islice(rows, 1))
        finally:  # whoever asked may have seen enough
            for future in ahead:
                future.cancel()


def in_processes(function: Callable[[T], Iterable[R]], items: Sequence[T]) -> Iterator[R]:
    """What ``function`` gives for the first item, then for the second, and so on; one process for each CPU.

    The processes are forked, so call this before there are threads. What ``function`` raises is raised here; a
    process that dies is a CommandError.
    """
    count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), len(items))
    if count < 2:
        yield from itertools.chain.from_iterable(map(function, items))
        return
    children: list[_Child] = []
    try:
        for number in range(count):
            children.append(_Child(function, items[number::count]))
        for number in range(len(items)):
            yield from children[number % count].results()
    finally:
        for child in children:
            child.end()


class _Child:
    """A process that works through its items, and the pipe that its results come through."""

    def __init__(self, function: Callable[[T], Iterable[R]], items: Sequence[T]) -> None:
        reading, writing = os.pipe()
        with contextlib.suppress(OSError):  # room for some folders, so that no child waits while another is heard
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # A Ctrl-C before the child has learned to ignore it would be told by Python in many words.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            self._pid = os.fork()
            if not self._pid:
                os.close(reading)
                _work(function, items, writing)
        finally:  # the parent's; the child never gets here
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        os.close(writing)
        self._pipe = open(reading, "rb")  # noqa: SIM115 - closed in end()

    def results(self) -> Iterator[R]:
        """Those of the next item."""
        try:
            while (batch := pickle.load(self._pipe)) is not None:
                if isinstance(batch, Exception):
                    raise batch
                yield from batch
        except (EOFError, pickle.UnpicklingError):
            raise CommandError("a process that was reading files has died; was there enough memory?") from None

    def end(self) -> None:
        self._pipe.close()
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)


def _work(function: Callable[[T], Iterable[R]], items: Sequence[T], writing: int) -> None:
    """The life of a child. It ends quietly when nobody reads any more; Ctrl-C is its parent's business."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        with open(writing, "wb") as pipe:
            try:
                for item in items:
                    _send(iter(function(item)), pipe)
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001 - it is raised again where the results are read
                pickle.dump(error, pipe)
        status = 0
    finally:
        os._exit(status)


def _send(results: Iterator[R], pipe: BinaryIO) -> None:
    """A few results at a time, then None. (A pickle of each would name its classes each time.)"""
    while batch := list(itertools.islice(results, _AT_A_TIME)):
        pickle.dump(batch, pipe, protocol=5)
        pipe.flush()
    pickle.dump(None, pipe)
    pipe.flush()
