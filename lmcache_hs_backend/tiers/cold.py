"""The cold tier: the chunk files of one namespace.

It reads, writes, moves and deletes the files of single chunks, and judges what the system answers: a file
that is not what it should be is a ``BadChunk``, a disk that fails is reported to ``health``, room is asked
of ``space``. It runs on the I/O threads, except where a method says that the store's lock is held: such a
method does no I/O. It knows nothing of slots, and decides nothing about chunks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format import chunk_file
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.header import BadChunk, FileLayout, Header
from lmcache_hs_backend.format.layout import (
    ARCHIVE,
    QUARANTINE,
    SUFFIX,
    FoundFile,
    chunk_path,
    fan_out,
    is_temporary,
    temporary_name,
)
from lmcache_hs_backend.format.pages import ALIGN, align
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.health import NO_SPACE, DiskHealth
from lmcache_hs_backend.tiers.index import Entry, Index
from lmcache_hs_backend.tiers.mover import Mover
from lmcache_hs_backend.tiers.namespace import Namespace, NotOurs
from lmcache_hs_backend.tiers.space import NoRoom, Space

logger = logging.getLogger(__name__)

_TELL_AGAIN_SEC = 10.0
#: Answers that concern one file and not the disk.
_ONE_FILE = (errno.EACCES, errno.EPERM, errno.EUCLEAN, errno.EBADMSG)
#: Answers that concern neither, but a limit of this process or a moment.
_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_MOST_SUSPECTS = 1000

_Written = tuple[str, FileLayout, bytes]  # what chunk_file.write returns


class _Turns:
    """A semaphore, to be held by ``with``. threading's own is Python code, at the very place where threads meet."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)


