"""Between the threads that read chunks and the call that waits for them.

A call that needs cold chunks hands one ``Waiter`` to all of its reads; each puts one ``Arrival`` there, whatever
became of it. Here is no I/O and no lock: the queue is the only thing that both sides change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lmcache_hs_backend.chunk import ChunkRef
from lmcache_hs_backend.tiers.copying import Copy

_ENOUGH = 2  # arrivals that wait for their caller to copy them


class Arrival(NamedTuple):
    """What became of one ``Read``: ``miss`` is a reason of metrics.MISSES, or None when the rows are there.

    ``rows``: layer_idx → rows that the caller has to copy itself, good for as long as its own lease.
    """

    position: int
    miss: str | None
    rows: Mapping[int, torch.Tensor]


class Waiter:
    """Who waits for the reads of one call: for ``refs[position]`` each, as the reads know them.

    ``result``: layer_idx → memory for the rows of all ``refs``, as soon as there is some.
    """

    def __init__(self, refs: Sequence[ChunkRef]) -> None:
        self.arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self.result: Mapping[int, torch.Tensor] = {}
        self.gave_up = False  # what has not started need not
        self._refs = refs

    @property
    def is_behind(self) -> bool:
        """Whether it has enough to do with what has arrived."""
        return bool(self.result) and self.arrivals.qsize() >= _ENOUGH

    def copy(self, position: int, rows: Mapping[int, torch.Tensor], copy: Copy) -> None:
        """Copy what was read for ``position`` to its place in the result."""
        ref = self._refs[position]
        for layer_idx, source in rows.items():
            copy(self.result[layer_idx][ref.start : ref.end], source)
