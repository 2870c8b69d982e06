"""A cold hit: its file is read on an I/O thread, judged and copied by the call that waits for it.

``Read`` does both halves of the work on one chunk, and is handed from one side to the other between them. The I/O
threads only move bytes, so the disk never waits for a checksum; the caller, who has nothing else to do, checks and
converts what has arrived. Where nobody waits, or the caller has fallen behind, the I/O thread does the second half
too. ``Waiter`` is where a call and its reads meet: its queue says who has a read in hand, and that one alone ends it.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

import torch

from lmcache_hs_backend.chunk import ChunkRef
from lmcache_hs_backend.format.header import BadChunk, Description, FileLayout
from lmcache_hs_backend.tiers.copying import Copy, copy_alone
from lmcache_hs_backend.tiers.index import Entry, Slot
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES
from lmcache_hs_backend.tiers.mover import FileOp
from lmcache_hs_backend.tiers.pair import TierPair

logger = logging.getLogger(__name__)

#: Reads that may wait for their caller, for each I/O thread.
_BACKLOG = 2


class Waiter:
    """A call that waits for the reads of some of its chunks.

    ``result``: layer_idx → memory for the rows of all ``refs``, as soon as there is some.
    """

    def __init__(self, refs: Sequence[ChunkRef]) -> None:
        self.refs = refs
        self.result: Mapping[int, torch.Tensor] = {}
        self.reserved: dict[int, dict[int, Slot]] = {}  # slots by position, until its read takes them
        self.reached = False  # one of its reads has been in the namespace's directory: others look if they fail
        self.gave_up = False  # what has not started need not
        self._arrived: SimpleQueue[Read] = SimpleQueue()
        self._in_hand: Read | None = None  # of the caller

    def has(self, reads: int) -> bool:
        """Whether so many have arrived and wait for the caller to go on with them."""
        return bool(self.result) and self._arrived.qsize() >= reads

    def put(self, read: Read) -> None:
        """A read has arrived, and is the caller's from now on."""
        self._arrived.put(read)
        if self.gave_up:  # it may have come too late for the caller to see
            self._clear()

    def get(self, deadline: float) -> Read:
        """The next read, for the caller to ``finish``. Raises queue.Empty at the deadline (monotonic)."""
        self._in_hand = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        return self._in_hand

    def give_up(self, pair: TierPair) -> None:
        """The caller wants nothing any more. Called on every path."""
        self.gave_up = True
        in_hand, self._in_hand = self._in_hand, None  # not in a circle with us, or the result would stay until a gc
        if in_hand is not None:
            in_hand.finish()  # it was interrupted, perhaps
        self._clear()
        with pair.lock:
            for slots in self.reserved.values():
                pair.hot.free(slots)
            self.reserved = {}

    def _clear(self) -> None:
        """End what has arrived, whoever comes first."""
        while True:
            try:
                read = self._arrived.get_nowait()
            except queue.Empty:
                return
            read.finish()


