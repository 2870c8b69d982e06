"""The cold tier: the chunk files of one namespace, the bytes they may take, and the health of the disk.

It reads, writes, moves and deletes the files of single chunks, keeps count of every byte under the
limit, and decides which file leaves when there is no room. It runs on the I/O threads, except where a
method says that the store's lock is held: such a method does no I/O. It knows nothing of slots.

Bytes are counted from the moment they are reserved for a write until the file is really gone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lmcache_hs_backend import chunkfile
from lmcache_hs_backend.arena import ALIGN, BufferPool, align
from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec
from lmcache_hs_backend.chunkfile import BadChunk, FileLayer, FileLayout, Header
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.index import Entry, Index
from lmcache_hs_backend.tiers.mover import Mover
from lmcache_hs_backend.tiers.namespace import (
    ARCHIVE,
    QUARANTINE,
    FoundFile,
    Namespace,
    NamespaceLock,
    chunk_path,
    fan_out,
)

logger = logging.getLogger(__name__)

PAUSE_SEC = 5.0
PROBE_SEC = (1.0, 30.0)  # first and longest time between two attempts to reach a disk that has failed
_TELL_AGAIN_SEC = 10.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ColdState(Enum):
    """``online``: reads and writes. ``paused``: reads only, no room. ``offline``: neither, the disk fails."""

    ONLINE = "online"
    PAUSED = "paused"
    OFFLINE = "offline"


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
    entry: Entry | None = None  # for kind "own"
    directory: str = ""  # for kind "dead": the namespace whose lock must be free


class ColdTier:
    """See the module's text."""

    def __init__(
        self,
        config: TieredConfig,
        namespace: Namespace,
        index: Index,
        mover: Mover,
        lock: threading.Lock,
        pool: BufferPool,
        metrics: Metrics,
        files: FileLayer,
        forget: Callable[[Entry], None],
        on_change: Callable[[], None],
    ) -> None:
        """``forget`` takes an entry out of both tiers without touching its file, ``on_change`` is told of
        every change of ``state``; both under the lock.
        """
        self.usage = Usage()
        self.state = ColdState.ONLINE
        self.quarantined: deque[FoundFile] = deque()
        self.archived: OrderedDict[bytes, int] = OrderedDict()
        self.dead: deque[tuple[FoundFile, str]] = deque()
        self._config = config
        self._directory = namespace.directory
        self._index = index
        self._mover = mover
        self._lock = lock
        self._pool = pool
        self._metrics = metrics
        self._files = files
        self._forget = forget
        self._on_change = on_change
        self._direct = config.use_odirect != "off" and self._probe_direct()
        self._resume_at = 0.0
        self._probe: threading.Thread | None = None
        self._probe_delay = PROBE_SEC[0]
        self._unlink_later: list[Entry] = []
        self._told_at = -_TELL_AGAIN_SEC

    # -- one chunk's file ------------------------------------------------------------------------------

    def path(self, name: bytes) -> str:
        return chunk_path(self._directory, name)

    def read(self, entry: Entry, layout: FileLayout, into: Mapping[int, memoryview]) -> Header:
        """Read layers of an entry's file. Raises BadChunk (missing files included) or OSError."""
        started = time.monotonic()
        try:
            header = chunkfile.read(
                self._files, self.path(entry.name), entry.name, entry.prefix, layout, into, self._pool,
                direct=self._direct, verify=self._config.verify_reads,
            )  # fmt: skip
        except OSError as error:
            raise self._read_error(error) from None
        self._metrics.observe("disk_read_seconds", time.monotonic() - started)
        self._metrics.add("read_bytes", sum(len(view) for view in into.values()))
        return header

    def read_header(self, name: bytes) -> Header:
        """The header of a chunk's file. Raises BadChunk (missing files included) or OSError."""
        try:
            return chunkfile.read_header(self._files, self.path(name))
        except OSError as error:
            raise self._read_error(error) from None

    def _read_error(self, error: OSError) -> BadChunk | OSError:
        """One missing file is a bad chunk; a missing directory is a disk that has gone away."""
        if isinstance(error, FileNotFoundError) and os.path.isdir(self._directory):
            return BadChunk("missing", str(error))
        self._failed("read", error)
        return error

    def write(
        self, entry: Entry, meta: ChunkMeta, ids: bytes, rows: Mapping[LayerSpec, memoryview], *, archive: bool = False
    ) -> FileLayout:
        """Write a chunk's file in place of the one it may have. Raises NoRoom or OSError.

        Counts its bytes; marking layers as clean is the caller's work.
        """
        started = time.monotonic()
        nbytes = _most_bytes(meta, ids, rows)
        self._reserve(nbytes)
        size = 0
        try:
            try:
                temporary, layout = self._write(entry, meta, ids, rows, archive)
            except OSError as error:
                if error.errno not in _NO_SPACE or not self._evict(nbytes):
                    raise
                temporary, layout = self._write(entry, meta, ids, rows, archive)  # once more, with room made
            self._rename(temporary, chunk_path(self._root(archive), entry.name))
            size = layout.size
        except OSError as error:
            if error.errno in _NO_SPACE:
                self._metrics.add("errors_disk_full")
                self._pause(f"no space left: {error}")
                raise NoRoom(for_ever=False) from None
            self._failed("write", error)
            raise
        finally:
            with self._lock:
                self.usage.reserved -= nbytes
                if size and archive:
                    self._count_archived(entry.name, size)
                elif size:
                    self.usage.own += size - entry.file_bytes
                    entry.file_bytes = size
        self._metrics.observe("disk_write_seconds", time.monotonic() - started)
        self._metrics.add("written_chunks")
        self._metrics.add("written_bytes", layout.size)
        self._probe_delay = PROBE_SEC[0]
        return layout

    def unlink(self, entry: Entry) -> None:
        """Delete the file of an entry that is GONE. A file that is not there is what was wanted."""
        try:
            self._unlink(self.path(entry.name))
        except OSError as error:
            self._metrics.add("errors_unlink")
            self._failed("read", error)
            with self._lock:
                self._unlink_later.append(entry)
            return
        with self._lock:
            self.usage.own -= entry.file_bytes
            entry.file_bytes = 0

    def archive(self, entry: Entry) -> None:
        """Move the file of an entry that is GONE to the archive: kept for extraction, never served."""
        target = chunk_path(self._root(archive=True), entry.name)
        try:
            self._rename(self.path(entry.name), target)
        except FileNotFoundError:
            size = 0
        except OSError as error:
            self._failed("write", error)
            with self._lock:
                self._unlink_later.append(entry)
            return
        else:
            size = entry.file_bytes
        with self._lock:
            self.usage.own -= entry.file_bytes
            entry.file_bytes = 0
            if size:
                self._count_archived(entry.name, size)

    def quarantine(self, entry: Entry, bad: BadChunk) -> None:
        """Set a bad file aside, so that a person can look at it; a missing one is only counted out."""
        now = time.monotonic()
        told = now - self._told_at < _TELL_AGAIN_SEC
        if not told:
            self._told_at = now
        # One line says what to look for; when a whole directory is damaged, the counters tell the rest.
        level = logging.DEBUG if told else logging.WARNING
        logger.log(level, "chunk file %s is not usable (%s): %s", self.path(entry.name), bad.reason, bad)
        size = entry.file_bytes
        target = os.path.join(
            self._directory, QUARANTINE, f"{entry.name.hex()}.{time.time_ns():x}.{bad.reason}{chunkfile.SUFFIX}"
        )
        moved = bad.reason != "missing"
        if moved:
            try:
                self._rename(self.path(entry.name), target)
            except FileNotFoundError:
                moved = False
            except OSError as error:
                self._failed("write", error)
                moved = False
        with self._lock:
            self.usage.own -= size
            entry.file_bytes = 0
            if moved:
                self.usage.quarantine += size
                self.quarantined.append(FoundFile(target, size, 0, b""))

    def save_use(self, entry: Entry, used_ns: int) -> None:
        """Tell a later start when the chunk was last used, in its file's mtime."""
        try:
            self._files.utime(self.path(entry.name), ns=(used_ns, used_ns), follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            self._failed("write", error)
            return
        entry.saved_ns = used_ns

    def _write(
        self, entry: Entry, meta: ChunkMeta, ids: bytes, rows: Mapping[LayerSpec, memoryview], archive: bool
    ) -> tuple[str, FileLayout]:
        folder = fan_out(self._root(archive), entry.name)
        write = functools.partial(
            chunkfile.write, self._files, folder, meta, ids, rows, self._pool,
            direct=self._direct, fsync=self._config.fsync, mtime_ns=entry.used_ns,
        )  # fmt: skip
        try:
            return write()
        except FileNotFoundError:
            self._make_folder(folder)
            return write()

    def _rename(self, source: str, target: str) -> None:
        try:
            try:
                self._files.rename(source, target)
            except FileNotFoundError:
                self._make_folder(os.path.dirname(target))
                self._files.rename(source, target)
            if self._config.fsync:
                fd = self._files.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    self._files.fsync(fd)
                finally:
                    self._files.close(fd)
        except OSError:
            if chunkfile.is_temporary(os.path.basename(source)):
                with contextlib.suppress(OSError):
                    self._files.unlink(source)
            raise

    def _make_folder(self, folder: str) -> None:
        """Make a directory below the namespace's own, which is never made again: it held the lock."""
        parent = os.path.dirname(folder)
        for path in (folder,) if parent == self._directory else (parent, folder):
            with contextlib.suppress(FileExistsError):
                self._files.mkdir(path, self._config.cold_dir_mode)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(path)

    def _root(self, archive: bool) -> str:
        return os.path.join(self._directory, ARCHIVE) if archive else self._directory

    def _count_archived(self, name: bytes, size: int) -> None:
        self.usage.archive += size - self.archived.pop(name, 0)
        self.archived[name] = size

    # -- room ------------------------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> None:
        """Count ``nbytes`` as taken, after making room for them. Raises NoRoom."""
        limit = self._config.max_cold_bytes
        while True:
            missing = self._missing_free_bytes(nbytes)
            with self._lock:
                if nbytes > limit or not self.readable:
                    raise NoRoom(for_ever=nbytes > limit)
                if self.usage.total + nbytes <= limit and not missing:
                    self.usage.reserved += nbytes
                    return
                victim = self._next_victim()
            if victim is None:
                if missing:
                    self._pause("less than min_free_disk is free, and nothing of ours is left to delete")
                raise NoRoom(for_ever=False)
            self._evict_file(victim)

    def trim(self) -> bool:
        """Delete one file if there are more bytes than the limit allows. False when there are not."""
        with self._lock:
            victim = self._next_victim() if self.usage.total > self._config.max_cold_bytes else None
        if victim is None:
            return False
        self._evict_file(victim)
        return True

    def _evict(self, nbytes: int) -> bool:
        """Delete files of at least ``nbytes`` in all, after the disk has said that it is full."""
        while nbytes > 0:
            with self._lock:
                victim = self._next_victim() if self.readable else None
            if victim is None:
                return False
            self._evict_file(victim)
            nbytes -= victim.size
        return True

    def _missing_free_bytes(self, nbytes: int) -> bool:
        """Whether writing ``nbytes`` would leave less than min_free_disk."""
        if not self._config.min_free_bytes:
            return False
        try:
            disk = self._files.statvfs(self._directory)
        except OSError:
            return False  # the write itself will tell
        return disk.f_bavail * disk.f_frsize < self._config.min_free_bytes + nbytes

    def _next_victim(self) -> _Victim | None:
        """Lock held. Quarantine first, then dead namespaces, then the archive, then our least recently used."""
        if self.quarantined:
            file = self.quarantined.popleft()
            return _Victim(file.path, file.size, "quarantine")
        if self.dead:
            file, directory = self.dead.popleft()
            return _Victim(file.path, file.size, "dead", directory=directory)
        if self.archived:
            name, size = self.archived.popitem(last=False)
            return _Victim(chunk_path(self._root(archive=True), name), size, "archive")
        idle = (e for e in self._index.cold.values() if not e.leases and not self._mover.is_busy(e.name))
        entry = self._index.oldest(idle)
        if entry is None:
            return None
        self._mover.claim(entry.name)
        self._forget(entry)
        return _Victim(self.path(entry.name), entry.file_bytes, "own", entry)

    def _evict_file(self, victim: _Victim) -> None:
        lock = None
        try:
            if victim.kind == "dead":
                lock = NamespaceLock.take(victim.directory)
                if lock is None:  # somebody lives there again: none of it is ours to count or delete
                    self._forget_dead(victim.directory)
                    with self._lock:
                        self.usage.dead -= victim.size
                    return
            if victim.entry is not None:
                self.unlink(victim.entry)
                self._metrics.loss("cold_limit")
                return
            try:
                self._unlink(victim.path)
            except OSError as error:  # a directory in quarantine, say; it stays, and is not counted on again
                logger.warning("%s cannot be deleted: %s", victim.path, error)
            with self._lock:
                setattr(self.usage, victim.kind, getattr(self.usage, victim.kind) - victim.size)
        finally:
            if lock is not None:
                lock.close()
            if victim.entry is not None:
                with self._lock:
                    self._mover.release(victim.entry.name)

    def _forget_dead(self, directory: str) -> None:
        with self._lock:
            theirs = [file for file, owner in self.dead if owner == directory]
            self.dead = deque(item for item in self.dead if item[1] != directory)
            self.usage.dead -= sum(file.size for file in theirs)

    def forget_revived(self) -> None:
        """Count no namespace as dead that somebody has locked since."""
        with self._lock:
            directories = {directory for _, directory in self.dead}
        for directory in directories:
            lock = NamespaceLock.take(directory)
            if lock is None:
                self._forget_dead(directory)
            else:
                lock.close()

    # -- health ----------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        return self.state is not ColdState.OFFLINE

    @property
    def writable(self) -> bool:
        return self.state is ColdState.ONLINE

    def check_health(self, stuck: int) -> None:
        """Called every moment: end a pause, go offline for a hanging operation, look for a disk that is back."""
        now = time.monotonic()
        if stuck and self.state is not ColdState.OFFLINE:
            self._go_offline(f"{stuck} file operation(s) have not returned in read_timeout_sec")
        if self.state is ColdState.ONLINE or now < self._resume_at:
            return
        if self.state is ColdState.PAUSED:
            self._change(ColdState.ONLINE)
        elif not stuck and (self._probe is None or not self._probe.is_alive()):
            # A thread of its own, one at a time: the I/O threads may all be stuck in the same disk.
            self._probe = threading.Thread(target=self._probe_disk, name="hs-probe", daemon=True)
            self._probe.start()

    def _failed(self, what: str, error: OSError) -> None:
        self._metrics.add(f"errors_{what}")
        self._go_offline(f"cannot {what}: {error}")

    def _go_offline(self, why: str) -> None:
        with self._lock:
            if self.state is ColdState.OFFLINE:
                return
            self._resume_at = time.monotonic() + self._probe_delay
            self._probe_delay = min(2 * self._probe_delay, PROBE_SEC[1])
            self.state = ColdState.OFFLINE
            self._on_change()
        logger.warning(
            "cold tier %s is offline: %s. Hidden states stay in RAM only until it answers again.",
            self._directory, why,
        )  # fmt: skip

    def _pause(self, why: str) -> None:
        with self._lock:
            if self.state is not ColdState.ONLINE:
                return
            self.state = ColdState.PAUSED
            self._resume_at = time.monotonic() + PAUSE_SEC
            self._on_change()
        logger.warning("cold tier %s takes no writes for %g s: %s", self._directory, PAUSE_SEC, why)

    def _change(self, state: ColdState) -> None:
        with self._lock:
            self.state = state
            self._on_change()
        logger.info("cold tier %s is %s", self._directory, state.value)

    def take_failed_unlinks(self) -> list[Entry]:
        """Lock held. Entries whose file could not be deleted, for another try now that the disk is back."""
        entries, self._unlink_later = self._unlink_later, []
        return entries

    def _probe_disk(self) -> None:
        path = os.path.join(self._directory, chunkfile.temporary_name("probe"))
        try:
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._files.pwritev(fd, [b"hs"], 0)
                self._files.fdatasync(fd)
            finally:
                self._files.close(fd)
                self._files.unlink(path)
        except OSError as error:
            logger.debug("the disk is not back: %s", error)
            self._resume_at = time.monotonic() + self._probe_delay
            self._probe_delay = min(2 * self._probe_delay, PROBE_SEC[1])
        else:
            self._change(ColdState.ONLINE)

    def _probe_direct(self) -> bool:
        """Whether the filesystem takes O_DIRECT, found out by writing one page."""
        path = os.path.join(self._directory, chunkfile.temporary_name("probe"))
        page = self._pool.get(ALIGN)
        try:
            fd = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            try:
                self._files.pwritev(fd, [page.bytes()], 0)
            finally:
                self._files.close(fd)
        except OSError as error:
            if self._config.use_odirect == "on":
                logger.warning("use_odirect is on, but %s does not take it: %s", self._directory, error)
            return False
        finally:
            with contextlib.suppress(OSError):
                self._files.unlink(path)
        return True


def _most_bytes(meta: ChunkMeta, ids: bytes, rows: Mapping[LayerSpec, memoryview]) -> int:
    """At least as many bytes as the file will have; how long its header is, only writing it tells."""
    text = 2 * len(meta.key) + len(meta.chunk_hash) + len(meta.parent) + 2 * len(meta.model) + len(meta.capture)
    head = align(1024 + text + 192 * len(rows) + len(ids))
    return head + sum(len(view) for view in rows.values())
