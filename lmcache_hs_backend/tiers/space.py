"""The bytes that the cold tier may take: counting them, reserving them, and choosing what leaves.

Bytes count from the moment they are reserved for a write until the file is really gone. Quarantine leaves
first, then dead namespaces, then the archive, then our own least recently used chunks. Nothing is evicted
in vain: when deleting has not helped a full disk once, it is not tried again before a write succeeds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.layout import FoundFile
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.health import DiskHealth
from lmcache_hs_backend.tiers.index import Entry, Index
from lmcache_hs_backend.tiers.mover import Mover
from lmcache_hs_backend.tiers.namespace import NamespaceLock, refuse_links

logger = logging.getLogger(__name__)

#: So long one write may delete files, or wait for another one that does, before it is put off.
_EVICT_SEC = 0.25


class NoRoom(Exception):
    """A chunk cannot be written: larger than the limit on its own (``for_ever``), or no room at present."""

    def __init__(self, for_ever: bool) -> None:
        super().__init__()
        self.for_ever = for_ever


@dataclass
class Usage:
    """Bytes on disk that count against ``max_cold_size``. The store's lock guards it."""

    own: int = 0
    reserved: int = 0
    archive: int = 0
    quarantine: int = 0
    dead: int = 0

    @property
    def total(self) -> int:
        return self.own + self.reserved + self.archive + self.quarantine + self.dead


class _Victim(NamedTuple):
    """A file that is to leave for lack of room."""

    path: str
    size: int
    kind: str  # a field of Usage
    name: bytes = b""  # for kinds "own" and "archive": of the chunk, claimed until its file is gone
    entry: Entry | None = None  # for kind "own"
    directory: str = ""  # for kind "dead": the namespace whose lock must be free


