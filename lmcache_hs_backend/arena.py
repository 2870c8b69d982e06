"""Memory for rows: the slots of the hot tier, and recycled buffers for what callers get.

``Arena`` hands out 4096-aligned slots of one anonymous mapping. It is not thread-safe: the store's lock
guards it, and its operations take constant time (except where free memory is scattered over many
different sizes). ``BufferPool`` hands out whole regions that come back by themselves when the last
tensor over them is gone. Neither does I/O.

Mappings are never unmapped by hand. Whoever may still touch one (an I/O thread, a caller's tensor) holds
a reference to it, so memory goes away after its last user and never before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections import deque

import torch

from lmcache_hs_backend.format.pages import ALIGN, align

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
#: After so many new regions without one coming back, the caller keeps them all: then huge pages, for which the kernel
#: has to compact memory sooner or later, cost more than the faults that they save.
_FRESH_IN_A_ROW = 8


def _memory(nbytes: int, *, huge: bool = True) -> memoryview:
    """Anonymous private memory, virtual until touched; ``huge``: in huge pages where the kernel gives them.

    Then it begins where a huge page does. In front of the first one there would be small pages, and a slot or result in
    them is hundreds of pieces for the disk, which takes a limited number at once: one file of 2 MiB took 1.4 ms instead
    of 0.8. (Kernels from 6.7 on align some mappings by themselves.)
    """
    huge = huge and nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    mapping = mmap.mmap(-1, nbytes + (HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not huge:
        return memoryview(mapping)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without transparent huge pages
        logger.debug("no huge pages: %s", error)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE
    return memoryview(mapping)[first : first + nbytes]


class Arena:
    """Slots of one fixed region of memory: segregated fit with coalescing.

    A slot is ``(offset, nbytes)`` with both multiples of 4096. The smallest free run that can hold a
    request is cut, so what was freed together is given out together again.
    """

    def __init__(self, capacity: int) -> None:
        """Reserve ``capacity`` bytes (rounded down to 4096) of virtual memory."""
        self.capacity = capacity // ALIGN * ALIGN
        if self.capacity <= 0:
            raise ValueError(f"a hot tier of {capacity} bytes cannot hold one page of {ALIGN} bytes")
        self._view = _memory(self.capacity)
        with torch.inference_mode(False):  # a store that is opened, or first used, within it shall not be bound to it
            self._base = torch.frombuffer(self._view, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self.free_bytes = self.capacity
        self.pinned = False
        # Free runs, three ways: by where they start, by where they end, and by how long they are.
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sizes: dict[int, dict[int, None]] = {}
        self._insert(0, self.capacity)

    def pin(self) -> None:
        """Register the region for direct GPU transfers. Raises RuntimeError when CUDA refuses."""
        # torch's own pin_memory would round the size up to a power of two.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = cudart.cudaHostRegister(self._base.data_ptr(), self.capacity, 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {self.capacity} bytes failed with status {int(status)}")
        self.pinned = True

    def unpin(self) -> None:
        """Undo ``pin``."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._base.data_ptr())  # type: ignore[no-untyped-call]
            self.pinned = False

    def release(self) -> None:
        """Let go of the memory. Only when nobody uses a slot; it is unmapped once no view of it is left."""
        self.unpin()
        self._typed.clear()
        self._base = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")

    # -- slots ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, count: int = 1) -> list[int]:
        """Offsets of up to ``count`` slots of ``nbytes`` (a multiple of 4096), adjacent as far as possible.

        Fewer than ``count`` when memory is short; ascending within each free run that is used.
        """
        offsets: list[int] = []
        while len(offsets) < count:
            run = self._pick((count - len(offsets)) * nbytes, nbytes)
            if run is None:
                break
            start, size = run
            fit = min(count - len(offsets), size // nbytes)
            self._remove(start)
            offsets.extend(range(start, start + fit * nbytes, nbytes))
            if size > fit * nbytes:
                self._insert(start + fit * nbytes, size - fit * nbytes)
        self.free_bytes -= len(offsets) * nbytes
        return offsets

    def free(self, offset: int, nbytes: int) -> None:
        """Give a slot back; it joins with its free neighbours."""
        self.free_bytes += nbytes
        before = self._ends.get(offset)
        if before is not None:
            self._remove(before)
            nbytes += offset - before
            offset = before
        after = self._starts.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes)
            nbytes += after
        self._insert(offset, nbytes)

    def _pick(self, wanted: int, least: int) -> tuple[int, int] | None:
        """The smallest free run of at least ``wanted`` bytes, else the largest of at least ``least``."""
        if wanted in self._sizes:
            size = wanted
        else:
            size = min((s for s in self._sizes if s > wanted), default=0) or max(self._sizes, default=0)
            if size < least:
                return None
        return next(iter(self._sizes[size])), size

    def _insert(self, start: int, size: int) -> None:
        self._starts[start] = size
        self._ends[start + size] = start
        self._sizes.setdefault(size, {})[start] = None

    def _remove(self, start: int) -> None:
        size = self._starts.pop(start)
        del self._ends[start + size]
        same = self._sizes[size]
        del same[start]
        if not same:
            del self._sizes[size]

    # -- contents ------------------------------------------------------------------------------------

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a slot, for I/O and checksums."""
        return self._view[offset : offset + nbytes]

    def rows_at(self, offset: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows of a slot, or of a run of adjacent slots, as ``[num_tokens, hidden_dim]``."""
        # One call into torch instead of two: it is on the way of every chunk.
        return self._typed_base(dtype).as_strided((num_tokens, hidden_dim), (hidden_dim, 1), offset // dtype.itemsize)

    def _typed_base(self, dtype: torch.dtype) -> torch.Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            with torch.inference_mode(False):
                typed = self._typed[dtype] = self._base.view(dtype)
        return typed


_Loan = weakref.ref[ctypes.Array[ctypes.c_char]]


class Buffer:
    """A region on loan from a ``BufferPool``: bytes for I/O and a tensor for the rows.

    It goes back when neither this object nor any view of its tensor is left.
    """

    def __init__(self, region: memoryview, lease: ctypes.Array[ctypes.c_char], nbytes: int) -> None:
        self._region = region
        self._lease = lease
        self.nbytes = nbytes

    def bytes(self) -> memoryview:
        """The bytes, for I/O. Keep this object for as long as they are in use."""
        return self._region[: self.nbytes]

    def rows(self, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """A ``[num_tokens, hidden_dim]`` tensor over the bytes; it keeps the region on loan by itself."""
        flat = torch.frombuffer(self._lease, dtype=dtype, count=num_tokens * hidden_dim)
        return flat.view(num_tokens, hidden_dim)


class BufferPool:
    """Recycled regions for results: pages that were touched once need no fault the next time.

    A result in fresh memory costs more in page faults than in copying. Idle regions are kept up to
    ``idle_limit`` bytes and for at most ``idle_sec`` seconds. Callers may keep what they got for ever:
    then there is nothing to recycle, and the next result comes from fresh memory.
    """

    def __init__(self, idle_limit: int, idle_sec: float = 60.0) -> None:
        self._idle_limit = idle_limit
        self._idle_sec = idle_sec
        self._on_loan: dict[int, tuple[_Loan, memoryview]] = {}  # by the id of the first, which has no hash
        self._returned: deque[memoryview] = deque()  # by ``_back``, until somebody who holds the lock looks
        self._lock = threading.Lock()  # guards _idle; nothing but list work happens under it
        self._idle: list[tuple[memoryview, float]] = []
        self._closed = False
        self._fresh = 0  # how many regions in a row were new: nobody gives any back

    def get(self, nbytes: int) -> Buffer:
        """A region of at least ``nbytes`` bytes, page-aligned, with undefined contents."""
        size = align(max(nbytes, 1), HUGE_PAGE if nbytes >= HUGE_PAGE else ALIGN)
        region = self._reuse(size)
        self._fresh = 0 if region is not None else self._fresh + 1
        if region is None:
            region = _memory(size, huge=self._fresh <= _FRESH_IN_A_ROW)
        lease = (ctypes.c_char * len(region)).from_buffer(region)
        loan = weakref.ref(lease, self._back)
        self._on_loan[id(loan)] = loan, region
        return Buffer(region, lease, nbytes)

    def _back(self, loan: _Loan) -> None:
        # Runs wherever the last view happens to go away, inside any lock, this pool's included: it may take none.
        region = self._on_loan.pop(id(loan))[1]
        if not self._closed:
            self._returned.append(region)

    def _reuse(self, size: int) -> memoryview | None:
        with self._lock:
            self._collect()
            best, best_size = -1, 2 * size + 1
            for number, (region, _) in enumerate(self._idle):
                if size <= len(region) < best_size:
                    best, best_size = number, len(region)
            return None if best < 0 else self._idle.pop(best)[0]

    def trim(self) -> None:
        """Let go of regions that have been idle too long or are too many. Called now and then."""
        with self._lock:
            self._collect()
            oldest = time.monotonic() - self._idle_sec
            self._idle = [item for item in self._idle if item[1] > oldest]

    def close(self) -> None:
        """Keep nothing from now on. Regions still on loan live until their users are gone."""
        with self._lock:
            self._closed = True
            self._collect()
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes of regions that wait to be used again."""
        with self._lock:
            self._collect()
            return sum(len(region) for region, _ in self._idle)

    def _collect(self) -> None:
        """Take what finalizers have returned; keep the most recent within the limit."""
        if not self._returned:
            return
        now = time.monotonic()
        while self._returned:
            self._idle.append((self._returned.popleft(), now))
        limit = 0 if self._closed else self._idle_limit
        total = sum([len(region) for region, _ in self._idle])
        while total > limit:
            total -= len(self._idle.pop(0)[0])
