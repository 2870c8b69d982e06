"""What happens to chunk files besides reading: written, deleted, archived, their last use saved.

Runs on the I/O threads. Every job ends with one transition that also frees its name.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Mapping

from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec, Presence
from lmcache_hs_backend.format.header import BadChunk
from lmcache_hs_backend.tiers.disk.chunk_files import Written, most_bytes
from lmcache_hs_backend.tiers.disk.health import NO_SPACE
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoThreads
from lmcache_hs_backend.tiers.flows.make_room import MakeRoom, NoRoom
from lmcache_hs_backend.tiers.memory.buffers import Buffer
from lmcache_hs_backend.tiers.state import leaving, writing
from lmcache_hs_backend.tiers.state.entries import CONFIRMED, UNREAD, ChunkEntry
from lmcache_hs_backend.tiers.state.jobs import ArchiveJob, DeleteJob, SaveUseJob, WriteJob

logger = logging.getLogger(__name__)

_NO_ROOM_SEC = 0.2
_ARCHIVE_SEC = 1.0

#: Rows of a chunk, layer by layer, and what owns the memory of those that RAM did not hold.
_Rows = tuple[Mapping[LayerSpec, memoryview], list[Buffer]]


class WriteBack:
    """Does the jobs that change chunk files."""

    def __init__(self, core: Core, io: IoThreads, room: MakeRoom) -> None:
        self._core = core
        self._room = room
        io.register(WriteJob, self.write)
        io.register(DeleteJob, self.delete)
        io.register(ArchiveJob, self.archive)
        io.register(SaveUseJob, self.save_use)

    # -- writing -----------------------------------------------------------------------------------------

    def write(self, job: WriteJob) -> None:
        """Write a chunk's file: what RAM holds, merged with what the file had. Then the chunk is clean."""
        core, state, entry = self._core, self._core.state, job.entry
        written: Written | None = None
        reserved, used_ns = 0, 0
        drop_reason, again_at = "", 0.0
        try:
            if not self._drop_orphan(entry):
                rows, _memory = self._gather(entry)
                with core.lock, core.step:
                    metadata, used_ns = entry.metadata, entry.used_ns
                assert metadata is not None  # a pinned chunk with rows has it
                meta, ids = metadata.parts()
                nbytes = most_bytes(meta, ids, rows)
                self._room.reserve(nbytes)
                reserved = nbytes
                written = self._write_file(entry, meta, ids, rows, used_ns, nbytes)
        except NoRoom as no_room:
            if no_room.forever:
                drop_reason = "too_large"
            else:
                again_at = time.monotonic() + _NO_ROOM_SEC
        except OSError as error:  # counted, and the tier is offline
            logger.debug("chunk %s stays dirty: %s", entry.name.hex(), error)
        except Exception:
            drop_reason = "unwritable"  # a bug; trying the same again and again would not mend it
            raise
        finally:
            with core.lock, core.step:
                now = time.monotonic()
                if written is not None:
                    writing.commit_write(state, job, written.layout, written.digests, used_ns, reserved, now)
                else:
                    writing.abort_write(state, job, now, reserved=reserved, drop_reason=drop_reason, again_at=again_at)
                core.space_freed.ring()
                if not state.orders.aging:
                    core.all_written.ring()
                if state.jobs.ready:
                    core.wake()

    def _drop_orphan(self, entry: ChunkEntry) -> bool:
        """Writing a chunk that can never be served again is a waste: its KV is gone."""
        core = self._core
        if entry.kv is not CONFIRMED:
            return False
        asked_ns = time.monotonic_ns()
        answer = core.presence_of([entry])[0]
        if answer is not Presence.GONE:
            return False
        writable = core.disk.health.writable
        with core.lock, core.step:
            core.state.kv_answered(entry, answer, asked_ns, writable=writable)
            return entry.dropped

    def _gather(self, entry: ChunkEntry) -> _Rows:
        """The bytes of all layers of a pinned chunk: from RAM, and from its file what RAM does not have.

        A bad file is quarantined, its layers are lost. Raises OSError, and NoRoom when there is no memory.
        """
        core = self._core
        if entry.file is UNREAD:
            core.read_header(entry)
            if entry.file is UNREAD:
                raise OSError("its header cannot be read")  # and it may have layers that RAM does not have
        with core.lock, core.step:
            layout, digests = entry.layout, entry.digests
            slots = list(entry.hot.values())
        tokens = entry.num_tokens
        rows = {slot.spec: core.arena.bytes_at(slot.offset, slot.spec.nbytes(tokens)) for slot in slots}
        if layout is None:
            return rows, []
        in_ram = {slot.spec.layer_idx for slot in slots}
        carried = [spec for spec in layout.layers if spec.layer_idx not in in_ram]
        if not carried:
            return rows, []
        try:
            buffers = {spec: core.pool.get(spec.nbytes(tokens)) for spec in carried}
        except (OSError, MemoryError) as error:
            logger.warning("no memory to carry %d layer(s) of a chunk over: %s", len(carried), error)
            raise NoRoom(forever=False) from None
        into = {spec.layer_idx: buffer.bytes() for spec, buffer in buffers.items()}
        try:
            preamble = core.disk.fetch(entry.name, layout, into)
            core.disk.check(entry.name, entry.prefix, layout, into, preamble, digests)
        except BadChunk as bad:
            core.file_unusable(entry, bad)
            return rows, []
        return rows | {spec: buffer.bytes() for spec, buffer in buffers.items()}, list(buffers.values())

    def _write_file(
        self,
        entry: ChunkEntry,
        meta: ChunkMeta,
        ids: bytes,
        rows: Mapping[LayerSpec, memoryview],
        used_ns: int,
        nbytes: int,
        *,
        archived: bool = False,
    ) -> Written | None:
        """Write and publish a chunk's file. None when the chunk was dropped before. Raises NoRoom or OSError."""
        core, disk = self._core, self._core.disk
        started = time.monotonic()
        try:
            try:
                written = disk.write(entry.name, meta, ids, rows, mtime_ns=used_ns, archived=archived)
            except OSError as error:
                if error.errno not in NO_SPACE or not self._room.evict_for_disk(nbytes):
                    raise
                try:  # once more, now that files were deleted
                    written = disk.write(entry.name, meta, ids, rows, mtime_ns=used_ns, archived=archived)
                except OSError:
                    self._room.eviction_has_not_helped()
                    raise
            # The temporary file is in the directory that the file gets. So whatever is dropped by a clear from here on
            # moves to the trash with it, published or not.
            if entry.dropped and not archived:
                disk.discard(written)
                return None
            try:
                disk.publish(written)
            except FileNotFoundError:
                if not entry.dropped:
                    raise
                return None
        except OSError as error:
            if isinstance(error, FileNotFoundError) and entry.dropped and not archived:
                return None  # a clear has just moved its directory away: that is not the disk's fault
            if error.errno == errno.EFBIG:  # a limit on the size of one file: no room will ever change that
                raise NoRoom(forever=True) from None
            if error.errno in NO_SPACE:
                core.metrics.add("errors_disk_full")
                disk.health.pause(f"no space left: {error}")
                raise NoRoom(forever=False) from None
            disk.health.failed("write", error)
            raise
        disk.health.wrote()
        core.metrics.observe(
            "disk_write_seconds",
            time.monotonic() - started,
            written_chunks=1,
            written_bytes=written.layout.size,
        )
        return written

    # -- leaving -----------------------------------------------------------------------------------------

    def delete(self, job: DeleteJob) -> None:
        """Delete the file that a dropped chunk has left, if there is one."""
        core, state = self._core, self._core.state
        deleted = True
        try:
            if job.name in state.accounts.leftover:
                deleted = False
                deleted = core.disk.unlink(job.name)
        finally:
            with core.lock, core.step:
                leaving.end_delete(state, job, deleted=deleted)
                core.space_freed.ring()
                if state.jobs.ready:
                    core.wake()

    def archive(self, job: ArchiveJob) -> None:
        """Move a dropped chunk's file to the archive: kept for extraction, never served."""
        core, state, entry = self._core, self._core.state, job.entry
        size, reserved, kept = 0, 0, False
        try:
            if job.pinned:
                size, reserved = self._write_to_archive(entry)
            else:
                size = core.disk.archive(entry.name)
            kept = True
        except (NoRoom, OSError) as error:
            logger.debug("chunk %s is not archived: %s", entry.name.hex(), error)
        finally:
            # What was rewritten, or could not be moved, is still in its place.
            deleted = core.disk.unlink(entry.name) if job.pinned or not kept else True
            with core.lock, core.step:
                leaving.end_archive(state, job, size, reserved, kept=kept, deleted=deleted)
                if state.jobs.ready:
                    core.wake()

    def _write_to_archive(self, entry: ChunkEntry) -> tuple[int, int]:
        """Returns the size of the file, and the bytes that were reserved for it."""
        core = self._core
        rows, _memory = self._gather(entry)
        with core.lock, core.step:
            metadata = entry.metadata
        assert metadata is not None  # a pinned chunk with rows has it
        meta, ids = metadata.parts()
        nbytes = most_bytes(meta, ids, rows)
        until = time.monotonic() + _ARCHIVE_SEC
        while True:
            try:
                self._room.reserve(nbytes)
                break
            except NoRoom as no_room:  # others may be making some at this moment; there is no second chance
                if no_room.forever or not core.disk.health.writable or time.monotonic() > until:
                    raise
            time.sleep(_NO_ROOM_SEC / 4)
        try:
            written = self._write_file(entry, meta, ids, rows, entry.used_ns, nbytes, archived=True)
        except BaseException:
            with core.lock, core.step:
                writing.release(core.state, nbytes)
            raise
        assert written is not None  # only chunks that are not archived are given up for being dropped
        return written.layout.size, nbytes

    def save_use(self, job: SaveUseJob) -> None:
        """Store when a chunk was last used, for the order after a restart."""
        core, entry = self._core, job.entry
        used_ns, saved = entry.used_ns, False
        try:
            if entry.has_file and not entry.dropped and time.monotonic() < job.until:
                saved = core.disk.save_use(entry.name, used_ns)
        finally:
            with core.lock, core.step:
                leaving.end_save_use(core.state, job, used_ns if saved else 0)
                if core.state.jobs.ready:
                    core.wake()
