"""The two tiers as a pair: leases, and the three ways in which a chunk moves between or out of them.

``TierPair`` owns the lock, the index, both tiers and their threads, and makes every transition that
concerns more than one of them. The moves are file operations of the mover: ``Read`` (a cold hit, which
is at the same time its promotion), ``Write`` (what makes a chunk clean, so that it can be demoted) and
``Delete``. When to do what is not decided here.

The lock guards the index, the arena's free list, the mover's queues and the cold tier's accounts. Under
it there is no I/O, no copy of rows, and no call into LMCache.

Order of a demotion: file published → index says cold → slot freed. A chunk that is being written is
hot until then; a slot that is being read has a lease, and outlives its chunk until the lease ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lmcache_hs_backend.arena import Buffer, BufferPool
from lmcache_hs_backend.chunk import AskPresence, LayerSpec, Presence, chunk_name
from lmcache_hs_backend.chunkfile import BadChunk, FileLayer, FileLayout, Header
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.cold import ColdTier, NoRoom
from lmcache_hs_backend.tiers.hot import HotTier
from lmcache_hs_backend.tiers.index import Entry, Index, Slot, Standing
from lmcache_hs_backend.tiers.mover import FileOp, Mover
from lmcache_hs_backend.tiers.namespace import Namespace
from lmcache_hs_backend.tiers.rate import RateMeter

logger = logging.getLogger(__name__)

MIN_IDLE_BUFFERS = 256 << 20


class TierPair:
    """See the module's text. Methods that say so need the lock held; the others take it themselves."""

    def __init__(self, config: TieredConfig, capacity: int, ask: AskPresence, metrics: Metrics) -> None:
        """Reserve the hot tier and start the I/O threads. ``open`` adds the cold tier."""
        self.config = config
        self.metrics = metrics
        self.ask = ask
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)  # a chunk became clean, or the disk changed its mind
        self.index = Index()
        self.hot = HotTier(capacity, self.index, self._evicted)
        self.pool = BufferPool(max(MIN_IDLE_BUFFERS, capacity // 8))
        self.mover = Mover(self.lock, config.io_threads, lambda: metrics.add("errors_internal"))
        self.rate = RateMeter()
        self.writing_bytes = 0  # slots of chunks that are being written, and will be clean when that is done

    def open(self, namespace: Namespace, files: FileLayer) -> None:
        """Attach the directory that this process owns."""
        self.cold = ColdTier(
            self.config, namespace, self.index, self.mover, self.lock, self.pool, self.metrics, files,
            forget=self.detach, on_change=self._cold_changed,
        )  # fmt: skip

    # -- transitions, lock held ------------------------------------------------------------------------

    def lease(self, entry: Entry) -> None:
        """Keep the slots of an entry where they are until ``release``."""
        entry.leases += 1
        if entry.leases == 1:
            self.index.hold(entry)

    def release(self, entry: Entry) -> None:
        """End a lease; the last one of a chunk that is GONE frees its slots."""
        entry.leases -= 1
        if entry.standing is Standing.GONE:
            if not entry.leases:
                self._vacate(entry)
        elif not entry.leases:
            self.index.settle(entry)

    def release_used(self, entries: Sequence[Entry]) -> None:
        """End a lease on each chunk of a sequence that was used: they become the youngest, the first most of all."""
        for entry in reversed(entries):
            self.release(entry)
        self.index.touch(entries)

    def detach(self, entry: Entry) -> None:
        """Take a chunk out of the index and of RAM; its file is the caller's business."""
        self.index.remove(entry)
        if not entry.leases:
            self._vacate(entry)

    def forget(self, entry: Entry, *, archive: bool = False) -> None:
        """A chunk leaves both tiers: RAM at once, disk as soon as what its name has in flight is over."""
        if archive or entry.file_bytes or self.mover.is_busy(entry.name):
            self.mover.submit(Delete(self, entry, archive))
        self.detach(entry)

    def forget_file(self, entry: Entry) -> None:
        """Try again to delete the file of a chunk that is GONE."""
        self.mover.submit(Delete(self, entry, archive=False))

    def kv_gone(self, entry: Entry) -> None:
        """LMCache has lost the KV of a confirmed chunk."""
        self.metrics.add("kv_gone_deleted")
        self.forget(entry, archive=self.config.on_kv_gone == "archive")

    def confirm(self, entry: Entry, kv_key: object) -> None:
        """The KV of a chunk has been seen present: from now on its absence means something."""
        entry.kv_key = kv_key
        if entry.standing is Standing.UNCONFIRMED:
            self.index.stand(entry, Standing.CONFIRMED)

    def discard_dirty(self, spare: frozenset[bytes]) -> bool:
        """Throw the oldest dirty chunk out of RAM, unwritten, sparing some. False when there is none."""
        for entry in self.index.dirty.values():
            if entry.name not in spare and not entry.leases and not self.mover.is_busy(entry.name):
                self._vacate(entry)
                if entry.filed is None:
                    self.index.remove(entry)
                else:
                    self.index.settle(entry)
                self.metrics.loss("offline")
                return True
        return False

    def header_known(self, entry: Entry, header: Header) -> None:
        """A file found at start has been looked into. Raises BadChunk when it is another chunk's."""
        if entry.standing is not Standing.UNREAD:
            return
        if chunk_name(header.meta.key) != entry.name:
            raise BadChunk("key", f"it holds the chunk {header.meta.key[:200]!r}")
        entry.prefix = header.meta.prefix
        entry.num_tokens = header.meta.num_tokens
        entry.filed = self.index.share(header.layout)
        entry.uncounted = frozenset(spec.layer_idx for spec in header.layout.layers)
        self.index.stand(entry, Standing.UNCONFIRMED)

    def _evicted(self, entry: Entry) -> None:
        """A chunk has left RAM to make room (HotTier has freed its slots)."""
        entry.meta, entry.ids = None, b""
        if entry.filed is None:  # the disk had refused it
            self.index.remove(entry)
            self.metrics.loss("too_large")
        else:
            self.metrics.add("demoted")

    def _vacate(self, entry: Entry) -> None:
        self.hot.vacate(entry)
        entry.meta, entry.ids = None, b""

    def _cold_changed(self) -> None:
        self.room.notify_all()
        self.mover.wake()

    # -- without the lock ------------------------------------------------------------------------------

    def presence(self, kv_keys: Sequence[object], memory_only: bool) -> Sequence[Presence]:
        """Ask for the KV of chunks. Never raises: who cannot be asked does not know."""
        try:
            return self.ask(kv_keys, memory_only)
        except Exception as error:  # noqa: BLE001 - LMCache's backends are third parties, and serving must go on
            self.metrics.add("errors_presence")
            logger.debug("cannot ask for the KV of %d chunk(s): %r", len(kv_keys), error)
            return [Presence.UNKNOWN] * len(kv_keys)

    def bad_file(self, entry: Entry, bad: BadChunk) -> None:
        """The file of an entry is not usable. Its name must be busy with the calling operation."""
        self.cold.quarantine(entry, bad)
        with self.lock:
            entry.filed = None
            if entry.standing is Standing.GONE:
                return
            if entry.hot:  # rows in RAM are good, and dirty again
                self.index.settle(entry)
            else:
                self.detach(entry)
                self.metrics.loss("bad_file")

    def read_header(self, entry: Entry) -> None:
        """Look into a file found at start; a bad one is set aside. Its name must be busy with the caller."""
        try:
            header = self.cold.read_header(entry.name)
            with self.lock:
                self.header_known(entry, header)
        except BadChunk as bad:
            self.bad_file(entry, bad)
        except OSError as error:
            logger.debug("the header of %s stays unread: %s", entry.name.hex(), error)

    def gather(self, entry: Entry) -> tuple[dict[LayerSpec, memoryview], list[Buffer]]:
        """The bytes of all layers of a leased entry: from RAM, and from its file what RAM does not have.

        The second value owns memory that the first refers to. A bad file is set aside, its layers are lost.
        """
        with self.lock:
            layout = entry.filed
            slots = list(entry.hot.values())
        arena, tokens = self.hot.arena, entry.num_tokens
        rows = {slot.spec: arena.bytes_at(slot.offset, slot.spec.nbytes(tokens)) for slot in slots}
        buffers: dict[LayerSpec, Buffer] = {}
        if layout is not None:
            in_ram = {slot.spec.layer_idx for slot in slots}
            carried = [spec for spec in layout.layers if spec.layer_idx not in in_ram]
            buffers = {spec: self.pool.get(spec.nbytes(tokens)) for spec in carried}
            if carried:
                try:
                    self.cold.read(entry, layout, {spec.layer_idx: b.bytes() for spec, b in buffers.items()})
                except BadChunk as bad:
                    self.bad_file(entry, bad)
                    buffers = {}
        return rows | {spec: buffer.bytes() for spec, buffer in buffers.items()}, list(buffers.values())


class Arrival(NamedTuple):
    """What became of one ``Read``: ``miss`` is a reason of metrics.MISSES, or None when the rows are there.

    They are in the slots of the entry, or, where no slot was free, in ``scratch`` (layer_idx → rows).
    """

    position: int
    miss: str | None
    scratch: dict[int, torch.Tensor]


class Read(FileOp):
    """Bring layers of a cold chunk into RAM: into slots, which promotes them, else into scratch memory."""

    is_read = True

    def __init__(
        self, pair: TierPair, entry: Entry, layer_idxs: Sequence[int], position: int,
        arrivals: SimpleQueue[Arrival] | None,
    ) -> None:  # fmt: skip
        """Lock held. Without ``arrivals`` nobody waits: a prefetch."""
        self.name = entry.name
        self.cancelled = False
        self._pair = pair
        self._entry = entry
        self._layer_idxs = layer_idxs
        self._position = position
        self._arrivals = arrivals
        pair.lease(entry)

    def run(self) -> None:
        scratch: dict[int, torch.Tensor] = {}
        miss: str | None = "bad_file"
        try:
            miss = self._read(scratch)
        finally:
            with self._pair.lock:
                self._pair.release(self._entry)
            if self._arrivals is not None:
                self._arrivals.put(Arrival(self._position, miss, scratch))

    def _read(self, scratch: dict[int, torch.Tensor]) -> str | None:
        pair, entry = self._pair, self._entry
        with pair.lock:
            # A read before this one may have brought some of the layers already.
            wanted = [layer_idx for layer_idx in self._layer_idxs if layer_idx not in entry.hot]
            layout = entry.filed
            if self.cancelled or not wanted:
                return "timeout" if self.cancelled else None
            if layout is None:
                return "bad_file"
            specs = [layout.spec(layer_idx) for layer_idx in wanted]
            slots = self._slots([spec for spec in specs if spec is not None], layout)
        try:
            header = pair.cold.read(entry, layout, self._into(wanted, layout, slots, scratch))
        except BadChunk as bad:
            self._give_back(slots)
            pair.bad_file(entry, bad)
            return "bad_file"
        except OSError:
            self._give_back(slots)
            return "offline"
        except BaseException:
            self._give_back(slots)
            raise
        if slots:
            with pair.lock:
                entry.hot.update(slots)
                entry.meta, entry.ids = header.meta, header.token_ids
                if entry.standing is not Standing.GONE:
                    pair.index.settle(entry)
                    pair.metrics.add("promoted")
        return None

    def _slots(self, specs: Sequence[LayerSpec], layout: FileLayout) -> dict[int, Slot]:
        """Slots for all the layers, or none. Nothing is promoted that nobody may have any more."""
        pair = self._pair
        if not (pair.config.promote or self._arrivals is None) or self._entry.standing is Standing.GONE:
            return {}
        placed = pair.hot.allocate([(layout.num_tokens, specs)])
        return placed[0] if placed else {}

    def _into(
        self, wanted: Sequence[int], layout: FileLayout, slots: Mapping[int, Slot], scratch: dict[int, torch.Tensor]
    ) -> dict[int, memoryview]:
        into = {}
        for layer_idx in wanted:
            spec = layout.spec(layer_idx)
            assert spec is not None  # the walk chose layers that the file has
            nbytes = spec.nbytes(layout.num_tokens)
            if layer_idx in slots:
                into[layer_idx] = self._pair.hot.arena.bytes_at(slots[layer_idx].offset, nbytes)
            else:
                buffer = self._pair.pool.get(nbytes)
                scratch[layer_idx] = buffer.rows(layout.num_tokens, spec.hidden_dim, spec.dtype)
                into[layer_idx] = buffer.bytes()
        return into

    def _give_back(self, slots: Mapping[int, Slot]) -> None:
        with self._pair.lock:
            self._pair.hot.free(slots)


class ReadHeader(FileOp):
    """Look into a file found at start, because somebody asks for its chunk now."""

    is_read = True

    def __init__(self, pair: TierPair, entry: Entry, done: SimpleQueue[None]) -> None:
        self.name = entry.name
        self._pair = pair
        self._entry = entry
        self._done = done

    def run(self) -> None:
        try:
            if self._entry.standing is Standing.UNREAD:
                self._pair.read_header(self._entry)
        finally:
            self._done.put(None)


class Write(FileOp):
    """Write a chunk's file: what RAM has, merged with what the file had. Then the chunk is clean."""

    def __init__(self, pair: TierPair, entry: Entry) -> None:
        """Lock held."""
        self.name = entry.name
        self._pair = pair
        self._entry = entry
        entry.claimed = True
        pair.lease(entry)
        pair.rate.start()
        self._slot_bytes = entry.hot_bytes
        pair.writing_bytes += self._slot_bytes

    def run(self) -> None:
        pair, entry = self._pair, self._entry
        written = 0
        try:
            if not self._drop_orphan():
                written = self._write()
        except NoRoom as no_room:
            entry.refused = no_room.for_ever
        except OSError as error:  # counted, and the tier is offline
            logger.debug("chunk %s stays dirty: %s", entry.name.hex(), error)
        finally:
            with pair.lock:
                pair.rate.finish(written)
                pair.writing_bytes -= self._slot_bytes
                entry.claimed = False
                pair.release(entry)
                pair.room.notify_all()

    def _drop_orphan(self) -> bool:
        """Writing a chunk that nobody can ever be served is a waste: its KV is gone."""
        pair, entry = self._pair, self._entry
        if entry.standing is not Standing.CONFIRMED:
            return False
        if pair.presence([entry.kv_key], True)[0] is not Presence.GONE:
            return False
        with pair.lock:
            if pair.index.get(entry.name) is entry:
                pair.kv_gone(entry)
        return True

    def _write(self) -> int:
        pair, entry = self._pair, self._entry
        rows, _memory = pair.gather(entry)
        with pair.lock:
            meta, ids, used_ns = entry.meta, entry.ids, entry.used_ns
        assert meta is not None  # a hot chunk has it
        layout = pair.cold.write(entry, meta, ids, rows)
        with pair.lock:
            entry.filed = pair.index.share(layout)
            entry.saved_ns = used_ns
        return layout.size


class Delete(FileOp):
    """The file of a chunk that is GONE leaves: for good, or to the archive with all its layers."""

    def __init__(self, pair: TierPair, entry: Entry, archive: bool) -> None:
        """Lock held, before the entry is detached."""
        self.name = entry.name
        self._pair = pair
        self._entry = entry
        self._archive = archive
        if archive:
            pair.lease(entry)

    def run(self) -> None:
        pair, entry = self._pair, self._entry
        if not self._archive:
            pair.cold.unlink(entry)
            return
        try:
            with pair.lock:
                unwritten, meta, ids = entry.dirty, entry.meta, entry.ids
            if unwritten and meta is not None:
                rows, _memory = pair.gather(entry)
                pair.cold.write(entry, meta, ids, rows, archive=True)
                pair.cold.unlink(entry)
            else:
                pair.cold.archive(entry)
        except (NoRoom, OSError) as error:
            logger.debug("chunk %s is not archived: %s", entry.name.hex(), error)
            pair.cold.unlink(entry)
        finally:
            with pair.lock:
                pair.release(entry)


class SaveUse(FileOp):
    """Tell a later start when chunks were last used."""

    def __init__(self, pair: TierPair, entry: Entry) -> None:
        self.name = entry.name
        self._pair = pair
        self._entry = entry

    def run(self) -> None:
        if self._entry.file_bytes:
            self._pair.cold.save_use(self._entry, self._entry.used_ns)