class ColdTier:
    """See the module's text."""

    def __init__(
        self,
        config: TieredConfig,
        namespace: Namespace,
        index: Index,
        mover: Mover,
        lock: threading.Lock,
        metrics: Metrics,
        files: FileLayer,
        give_up_file: Callable[[Entry], None],
        on_change: Callable[[], None],
    ) -> None:
        """For ``give_up_file`` see Space, for ``on_change`` DiskHealth."""
        directory = namespace.directory
        self.health = DiskHealth(directory, files, lock, metrics, on_change, namespace.check)
        self.space = Space(
            config, directory, index, mover, lock, metrics, files, self.health, self._path, give_up_file, self.unlink
        )  # fmt: skip
        self._config = config
        self._directory = directory
        self._check_ours = namespace.check
        self._lock = lock
        self._metrics = metrics
        self._files = files
        self._direct = config.use_odirect != "off" and self._probe_direct()
        # Threads that all wait for the disk come back from it together, and then the disk waits for them. So one too
        # many for it always has the next file ready.
        threads = config.io_threads
        self._turns = _Turns(threads - 1 if threads > 2 else threads)
        self._undeleted: dict[bytes, Entry] = {}  # chunks that are GONE, and whose file could not be deleted
        self._suspects: set[bytes] = set()  # chunks whose file has given EIO once
        self._told_at = -_TELL_AGAIN_SEC

    @property
    def readable(self) -> bool:
        return self.health.readable

    @property
    def writable(self) -> bool:
        return self.health.writable

    def path(self, name: bytes) -> str:
        """Where a chunk's file lies."""
        return self._path(name, False)

    def _path(self, name: bytes, archived: bool) -> str:
        return chunk_path(self._root(archived), name)

    def _reach(self, name: bytes, *, known: bool = False) -> str:
        """The path of a chunk's file, once it is sure that it leads through directories of ours.

        ``known``: that the namespace's is, a moment ago another file has shown.
        """
        if not known:
            self._check_ours()
        self._check_place(fan_out(self._directory, name))
        return chunk_path(self._directory, name)

    def _root(self, archived: bool) -> str:
        return os.path.join(self._directory, ARCHIVE) if archived else self._directory

    # -- reading ---------------------------------------------------------------------------------------

    def read(self, entry: Entry, layout: FileLayout, into: Mapping[int, memoryview]) -> None:
        """Read layers of an entry's file. Raises BadChunk (missing files included) or OSError."""
        self.check(entry, layout, into, self.fetch(entry, layout, into))

    def fetch(self, entry: Entry, layout: FileLayout, into: Mapping[int, memoryview], *, known: bool = False) -> bytes:
        """The I/O of ``read``; what has come is for ``check`` to judge. ``known``: see ``_reach``."""
        started = time.monotonic()
        try:
            path = self._reach(entry.name, known=known)
            preamble = chunk_file.fetch(self._files, path, layout, into, direct=self._direct, turn=self._turns)
        except (OSError, BadChunk) as error:
            raise self._judged(entry.name, error) from None
        self._suspects.discard(entry.name)
        read_bytes = sum(len(view) for view in into.values())
        self._metrics.observe("disk_read_seconds", time.monotonic() - started, read_bytes=read_bytes)
        return preamble

    def check(self, entry: Entry, layout: FileLayout, into: Mapping[int, memoryview], preamble: bytes) -> bytes:
        """The rest of ``read``, without I/O: whether that is the chunk. Returns its digests. Raises BadChunk."""
        return chunk_file.check(
            preamble, entry.name, entry.prefix, layout, into, verify=self._config.verify_reads, digests=entry.digests
        )

    def read_header(self, name: bytes) -> Header:
        """The header of a chunk's file. Raises BadChunk (missing files included) or OSError."""
        try:
            header = chunk_file.read_header(self._files, self._reach(name))
            self._suspects.discard(name)
            return header
        except (OSError, BadChunk) as error:
            raise self._judged(name, error) from None

    def _judged(self, name: bytes, error: OSError | BadChunk) -> BadChunk | OSError:
        """Whether it is the file or the disk: a disk that works, but fails for the same file again, is fine."""
        if isinstance(error, (FileNotFoundError, BadChunk)):
            try:
                self._check_ours()
            except OSError as other:  # what lies there now says nothing about our files
                error = other
            else:
                return error if isinstance(error, BadChunk) else BadChunk("missing", str(error))
        if error.errno not in _THE_PROCESS and not isinstance(error, NotOurs):
            if name in self._suspects or (error.errno in _ONE_FILE and self._is_open(fan_out(self._directory, name))):
                self._suspects.discard(name)
                return BadChunk("unreadable", str(error))
            if len(self._suspects) < _MOST_SUSPECTS:
                self._suspects.add(name)
        self.health.failed("read", error)
        return error

    def _is_open(self, folder: str) -> bool:
        return os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)

    # -- writing ---------------------------------------------------------------------------------------

    def write(
        self,
        entry: Entry,
        meta: ChunkMeta,
        ids: bytes,
        rows: Mapping[LayerSpec, memoryview],
        *,
        archived: bool = False,
    ) -> tuple[FileLayout, bytes]:
        """Write a chunk's file in place of the one it may have. Raises NoRoom or OSError.

        Returns its layout and digests, and counts its bytes; marking layers as clean is the caller's work.
        """
        started = time.monotonic()
        nbytes = _most_bytes(meta, ids, rows)
        self.space.reserve(nbytes)
        size = 0
        try:
            layout, digests = self._write_and_rename(entry, meta, ids, rows, archived, nbytes)
            size = layout.size
        except OSError as error:
            if error.errno == errno.EFBIG:  # a limit on the size of one file: no room will ever change that
                raise NoRoom(for_ever=True) from None
            if error.errno in NO_SPACE:
                self._metrics.add("errors_disk_full")
                self.health.pause(f"no space left: {error}")
                raise NoRoom(for_ever=False) from None
            self.health.failed("write", error)
            raise
        finally:
            with self._lock:
                self.space.usage.reserved -= nbytes
                if size and archived:
                    self.space.count_archived(entry.name, size)
                elif size:
                    self._uncount_replaced(entry)
                    self.space.usage.own += size - entry.file_bytes
                    entry.file_bytes = size
        self.health.wrote()
        self.space.eviction_helps = True
        self._metrics.observe(
            "disk_write_seconds", time.monotonic() - started, written_chunks=1, written_bytes=layout.size
        )
        return layout, digests

    def _write_and_rename(
        self,
        entry: Entry,
        meta: ChunkMeta,
        ids: bytes,
        rows: Mapping[LayerSpec, memoryview],
        archived: bool,
        nbytes: int,
    ) -> tuple[FileLayout, bytes]:
        folder = fan_out(self._root(archived), entry.name)
        self._check_folder(folder)

        def write(direct: bool) -> _Written:
            return chunk_file.write(
                self._files, folder, meta, ids, rows,
                direct=direct, fsync=self._config.fsync, mtime_ns=entry.used_ns, turn=self._turns,
            )  # fmt: skip

        try:
            temporary, layout, digests = self._with_folder(folder, write)
        except OSError as error:
            if error.errno == errno.EINVAL and self._direct:  # what is left after a short write is not aligned
                temporary, layout, digests = write(False)
            elif error.errno in NO_SPACE and self.space.evict_for_disk(nbytes):
                temporary, layout, digests = self._after_eviction(folder, write)
            else:
                raise
        self._rename(temporary, chunk_path(self._root(archived), entry.name))
        return layout, digests

    def _with_folder(self, folder: str, write: Callable[[bool], _Written]) -> _Written:
        try:
            return write(self._direct)
        except FileNotFoundError:
            self._make_folder(folder)
            return write(self._direct)

    def _after_eviction(self, folder: str, write: Callable[[bool], _Written]) -> _Written:
        """Once more, now that files were deleted. If that has not helped, more of it will not either."""
        try:
            return self._with_folder(folder, write)
        except OSError:
            self.space.eviction_helps = False
            raise

    def save_use(self, entry: Entry, used_ns: int) -> None:
        """Tell a later start when the chunk was last used, in its file's mtime."""
        try:
            self._files.utime(self._reach(entry.name), ns=(used_ns, used_ns), follow_symlinks=False)
        except OSError as error:  # only the order of a later eviction depends on it
            logger.debug("the last use of %s is not saved: %s", entry.name.hex(), error)
            return
        with self._lock:
            entry.saved_ns = used_ns

    # -- out of the way --------------------------------------------------------------------------------

    def unlink(self, entry: Entry) -> bool:
        """Delete the file of an entry. A file that is not there is what was wanted; False: it is still there."""
        try:
            path = self._reach(entry.name)
            try:
                self._files.unlink(path)
            except FileNotFoundError:
                pass
            except IsADirectoryError:
                self._move_aside(path)
        except OSError as error:
            self._metrics.add("errors_unlink")
            logger.debug("%s cannot be deleted: %s", self.path(entry.name), error)
            with self._lock:
                former = self._undeleted.get(entry.name)
                if former is not None and former is not entry:  # it is one and the same file
                    entry.file_bytes += former.file_bytes
                    former.file_bytes = 0
                self._undeleted[entry.name] = entry
            return False
        with self._lock:
            self.space.usage.own -= entry.file_bytes
            entry.file_bytes = 0
        return True

    def left_behind(self, entry: Entry) -> None:
        """Lock held. A chunk is GONE; a file of it that could not be set aside counts until it is deleted."""
        if entry.file_bytes:
            self._undeleted[entry.name] = entry

    def _uncount_replaced(self, entry: Entry) -> None:
        """Lock held. A file of that name that could not be deleted is gone: another one has been renamed over it."""
        former = self._undeleted.get(entry.name)
        if former is not None and former is not entry:
            del self._undeleted[entry.name]
            self.space.usage.own -= former.file_bytes
            former.file_bytes = 0

    def take_undeleted(self) -> list[Entry]:
        """Lock held. Entries whose file could not be deleted, for another try."""
        entries, self._undeleted = list(self._undeleted.values()), {}
        return entries

    def archive(self, entry: Entry) -> None:
        """Move the file of an entry that is GONE to the archive: kept for extraction, never served."""
        size = entry.file_bytes
        try:
            target = self._path(entry.name, True)
            self._rename(self._reach(entry.name), target)
            size = os.lstat(target).st_size  # it may not have been counted yet
        except FileNotFoundError:
            size = 0
        except OSError as error:
            logger.debug("%s cannot be archived: %s", self.path(entry.name), error)
            self._metrics.loss("archive")
            self.unlink(entry)
            return
        with self._lock:
            self.space.usage.own -= entry.file_bytes
            entry.file_bytes = 0
            if size:
                self.space.count_archived(entry.name, size)

    def quarantine(self, entry: Entry, bad: BadChunk) -> None:
        """Set a bad file aside, so that a person can look at it; a missing one is only counted out."""
        now = time.monotonic()
        told = now - self._told_at < _TELL_AGAIN_SEC
        if not told:
            self._told_at = now
        # One line says what to look for; when a whole directory is damaged, the counters tell the rest.
        level = logging.DEBUG if told else logging.WARNING
        logger.log(level, "chunk file %s is not usable (%s): %s", self.path(entry.name), bad.reason, bad)
        name = f"{entry.name.hex()}.{time.time_ns():x}.{bad.reason}{SUFFIX}"
        target = os.path.join(self._directory, QUARANTINE, name)
        moved = bad.reason != "missing"
        size = 0
        if moved:
            try:
                self._rename(self._reach(entry.name), target)
                size = os.lstat(target).st_size
            except FileNotFoundError:
                moved = False
            except OSError as error:
                self.health.failed("write", error)
                return  # it lies where it was, and counts
        with self._lock:
            self.space.usage.own -= entry.file_bytes
            entry.file_bytes = 0
            if moved:
                self.space.usage.quarantine += size
                self.space.quarantined.append(FoundFile(target, size, 0, b""))

    # -- directories -----------------------------------------------------------------------------------

    def _rename(self, source: str, target: str) -> None:
        folder = os.path.dirname(target)
        try:
            if folder != os.path.dirname(source):  # else it has been looked at, and both names lead through it
                self._check_folder(folder)
            try:
                self._files.rename(source, target)
            except FileNotFoundError:
                self._make_folder(folder)
                self._files.rename(source, target)
            except IsADirectoryError:
                self._move_aside(target)
                self._files.rename(source, target)
        except OSError:
            if is_temporary(os.path.basename(source)):
                with contextlib.suppress(OSError):
                    self._files.unlink(source)
            raise
        self._sync_folder(folder)

    def _make_folder(self, folder: str) -> None:
        """Make a directory below the namespace's own, which is never made again: it held the lock."""
        parent = os.path.dirname(folder)
        for path in (folder,) if parent == self._directory else (parent, folder):
            with contextlib.suppress(FileExistsError):
                self._files.mkdir(path, self._config.cold_dir_mode)
                os.chmod(path, self._config.cold_dir_mode)
                self._sync_folder(os.path.dirname(path))

    def _sync_folder(self, folder: str) -> None:
        """With ``fsync``: make names durable. The file is there already, so a refusal only ends the promise."""
        if not self._config.fsync:
            return
        try:
            fd = self._files.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._files.fsync(fd)
            finally:
                self._files.close(fd)
        except OSError as error:
            self.health.failed("write", error)

    def _check_folder(self, folder: str) -> None:
        """Move aside what is named like a directory of ours and is none: a link may lead out of the cold path.

        Raises NotOurs when the namespace's own directory is another one by now.
        """
        if folder == self._directory:
            self._check_ours()
        else:
            self._check_folder(os.path.dirname(folder))
            self._check_place(folder)

    def _check_place(self, folder: str) -> None:
        try:
            mode = os.lstat(folder).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            self._move_aside(folder)

    def _move_aside(self, path: str) -> None:
        """Something foreign has the name of a directory or file of ours."""
        aside = f"{path}.foreign-{time.time_ns():x}"
        self._files.rename(path, aside)
        logger.warning("%s is not ours; it is now %s", path, aside)

    def _probe_direct(self) -> bool:
        """Whether the filesystem takes O_DIRECT, found out by writing one page."""
        path = os.path.join(self._directory, temporary_name("probe"))
        page = mmap.mmap(-1, ALIGN)  # aligned, as O_DIRECT wants it
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT | os.O_CLOEXEC
        try:
            fd = self._files.open(path, flags, 0o600)
            try:
                self._files.pwritev(fd, [page], 0)
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
    # A character can take six bytes in JSON, and twice that in JSON within JSON.
    text = 6 * (len(meta.key) + len(meta.chunk_hash) + len(meta.parent) + len(meta.model) + len(meta.capture))
    preamble = align(1024 + text + 192 * len(rows) + len(ids))
    return preamble + sum(len(view) for view in rows.values())
