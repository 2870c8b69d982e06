"""The hot tier in a client: it maps the server's memory, and copies its own rows in and results out.

The server names the slots: for a store ones that nothing else uses, for a retrieve ones that it has pinned. A client
touches no others.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from lmcache_hs_backend.format.pages import ALIGN
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import Segment
from lmcache_hs_backend.integrations.lmcache_mp.wire import BrokenMessage, HotRun
from lmcache_hs_backend.tiers.memory.arena import HUGE_PAGE, Arena, populate
from lmcache_hs_backend.tiers.memory.copies import CopyPair, copy_without_team, move_bytes, pair_bytes, plain_address
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

logger = logging.getLogger(__name__)

#: So few copies that forming a team of threads for each does not count, if they are so large that waiting for a time
#: slice, 3 or 4 ms, does not count either: 4 MiB take a thread alone 0.3 ms, and took a team 5 ms on busy cores.
_FEW_PAIRS = 4
_TEAM_BYTES = 32 << 20


class HotMemory:
    """The hot tier of a store, as a client maps it. Thread-safe: the server gives no slot to two copies at a time."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map ``fd``, which stays the caller's to close. Raises ValueError or OSError."""
        view = Segment(fd, nbytes).view
        self._arena = Arena(nbytes, lambda _: view)
        self._populated = bytearray(-(-nbytes // HUGE_PAGE))  # which pieces of that size
        self._may_pin = True

    def copy_in(self, rows: Mapping[int, torch.Tensor], runs: Iterable[HotRun]) -> None:
        """Copy rows to where the server wants them; they are there when it returns.

        Args:
            rows: layer_idx → ``[num_tokens, hidden_dim]``, on any device.
            runs: Which of them go where.

        Raises:
            BrokenMessage: A run does not lie within the rows or the hot tier.
        """
        pairs: list[CopyPair] = []
        devices: set[torch.device] = set()
        for run in runs:
            tensor = rows.get(run.layer_idx)
            if tensor is None or tensor.shape[1] != run.hidden_dim or run.row + run.num_tokens > tensor.shape[0]:
                raise BrokenMessage(f"other rows are wanted of layer {run.layer_idx} than there are")
            pairs.append((self._slots(run), tensor.detach()[run.row : run.row + run.num_tokens]))
            if tensor.is_cuda:
                devices.add(tensor.device)
        if not devices:
            _copy(pairs)
            return
        self._pin(next(iter(devices)))
        try:
            for slots, source in pairs:
                slots.copy_(source, non_blocking=True)
        finally:  # also after an error: nothing may write into slots that are given back
            for device in devices:
                torch.cuda.current_stream(device).synchronize()

    def copy_out(
        self,
        runs: Sequence[HotRun],
        dtype: torch.dtype | None,
        allocate: Callable[[int, int, torch.dtype], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """layer_idx → a copy of its rows.

        Args:
            runs: Where they are.
            dtype: Of the result; None: as the rows are kept.
            allocate: Gives memory: ``[num_tokens, hidden_dim]`` of a dtype.

        Raises:
            BrokenMessage: A run does not lie within the hot tier.
            OSError, MemoryError, RuntimeError: There is no memory for the result.
        """
        result: dict[int, torch.Tensor] = {}
        tokens: dict[int, int] = {}
        for run in runs:
            tokens[run.layer_idx] = max(tokens.get(run.layer_idx, 0), run.row + run.num_tokens)
        pairs: list[CopyPair] = []
        for run in runs:
            slots = self._slots(run)
            if run.layer_idx not in result:
                result[run.layer_idx] = allocate(tokens[run.layer_idx], run.hidden_dim, dtype or slots.dtype)
            pairs.append((result[run.layer_idx][run.row : run.row + run.num_tokens], slots))
        _copy(pairs)
        return result

    def _slots(self, run: HotRun) -> torch.Tensor:
        dtype = TORCH_DTYPES.get(run.dtype)
        nbytes = 0 if dtype is None else run.num_tokens * run.hidden_dim * dtype.itemsize
        if not nbytes or run.offset % ALIGN or run.offset + nbytes > self._arena.capacity:
            raise BrokenMessage(f"rows at {run.offset} of a hot tier of {self._arena.capacity} bytes: {run}")
        self._populate(run.offset, nbytes)
        return self._arena.rows_at(run.offset, run.num_tokens, run.hidden_dim, run.dtype)

    def _populate(self, offset: int, nbytes: int) -> None:
        for number in range(offset // HUGE_PAGE, -(-(offset + nbytes) // HUGE_PAGE)):
            if not self._populated[number]:
                self._populated[number] = 1
                begin = number * HUGE_PAGE
                granule = self._arena.bytes_at(begin, min(HUGE_PAGE, self._arena.capacity - begin))
                populate(torch.frombuffer(granule, dtype=torch.uint8))

    def _pin(self, device: torch.device) -> None:
        """Once: register the mapping with CUDA, or copies from a GPU go through memory of the driver's."""
        if self._may_pin:
            self._may_pin = False
            try:
                with torch.cuda.device(device):
                    self._arena.pin()
                weakref.finalize(self, self._arena.unpin).atexit = False
            except RuntimeError as error:
                logger.warning("copies from the GPU are slower, the hot tier cannot be pinned here: %s", error)


def _copy(pairs: Sequence[CopyPair]) -> None:
    """Copy each pair, as ``flows.copier`` does where there are no I/O threads to help and cores are busy.

    They are: the server has just worked on one of them for this call.
    """
    if len(pairs) <= _FEW_PAIRS and sum(map(pair_bytes, pairs)) >= _TEAM_BYTES:
        for target, source in pairs:
            target.copy_(source)
        return
    converted = [pair for pair in pairs if not _move(*pair)]
    if converted:
        copy_without_team(converted)


def _move(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy bytes as they are. False, and nothing is copied, if rows have to be converted or do not lie together."""
    to, come_from = plain_address(target), plain_address(source)
    if target.dtype != source.dtype or target.shape != source.shape or not to or not come_from:
        return False
    move_bytes(to, come_from, source.nbytes)
    return True
