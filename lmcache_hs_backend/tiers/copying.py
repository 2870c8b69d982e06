"""Copies of rows in memory: by torch's own threads, or piece by piece by the caller and idle I/O threads.

torch copies a large tensor with a team of OpenMP threads: one more core for one copy, at the price of waiting for
the slowest of them, and of threads that spin for more work afterwards. Where cores are busy, which on a server is
the rule, the price is a turn of the scheduler for *each* copy: 16 scattered chunks took 116 ms instead of 10. So
teams are for few copies, or large ones; of many small ones, whoever has time takes the next. I/O threads form no
teams either, and neither does a caller beside them: they would get in the way of reading. While they work on something
else, a small copy is not worth a team either: it saves less than the turn that waiting for one member may cost, and
the other members go on spinning on cores that the I/O threads then take from the caller.

The size of a team is a property of the thread that forms it (OpenMP's nthreads-var). ``torch.set_num_threads`` also
changes what threads to come start with, so OpenMP is asked directly. This module knows nothing of chunks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

from lmcache_hs_backend.tiers.mover import FileOp, Mover

#: Where the rows go, and where they come from; both ``[num_tokens, hidden_dim]``.
Pair = tuple[torch.Tensor, torch.Tensor]
#: Copies the second into the first, converting.
Copy = Callable[[torch.Tensor, torch.Tensor], object]

#: OpenMP runtimes that builds of torch link, by the names under which the loader knows them.
_RUNTIMES = ("libgomp.so.1", "libiomp5.so", "libomp.so", "libomp.dylib")
#: at::internal::GRAIN_SIZE: smaller tensors are copied by the calling thread.
_SERIAL_NUMEL = 32768
#: So few copies that forming a team for each does not count.
_FEW_PAIRS = 4
#: So large that forming a team for it does not count: one thread takes a turn of the scheduler, 3 or 4 ms, for it.
_TEAM_BYTES = 32 << 20
#: Bytes that a thread takes at a time: enough to be worth waking one, little enough to end together.
_PIECE_BYTES = 4 << 20


class Crew:
    """Whoever copies: the caller, and those I/O threads that have nothing to read or write."""

    def __init__(self, mover: Mover, threads: int) -> None:
        """``threads``: how many the mover has."""
        self._mover = mover
        self._threads = threads

    def copy(self, pairs: Sequence[Pair], *, reading: bool = False) -> None:
        """Copy all of them, converting. ``reading``: I/O threads read for the caller, who keeps out of their way.

        Raises what a copy raises, when nobody works on any of them any more.
        """
        if not reading and self._mover.working and sum(map(_nbytes, pairs)) < _TEAM_BYTES:
            with alone():
                _copy(pairs)
            return
        if not reading and (len(pairs) <= _FEW_PAIRS or all(_nbytes(pair) >= _TEAM_BYTES for pair in pairs)):
            for target, source in pairs:  # in the caller's mode, as the result was made
                target.copy_(source)
            return
        pieces = _pieces(pairs)
        helpers = min(len(pieces), torch.get_num_threads(), self._threads + 1) - 1
        work = _Work(pieces)
        if helpers > 0:
            self._mover.enlist([_Help(work) for _ in range(helpers)], only_idle=not reading)
        with alone():
            work.finish()


class _Work:
    """Pieces that wait for somebody to copy them. Taking one is atomic, and whoever takes one finishes it."""

    def __init__(self, pieces: Sequence[Sequence[Pair]]) -> None:
        self._left = deque(pieces)
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._others = len(pieces)  # how many pieces the caller has not taken

    def help(self) -> None:
        """Take pieces as long as there are any, on a thread of ours."""
        while True:
            try:
                piece = self._left.popleft()
            except IndexError:
                return
            try:
                _copy(piece)
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                self._done.put(error)
            else:
                self._done.put(None)

    def finish(self) -> None:
        """Take pieces as well, on the caller's thread, and wait for those that others have taken."""
        try:
            while (piece := self._take()) is not None:
                _copy(piece)
        finally:
            while self._take() is not None:
                pass  # after an error nobody begins another one
            errors = [self._done.get() for _ in range(self._others)]
        for error in errors:
            if error is not None:
                raise error

    def _take(self) -> Sequence[Pair] | None:
        try:
            piece = self._left.popleft()
        except IndexError:
            return None
        self._others -= 1
        return piece


class _Help(FileOp):
    """An I/O thread lends a hand."""

    def __init__(self, work: _Work) -> None:
        self._work = work

    def run(self) -> None:
        self._work.help()


def _pieces(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The same copies in pieces of about _PIECE_BYTES: large ones cut, small ones together."""
    pieces: list[list[Pair]] = []
    room = 0
    for target, source in pairs:
        row_bytes = _row_bytes((target, source))
        step = max(1, _PIECE_BYTES // row_bytes)
        for begin in range(0, target.shape[0], step):
            pair = target[begin : begin + step], source[begin : begin + step]
            nbytes = pair[0].shape[0] * row_bytes
            if nbytes > room:
                pieces.append([])
                room = _PIECE_BYTES
            pieces[-1].append(pair)
            room -= nbytes
    return pieces


def _row_bytes(pair: Pair) -> int:
    """Bytes of a row, on the side where it is larger."""
    target, source = pair
    return target.shape[1] * max(target.itemsize, source.itemsize)


def _nbytes(pair: Pair) -> int:
    return pair[0].shape[0] * _row_bytes(pair)


def _copy(piece: Sequence[Pair]) -> None:
    with torch.inference_mode():
        for target, source in piece:
            copy_serially(target, source)


# -- one thread alone --------------------------------------------------------------------------------------------


def work_alone() -> None:
    """Have the calling thread form no teams, where torch's OpenMP runtime can be found. Nothing else changes."""
    torch.get_num_threads()  # torch sets the team's size on a thread's first use; after that it stays as we want it
    for runtime in _runtimes():
        runtime.omp_set_num_threads(1)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The same for as long as the block runs, on a thread that is not ours."""
    threads = torch.get_num_threads()
    work_alone()
    try:
        yield
    finally:
        for runtime in _runtimes():
            runtime.omp_set_num_threads(threads)


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, both ``[num_tokens, hidden_dim]``, on the calling thread only."""
    # A result that was made within inference mode, which belongs to its thread, can be written in that mode alone.
    with torch.inference_mode():
        copy_serially(target, source)


def copy_serially(target: torch.Tensor, source: torch.Tensor) -> None:
    """The same, for a caller who has entered that mode once for many."""
    if torch.get_num_threads() == 1:
        target.copy_(source)
        return
    step = max(1, (_SERIAL_NUMEL - 1) // source.shape[1])
    for begin in range(0, source.shape[0], step):
        target[begin : begin + step].copy_(source[begin : begin + step])


@functools.cache
def _runtimes() -> list[ctypes.CDLL]:
    found = []
    for name in _RUNTIMES:
        try:
            runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # only one that is in use already
            runtime.omp_set_num_threads.argtypes = [ctypes.c_int]
        except (OSError, AttributeError):
            continue
        found.append(runtime)
    return found