class Space:
    """The accounts of one cold path, and the order in which files leave it."""

    def __init__(
        self,
        config: TieredConfig,
        directory: str,
        index: Index,
        mover: Mover,
        lock: threading.Lock,
        metrics: Metrics,
        files: FileLayer,
        health: DiskHealth,
        path: Callable[[bytes, bool], str],
        give_up_file: Callable[[Entry], None],
        unlink: Callable[[Entry], bool],
    ) -> None:
        """``path(name, archived)`` is where a chunk's file lies. ``give_up_file`` takes a file out of the index,
        and with it a chunk that has no rows in RAM, under the lock; ``unlink`` then deletes and uncounts it.
        """
        self.usage = Usage()
        self.quarantined: deque[FoundFile] = deque()
        self.archived: OrderedDict[bytes, int] = OrderedDict()
        self.dead: deque[tuple[FoundFile, str]] = deque()
        self.eviction_helps = True  # deleting files makes room on the disk, as far as is known
        self.sized = False  # the sizes of what was found at start are known: before, none of our own chunks is evicted
        self._config = config
        self._directory = directory
        self._index = index
        self._mover = mover
        self._lock = lock
        self._metrics = metrics
        self._files = files
        self._health = health
        self._path = path
        self._give_up_file = give_up_file
        self._unlink = unlink
        # Held from the look at the disk until the bytes are promised, or two writes would take the same room, and each
        # find that deleting has not helped. Taken before the store's lock and ``_burying``; the disk may hang under it.
        self._reserving = threading.Lock()
        # Held while a file of a dead namespace is deleted: its flock does not tell our own threads apart.
        self._burying = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Count ``nbytes`` as taken, after making room for them. Raises NoRoom."""
        limit = self._config.max_cold_bytes
        if nbytes > limit:
            raise NoRoom(for_ever=True)
        if not self._reserving.acquire(timeout=_EVICT_SEC):
            raise NoRoom(for_ever=False)
        try:
            if not self._keep_free(nbytes):
                self._health.pause("less than min_free_disk is free")
                raise NoRoom(for_ever=False)
            while True:
                with self._lock:
                    over = self.usage.total + nbytes - limit
                    if over <= 0:
                        self.usage.reserved += nbytes
                        return
                if not self._evict(over):
                    raise NoRoom(for_ever=False)
        finally:
            self._reserving.release()

    def _keep_free(self, nbytes: int) -> bool:
        """Whether writing ``nbytes`` leaves min_free_disk, after deleting files if need be."""
        missing = self._missing_free_bytes(nbytes + self.usage.reserved)
        for _ in range(self._config.io_threads):
            if not missing:
                return True
            others = self.usage.reserved  # by writes that are under way, and make directories besides
            if not self.evict_for_disk(missing):
                return not self._missing_free_bytes(nbytes)
            # What others have been promised they may have written meanwhile, and it must not count twice.
            missing = self._missing_free_bytes(nbytes)
            if not others:
                break
        self.eviction_helps = not missing
        return not missing

    def evict_for_disk(self, nbytes: int) -> bool:
        """Delete files of ``nbytes`` because the filesystem is full. False when that cannot help."""
        return self.eviction_helps and self._evict(nbytes)

    def trim(self) -> bool:
        """Delete one file if there are more bytes than the limit allows. False when there are not."""
        with self._lock:
            over = self.usage.total > self._config.max_cold_bytes
        return over and self._evict(1)

    def count_archived(self, name: bytes, size: int) -> None:
        """Lock held. A chunk's file is in the archive now, in place of the one that may have been there."""
        self.usage.archive += size - self.archived.pop(name, 0)
        self.archived[name] = size

    def forget_revived(self) -> None:
        """Count no namespace as dead that somebody has locked since, or removed."""
        with self._lock:
            directories = {directory for _, directory in self.dead}
        for directory in directories:
            with self._burying:
                lock = self._lock_dead(directory)
                if lock is not None:
                    lock.close()

    # -- eviction --------------------------------------------------------------------------------------

    def _evict(self, nbytes: int) -> bool:
        """Delete files of at least ``nbytes`` in all. False when nothing (more) can be deleted.

        Raises NoRoom after a while: one write that makes room for hundreds of files would pass for one that hangs, and
        the others wait for it. What is deleted stays deleted, and the next try goes on.
        """
        until = time.monotonic() + _EVICT_SEC
        while nbytes > 0:
            if time.monotonic() > until:
                raise NoRoom(for_ever=False)
            with self._lock:
                victim = self._next_victim() if self._health.readable else None
            if victim is None:
                return False
            freed = self._evict_file(victim)
            if freed is None:
                return False
            nbytes -= freed
        return True

    def _next_victim(self) -> _Victim | None:
        """Lock held."""
        if self.quarantined:
            file = self.quarantined.popleft()
            return _Victim(file.path, file.size, "quarantine")
        if self.dead:
            file, directory = self.dead.popleft()
            return _Victim(file.path, file.size, "dead", directory=directory)
        archived = next((name for name in self.archived if not self._mover.is_busy(name)), None)
        if archived is not None:
            self._mover.claim(archived)
            return _Victim(self._path(archived, True), self.archived.pop(archived), "archive", archived)
        if not self.sized:
            return None
        idle = (e for e in self._index.cold.values() if not e.leases and not self._mover.is_busy(e.name))
        entry = self._index.oldest(idle)
        if entry is None:
            return None
        self._mover.claim(entry.name)
        self._give_up_file(entry)
        return _Victim(self._path(entry.name, False), entry.file_bytes, "own", entry.name, entry)

    def _evict_file(self, victim: _Victim) -> int | None:
        """Delete a victim: the bytes that are free now, None when it cannot be deleted."""
        if victim.entry is not None:
            deleted = self._unlink(victim.entry)
            with self._lock:
                if not victim.entry.gone:  # else its name, and its place in the orders, may be another chunk's by now
                    self._index.settle(victim.entry)
                    if not deleted:  # the next one shall not be the same again
                        self._index.touch([victim.entry])
                self._mover.release(victim.name)
            return victim.size if deleted else None
        freed: int | None = victim.size
        try:
            if victim.kind == "dead":
                freed = self._bury(victim)
            else:
                self._delete(victim.path, self._directory)
        except OSError as error:
            # It stays, and is not looked at again; after a restart it is found and counted once more.
            logger.warning("%s cannot be deleted: %s", victim.path, error)
            self._metrics.add("errors_unlink")
            freed = None
        with self._lock:
            setattr(self.usage, victim.kind, getattr(self.usage, victim.kind) - victim.size)
            if victim.name:
                self._mover.release(victim.name)
        return freed

    def _bury(self, victim: _Victim) -> int:
        """Delete a file of a dead namespace, unless somebody lives there again: none of it was ours to count."""
        with self._burying:
            lock = self._lock_dead(victim.directory)
            if lock is None:
                return 0
            try:
                self._delete(victim.path, victim.directory)
            finally:
                lock.close()
        return victim.size

    def _delete(self, path: str, directory: str) -> None:
        refuse_links(path, directory)
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(path)

    def _lock_dead(self, directory: str) -> NamespaceLock | None:
        """The lock of a dead namespace, or None: then it has an owner, or is gone, and is not counted any more."""
        try:
            lock = NamespaceLock.take(directory)
        except OSError as error:
            logger.info("%s is no longer counted: %s", directory, error)
            lock = None
        if lock is None:
            with self._lock:
                theirs = [file for file, owner in self.dead if owner == directory]
                self.dead = deque(item for item in self.dead if item[1] != directory)
                self.usage.dead -= sum(file.size for file in theirs)
        return lock

    def _missing_free_bytes(self, nbytes: int) -> int:
        """How many bytes more must be free so that writing ``nbytes`` leaves min_free_disk."""
        if not self._config.min_free_bytes:
            return 0
        try:
            disk = self._files.statvfs(self._directory)
        except OSError:
            return 0  # the write itself will tell
        return max(0, self._config.min_free_bytes + nbytes - disk.f_bavail * disk.f_frsize)
