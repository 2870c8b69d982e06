"""Where the result of a client's retrieve goes, on the server's side: an ``Outputs``.

Rows that are all in RAM the client copies by itself, out of slots that stay pinned until it has them. When some come
from disk, the server puts the result together, in segments that it shares with this client alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from lmcache_hs_backend.format.pages import align
from lmcache_hs_backend.integrations.lmcache_mp.client_copies import ClientCopies
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import DTYPE_NAMES, Segment
from lmcache_hs_backend.integrations.lmcache_mp.wire import SegmentPlace
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES
from lmcache_hs_backend.tiers.memory.runs import Move
from lmcache_hs_backend.tiers.state.slots import FreeList

_SMALLEST = 16 << 20  # bytes of a segment


class ClientResults:
    """The results of one connection. Shared memory grows as needed, up to ``limit`` bytes.

    Not thread-safe: a connection has one thread.
    """

    def __init__(self, limit: int, copies: ClientCopies) -> None:
        """``copies``: those that the client makes."""
        self._limit = limit
        self._copies = copies
        self.copied = False  # the client has copied its result: there is nothing to reply
        self._segments: list[tuple[Segment, FreeList]] = []
        self._lent: dict[tuple[int, int], int] = {}  # (segment, offset) → bytes, until neither side uses them
        # Those of them that this side may still write: a read that comes too late for its call does.
        self._written: set[tuple[int, int]] = set()
        self._left: deque[tuple[int, int]] = deque()  # of which this side's last view is gone; finalizers append
        self._released: set[tuple[int, int]] = set()  # with which the client is done, and this side is not
        self._new: list[tuple[int, int]] = []  # descriptor and size of segments that the client does not have yet
        self._places: dict[int, SegmentPlace] = {}  # of the call in progress, by the address of the rows

    def begin(self) -> None:
        """A call begins."""
        self.copied = False

    def copy_hot(self, moves: Mapping[int, Sequence[Move]]) -> dict[int, torch.Tensor]:
        """See Outputs. Raises ConnectionError when the client is gone."""
        self._copies.copy(moves)
        self.copied = True
        shapes = {}
        for layer_idx, its_moves in moves.items():
            row, tokens, (_, _, spec) = its_moves[-1]
            dtype = TORCH_DTYPES[spec.dtype]
            shapes[layer_idx] = torch.empty(row + tokens, spec.hidden_dim, dtype=dtype, device="meta")
        return shapes

    def rows(self, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the rows of one layer of a result. Raises MemoryError when the client holds too much."""
        nbytes = align(max(1, num_tokens * hidden_dim * dtype.itemsize))
        number, offset = self._allocate(nbytes)
        self._lent[number, offset] = nbytes
        place = SegmentPlace(0, number, offset, num_tokens, hidden_dim, DTYPE_NAMES[dtype])
        tensor = self._segments[number - 1][0].rows(place, self._left)
        if tensor.numel():
            self._written.add((number, offset))
        self._places[tensor.data_ptr()] = place
        return tensor

    def hand_over(self, result: dict[int, torch.Tensor]) -> list[SegmentPlace]:
        """End a call: the places of its result, none if the client has copied it by itself.

        Memory that was taken for it and is not part of it is free again.
        """
        places: list[SegmentPlace] = []
        if self.copied:
            return places
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
        """The client is done with these. What was never lent is passed over: it may come twice."""
        self._collect()
        for result in results:
            if result in self._written:
                self._released.add(result)
            else:
                self._free(result)

    def _collect(self) -> None:
        """Free what the client has released before this side was done with it."""
        while self._left:
            result = self._left.popleft()
            self._written.discard(result)
            if result in self._released:
                self._released.discard(result)
                self._free(result)

    def _free(self, result: tuple[int, int]) -> None:
        nbytes = self._lent.pop(result, None)
        if nbytes is not None:
            self._segments[result[0] - 1][1].free(result[1], nbytes)

    def close(self) -> None:
        """Let go of everything. The client's tensors keep their memory."""
        for fd, _ in self._new:
            os.close(fd)
        self._segments, self._new, self._lent, self._places = [], [], {}, {}

    def _allocate(self, nbytes: int) -> tuple[int, int]:
        self._collect()
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
        segment, fd = Segment.create(size, "result")
        segment.populate()
        self._new.append((fd, size))
        self._segments.append((segment, FreeList(size)))
        return len(self._segments), self._segments[-1][1].allocate(nbytes)[0]
