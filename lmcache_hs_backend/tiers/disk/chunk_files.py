"""The chunk files of one namespace: read, written, moved and deleted by name.

It runs on the I/O threads and takes no lock of the store's. What the system answers is judged here: a file that is
not what it should be is a ``BadChunk``, a disk that fails is an ``OSError`` and reported to ``health``. It decides
nothing about chunks, and counts no bytes against a limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import NamedTuple, cast

from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format import chunk_file
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.header import BadChunk, FileLayout, Header
from lmcache_hs_backend.format.layout import (
    ARCHIVE,
    QUARANTINE,
    TRASH,
    FoundFile,
    chunk_folders,
    chunk_path,
    fan_out,
    is_temporary,
    quarantine_name,
    temporary_name,
)
from lmcache_hs_backend.format.pages import align
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.disk.health import DiskHealth
from lmcache_hs_backend.tiers.disk.optional_calls import OptionalCalls
from lmcache_hs_backend.tiers.disk.owned_namespace import NotOurs, OwnedNamespace

logger = logging.getLogger(__name__)

_WARN_AGAIN_SEC = 10.0
#: Answers that concern one file and not the disk.
_ONE_FILE = (errno.EACCES, errno.EPERM, errno.EUCLEAN, errno.EBADMSG)
#: Answers that concern neither, but a limit of this process or a moment.
_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_MOST_SUSPECTS = 1000


class Written(NamedTuple):
    """A chunk file that is complete under a temporary name, and the name that it is to get."""

    temporary: str
    path: str
    layout: FileLayout
    digests: bytes


class _IoSlots:
    """A semaphore, to be held by ``with``. threading's own is Python code, at the very place where threads meet."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)


