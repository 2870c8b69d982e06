"""Copies of rows on the I/O threads, each on its own thread alone.

torch copies large tensors with a team of OpenMP threads, and those spin for more work afterwards, each on a core that
reading needs: that made a retrieve from disk two to four times slower on two cores, and every I/O thread would get a
team of its own. The size of a team is a property of the thread that forms it (OpenMP's nthreads-var), but
``torch.set_num_threads`` also changes what threads to come start with, so OpenMP is asked directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

import torch

#: OpenMP runtimes that builds of torch link, by the names under which the loader knows them.
_RUNTIMES = ("libgomp.so.1", "libiomp5.so", "libomp.so", "libomp.dylib")
#: at::internal::GRAIN_SIZE: smaller tensors are copied by the calling thread.
_SERIAL_NUMEL = 32768


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


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, both ``[num_tokens, hidden_dim]``, on the calling thread only."""
    if torch.get_num_threads() == 1:
        target.copy_(source)
        return
    step = max(1, (_SERIAL_NUMEL - 1) // source.shape[1])
    for begin in range(0, source.shape[0], step):
        target[begin : begin + step].copy_(source[begin : begin + step])