class Read(FileOp):
    """Bring layers of a cold chunk into RAM: into slots, which promotes them, else into scratch memory.

    For a caller that waits, the rows then go on into its result, while the other reads go on. The name stays busy
    until the read is finished, so whoever wants the same chunk next finds it in RAM.
    """

    def __init__(
        self,
        pair: TierPair,
        entry: Entry,
        layer_idxs: Sequence[int],
        position: int = 0,
        waiter: Waiter | None = None,
        *,
        doubtful: bool = False,
    ) -> None:
        """Lock held. Without ``waiter`` it is a prefetch, which goes behind the reads that somebody waits for.

        ``doubtful``: what was read before did not add up. It may have been damaged on its way; if it still does not,
        the file is set aside, so an I/O thread judges it.
        """
        self.name = entry.name
        self.is_read = waiter is not None
        self.position = position
        self.miss: str | None = "bad_file"  # a reason of metrics.MISSES, or None when the rows are there
        self._pair = pair
        self._entry = entry
        self._layer_idxs = layer_idxs
        self._waiter = waiter
        self._doubtful = doubtful
        self._layout: FileLayout | None = None  # of the file, if it has to be read
        self._slots: dict[int, Slot] = {}  # ours until they are the entry's
        self._scratch: dict[int, torch.Tensor] = {}  # rows of the layers for which there was no slot
        self._into: dict[int, memoryview] = {}  # the memory that the file has to fill
        self._head: bytes | None = None  # what stands in front of the rows in the file, once it has
        self._good: tuple[bytes, Description] | None = None  # the file's digests, and what else it says, if all is well
        self._ended = False
        pair.lease(entry)

    # -- the I/O thread's half -----------------------------------------------------------------------------

    def run(self) -> None:
        waiter = self._waiter
        try:
            self.miss = self._reserve() or self._fetch()
        finally:
            self.handed_over = self._is_for(waiter)
            over = True
            try:
                over = self.handed_over or self.finish()
            finally:
                if waiter is not None and over:
                    waiter.put(self)

    def _is_for(self, waiter: Waiter | None) -> bool:
        """Whether the caller does the rest, rather than this thread.

        A copy on a second thread costs both of them time, so that is worth it only when the caller is far behind, or
        nothing is left to read.
        """
        if waiter is None or self.miss is not None or self._doubtful:
            return False
        return not waiter.has(_BACKLOG * self._pair.config.io_threads if self._pair.mover.queued_reads else 1)

    def _reserve(self) -> str | None:
        """Find out what has to be read, and memory for it. Why that is in vain, or None."""
        pair, entry, waiter = self._pair, self._entry, self._waiter
        with pair.lock:
            if waiter is not None:
                self._slots = waiter.reserved.pop(self.position, {})
                if waiter.gave_up:
                    return "timeout"
            # A read before this one may have brought some of the layers already.
            wanted = [layer_idx for layer_idx in self._layer_idxs if layer_idx not in entry.hot]
            if wanted and entry.gone:
                return "absent"  # the file of that name may be another chunk's by now
            layout = entry.filed
            specs = entry.specs(wanted)  # as its file has them
            if len(specs) < len(wanted):
                return "bad_file"  # it was lost after the walk, and perhaps written again with fewer layers
            if specs != [slot.spec for slot in self._slots.values()]:
                pair.hot.free(self._slots)
                self._slots = {}
                if pair.config.promote or waiter is None:
                    # Slots for all the layers, or none: then nothing is promoted.
                    self._slots = next(iter(pair.hot.allocate([(entry.num_tokens, specs)])), {})
        if not specs or (waiter is None and not self._slots):
            return None  # a prefetch has no use for what it cannot keep
        self._layout = layout
        for spec in specs:
            layer_idx, nbytes = spec.layer_idx, spec.nbytes(entry.num_tokens)
            slot = self._slots.get(layer_idx)
            if slot is not None:
                self._into[layer_idx] = pair.hot.arena.bytes_at(slot.offset, nbytes)
                continue
            try:
                buffer = pair.pool.get(nbytes)
            except (OSError, MemoryError) as error:
                logger.warning("no memory to read %d bytes into: %s", nbytes, error)
                return "memory"
            self._into[layer_idx] = buffer.bytes()
            self._scratch[layer_idx] = buffer.rows(entry.num_tokens, spec.hidden_dim, TORCH_DTYPES[spec.dtype])
        return None

    def _fetch(self) -> str | None:
        """Have the file's bytes where they belong, as they are. Why that fails."""
        pair, entry, layout = self._pair, self._entry, self._layout
        if layout is None:
            return None
        waiter = self._waiter
        known = waiter is not None and waiter.reached and not self._doubtful
        try:
            self._head = pair.cold.fetch(entry, layout, self._into, known=known)
        except BadChunk as bad:
            pair.bad_file(entry, bad)
            return "bad_file"
        except OSError as error:
            logger.debug("chunk %s is not read: %s", entry.name.hex(), error)
            return "offline"
        if waiter is not None:
            waiter.reached = True
        return None

    # -- the other half, by whoever has the read in hand ---------------------------------------------------

    def finish(self, copy: Copy = copy_alone) -> bool:
        """Check what was read, copy it to its place in the result, and give it to the entry.

        False: it did not add up, and the chunk is read once more, for the same waiter.
        """
        if self._ended:
            return True
        miss, self.miss = self.miss, "bad_file"
        again = False
        try:
            preamble, layout = self._head, self._layout
            if preamble is not None and layout is not None:
                digests = self._pair.cold.check(self._entry, layout, self._into, preamble)
                self._good = digests, Description.of_file(preamble, layout)
            if miss is None and self._waiter is not None and not self._waiter.gave_up:
                self._copy(self._waiter, copy)
            self.miss = miss
        except BadChunk as bad:
            again = not self._doubtful
            if not again:
                self._pair.bad_file(self._entry, bad)
        finally:
            self._end(again)
        return not again

    def _copy(self, waiter: Waiter, copy: Copy) -> None:
        entry, arena, ref = self._entry, self._pair.hot.arena, waiter.refs[self.position]
        for layer_idx in self._layer_idxs:
            rows = self._scratch.get(layer_idx)
            if rows is None:
                slot = self._slots.get(layer_idx) or entry.hot[layer_idx]
                rows = arena.rows_at(slot.offset, entry.num_tokens, slot.spec.hidden_dim, TORCH_DTYPES[slot.spec.dtype])
            copy(waiter.result[layer_idx][ref.start : ref.end], rows)

    def _end(self, again: bool) -> None:
        """What was read becomes the entry's, and the lease ends."""
        pair, entry, slots, good = self._pair, self._entry, self._slots, self._good
        self._ended = True
        self._scratch, self._into = {}, {}
        with pair.lock:
            if good is None:
                pair.hot.free(slots)
            else:
                entry.digests, described = good
                if slots:
                    entry.hot.update(slots)
                    entry.described = described
            if again:
                pair.mover.submit(Read(pair, entry, self._layer_idxs, self.position, self._waiter, doubtful=True))
            pair.release(entry)
            if self.handed_over:
                pair.mover.release(self.name)
        if slots and good is not None:
            pair.metrics.add("promoted")
