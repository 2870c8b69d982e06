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


#: Rows of one layer that lie side by side both in the tensor and in memory: the first row, how many, and the offset.
Run = tuple[int, int, int, LayerSpec]


def runs_of(moves: Sequence[Move]) -> list[Run]:
    """The same rows in as few pieces as possible."""
    if len(moves) == 1:
        first_row, num_tokens, slot = moves[0]
        return [(first_row, num_tokens, slot[0], slot[2])]
    runs: list[Run] = []
    spec: LayerSpec | None = None
    # The run so far; ``end`` is where its next slot would begin.
    row = tokens = offset = end = row_bytes = 0
    for first_row, num_tokens, slot in moves:
        begin, nbytes, its_spec = slot
        if begin == end and first_row == row + tokens and its_spec == spec:
            tokens += num_tokens
        else:
            if spec is not None:
                runs.append((row, tokens, offset, spec))
            row, tokens, offset, spec = first_row, num_tokens, begin, its_spec
            row_bytes = spec.nbytes(1)
        end = begin + nbytes if nbytes == num_tokens * row_bytes else -1  # padding ends a run
    if spec is not None:
        runs.append((row, tokens, offset, spec))
    return runs


def copy_pairs(arena: Arena, rows: torch.Tensor, moves: Sequence[Move], *, to_read: bool = False) -> list[CopyPair]:
    """Pairs of equal shape: rows of the tensor, and the memory of one or more slots, as ``Arena.rows_at`` gives it."""
    pairs = []
    for row, tokens, offset, spec in runs_of(moves):
        part = rows if tokens == rows.shape[0] else rows[row : row + tokens]
        pairs.append((part, arena.rows_at(offset, tokens, spec.hidden_dim, spec.dtype, to_read=to_read)))
    return pairs
