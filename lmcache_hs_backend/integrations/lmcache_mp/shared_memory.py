"""Memory that a client and the server both map: sealed, without a name, gone with its last user.

A segment is a memfd, so nothing is left in /dev/shm when a process is killed, and a container's limit on /dev/shm does
not apply. It is sealed against shrinking, because memory that was cut crashes the process that touches it next.

What costs is the first touch of a page, in each process that maps it: memory is populated in large pieces, and begins
where a huge page does.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import weakref
from collections import deque

import torch

from lmcache_hs_backend.format.pages import ALIGN
from lmcache_hs_backend.integrations.lmcache_mp.wire import SegmentPlace
from lmcache_hs_backend.tiers.memory.arena import HUGE_PAGE, populate

#: dtypes of results, as they are named on the wire.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.munmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """Shared memory, mapped for as long as this object or a tensor over it lives."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map ``fd``, which stays the caller's to close.

        Raises:
            ValueError: It is not sealed memory of ``nbytes`` bytes.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes or nbytes <= 0:
            raise ValueError(f"a shared segment of {nbytes} bytes was announced; the descriptor is something else")
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            sealed = 0
        if sealed & _SEALS != _SEALS:
            raise ValueError("shared memory has to be a memfd that is sealed against shrinking and growing")
        self.nbytes = nbytes
        self.view = _map(fd, nbytes)

    @classmethod
    def create(cls, nbytes: int, kind: str) -> tuple[Segment, int]:
        """New memory and its descriptor, the caller's to send and close. Raises OSError.

        ``kind``: what /proc/<pid>/maps shows of it, as ``memfd:lmcache-hs-<kind>``.
        """
        fd = os.memfd_create(f"lmcache-hs-{kind}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, nbytes), fd
        except BaseException:
            os.close(fd)
            raise

    def populate(self) -> None:
        """Have the kernel provide the memory now, where it can. Other processes that map it do that for themselves."""
        populate(torch.frombuffer(self.view, dtype=torch.uint8))

    def rows(self, place: SegmentPlace, returned: deque[tuple[int, int]] | None = None) -> torch.Tensor:
        """The rows at a place, as a tensor that keeps the memory mapped.

        ``returned`` gets (segment, offset) when the last view of the tensor is gone.

        Raises:
            ValueError: The place does not lie within the segment, or its dtype is none that rows have.
        """
        dtype = DTYPES.get(place.dtype)
        if dtype is None:
            raise ValueError(f"rows of dtype {place.dtype!r}; allowed are {', '.join(DTYPES)}")
        nbytes = place.num_tokens * place.hidden_dim * dtype.itemsize
        if place.offset % ALIGN or place.offset + nbytes > self.nbytes:
            raise ValueError(f"rows of {nbytes} bytes at {place.offset} of a shared segment of {self.nbytes} bytes")
        if not nbytes:
            return torch.empty(0, place.hidden_dim, dtype=dtype)
        memory = (ctypes.c_char * nbytes).from_buffer(self.view, place.offset)
        if returned is not None:
            # It runs wherever the last view goes away, inside any lock: it does nothing but append.
            weakref.finalize(memory, returned.append, (place.segment, place.offset)).atexit = False
        with torch.inference_mode(False):
            flat = torch.frombuffer(memory, dtype=dtype)
        return flat.view(place.num_tokens, place.hidden_dim)


def _map(fd: int, nbytes: int) -> memoryview:
    """Map a descriptor so that it begins at a huge page; unmapped with the last view of it. Raises OSError."""
    reserved = nbytes + HUGE_PAGE
    base = _libc.mmap(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    begin = -(-base // HUGE_PAGE) * HUGE_PAGE if base not in (None, _MAP_FAILED) else _MAP_FAILED
    if begin == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{nbytes} bytes of shared memory cannot be mapped")
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(begin, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != begin:
        error = ctypes.get_errno()
        _libc.munmap(base, reserved)
        raise OSError(error, f"{nbytes} bytes of shared memory cannot be mapped")
    memory = (ctypes.c_char * nbytes).from_address(begin)
    weakref.finalize(memory, _libc.munmap, base, reserved).atexit = False
    return memoryview(memory).cast("B")
