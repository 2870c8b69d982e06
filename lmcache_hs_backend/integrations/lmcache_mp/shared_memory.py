"""Memory that a client and the server both map: sealed, without a name, gone with its last user.

A segment is a memfd, so nothing is left in /dev/shm when a process is killed, and a container's limit on /dev/shm does
not apply. It is sealed against shrinking: a peer that cut it would otherwise crash whoever touches it next.

Today rows are copied into or out of such memory, and the server copies once more between it and the hot tier's slots (a
result is written into it directly). A ``wire.SegmentPlace`` names a segment, so the hot tier's
own arena can become one.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Iterable

import torch

from lmcache_hs_backend.format.pages import ALIGN, align
from lmcache_hs_backend.integrations.lmcache_mp.wire import SegmentPlace
from lmcache_hs_backend.tiers.state.slots import FreeList

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SMALLEST = 16 << 20  # bytes of a segment for results


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
        self.mapping = mmap.mmap(fd, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> tuple[Segment, int]:
        """New memory and its descriptor, the caller's to send and close. Raises OSError."""
        fd = os.memfd_create("lmcache-hs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, nbytes), fd
        except BaseException:
            os.close(fd)
            raise

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
        memory = (ctypes.c_char * nbytes).from_buffer(self.mapping, place.offset)
        if returned is not None:
            # It runs wherever the last view goes away, inside any lock: it does nothing but append.
            weakref.finalize(memory, returned.append, (place.segment, place.offset)).atexit = False
        with torch.inference_mode(False):
            flat = torch.frombuffer(memory, dtype=dtype)
        return flat.view(place.num_tokens, place.hidden_dim)


class SharedOutputs:
    """The memory of one client's results, on the server's side: grows as needed, up to ``limit`` bytes.

    Not thread-safe: a client's connection has one thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._segments: list[tuple[Segment, FreeList]] = []
        self._lent: dict[tuple[int, int], int] = {}  # (segment, offset) → bytes, until the client releases them
        self._new: list[tuple[int, int]] = []  # descriptor and size of segments that the client does not have yet
        self._places: dict[int, SegmentPlace] = {}  # of the call in progress, by the address of the rows

    def rows(self, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the rows of one layer of a result. Raises MemoryError when the client holds too much."""
        nbytes = align(max(1, num_tokens * hidden_dim * dtype.itemsize))
        number, offset = self._allocate(nbytes)
        self._lent[number, offset] = nbytes
        place = SegmentPlace(0, number, offset, num_tokens, hidden_dim, DTYPE_NAMES[dtype])
        tensor = self._segments[number - 1][0].rows(place)
        self._places[tensor.data_ptr()] = place
        return tensor

    def hand_over(self, result: dict[int, torch.Tensor]) -> list[SegmentPlace]:
        """End a call: the places of its result. Memory that was taken for it and is not part of it is free again."""
        places = []
        for layer_idx, tensor in result.items():
            place = self._places.pop(tensor.data_ptr())
            place.layer_idx, place.num_tokens = layer_idx, tensor.shape[0]
            places.append(place)
        self.release((place.segment, place.offset) for place in self._places.values())
        self._places = {}
        return places

    def take_new(self) -> list[tuple[int, int]]:
        """(descriptor, size) of the segments that the client does not have yet, to be sent and closed."""
        new, self._new = self._new, []
        return new

    def release(self, results: Iterable[tuple[int, int]]) -> None:
        """The client is done with these. What was never lent is passed over: it may have been said twice."""
        for number, offset in results:
            nbytes = self._lent.pop((number, offset), None)
            if nbytes is not None:
                self._segments[number - 1][1].free(offset, nbytes)

    def close(self) -> None:
        """Let go of everything. The client's tensors keep their memory."""
        for fd, _ in self._new:
            os.close(fd)
        self._segments, self._new, self._lent, self._places = [], [], {}, {}

    def _allocate(self, nbytes: int) -> tuple[int, int]:
        for number, (_, slots) in enumerate(self._segments, 1):
            offsets = slots.allocate(nbytes)
            if offsets:
                return number, offsets[0]
        held = sum(segment.nbytes for segment, _ in self._segments)
        size = align(max(_SMALLEST, held, nbytes))  # twice as much as before, as far as that is allowed
        if held + size > self._limit:
            size = align(nbytes)
        if held + size > self._limit:
            raise MemoryError(f"the client holds results of {held} bytes, of client_memory {self._limit}")
        segment, fd = Segment.create(size)
        self._new.append((fd, size))
        self._segments.append((segment, FreeList(size)))
        return len(self._segments), self._segments[-1][1].allocate(nbytes)[0]
