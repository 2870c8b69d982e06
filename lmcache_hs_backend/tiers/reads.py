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

from lmcache_hs_backend.chunk import ChunkRef, LayerSpec
from lmcache_hs_backend.chunkfile import BadChunk, FileLayout, Header
from lmcache_hs_backend.tiers.copying import Copy, copy_alone
from lmcache_hs_backend.tiers.index import Entry, Slot
from lmcache_hs_backend.tiers.mover import FileOp
from lmcache_hs_backend.tiers.pair import TierPair

logger = logging.getLogger(__name__)

#: So many reads may wait for their caller before I/O threads, which have others to do, help with the rest of the work.
_ENOUGH = 4


class Waiter:
    """A call that waits for the reads of some of its chunks.

    ``result``: layer_idx → memory for the rows of all ``refs``, as soon as there is some.
    """

    def __init__(self, refs: Sequence[ChunkRef]) -> None:
        self.refs = refs
        self.result: Mapping[int, torch.Tensor] = {}
        self.gave_up = False  # what has not started need not
        self._arrived: SimpleQueue[Read] = SimpleQueue()

    def is_behind(self, busy: bool) -> bool:
        """Whether the caller has enough to do with what has arrived; ``busy``: the I/O threads as well."""
        return bool(self.result) and self._arrived.qsize() >= (_ENOUGH if busy else 1)

    def put(self, read: Read) -> None:
        """A read has arrived, and is the caller's from now on."""
        self._arrived.put(read)
        if self.gave_up:  # it may have come too late for the caller to see
            self._clear()

    def get(self, deadline: float) -> Read:
        """The next read, for the caller to ``finish``. Raises queue.Empty at the deadline (monotonic)."""
        return self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))

    def copy(self, position: int, rows: Mapping[int, torch.Tensor], copy: Copy) -> None:
        """Copy what was read for ``refs[position]`` to its place in the result."""
        ref = self.refs[position]
        for layer_idx, source in rows.items():
            copy(self.result[layer_idx][ref.start : ref.end], source)

    def give_up(self) -> None:
        """The caller wants nothing any more. Called on every path."""
        self.gave_up = True
        self._clear()

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

        ``doubtful``: what was read before did not add up. The I/O thread judges it, as it may set the file aside.
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
        self._rows: dict[int, torch.Tensor] = {}  # for the result
        self._into: dict[int, memoryview] = {}  # the same memory, as far as the file has to fill it
        self._head: bytes | None = None  # what stands in front of the rows in the file, once it has
        self._header: Header | None = None  # the same, when it is good and so are the rows
        self._ended = False
        pair.lease(entry)

    # -- the I/O thread's half -----------------------------------------------------------------------------

    def run(self) -> None:
        waiter = self._waiter
        try:
            self.miss = self._reserve() or self._fetch()
        finally:
            self.handed_over = self._is_for(waiter)
            if not self.handed_over:
                self.finish()
            if waiter is not None:
                waiter.put(self)

    def _is_for(self, waiter: Waiter | None) -> bool:
        """Whether the caller does the rest, rather than this thread."""
        if waiter is None or self.miss is not None or self._doubtful:
            return False
        return not waiter.is_behind(self._pair.mover.queued_reads > 0)

    def _reserve(self) -> str | None:
        """Find out what has to be read, and memory for it. Why that is in vain, or None."""
        pair, entry, waiter = self._pair, self._entry, self._waiter
        if waiter is not None and waiter.gave_up:
            return "timeout"
        with pair.lock:
            # A read before this one may have brought some of the layers already.
            wanted = [layer_idx for layer_idx in self._layer_idxs if layer_idx not in entry.hot]
            layout = entry.filed
            if wanted and entry.gone:
                return "absent"  # the file of that name may be another chunk's by now
            specs = [spec for idx in wanted if layout is not None and (spec := layout.spec(idx)) is not None]
            if len(specs) < len(wanted):
                return "bad_file"  # it was lost after the walk, and perhaps written again with fewer layers
            if specs and (pair.config.promote or waiter is None):
                # Slots for all the layers, or none: then nothing is promoted.
                self._slots = next(iter(pair.hot.allocate([(entry.num_tokens, specs)])), {})
            slots = entry.hot | self._slots
        if waiter is None and not self._slots:
            return None  # a prefetch has no other use for what it reads
        if specs:
            self._layout = layout
        try:
            for spec in specs:
                self._find_memory(spec, slots.get(spec.layer_idx))
        except (OSError, MemoryError) as error:
            logger.warning("no memory to read chunk %s into: %s", entry.name.hex(), error)
            return "memory"
        for layer_idx in self._layer_idxs if waiter is not None else ():
            if layer_idx in slots:
                self._rows[layer_idx] = self._slot_rows(slots[layer_idx])
        return None

    def _find_memory(self, spec: LayerSpec, slot: Slot | None) -> None:
        """Where a layer of the file goes: its slot, or memory that lasts until it is copied."""
        tokens = self._entry.num_tokens
        nbytes = spec.nbytes(tokens)
        if slot is not None:
            self._into[spec.layer_idx] = self._pair.hot.arena.bytes_at(slot.offset, nbytes)
        else:
            buffer = self._pair.pool.get(nbytes)
            self._into[spec.layer_idx] = buffer.bytes()
            self._rows[spec.layer_idx] = buffer.rows(tokens, spec.hidden_dim, spec.dtype)

    def _slot_rows(self, slot: Slot) -> torch.Tensor:
        spec = slot.spec
        return self._pair.hot.arena.rows_at(slot.offset, self._entry.num_tokens, spec.hidden_dim, spec.dtype)

    def _fetch(self) -> str | None:
        """Have the file's bytes where they belong, as they are. Why that fails."""
        pair, entry, layout = self._pair, self._entry, self._layout
        if layout is None:
            return None
        try:
            self._head = pair.cold.fetch(entry, layout, self._into)
        except BadChunk as bad:
            pair.bad_file(entry, bad)
            return "bad_file"
        except OSError as error:
            logger.debug("chunk %s is not read: %s", entry.name.hex(), error)
            return "offline"
        return None

    # -- the other half, by whoever has the read in hand ---------------------------------------------------

    def finish(self, copy: Copy = copy_alone) -> bool:
        """Check what was read, copy it to its place in the result, and give it to the entry.

        False: it did not add up, and the chunk is read once more, for the same waiter.
        """
        if self._ended:
            return True
        again = False
        try:
            if self._head is not None and self._layout is not None:
                self._header = self._pair.cold.check(self._entry, self._layout, self._into, self._head)
            if self.miss is None and self._waiter is not None and not self._waiter.gave_up:
                self._waiter.copy(self.position, self._rows, copy)
        except BadChunk as bad:
            self.miss = "bad_file"
            again = self.handed_over
            if not again:
                self._pair.bad_file(self._entry, bad)
        finally:
            self._end(again)
        return not again

    def _end(self, again: bool) -> None:
        """What was read becomes the entry's, and the lease ends."""
        pair, entry, slots, header = self._pair, self._entry, self._slots, self._header
        self._ended = True
        self._rows, self._into = {}, {}
        with pair.lock:
            if header is None:
                pair.hot.free(slots)
            elif slots:
                entry.hot.update(slots)
                entry.meta, entry.ids = header.meta, header.token_ids
            if again:
                pair.mover.submit(Read(pair, entry, self._layer_idxs, self.position, self._waiter, doubtful=True))
            pair.release(entry)
            if self.handed_over:
                pair.mover.release(self.name)
        if slots and header is not None:
            pair.metrics.add("promoted")
