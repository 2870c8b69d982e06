"""Memory for what callers get: recycled regions outside the hot tier.

A result in fresh memory costs more in page faults than in copying. ``BufferPool`` hands out whole regions that come
back by themselves when the last tensor over them is gone. It does no I/O.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import weakref
from collections import deque

import torch

from lmcache_hs_backend.format.pages import ALIGN, align
from lmcache_hs_backend.tiers.memory.arena import HUGE_PAGE, map_memory

#: After so many new regions without one coming back, the caller keeps them all: then huge pages, for which the kernel
#: has to compact memory sooner or later, cost more than the faults that they save.
_FRESH_IN_A_ROW = 8
#: Bytes up to which the C library keeps freed memory itself, touched, so that recycling it here gains nothing.
SMALL_RESULT = 1 << 20

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
        self._returned: deque[memoryview] = deque()  # by ``_back``, until a holder of the lock looks
        self._lock = threading.Lock()  # guards _idle; nothing but list work happens under it
        self._idle: list[tuple[memoryview, float]] = []
        self._closed = False
        self._fresh = 0  # how many regions in a row were new: none comes back

    def get(self, nbytes: int) -> Buffer:
        """A region of at least ``nbytes`` bytes, page-aligned, with undefined contents."""
        size = align(max(nbytes, 1), HUGE_PAGE if nbytes >= HUGE_PAGE else ALIGN)
        region = self._reuse(size)
        self._fresh = 0 if region is not None else self._fresh + 1
        if region is None:
            region = map_memory(size, huge=self._fresh <= _FRESH_IN_A_ROW)
        lease = (ctypes.c_char * len(region)).from_buffer(region)
        loan = weakref.ref(lease, self._back)
        self._on_loan[id(loan)] = loan, region
        return Buffer(region, lease, nbytes)

    @functools.cached_property
    def _pinned(self) -> bool:
        return torch.cuda.is_available()  # not in the constructor: asking may spoil a later fork

    def rows(self, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result: ``[num_tokens, hidden_dim]``, undefined. Raises OSError, MemoryError or RuntimeError."""
        if self._pinned:
            # Recycling a region of ours under a copy that is still running would corrupt it; torch knows.
            return torch.empty(num_tokens, hidden_dim, dtype=dtype, pin_memory=True)
        nbytes = num_tokens * hidden_dim * dtype.itemsize
        if nbytes <= SMALL_RESULT:
            return torch.empty(num_tokens, hidden_dim, dtype=dtype)
        return self.get(nbytes).rows(num_tokens, hidden_dim, dtype)

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

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have had it."""
        self._lock = threading.Lock()

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
