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
import math
import threading
import time
from collections.abc import Sequence

from lmcache_hs_backend.arena import Buffer, BufferPool
from lmcache_hs_backend.chunk import AskPresence, ChunkRef, LayerSpec, Presence, chunk_name
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.header import BadChunk, Header
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.cold import ColdTier
from lmcache_hs_backend.tiers.copying import Crew, work_alone
from lmcache_hs_backend.tiers.hot import HotTier
from lmcache_hs_backend.tiers.index import Entry, Index, Standing
from lmcache_hs_backend.tiers.mover import FileOp, Mover
from lmcache_hs_backend.tiers.namespace import Namespace
from lmcache_hs_backend.tiers.rate import RateMeter
from lmcache_hs_backend.tiers.space import NoRoom

logger = logging.getLogger(__name__)

MIN_IDLE_BUFFERS = 256 << 20
_NO_ROOM_SEC = 0.2
_ARCHIVE_SEC = 1.0


class TierPair:
    """See the module's text. Methods that say so need the lock held; the others take it themselves."""

    def __init__(self, config: TieredConfig, capacity: int, ask: AskPresence, metrics: Metrics) -> None:
        """Reserve the hot tier and start the I/O threads. ``open`` adds the cold tier."""
        self.config = config
        self.metrics = metrics
        self.ask = ask
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)  # a chunk became clean, or the disk changed its mind
        self.quiet = threading.Condition(self.lock)  # nothing is left to write, or the disk changed its mind
        self.index = Index()
        self.pool = BufferPool(max(MIN_IDLE_BUFFERS, capacity // 8))
        self.mover = Mover(self.lock, config.io_threads, lambda: metrics.add("errors_internal"), work_alone)
        self.hot = HotTier(capacity, self.index, self._evicted, Crew(self.mover, config.io_threads))
        self.rate = RateMeter()
        self.cleared = False  # everything was dropped before the scan had found what is on disk
        self.write_again_at = 0.0  # no write is started before (monotonic): the last one found no room
        self.writing_bytes = 0  # slots of chunks that are being written, and will be clean when that is done

    def open(self, namespace: Namespace, files: FileLayer) -> None:
        """Attach the directory that this process owns."""
        self.cold = ColdTier(
            self.config, namespace, self.index, self.mover, self.lock, self.metrics, files,
            give_up_file=self._give_up_file, on_change=self._cold_changed,
        )  # fmt: skip

    # -- transitions, lock held ------------------------------------------------------------------------

    def lease(self, *entries: Entry) -> None:
        """Keep the slots of these entries where they are until ``release``."""
        for entry in entries:
            entry.leases += 1
            if entry.leases == 1:
                self.index.hold(entry)

    def release(self, entry: Entry) -> None:
        """End a lease; the last one of a chunk that is GONE frees its slots."""
        entry.leases -= 1
        if not entry.gone:
            self.index.settle(entry)
        elif not entry.leases:
            self._vacate(entry)

    def release_used(self, entries: Sequence[Entry]) -> None:
        """End a lease on each chunk of a sequence that was used: they become the youngest, the first most of all."""
        for entry in reversed(entries):
            entry.leases -= 1
            if entry.leases:
                continue
            if entry.gone:
                self._vacate(entry)
            else:
                self.index.let_go(entry)
        self.index.touch(entries)

    def detach(self, entry: Entry) -> None:
        """Take a chunk out of the index and of RAM; its file is the caller's business."""
        self.index.remove(entry)
        if not entry.leases:
            self._vacate(entry)

    def forget(self, entry: Entry, *, archive: bool = False) -> None:
        """A chunk leaves both tiers: RAM at once, disk as soon as what its name has in flight is over."""
        if archive and entry.dirty and not self.cold.writable:
            self.metrics.loss("archive")  # its slots are not kept for a disk that may never come back
            archive = False
        if archive or entry.file_bytes or self.mover.is_busy(entry.name):
            self.mover.submit(Delete(self, entry, archive))
        self.detach(entry)

    def delete_again(self) -> None:
        """Try again to delete files that could not be deleted."""
        for entry in self.cold.take_undeleted():
            self.mover.submit(Delete(self, entry, archive=False))

    def save_uses(self, until: float) -> None:
        """So that the next start knows the order: least recently used first, the suffix before its prefix."""
        if self.cold.readable:
            for entry in self.index.cold.values():
                if entry.used_ns > entry.saved_ns:
                    self.mover.submit(SaveUse(self, entry, until))

    def kv_gone(self, entry: Entry) -> None:
        """LMCache has lost the KV of a confirmed chunk."""
        self.metrics.add("kv_gone_deleted")
        self.forget(entry, archive=self.config.on_kv_gone == "archive")

    def confirm(self, entry: Entry, kv_key: object, seen_ns: int) -> None:
        """The KV of a chunk has been seen present (``seen_ns``: monotonic): from now on its absence means something."""
        entry.kv_key = kv_key
        entry.seen_ns = seen_ns
        if entry.standing is Standing.UNCONFIRMED:
            self.index.stand(entry, Standing.CONFIRMED)

    def discard_dirty(self, spare: frozenset[bytes]) -> bool:
        """Throw the oldest dirty chunk out of RAM, unwritten, sparing some. False when there is none."""
        for entry in self.index.dirty.values():
            if entry.name not in spare and not entry.leases and not self.mover.is_busy(entry.name):
                if entry.filed is None and not entry.file_bytes:
                    self.forget(entry)
                else:
                    self._vacate(entry)
                    if entry.unread:  # nothing is known of it again, but that it has a file
                        self.index.stand(entry, Standing.UNREAD)
                    self.index.settle(entry)
                self.metrics.loss("offline")
                return True
        return False

    def header_known(self, entry: Entry, header: Header) -> None:
        """A file found at start has been looked into. Raises BadChunk when it is another chunk's."""
        if not entry.unread or (entry.gone and not entry.hot):
            return
        meta = header.meta
        if chunk_name(meta.key) != entry.name:
            raise BadChunk("key", f"it holds the chunk {meta.key[:200]!r}")
        if entry.standing is not Standing.UNREAD and (meta.prefix, meta.num_tokens) != (entry.prefix, entry.num_tokens):
            raise BadChunk("collision", "another prompt with the same chunk hash was stored before it was read")
        for spec in header.layout.layers:
            slot = entry.hot.get(spec.layer_idx)
            if slot is not None and slot.spec.hidden_dim != spec.hidden_dim:
                raise BadChunk("replaced", f"layer {spec.layer_idx} was stored again with another hidden size")
        entry.filed, entry.digests = self.index.share(header.layout), header.digests
        if entry.standing is Standing.UNREAD:
            entry.prefix, entry.num_tokens = meta.prefix, meta.num_tokens
            entry.uncounted = frozenset(spec.layer_idx for spec in header.layout.layers)
            self.index.stand(entry, Standing.UNCONFIRMED)
        if not entry.gone:
            self.index.settle(entry)

    def adopt(self, entry: Entry, ref: ChunkRef, present: bool) -> None:
        """Rows are stored for a chunk whose file has not been looked into: whose it is, the store knows first."""
        entry.prefix, entry.num_tokens, entry.kv_key = ref.prefix, ref.num_tokens, ref.kv_key
        self.index.stand(entry, Standing.CONFIRMED if present else Standing.UNCONFIRMED)

    def _evicted(self, entry: Entry) -> None:
        """A chunk has left RAM to make room (HotTier has freed its slots)."""
        entry.described = None
        if entry.refused:
            self.metrics.loss(entry.refused)
            entry.refused = ""
        else:
            self.metrics.add("demoted")
        if entry.filed is None:
            self.forget(entry)

    def _give_up_file(self, entry: Entry) -> None:
        """The file of a chunk has to make room. Rows in RAM stay there, and are not written again."""
        entry.filed = None
        if entry.hot:
            entry.refused = "cold_limit"
            self.index.settle(entry)
        else:
            self.detach(entry)
            self.metrics.loss("cold_limit")

    def _vacate(self, entry: Entry) -> None:
        self.hot.vacate(entry)
        entry.described = None

    def _cold_changed(self) -> None:
        self.room.notify_all()
        self.quiet.notify_all()
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
            layout, entry.filed = entry.filed, None
            if entry.gone:
                return
            if layout is None or any(spec.layer_idx not in entry.hot for spec in layout.layers):
                self.metrics.loss("bad_file")
            if entry.hot:  # rows in RAM are good, and dirty again
                self.index.settle(entry)
            else:
                self.detach(entry)
                self.cold.left_behind(entry)

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

        The second value owns memory that the first refers to. A bad file is set aside, its layers are lost. Raises
        OSError, and NoRoom when there is no memory.
        """
        if entry.unread:
            self.read_header(entry)
            if entry.unread:
                raise OSError("its file cannot be looked into")  # and may have layers that RAM does not have
        with self.lock:
            layout = entry.filed
            slots = list(entry.hot.values())
        arena, tokens = self.hot.arena, entry.num_tokens
        rows = {slot.spec: arena.bytes_at(slot.offset, slot.spec.nbytes(tokens)) for slot in slots}
        buffers: dict[LayerSpec, Buffer] = {}
        if layout is not None:
            in_ram = {slot.spec.layer_idx for slot in slots}
            carried = [spec for spec in layout.layers if spec.layer_idx not in in_ram]
            try:
                buffers = {spec: self.pool.get(spec.nbytes(tokens)) for spec in carried}
            except (OSError, MemoryError) as error:
                logger.warning("no memory to carry %d layer(s) of a chunk over: %s", len(carried), error)
                raise NoRoom(for_ever=False) from None
            if carried:
                try:
                    self.cold.read(entry, layout, {spec.layer_idx: b.bytes() for spec, b in buffers.items()})
                except BadChunk as bad:
                    self.bad_file(entry, bad)
                    buffers = {}
        return rows | {spec: buffer.bytes() for spec, buffer in buffers.items()}, list(buffers.values())


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
            with pair.lock:
                if no_room.for_ever:
                    entry.refused = "too_large"
                else:
                    pair.write_again_at = time.monotonic() + _NO_ROOM_SEC
        except OSError as error:  # counted, and the tier is offline
            logger.debug("chunk %s stays dirty: %s", entry.name.hex(), error)
        except Exception:
            with pair.lock:
                entry.refused = "unwritable"  # a bug; trying the same again and again would not mend it
            raise
        finally:
            with pair.lock:
                pair.rate.finish(written)
                pair.writing_bytes -= self._slot_bytes
                entry.claimed = False
                pair.release(entry)
                pair.room.notify_all()
                if not pair.index.aging:
                    pair.quiet.notify_all()

    def _drop_orphan(self) -> bool:
        """Writing a chunk that nobody can ever be served is a waste: its KV is gone."""
        pair, entry = self._pair, self._entry
        if entry.standing is not Standing.CONFIRMED:
            return False
        asked_ns = time.monotonic_ns()
        if pair.presence([entry.kv_key], True)[0] is not Presence.GONE:
            return False
        with pair.lock:
            if entry.seen_ns < asked_ns and pair.index.get(entry.name) is entry:
                pair.kv_gone(entry)
            return entry.gone

    def _write(self) -> int:
        pair, entry = self._pair, self._entry
        rows, _memory = pair.gather(entry)
        with pair.lock:
            described, used_ns = entry.described, entry.used_ns
        assert described is not None  # a hot chunk is
        layout, digests = pair.cold.write(entry, *described.parts(), rows)
        with pair.lock:
            entry.filed, entry.digests = pair.index.share(layout), digests
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
        self._dirty = archive and entry.dirty  # rows that only RAM has: keep them until they are written
        if self._dirty:
            pair.lease(entry)

    def run(self) -> None:
        pair, entry = self._pair, self._entry
        if not self._archive:
            if not self._is_late():
                pair.cold.unlink(entry)
        elif not self._dirty:
            pair.cold.archive(entry)
        else:
            try:
                self._write_to_archive()
            except (NoRoom, OSError) as error:
                logger.debug("chunk %s is not archived: %s", entry.name.hex(), error)
                pair.metrics.loss("archive")
            finally:
                with pair.lock:
                    pair.release(entry)
                pair.cold.unlink(entry)

    def _is_late(self) -> bool:
        """Whether the file of that name is a newer one: a first attempt has failed, and the chunk came back."""
        pair, entry = self._pair, self._entry
        with pair.lock:
            owner = pair.index.get(entry.name)
            if owner is None or owner.filed is None:
                return False
            if owner is not entry:
                pair.cold.space.usage.own -= entry.file_bytes
                entry.file_bytes = 0
            return True

    def _write_to_archive(self) -> None:
        pair, entry = self._pair, self._entry
        rows, _memory = pair.gather(entry)
        with pair.lock:
            described = entry.described
        assert described is not None  # a hot chunk is
        until = time.monotonic() + _ARCHIVE_SEC
        while True:
            try:
                pair.cold.write(entry, *described.parts(), rows, archived=True)
                return
            except NoRoom as no_room:  # somebody else may be making some at this moment; there is no second chance
                if no_room.for_ever or not pair.cold.writable or time.monotonic() > until:
                    raise
            time.sleep(_NO_ROOM_SEC / 4)


class SaveUse(FileOp):
    """Tell a later start when chunks were last used."""

    def __init__(self, pair: TierPair, entry: Entry, until: float = math.inf) -> None:
        """``until``: when that is too late (monotonic), and not done any more."""
        self.name = entry.name
        self._pair = pair
        self._entry = entry
        self._until = until

    def run(self) -> None:
        if self._entry.file_bytes and time.monotonic() < self._until:
            self._pair.cold.save_use(self._entry, self._entry.used_ns)
