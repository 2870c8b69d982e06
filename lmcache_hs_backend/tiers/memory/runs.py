"""Slots of the hot tier as pairs of tensors to copy: one pair per run of adjacent slots.

Slots that follow each other both in the tensor and, without a gap, in memory are copied at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.tiers.memory.arena import Arena
from lmcache_hs_backend.tiers.memory.copies import CopyPair

#: Rows of one layer of one chunk on their way between a tensor and a slot: the first row in the tensor, how many, and
#: the slot as ``(offset, nbytes, spec)``.
Move = tuple[int, int, tuple[int, int, LayerSpec]]


def copy_pairs(arena: Arena, rows: torch.Tensor, moves: Sequence[Move]) -> list[CopyPair]:
    """Pairs of equal shape: rows of the tensor, and the memory of one or more slots."""
    if len(moves) == 1:
        first_row, num_tokens, slot = moves[0]
        return [_pair(arena, rows, first_row, num_tokens, slot[0], slot[2])]
    pairs: list[CopyPair] = []
    spec: LayerSpec | None = None
    # The run so far; ``end`` is where its next slot would begin.
    row = tokens = offset = end = row_bytes = 0
    for first_row, num_tokens, slot in moves:
        begin, nbytes, its_spec = slot
        if begin == end and first_row == row + tokens and its_spec == spec:
            tokens += num_tokens
        else:
            if spec is not None:
                pairs.append(_pair(arena, rows, row, tokens, offset, spec))
            row, tokens, offset, spec = first_row, num_tokens, begin, its_spec
            row_bytes = spec.nbytes(1)
        end = begin + nbytes if nbytes == num_tokens * row_bytes else -1  # padding ends a run
    if spec is not None:
        pairs.append(_pair(arena, rows, row, tokens, offset, spec))
    return pairs


def _pair(arena: Arena, rows: torch.Tensor, row: int, tokens: int, offset: int, spec: LayerSpec) -> CopyPair:
    part = rows if tokens == rows.shape[0] else rows[row : row + tokens]
    return part, arena.rows_at(offset, tokens, spec.hidden_dim, spec.dtype)
