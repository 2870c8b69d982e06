"""The memory of the hot tier: one mapping, seen as bytes for I/O and as rows for copies.

Which of its bytes are free is ``state.slots``' business; this module does no bookkeeping and no I/O. The mapping is
never unmapped by hand: whatever may still touch it (an I/O thread, a caller's tensor) holds a reference to it, so
memory goes away after its last user and never before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable

import torch

from lmcache_hs_backend.tiers.memory.copies import move_bytes
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

logger = logging.getLogger(__name__)

#: Maps so many bytes.
MapMemory = Callable[[int], memoryview]

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1

_libc = ctypes.CDLL(None, use_errno=True)


def map_memory(nbytes: int, *, huge: bool = True) -> memoryview:
    """Anonymous private memory, virtual until touched; ``huge``: in huge pages where the kernel gives them.

    Then it begins where a huge page does. In front of the first one there would be small pages, and a slot or result in
    them is hundreds of pieces for the disk, which takes a limited number at once: one file of 2 MiB took 1.4 ms instead
    of 0.8. (Kernels from 6.7 on align some mappings by themselves.) Raises OSError or ValueError when the system
    refuses.
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


def populate(memory: torch.Tensor) -> bool:
    """Have the kernel provide memory for writing, in one call instead of a fault for each page.

    It begins at a page. Contents stay; the GIL is released. False when the kernel (before Linux 5.14) cannot do it.
    """
    return _madvise(memory, _MADV_POPULATE_WRITE)


def _madvise(memory: torch.Tensor, advice: int) -> bool:
    address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    return not _libc.madvise(address, nbytes, advice)


class Arena:
    """``capacity`` bytes (a multiple of 4096) of virtual memory; pages are touched when rows come."""

    def __init__(self, capacity: int, map_bytes: MapMemory = map_memory) -> None:
        """``map_bytes``: where the memory comes from. Raises what it raises when so many bytes cannot be mapped."""
        self._is_shared = map_bytes is not map_memory
        self.capacity = capacity
        self.pinned = False
        self.touched_bytes = 0  # from the start on; see touch
        self._view = map_bytes(capacity)
        with torch.inference_mode(False):  # a store that is opened, or first used, within it shall not be bound to it
            self._base = torch.frombuffer(self._view, dtype=torch.uint8)
        self._address = self._base.data_ptr()
        self._typed: dict[str, torch.Tensor] = {}
        self._readable: dict[str, torch.Tensor] = {}

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
        """Give up the memory, when no slot is in use any more; it is unmapped once no view of it is left."""
        self.unpin()
        self._typed.clear()
        self._readable.clear()
        self._base = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")

    def touch(self, nbytes: int) -> bool:
        """Have the kernel provide the next ``nbytes`` that were never used, without a change of their contents.

        The first use of memory costs a page fault, ten times what the copy into it takes. Releases the GIL meanwhile.
        Returns False when all of it is touched, or the kernel (before Linux 5.14) cannot do it.
        """
        base = self._base  # keeps the mapping, should it be released now
        end = min(self.touched_bytes + nbytes, base.numel())
        if self.pinned or end <= self.touched_bytes:
            return False
        memory = base[self.touched_bytes : end]
        if not populate(memory):
            return False
        if self._is_shared:  # for that the kernel gives small pages: each process that maps them has a fault for each
            _madvise(memory, _MADV_COLLAPSE)
        self.touched_bytes = end
        return True

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space; 0 after ``release``."""
        return len(self._view)

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a slot, for I/O and checksums."""
        return self._view[offset : offset + nbytes]

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Fill a slot, or a run of adjacent slots, from another address of this process; see ``copies.move_bytes``."""
        view = self._view  # keeps the mapping, should it be released now
        if offset + nbytes > len(view):
            raise ValueError("the slot is not in this memory, or it was released")
        move_bytes(self._address + offset, source, nbytes)

    def rows_at(
        self, offset: int, num_tokens: int, hidden_dim: int, dtype: str, *, to_read: bool = False
    ) -> torch.Tensor:
        """The rows of a slot, or of a run of adjacent slots: ``[num_tokens, hidden_dim]`` of ``dtype`` ("BF16", …).

        ``to_read``: they are copied from only. Then it is an inference tensor, which is a view in less time.
        """
        views = self._readable if to_read else self._typed
        typed = views.get(dtype)
        if typed is None:
            with torch.inference_mode(to_read):
                typed = views[dtype] = torch.frombuffer(self._view, dtype=TORCH_DTYPES[dtype])
        # One call into torch instead of two: it is on the way of every chunk.
        return typed.as_strided((num_tokens, hidden_dim), (hidden_dim, 1), offset // typed.itemsize)
