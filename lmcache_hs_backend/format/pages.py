"""The unit in which rows are placed, in memory and in files: O_DIRECT moves nothing smaller, nor anything else."""

from __future__ import annotations

ALIGN = 4096


def align(nbytes: int, to: int = ALIGN) -> int:
    """``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to