class ChunkFiles:
    """See the module's text."""

    def __init__(self, config: TieredConfig, namespace: OwnedNamespace, metrics: Metrics, files: FileLayer) -> None:
        """Touches nothing; call ``opened`` when the namespace is open."""
        self._namespace = namespace
        self._calls = OptionalCalls(files, config.cold_path)
        self._files = cast("FileLayer", self._calls)
        self.health = DiskHealth(namespace, self._files, metrics)
        self._config = config
        self._verify_lock = namespace.verify_lock
        self._metrics = metrics
        self._direct = False
        # Threads that all wait for the disk come back from it together, and then the disk waits for them. So one too
        # many for it always has the next file ready.
        threads = config.io_threads
        self._io_slots = _IoSlots(threads - 1 if threads > 2 else threads)
        self._suspects: set[bytes] = set()  # chunks whose file has given EIO once
        self._warned_at = -_WARN_AGAIN_SEC

    @property
    def directory(self) -> str:
        """The namespace's."""
        return self._namespace.directory

    def opened(self) -> None:
        """The namespace is open: find out whether it takes O_DIRECT, by writing."""
        self._direct = self._config.use_odirect != "off" and self._takes_direct()

    def use_files(self, files: FileLayer) -> None:
        """Send system calls through ``files`` from now on."""
        self._calls = OptionalCalls(files, self._config.cold_path)
        self._files = self.health.files = cast("FileLayer", self._calls)

    def path(self, name: bytes, *, archived: bool = False) -> str:
        """Where the file of a chunk is, or would be."""
        return chunk_path(self._root(archived), name)

    def _checked_path(self, name: bytes, *, skip_lock_check: bool = False) -> str:
        """The path of a chunk's file, once it is sure that it leads through directories of ours.

        ``skip_lock_check``: another read of the same call has just made that check.
        """
        if not skip_lock_check:
            self._verify_lock()
        self._check_place(fan_out(self.directory, name))
        return chunk_path(self.directory, name)

    def _root(self, archived: bool) -> str:
        return os.path.join(self.directory, ARCHIVE) if archived else self.directory

    # -- reading ---------------------------------------------------------------------------------------

    def fetch(
        self, name: bytes, layout: FileLayout, into: Mapping[int, memoryview], *, skip_lock_check: bool = False
    ) -> bytes:
        """Move layers of a chunk's file to ``into`` (layer_idx → bytes), unchecked. Returns the file's preamble.

        ``check`` says whether that is the chunk. Raises BadChunk (missing files included) or OSError.
        """
        started = time.monotonic()
        try:
            path = self._checked_path(name, skip_lock_check=skip_lock_check)
            preamble = self._fetch(path, layout, into)
        except (OSError, BadChunk) as error:
            raise self._classified(name, error) from None
        self._suspects.discard(name)
        read_bytes = sum(len(view) for view in into.values())
        self._metrics.observe("disk_read_seconds", time.monotonic() - started, read_bytes=read_bytes)
        return preamble

    def _fetch(self, path: str, layout: FileLayout, into: Mapping[int, memoryview]) -> bytes:
        direct = self._direct  # another thread may turn it off at any moment
        try:
            return chunk_file.fetch(self._files, path, layout, into, direct=direct, io_slots=self._io_slots)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            preamble = chunk_file.fetch(self._files, path, layout, into, direct=False, io_slots=self._io_slots)
            self._direct = False  # reading with O_DIRECT is refused where writing with it was not
            self._calls.refused("odirect", error)
            return preamble

    def free_bytes(self) -> int | None:
        """Bytes that the filesystem has free for us; None where it does not say."""
        return self._calls.free_bytes(self.directory)

    def total_bytes(self) -> int | None:
        """The size of the filesystem; None where it does not say."""
        return self._calls.total_bytes(self.directory)

    def check(
        self,
        name: bytes,
        prefix: bytes,
        layout: FileLayout,
        into: Mapping[int, memoryview],
        preamble: bytes,
        digests: bytes,
    ) -> bytes:
        """Whether what ``fetch`` brought is the chunk; no I/O. Returns the file's digests. Raises BadChunk.

        ``digests``: those that are known; a preamble that fits them is not parsed again.
        """
        return chunk_file.check(preamble, name, prefix, layout, into, verify=self._config.verify_reads, digests=digests)

    def read_header(self, name: bytes) -> Header:
        """The header of a chunk's file. Raises BadChunk (missing files included) or OSError."""
        try:
            header = chunk_file.read_header(self._files, self._checked_path(name))
            self._suspects.discard(name)
            return header
        except (OSError, BadChunk) as error:
            raise self._classified(name, error) from None

    def _classified(self, name: bytes, error: OSError | BadChunk) -> BadChunk | OSError:
        """Whether it is the file or the disk: a disk that works, but fails for the same file again, is fine."""
        if isinstance(error, (FileNotFoundError, BadChunk)):
            try:
                self._verify_lock()
            except OSError as other:  # what is there now says nothing about our files
                error = other
            else:
                return error if isinstance(error, BadChunk) else BadChunk("missing", str(error))
        if error.errno not in _THE_PROCESS and not isinstance(error, NotOurs):
            if name in self._suspects or (error.errno in _ONE_FILE and self._is_open(fan_out(self.directory, name))):
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
        name: bytes,
        meta: ChunkMeta,
        ids: bytes,
        rows: Mapping[LayerSpec, memoryview],
        *,
        mtime_ns: int,
        archived: bool = False,
    ) -> Written:
        """Write a chunk's file under a temporary name beside its own. ``publish`` or ``discard`` it afterwards.

        Raises OSError, having removed what it wrote; the caller reports to ``health``.
        """
        path = self.path(name, archived=archived)
        folder = os.path.dirname(path)
        self._check_folder(folder)

        def write(direct: bool) -> tuple[str, FileLayout, bytes]:
            return chunk_file.write(
                self._files, folder, meta, ids, rows,
                direct=direct, fsync=self._config.fsync, mtime_ns=mtime_ns, io_slots=self._io_slots,
            )  # fmt: skip

        direct = self._direct
        try:
            try:
                temporary, layout, digests = write(direct)
            except FileNotFoundError:
                self._make_folder(folder)
                temporary, layout, digests = write(direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            temporary, layout, digests = write(False)  # what is left after a short write is not aligned
        return Written(temporary, path, layout, digests)

    def publish(self, written: Written) -> None:
        """Give a written file its name, in place of the file that may have it. Raises OSError; then it is removed."""
        self._rename(written.temporary, written.path)

    def discard(self, written: Written) -> None:
        """Remove a written file that is not wanted any more. What is left of it goes at the next start."""
        with contextlib.suppress(OSError):
            self._files.unlink(written.temporary)

    def save_use(self, name: bytes, used_ns: int) -> bool:
        """Store when a chunk was last used in its file's mtime. False when that is refused."""
        try:
            self._files.utime(self._checked_path(name), ns=(used_ns, used_ns), follow_symlinks=False)
        except OSError as error:  # only the order of a later eviction depends on it
            logger.debug("the last use of %s is not saved: %s", name.hex(), error)
            return False
        return True

    # -- out of the way --------------------------------------------------------------------------------

    def unlink(self, name: bytes) -> bool:
        """Delete a chunk's file. A file that is not there is what was wanted. False: it is still there, and counted."""
        try:
            path = self._checked_path(name)
            try:
                self._files.unlink(path)
            except FileNotFoundError:
                pass
            except IsADirectoryError:
                self._move_aside(path)
        except OSError as error:
            self._metrics.add("errors_unlink")
            logger.debug("%s cannot be deleted: %s", self.path(name), error)
            return False
        return True

    def archive(self, name: bytes) -> int:
        """Move a chunk's file to the archive. Returns its size, 0 when there was no file. Raises OSError."""
        target = self.path(name, archived=True)
        try:
            self._rename(self._checked_path(name), target)
            return os.lstat(target).st_size
        except FileNotFoundError:
            return 0

    def quarantine(self, name: bytes, bad: BadChunk) -> tuple[FoundFile | None, bool]:
        """Move an unusable file to the quarantine, so that a person can look at it.

        Returns the file where it is now, None when there was none to move or it cannot be moved, and whether it is
        still in its place.
        """
        now = time.monotonic()
        recent = now - self._warned_at < _WARN_AGAIN_SEC
        if not recent:
            self._warned_at = now
        # One line says what to look for; when a whole directory is damaged, the counters tell the rest.
        level = logging.DEBUG if recent else logging.WARNING
        logger.log(level, "chunk file %s is not usable (%s): %s", self.path(name), bad.reason, bad)
        if bad.reason == "missing":
            return None, False
        aside = quarantine_name(os.path.basename(self.path(name)), bad.reason)
        target = os.path.join(self.directory, QUARANTINE, aside)
        try:
            self._rename(self._checked_path(name), target)
            return FoundFile(target, os.lstat(target).st_size, 0, b""), False
        except FileNotFoundError:
            return None, False
        except OSError as error:
            self.health.failed("write", error)
            return None, True

    def siblings(self) -> list[str]:
        """See OwnedNamespace."""
        return self._namespace.siblings()

    def purge(self, directory: str = "") -> None:
        """Move all chunks of the namespace to the trash, directory by directory; the archive stays. Raises OSError.

        When it returns, no start will find them again, whatever happens to the process. A chunk's file that is being
        written moves along with the directory of its temporary file.

        ``directory``: of a sibling, whose lock the caller holds; by default the namespace's own.
        """
        self._verify_lock()
        directory = directory or self.directory
        trash = os.path.join(self.directory, TRASH, temporary_name("cleared"))
        folders = chunk_folders(directory)  # raises where it cannot be listed: nothing would be moved
        if folders:
            os.makedirs(trash, self._config.cold_dir_mode, exist_ok=True)
        for folder in folders:
            self._files.rename(folder, os.path.join(trash, os.path.basename(folder)))
        if folders:
            self._sync_folder(trash)
            self._sync_folder(directory)

    def empty_trash(self, count: int) -> tuple[int, bool]:
        """Delete up to ``count`` files of the trash. Returns their bytes, and whether there may be more.

        Raises OSError; what cannot be deleted is tried again by the next start.
        """
        root = os.path.join(self.directory, TRASH)
        if not os.path.isdir(root):
            return 0, False
        nbytes = deleted = 0
        for path, folders, names in os.walk(root, topdown=False):
            for name in names:
                if deleted == count:
                    return nbytes, True
                file = os.path.join(path, name)
                size = os.lstat(file).st_size
                self._files.unlink(file)
                nbytes, deleted = nbytes + size, deleted + 1
            for folder in folders:
                if os.path.islink(os.path.join(path, folder)):
                    self._files.unlink(os.path.join(path, folder))
            os.rmdir(path)
        return nbytes, False

    # -- directories -----------------------------------------------------------------------------------

    def _rename(self, source: str, target: str) -> None:
        folder = os.path.dirname(target)
        try:
            if folder != os.path.dirname(source):  # else it has been checked, and both names lead through it
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
        for path in (folder,) if parent == self.directory else (parent, folder):
            with contextlib.suppress(FileExistsError):
                self._files.mkdir(path, self._config.cold_dir_mode)
                self._calls.chmod(path, self._config.cold_dir_mode)
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
        if folder == self.directory:
            self._verify_lock()
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

    def _takes_direct(self) -> bool:
        refusal = chunk_file.direct_refusal(self._files, self.directory)
        if refusal is not None and self._config.use_odirect == "on":
            logger.warning("use_odirect is on, but %s does not take it: %s", self.directory, refusal)
        return refusal is None


def most_bytes(meta: ChunkMeta, ids: bytes, rows: Mapping[LayerSpec, memoryview]) -> int:
    """At least as many bytes as the file will have; how long its header is, only writing it tells."""
    # A character can take six bytes in JSON, and twice that in JSON within JSON.
    text = 6 * (len(meta.key) + len(meta.chunk_hash) + len(meta.parent) + len(meta.model) + len(meta.capture))
    preamble = align(1024 + text + 192 * len(rows) + len(ids))
    return preamble + sum(len(view) for view in rows.values())
