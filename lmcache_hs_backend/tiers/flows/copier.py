"""Rows between callers' tensors and the hot tier: which thread copies them.

The caller copies, and I/O threads that have nothing to read or write help. I/O threads form no teams of OpenMP
threads, and neither does a caller beside them: they would get in the way of reading. While they work on something
else, a small copy is not worth a team either: it saves less than the time slice that waiting for one member may cost,
and the other members go on spinning on cores that the I/O threads then take from the caller.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lmcache_hs_backend.tiers.flows.io_threads import IoThreads
from lmcache_hs_backend.tiers.memory.arena import Arena
from lmcache_hs_backend.tiers.memory.copies import (
    CopyPair,
    SharedCopies,
    alone,
    copy_without_team,
    pair_bytes,
    pieces_of,
    plain_address,
)
from lmcache_hs_backend.tiers.memory.runs import Move, copy_pairs, runs_of
from lmcache_hs_backend.tiers.state.jobs import FileJob

#: So few copies that forming a team for each does not count.
_FEW_PAIRS = 4
#: So large that forming a team for it does not count: one thread takes a time slice, 3 or 4 ms, for it.
_TEAM_BYTES = 32 << 20
#: So little that the caller has copied it alone before a team would have come together.
_ALONE_BYTES = 2 << 20
_LOOK_AGAIN_SEC = 0.001


@dataclass(eq=False)
class CopyJob(FileJob):
    """An idle I/O thread takes pieces of a copy."""

    copies: SharedCopies


class Copier:
    """Copies rows into and out of slots that cannot be freed meanwhile: on loan to the caller, or pinned."""

    def __init__(self, arena: Arena, io: IoThreads) -> None:
        self._arena = arena
        self._io = io
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._shared: set[SharedCopies] = set()  # under way, or left by a caller who was interrupted
        io.register(CopyJob, lambda job: job.copies.help())

    def copy_in(self, rows: torch.Tensor, moves: Sequence[Move]) -> None:
        """Copy rows of one layer, outside autograd, into their slots.

        A GPU tensor is copied asynchronously; call ``synchronize`` before the slots are published.
        """
        if rows.is_cpu and self._move_in(rows, moves):
            return
        pairs = copy_pairs(self._arena, rows.detach(), moves)
        if rows.is_cuda:
            stream = self._stream(rows.device)
            stream.wait_stream(torch.cuda.current_stream(rows.device))
            with torch.cuda.stream(stream):
                for source, slot in pairs:
                    slot.copy_(source, non_blocking=True)
            rows.record_stream(stream)
        else:
            self.copy([(slot, source) for source, slot in pairs])

    def _move_in(self, rows: torch.Tensor, moves: Sequence[Move]) -> bool:
        """Copy rows, of the dtype of their slots, without torch. False, and nothing is copied, if it is not for that.

        Of a small store torch's own work is the larger part: views, dispatch, and with more than one thread a team.
        """
        nbytes = rows.nbytes
        if nbytes > _ALONE_BYTES and (nbytes > _TEAM_BYTES or torch.get_num_threads() > 1):
            return False  # of much, torch's way is a little faster
        source = plain_address(rows)
        if not source:
            return False
        for row, tokens, offset, spec in runs_of(moves):
            self._arena.write(offset, source + spec.nbytes(row), spec.nbytes(tokens))
        return True

    def synchronize(self, device: torch.device) -> None:
        """Wait until the copies from a GPU have arrived."""
        if device.type == "cuda":
            self._stream(device).synchronize()

    def copy_out(
        self, rows: Mapping[int, torch.Tensor], moves: Mapping[int, Sequence[Move]], *, reading: bool = False
    ) -> None:
        """Copy slots into rows, layer by layer, converting to the dtype of the rows.

        ``reading``: I/O threads read for the caller, who keeps out of their way.
        """
        pairs: list[CopyPair] = []
        for layer_idx, target in rows.items():
            pairs += copy_pairs(self._arena, target, moves[layer_idx], to_read=True)
        if pairs:
            self.copy(pairs, reading=reading)

    def copy(self, pairs: Sequence[CopyPair], *, reading: bool = False) -> None:
        """Copy all pairs, converting. Raises what a copy raises, when no thread works on any of them any more."""
        threads = torch.get_num_threads()
        if threads > 1 and not reading:
            nbytes = sum(map(pair_bytes, pairs))
            if nbytes <= _ALONE_BYTES or (nbytes < _TEAM_BYTES and self._io.working):
                copy_without_team(pairs)
                return
        few = len(pairs) <= _FEW_PAIRS
        if threads == 1 or (not reading and (few or all(pair_bytes(pair) >= _TEAM_BYTES for pair in pairs))):
            for target, source in pairs:  # in the caller's mode, as the result was made
                target.copy_(source)
            return
        pieces = pieces_of(pairs)
        helpers = min(len(pieces), threads, self._io.count + 1) - 1
        copies = SharedCopies(pieces)
        try:
            with copies.running:
                self._shared.add(copies)
                if helpers > 0:
                    self._io.submit_if_idle([CopyJob(copies) for _ in range(helpers)], only_idle=not reading)
                with alone():
                    copies.finish()
        finally:
            self._shared.difference_update([other for other in list(self._shared) if other.at_rest()])

    def settle(self) -> None:
        """Wait until no thread works any more on a copy whose caller has been interrupted."""
        for copies in list(self._shared):
            while not copies.running.locked():
                if copies.at_rest():
                    self._shared.discard(copies)
                    break
                time.sleep(_LOOK_AGAIN_SEC)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:  # two first stores may both make one; all use the same in the end
            self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return self._streams[device]
