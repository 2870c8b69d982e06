"""Room on disk for a write: within ``max_cold_size``, and above ``min_free_disk``.

Files leave in the order of ``state.making_room``. Nothing is evicted in vain: when deleting has not helped a full
disk once, it is not tried again before a write succeeds; and when a file cannot be deleted, writes pause, as on a full
disk. Runs on the I/O threads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.tiers.disk.owned_namespace import refuse_links
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.neighbours import Neighbours
from lmcache_hs_backend.tiers.state import making_room
from lmcache_hs_backend.tiers.state.tier_state import Victim, VictimKind

logger = logging.getLogger(__name__)

#: Files of the trash that are deleted in one go, which keeps an I/O thread for some milliseconds.
_TRASH_FILES = 64
#: So long one write may delete files, or wait for another one that does, before it is put off.
_EVICT_SEC = 0.25


class NoRoom(Exception):
    """A chunk cannot be written: larger than the limit on its own (``forever``), or no room at present."""

    def __init__(self, *, forever: bool) -> None:
        super().__init__()
        self.forever = forever


class MakeRoom:
    """Reserves bytes for writes, and deletes files for them."""

    def __init__(self, core: Core, files: FileLayer, neighbours: Neighbours) -> None:
        self._core = core
        self._files = files
        self._neighbours = neighbours
        # Held from the look at the disk until the bytes are promised, or two writes would take the same room, and each
        # find that deleting has not helped. Taken before the store's lock; the disk may hang
        # under it, so it is waited for with a timeout.
        self._reserving = threading.Lock()
        self._emptying = threading.Lock()  # held by the thread that deletes files of the trash

    def reserve(self, nbytes: int) -> None:
        """Count ``nbytes`` as taken, after making room for them. Raises NoRoom."""
        core = self._core
        if nbytes > core.state.max_cold_bytes:
            raise NoRoom(forever=True)
        if not self._reserving.acquire(timeout=_EVICT_SEC):
            raise NoRoom(forever=False)
        try:
            if not self._keep_free(nbytes):
                core.disk.health.pause("less than min_free_disk is free")
                raise NoRoom(forever=False)
            while True:
                with core.lock, core.step:
                    over = making_room.reserve(core.state, nbytes)
                if not over:
                    return
                if not self.evict(over):
                    raise NoRoom(forever=False)
        finally:
            self._reserving.release()

    def _keep_free(self, nbytes: int) -> bool:
        """Whether writing ``nbytes`` leaves min_free_disk, after deleting files if need be."""
        accounts = self._core.state.accounts
        missing = self._missing_free_bytes(nbytes + accounts.reserved)
        for _ in range(self._core.config.io_threads):
            if not missing:
                return True
            others = accounts.reserved  # by writes that are under way, and make directories besides
            if not self.evict_for_disk(missing):
                return not self._missing_free_bytes(nbytes)
            # What others have been promised they may have written in the meantime, and it must not count twice.
            missing = self._missing_free_bytes(nbytes)
            if not others:
                break
        self._core.state.eviction_helps = not missing
        return not missing

    def evict_for_disk(self, nbytes: int) -> bool:
        """Delete files of ``nbytes`` because the filesystem is full. False when that cannot help."""
        return self._core.state.eviction_helps and self.evict(nbytes)

    def eviction_has_not_helped(self) -> None:
        """The disk is still full after ``evict_for_disk``: more of it will not help either."""
        self._core.state.eviction_helps = False

    def trim(self) -> bool:
        """Delete one file if there are more bytes than the limit allows. False when there are not."""
        core = self._core
        with core.lock, core.step:
            over = core.state.accounts.total > core.state.max_cold_bytes
        try:
            return over and self.evict(1)
        except NoRoom:  # it takes long, and nothing waits for it
            return True

    def empty_trash(self, count: int = _TRASH_FILES) -> int:
        """Delete a few files of what was cleared. Returns their bytes; 0 when there are none, or they cannot go."""
        core = self._core
        if not self._emptying.acquire(blocking=False):
            return 0
        try:
            nbytes, more = core.disk.empty_trash(count)
            with core.lock, core.step:
                core.state.accounts.trash_deleted(nbytes, more=more)
            return nbytes
        except OSError as error:
            logger.debug("the trash of %s is not emptied: %s", core.disk.directory, error)
            return 0
        finally:
            self._emptying.release()

    def use_files(self, files: FileLayer) -> None:
        """Send system calls through ``files`` from now on."""
        self._files = files
        self._neighbours.use_files(files)

    # -- eviction --------------------------------------------------------------------------------------

    def evict(self, nbytes: int) -> bool:
        """Delete files of at least ``nbytes`` in all. False when nothing (more) can be deleted.

        Raises NoRoom after a while: one write that makes room for hundreds of files would pass for one that hangs, and
        the others wait for it. What is deleted stays deleted, and the next try goes on.
        """
        core = self._core
        until = time.monotonic() + _EVICT_SEC
        while nbytes > 0:
            if time.monotonic() > until:
                raise NoRoom(forever=False)
            if not core.disk.health.readable:
                return False
            if core.state.accounts.trash and (freed := self.empty_trash()):
                nbytes -= freed
                continue
            with core.lock, core.step:
                victim = making_room.prepare_eviction(core.state, time.monotonic())
            if victim is None:
                return False
            gained = self._delete_victim(victim)
            if gained is None:
                return False
            nbytes -= gained
        return True

    def _delete_victim(self, victim: Victim) -> int | None:
        """The bytes that are free now, None when the victim cannot be deleted."""
        core = self._core
        freed: int | None = None
        try:
            freed = self._delete(victim)
        finally:
            with core.lock, core.step:
                end = making_room.commit_eviction if freed is not None else making_room.abort_eviction
                end(core.state, victim)
                if core.state.jobs.ready:
                    core.wake()
        if freed is None and victim.entry is not None:
            core.disk.health.pause("a chunk file cannot be deleted to make room")
        return freed

    def _delete(self, victim: Victim) -> int | None:
        disk = self._core.disk
        if victim.kind is VictimKind.OWN:
            return victim.size if disk.unlink(victim.name) else None
        if victim.kind is VictimKind.DEAD:
            freed = self._neighbours.delete_oldest(victim.directory)
            victim.size = freed or 0
            return freed
        path = disk.path(victim.name, archived=True) if victim.file is None else victim.file.path
        try:
            self._unlink(path, disk.directory)
        except OSError as error:
            # It stays, and is not looked at again; after a restart it is found and counted once more.
            logger.warning("%s cannot be deleted: %s", path, error)
            self._core.metrics.add("errors_unlink")
            return None
        return victim.size

    def _unlink(self, path: str, directory: str) -> None:
        refuse_links(path, directory)
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(path)

    def _missing_free_bytes(self, nbytes: int) -> int:
        """How many bytes more must be free so that writing ``nbytes`` leaves min_free_disk."""
        core = self._core
        if not core.min_free_bytes:
            return 0
        free = core.disk.free_bytes()
        return 0 if free is None else max(0, core.min_free_bytes + nbytes - free)
