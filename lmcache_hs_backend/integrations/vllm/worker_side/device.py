"""Rows off the device: out of the paged hidden-states cache, into host memory.

vLLM keeps the rows of running requests in one tensor ``[num_blocks, num_layers, block_size, hidden_dim]``;
the rows of a token are in block ``position // block_size`` of its request. With an accelerator the copies run on a
stream of their own into pinned memory, and starting one does not wait; without an accelerator they are plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class HostRows(NamedTuple):
    """Rows on their way to, or in, host memory. ``arrived`` is None when they are there."""

    tensors: list[torch.Tensor]
    arrived: torch.cuda.Event | None

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they have arrived. Blocks."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class HiddenStatesCache:
    """vLLM's cache of hidden states, for reading."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        self.num_blocks, self.num_layers, self.block_size, self.hidden_dim = cache.shape
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._cache.dtype

    def layers(self, blocks: Sequence[int], start: int, num_tokens: int, positions: Sequence[int]) -> HostRows:
        """One ``[num_tokens, hidden_dim]`` tensor per layer: the tokens from position ``start`` on.

        ``blocks`` begin with the one that holds ``start``; ``positions`` are those of the layers in the cache.
        """
        first = start % self.block_size

        def gather(index: torch.Tensor) -> list[torch.Tensor]:
            gathered = (self._cache[:, layer].index_select(0, index) for layer in positions)
            return [rows.view(-1, self.hidden_dim)[first : first + num_tokens] for rows in gathered]

        return self._copy(blocks, gather)

    def tokens(self, blocks: Sequence[int], num_tokens: int) -> HostRows:
        """One ``[num_tokens, num_layers, hidden_dim]`` tensor: the tokens from position 0 on."""

        def gather(index: torch.Tensor) -> list[torch.Tensor]:
            slots = torch.arange(num_tokens, device=index.device)
            return [self._cache[index[slots // self.block_size], :, slots % self.block_size]]

        return self._copy(blocks, gather)

    def protect(self) -> None:
        """Let the device write blocks again only after the copies under way have read them."""
        if self._last is not None:
            torch.cuda.current_stream(self._cache.device).wait_event(self._last)

    def wait_for_copies(self) -> None:
        """Return when no copy reads the cache any more. Blocks."""
        if self._last is not None:
            self._last.synchronize()  # copies run in order, so it is the last to end

    def _copy(self, blocks: Sequence[int], gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> HostRows:
        if self._stream is None:
            return HostRows(gather(torch.tensor(blocks, dtype=torch.long)), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, dtype=torch.long, pin_memory=True).to(self._cache.device, non_blocking=True)
            host = []
            for rows in gather(index):
                pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                host.append(pinned.copy_(rows, non_blocking=True))
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        self._last = arrived
        return HostRows(host, arrived)
