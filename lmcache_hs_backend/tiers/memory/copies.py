"""Copies of rows in memory, by torch's team of threads or piece by piece by whichever thread has time.

torch copies a large tensor with a team of OpenMP threads: one more core for one copy, at the price of waiting for
the slowest of them, and of threads that spin for more work afterwards. Where cores are busy, which on a server is
the rule, the price is a time slice for *each* copy: 16 scattered chunks took 116 ms instead of 10. So teams are for
few copies, or large ones; of many small ones, whichever thread has time takes the next (``SharedCopies``).

The size of a team is a property of the thread that forms it (OpenMP's nthreads-var). ``torch.set_num_threads`` also
changes what threads to come start with, so OpenMP is asked directly. Which thread copies what is decided in
``flows.copier``; this module knows nothing of chunks, files or threads' work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

#: Where the rows go, and where they come from; both ``[num_tokens, hidden_dim]``.
CopyPair = tuple[torch.Tensor, torch.Tensor]
#: Copies the second into the first, converting.
CopyRows = Callable[[torch.Tensor, torch.Tensor], object]

#: OpenMP runtimes that builds of torch link, by the names under which the loader knows them.
_RUNTIMES = ("libgomp.so.1", "libiomp5.so", "libomp.so", "libomp.dylib")
#: at::internal::GRAIN_SIZE: smaller tensors are copied by the calling thread.
_SERIAL_NUMEL = 32768
#: Bytes that a thread takes at a time: enough to be worth waking one, little enough to end together.
_PIECE_BYTES = 4 << 20


class SharedCopies:
    """Pieces of a copy that several threads take one by one. Taking one is atomic, and its taker finishes it."""

    def __init__(self, pieces: Sequence[Sequence[CopyPair]]) -> None:
        """See ``pieces_of``."""
        self._left = deque(pieces)
        self._helping: deque[None] = deque()  # one for each thread that may have a piece in hand
        self.running = threading.Lock()  # the caller's, until it has left ``finish``, by whatever way
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._others = len(pieces)  # how many pieces the caller has not taken

    def help(self) -> None:
        """Take pieces as long as there are any, on an I/O thread."""
        self._helping.append(None)
        try:
            self._help()
        finally:
            self._helping.pop()

    def _help(self) -> None:
        while True:
            try:
                piece = self._left.popleft()
            except IndexError:
                return
            try:
                copy_all(piece)
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                self._done.put(error)
            else:
                self._done.put(None)

    def at_rest(self) -> bool:
        """Whether the caller has left and no thread has a piece in hand; then none is begun any more.

        An exception from outside may end ``finish`` before others have ended what they had begun.
        """
        if self.running.locked():
            return False
        self._left.clear()
        return not self._helping

    def finish(self) -> None:
        """Take pieces as well, on the caller's thread, and wait for those that others have taken.

        Raises what a copy has raised, when no thread works on any of them any more.
        """
        try:
            while (piece := self._take()) is not None:
                copy_all(piece)
        finally:
            while self._take() is not None:
                pass  # after an error no further piece is begun
            errors = [self._done.get() for _ in range(self._others)]
        for error in errors:
            if error is not None:
                raise error

    def _take(self) -> Sequence[CopyPair] | None:
        try:
            piece = self._left.popleft()
        except IndexError:
            return None
        self._others -= 1
        return piece


def pieces_of(pairs: Sequence[CopyPair]) -> list[list[CopyPair]]:
    """The same copies in pieces of about _PIECE_BYTES: large ones cut, small ones together."""
    pieces: list[list[CopyPair]] = []
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


def _row_bytes(pair: CopyPair) -> int:
    """Bytes of a row, on the side where it is larger."""
    target, source = pair
    return target.shape[1] * max(target.itemsize, source.itemsize)


# -- bytes as they are -------------------------------------------------------------------------------------------

#: ``memmove`` that keeps the interpreter's lock, and the one of ctypes, which gives it up meanwhile.
_move_at_once = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.CDLL(None))
)
#: So few bytes are copied, 50 µs, before another thread would have let go of the interpreter again.
_AT_ONCE_BYTES = 1 << 20


def plain_address(rows: torch.Tensor) -> int:
    """Where in this process's memory the bytes of ``rows`` lie one after the other; 0 when they do not."""
    # A tensor of another type, or with the sign bit pending, is not what its memory says.
    if type(rows) is not torch.Tensor or not rows.is_cpu or not rows.is_contiguous() or rows.is_neg():
        return 0
    return rows.data_ptr()


def move_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy memory from one address to another on the calling thread alone: a third of what torch takes for little."""
    (_move_at_once if nbytes <= _AT_ONCE_BYTES else ctypes.memmove)(target, source, nbytes)


def pair_bytes(pair: CopyPair) -> int:
    """Bytes that a copy moves, on the side where they are more."""
    return pair[0].shape[0] * _row_bytes(pair)


def copy_all(piece: Sequence[CopyPair]) -> None:
    """Copy each pair on the calling thread alone."""
    with torch.inference_mode():
        for target, source in piece:
            copy_serially(target, source)


# -- one thread alone --------------------------------------------------------------------------------------------


def work_alone() -> None:
    """Have the calling thread form no teams, where torch's OpenMP runtime can be found. Nothing else changes."""
    torch.get_num_threads()  # torch sets the team's size on a thread's first use; after that it stays as we want it
    _form_teams_of(1)


def _form_teams_of(threads: int) -> None:
    for runtime in _runtimes():
        runtime.omp_set_num_threads(threads)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The same for as long as the block runs, on a caller's thread."""
    threads = torch.get_num_threads()
    work_alone()
    try:
        yield
    finally:
        _form_teams_of(threads)


def copy_without_team(pairs: Sequence[CopyPair]) -> None:
    """Copy each pair on the calling thread alone, in the mode of inference that it is in. For a few small copies."""
    if not _runtimes():
        copy_all(pairs)
        return
    threads = torch.get_num_threads()
    try:  # as in ``alone``, but every small call comes by here, and a generator is a detour
        work_alone()
        for target, source in pairs:
            target.copy_(source)
    finally:
        _form_teams_of(threads)


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
    found: list[ctypes.CDLL] = []
    for name in _RUNTIMES:
        try:
            # Only one that is in use already; a call is too short to give up the interpreter's lock for.
            runtime = ctypes.PyDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            runtime.omp_set_num_threads.argtypes = [ctypes.c_int]
        except (OSError, AttributeError):
            continue
        found.append(runtime)
    return found
