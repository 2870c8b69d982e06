"""Other directories under the cold path: what no process holds is counted and leaves first, or is adopted.

A namespace whose lock is held is never touched or counted. One that is free is *dead*: another model, an earlier
revision, or what another process has left. Its bytes count against our limit, and its files leave before our own. A
subdirectory ``pN`` of our own namespace was filled by a process that started while another one held the namespace; when
that process has ended, its chunks are renamed into our directory and served like any others found at start. Unless
everything was cleared meanwhile: then they go to our trash, and so does, with a clear, what is left of any process of
our namespace that has ended.

Only sums are kept, a few numbers per directory: files are listed when they have to leave. Runs on the I/O threads.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.layout import (
    ARCHIVE,
    QUARANTINE,
    SEQUENCES,
    SUBDIRECTORY,
    TRASH,
    FoundFile,
    chunk_path,
    is_temporary,
    scan_chunks,
    scan_flat,
)
from lmcache_hs_backend.format.namespace import namespaces
from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock, refuse_links
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.state import recovering, sharing

logger = logging.getLogger(__name__)

#: Files of a dead namespace that are remembered, oldest first, until they leave.
_LISTED = 1000


class Neighbours:
    """See the module's text."""

    def __init__(self, core: Core, files: FileLayer) -> None:
        self._core = core
        self._files = files
        # Held with the lock of a dead namespace, since flock does not tell our own threads apart. Never while many
        # files are looked at: a clear waits for it, and a process that starts waits for the namespace's lock.
        self._busy = threading.Lock()
        self._listing = threading.Lock()  # guards the two below; taken before _busy
        self._listed: deque[FoundFile] = deque()
        self._listed_of = ""

    def use_files(self, files: FileLayer) -> None:
        """Send system calls through ``files`` from now on."""
        self._files = files

    def look(self) -> None:
        """Look at every other namespace: count those that have lost their owner, forget those that have one again."""
        core = self._core
        own = core.disk.directory
        try:
            others = [directory for directory, _ in namespaces(core.config.cold_path)]
        except OSError as error:  # ours is open and works
            logger.warning("other namespaces are not counted: %s cannot be listed: %s", core.config.cold_path, error)
            return
        gone = set(core.state.accounts.dead_bytes) - set(others)
        for directory in others:
            with contextlib.suppress(OSError):
                if os.path.samefile(directory, own):
                    continue
            ours = os.path.dirname(directory) == own and SUBDIRECTORY.fullmatch(os.path.basename(directory))
            try:
                dead = self._is_dead(directory, adopt=bool(ours))
                if dead and directory not in core.state.accounts.dead_bytes:
                    nbytes = sum(file.size for file in _files_of(directory))
                    dead = self._is_dead(directory)  # still
                    if dead:
                        with core.lock, core.step:
                            core.state.accounts.add_dead(directory, nbytes)
            except OSError as error:  # it costs no more than this one
                logger.warning("%s is not counted: %s", directory, error)
                continue
            if not dead:
                gone.add(directory)
        with core.lock, core.step:
            for directory in gone:
                core.state.accounts.forget_dead(directory)

    def _is_dead(self, directory: str, *, adopt: bool = False) -> bool:
        """Whether no process holds a namespace; then, if so wanted, adopt what it has. Raises OSError."""
        with self._busy:
            lock = self._lock(directory)
            if lock is None:
                return False
            try:
                if adopt:
                    self._adopt(directory)
            finally:
                lock.close()
        return True

    def purge(self) -> None:
        """Move the chunks of our namespace to the trash, ours and those that processes have left that have ended.

        Raises OSError when ours cannot be moved. Of the others that is a WARNING.
        """
        disk = self._core.disk
        with self._busy:  # nothing is adopted meanwhile
            disk.purge()
            try:
                siblings = disk.siblings()
            except OSError as error:
                logger.warning("%s was cleared, but not what other processes have left: %s", disk.directory, error)
                return
            for directory in siblings:
                lock = self._lock(directory)
                if lock is None:
                    continue
                try:
                    self._purge_dead(directory)
                except OSError as error:
                    logger.warning(
                        "%s was cleared, but not %s, which a process has left that has ended: %s. Delete it by hand, "
                        "or what it holds is found again by a later start.", disk.directory, directory, error,
                    )  # fmt: skip
                finally:
                    lock.close()

    def delete(self, names: Sequence[bytes]) -> int:
        """Delete what processes of our namespace that have ended have left of some chunks.

        Returns how many files cannot be deleted; that is not tried again.
        """
        failed = 0
        try:
            siblings = self._core.disk.siblings()
        except OSError:
            return len(names)
        for directory in siblings:
            paths = [path for name in names if os.path.lexists(path := chunk_path(directory, name))]
            if not paths:
                continue
            with self._busy:
                lock = self._lock(directory)
                if lock is None:
                    continue
                try:
                    for path in paths:
                        failed += not self._delete(path, directory)
                finally:
                    lock.close()
        return failed

    def _delete(self, path: str, directory: str) -> bool:
        try:
            refuse_links(path, directory)
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)
        except OSError as error:
            logger.warning("%s is left of a chunk that was dropped: %s", path, error)
            return False
        return True

    def _purge_dead(self, directory: str) -> None:
        core = self._core
        core.disk.purge(directory)
        with core.lock, core.step:
            core.state.accounts.dead_cleared(directory)

    def delete_oldest(self, directory: str) -> int | None:
        """Delete the oldest file of a dead namespace. Returns its bytes, 0 for a namespace that is not dead any more.

        None when its files cannot be deleted; they are no longer counted then.
        """
        core = self._core
        try:
            with self._listing:
                file = self._next_file(directory)
            if file is None:
                with core.lock, core.step:
                    core.state.accounts.empty_dead(directory)
                return 0
            with self._busy:
                lock = self._lock(directory)
                if lock is None:
                    with core.lock, core.step:
                        core.state.accounts.forget_dead(directory)
                    return 0
                try:
                    refuse_links(file.path, directory)
                    with contextlib.suppress(FileNotFoundError):
                        self._files.unlink(file.path)
                    return file.size
                finally:
                    lock.close()
        except OSError as error:
            # They stay, and are not looked at again; after a restart they are found and counted once more.
            logger.warning("%s is no longer counted: a file of it cannot be deleted: %s", directory, error)
            core.metrics.add("errors_unlink")
            with core.lock, core.step:
                core.state.accounts.empty_dead(directory)
            return None

    def _lock(self, directory: str) -> NamespaceLock | None:
        """The lock of a namespace that no process holds, or None."""
        try:
            return NamespaceLock.take(directory)
        except OSError as error:
            logger.info("%s is not counted: %s", directory, error)
            return None

    def _next_file(self, directory: str) -> FoundFile | None:
        if self._listed_of != directory or not self._listed:
            oldest = heapq.nsmallest(_LISTED, _files_of(directory), key=lambda file: file.mtime_ns)
            self._listed, self._listed_of = deque(oldest), directory
        return self._listed.popleft() if self._listed else None

    # -- adopting ------------------------------------------------------------------------------------------

    def _adopt(self, directory: str) -> None:
        """Rename what a subdirectory of our namespace holds into it. Its lock is held by the caller.

        After a clear its chunks go to the trash: they may be of the weights that the clear was for, and a later start,
        which knows of no clear, would adopt them. Raises OSError.
        """
        core = self._core
        adopted = 0
        for file in scan_chunks(directory):
            if core.state.epoch:
                break
            if file.name:
                adopted += self._adopt_chunk(file)
        if core.state.epoch:
            self._purge_dead(directory)
        for file in scan_chunks(os.path.join(directory, ARCHIVE)):
            target = core.disk.path(file.name, archived=True) if file.name else ""
            if target and not os.path.lexists(target) and self._move(file.path, target):
                with core.lock, core.step:
                    sharing.archived(core.state, file.name, file.size)
        prefix = os.path.basename(directory)
        for name in (SEQUENCES, QUARANTINE):
            for file in scan_flat(os.path.join(directory, name)):
                target = os.path.join(core.disk.directory, name, f"{prefix}-{os.path.basename(file.path)}")
                if not os.path.lexists(target) and self._move(file.path, target) and name == QUARANTINE:
                    with core.lock, core.step:
                        core.state.accounts.add_quarantined(file._replace(path=target))
        if adopted:
            logger.info(
                "%s: %d chunk(s) of a process that has ended are found in %s", core.disk.directory, adopted, directory
            )

    def _adopt_chunk(self, file: FoundFile) -> bool:
        """Rename one chunk's file into our directory, unless we have the chunk; then it stays, and leaves first."""
        core, state = self._core, self._core.state
        with core.lock, core.step:
            entry = state.entries.get(file.name)
            if state.jobs.is_busy(file.name) or (entry is not None and entry.has_file):
                return False
            state.jobs.claim(file.name, time.monotonic())
        moved = False
        try:
            moved = self._move(file.path, chunk_path(core.disk.directory, file.name))
        finally:
            with core.lock, core.step:
                if moved:
                    recovering.found(state, [file.name])
                    recovering.sized(state, [file])
                state.jobs.finish(file.name)
        return moved

    def _move(self, source: str, target: str) -> bool:
        try:
            os.makedirs(os.path.dirname(target), self._core.config.cold_dir_mode, exist_ok=True)
            self._files.rename(source, target)
        except OSError as error:
            logger.debug("%s is not adopted: %s", source, error)
            return False
        return True


def _files_of(directory: str) -> Iterator[FoundFile]:
    """The files of a namespace that count: chunks, archive, quarantine, trash, temporaries."""
    folders = [directory, os.path.join(directory, ARCHIVE)]
    trash = os.path.join(directory, TRASH)
    if os.path.isdir(trash) and not os.path.islink(trash):
        with contextlib.suppress(OSError), os.scandir(trash) as entries:
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    yield from itertools.chain.from_iterable(map(scan_chunks, folders))
    yield from scan_flat(os.path.join(directory, QUARANTINE))
    for file in scan_flat(directory):
        if is_temporary(os.path.basename(file.path)):
            yield file
