"""What lies on disk at start: the files are the only truth, and this is where they become an index.

Names are listed first, so that chunks can be served; sizes next, before any write may start, so that the limit
holds; headers are read behind, in batches on the I/O threads, or when somebody asks. Everything recovered is
UNCONFIRMED: it is not served before its KV is seen, and not deleted because the KV is absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from lmcache_hs_backend.config import GIB
from lmcache_hs_backend.format.layout import (
    ARCHIVE,
    QUARANTINE,
    FoundFile,
    chunk_names,
    fan_out_folders,
    is_in_the_making,
    is_temporary,
    scan_chunks,
    scan_flat,
    scan_folder,
)
from lmcache_hs_backend.format.namespace import namespaces
from lmcache_hs_backend.tiers.index import Entry, Standing
from lmcache_hs_backend.tiers.mover import Executor
from lmcache_hs_backend.tiers.namespace import NamespaceLock
from lmcache_hs_backend.tiers.pair import Delete, TierPair

logger = logging.getLogger(__name__)

_UNDER_ONE_LOCK = 1000
_HEADERS_PER_HOP = 64
_TRIMMED_PER_HOP = 32
#: Bytes that a file counts for until its size is known. Not 0: an entry has a file when it has bytes on disk.
_UNCOUNTED = 1

T = TypeVar("T")


class Recovery:
    """Brings the files of a cold path into the index and the accounts of a pair of tiers."""

    def __init__(self, pair: TierPair, cold_path: str, directory: str, executor: Executor) -> None:
        self._pair = pair
        self._cold_path = cold_path
        self._directory = directory
        self._executor = executor

    async def scan(self) -> None:
        """Index everything by name, then count it by size. No write may start before this is done.

        The names are there long before the sizes: those take a look at every file, and nobody who asks for a
        chunk has to wait for them.
        """
        loop = asyncio.get_running_loop()
        folders = await loop.run_in_executor(self._executor, self._scan_top)
        for folder in folders:
            names = await loop.run_in_executor(self._executor, chunk_names, folder)
            with self._pair.lock:
                for name in names:
                    self._add(name)
        files = await loop.run_in_executor(self._executor, self._scan_own, folders)
        files.sort(key=lambda file: file.mtime_ns)
        for batch in _batches(files, _UNDER_ONE_LOCK):
            with self._pair.lock:
                for file in batch:
                    self._count(file)
        with self._pair.lock:
            self._pair.index.all_dated()
            self._pair.cold.space.sized = True
        await loop.run_in_executor(self._executor, self._scan_aside)
        await loop.run_in_executor(self._executor, self._scan_dead)
        usage = self._pair.cold.space.usage
        if usage.total:
            logger.info(
                "found in %s: %d chunk(s) of %.3g GB; set aside or of other namespaces: %.3g GB; limit %.3g GB",
                self._directory, len(files), usage.own / GIB, (usage.total - usage.own) / GIB,
                self._pair.config.max_cold_size,
            )  # fmt: skip

    async def read_headers(self) -> None:
        """Read what the scan has left unread, most recently used first. What a failing disk hides stays unread."""
        loop = asyncio.get_running_loop()
        with self._pair.lock:
            unread = [entry for entry in self._pair.index.cold.values() if entry.unread]
        for batch in _batches(reversed(unread), _HEADERS_PER_HOP):
            if not self._pair.cold.readable:
                return
            await loop.run_in_executor(self._executor, self._read_batch, batch)

    async def trim(self) -> None:
        """Bring what was found under the limit, which may be lower than it was."""
        loop = asyncio.get_running_loop()
        excess = self._pair.cold.space.usage.total - self._pair.config.max_cold_bytes
        if excess > 0:
            logger.info("%s: %.2f GB above max_cold_size leave, oldest first", self._directory, excess / GIB)
        while await loop.run_in_executor(self._executor, self._trim_batch):
            pass

    async def forget_revived(self) -> None:
        """Namespaces that were dead and have an owner again are no longer ours to count."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._pair.cold.space.forget_revived)

    # -- on an I/O thread --------------------------------------------------------------------------------

    def _scan_top(self) -> list[str]:
        """The fan-out directories of this namespace."""
        for file in scan_flat(self._directory):
            if is_temporary(os.path.basename(file.path)):
                self._remove(file.path)
        return fan_out_folders(self._directory)

    def _scan_own(self, folders: Iterable[str]) -> list[FoundFile]:
        """The chunks of this namespace; what a crash has left beside them goes."""
        files = []
        for file in itertools.chain.from_iterable(map(scan_folder, folders)):
            if file.name:
                files.append(file)
            else:
                self._remove(file.path)
        return files

    def _scan_aside(self) -> None:
        """The archive and the quarantine of this namespace."""
        space = self._pair.cold.space
        quarantined = sorted(scan_flat(os.path.join(self._directory, QUARANTINE)), key=lambda f: f.mtime_ns)
        archived = sorted(scan_chunks(os.path.join(self._directory, ARCHIVE)), key=lambda f: f.mtime_ns)
        with self._pair.lock:
            known = {file.path for file in space.quarantined}  # set aside since we started
            for file in quarantined:
                if file.path not in known:
                    space.quarantined.append(file)
                    space.usage.quarantine += file.size
            for file in archived:
                if file.name and file.name not in space.archived:
                    space.count_archived(file.name, file.size)
        for file in archived:
            if not file.name:
                self._remove(file.path)

    def _scan_dead(self) -> None:
        """Namespaces that no process holds: another model, an earlier revision, a second process's leftovers."""
        dead: list[tuple[FoundFile, str]] = []
        try:
            others = [directory for directory, _ in namespaces(self._cold_path)]
        except OSError as error:  # ours is open and works
            logger.warning("other namespaces are not counted: %s cannot be listed: %s", self._cold_path, error)
            return
        for directory in others:
            try:
                if os.path.samefile(directory, self._directory):
                    continue
                lock = NamespaceLock.take(directory)
            except OSError as error:
                logger.info("%s is not counted: %s", directory, error)
                continue
            if lock is None:
                continue
            lock.close()  # only tried: its owner may be starting at this moment, and eviction takes it again
            folders = (directory, os.path.join(directory, ARCHIVE))
            aside = scan_flat(os.path.join(directory, QUARANTINE))
            dead.extend((file, directory) for file in itertools.chain(*map(scan_chunks, folders), aside))
        dead.sort(key=lambda item: item[0].mtime_ns)
        with self._pair.lock:
            self._pair.cold.space.dead.extend(dead)
            self._pair.cold.space.usage.dead += sum(file.size for file, _ in dead)

    def _read_batch(self, batch: Iterable[Entry]) -> None:
        pair = self._pair
        for entry in batch:
            with pair.lock:
                if not pair.cold.readable:
                    return
                if pair.index.get(entry.name) is not entry or not entry.unread or pair.mover.is_busy(entry.name):
                    continue  # somebody is dealing with it already
                pair.mover.claim(entry.name)
            try:
                pair.read_header(entry)
            finally:
                with pair.lock:
                    pair.mover.release(entry.name)

    def _trim_batch(self) -> bool:
        return all(self._pair.cold.space.trim() for _ in range(_TRIMMED_PER_HOP))

    def _add(self, name: bytes) -> None:
        """Lock held. A chunk that was stored meanwhile has a file now that nobody has looked into."""
        index = self._pair.index
        entry = index.get(name)
        self._pair.cold.space.usage.own += _UNCOUNTED
        if self._pair.cleared:  # before it was known what there was to clear; what is here now came later
            former = Entry(name, Standing.GONE, file_bytes=_UNCOUNTED)
            self._pair.mover.submit(Delete(self._pair, former, archive=False))
        elif entry is not None:
            entry.file_bytes = _UNCOUNTED
            index.settle(entry)
        else:
            index.add_found(name, _UNCOUNTED)

    def _count(self, file: FoundFile) -> None:
        """Lock held. What has left meanwhile stays away."""
        entry = self._pair.index.get(file.name)
        if entry is None or not entry.file_bytes:
            return
        nbytes = max(_UNCOUNTED, file.size)  # an empty file is one too, and has to be set aside
        self._pair.cold.space.usage.own += nbytes - entry.file_bytes
        entry.file_bytes = nbytes
        self._pair.index.date(entry, file.mtime_ns)

    @staticmethod
    def _remove(path: str) -> None:
        """Something left over goes, but not what is being written: a chunk may be archived before we have looked."""
        if is_in_the_making(os.path.basename(path)):
            return
        with contextlib.suppress(OSError):  # a left-over that cannot be removed is tried again at the next start
            os.unlink(path)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
