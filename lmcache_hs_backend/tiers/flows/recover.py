"""What is on disk at start: the files are the only truth, and this is where they become an index.

Names are listed first, so that chunks can be served; sizes next, before any write may start, so that the limit holds;
headers are read in the background, in batches on the I/O threads, or when a call asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from lmcache_hs_backend.config import GIB
from lmcache_hs_backend.format.layout import (
    ARCHIVE,
    QUARANTINE,
    chunk_names,
    fan_out_folders,
    is_in_the_making,
    is_temporary,
    scan_chunks,
    scan_flat,
    scan_folder,
)
from lmcache_hs_backend.tiers.disk.found_chunks import FoundChunks
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoExecutor
from lmcache_hs_backend.tiers.flows.make_room import MakeRoom
from lmcache_hs_backend.tiers.flows.neighbours import Neighbours
from lmcache_hs_backend.tiers.state import recovering, sharing
from lmcache_hs_backend.tiers.state.entries import UNREAD, ChunkEntry

logger = logging.getLogger(__name__)

_LOCK_BATCH = 1000
#: From so many chunks on, what was found at start is kept out of Python's full garbage collections. It is not garbage
#: before it is dropped, and then reference counts free it.
_MANY_CHUNKS = 20_000
_HEADERS_PER_HOP = 64
_TRIMMED_PER_HOP = 32

T = TypeVar("T")


class Recover:
    """Brings the files of a cold path into the state of a store."""

    def __init__(self, core: Core, room: MakeRoom, neighbours: Neighbours, executor: IoExecutor) -> None:
        self._core = core
        self._room = room
        self._neighbours = neighbours
        self._directory = core.disk.directory
        self._executor = executor
        self._found = FoundChunks()

    async def scan(self) -> None:
        """Index everything by name, then count it by size. No write may start before this is done.

        The names are there long before the sizes: those take a look at every file, and a call that asks for a chunk
        does not have to wait for them.
        """
        loop = asyncio.get_running_loop()
        core = self._core
        folders = await loop.run_in_executor(self._executor, self._scan_top)
        for folder in folders:
            names = await loop.run_in_executor(self._executor, chunk_names, folder)
            for some in _batches(names, _LOCK_BATCH):
                with core.lock, core.step:
                    recovering.found(core.state, some)
            if len(core.state.entries) > _MANY_CHUNKS:
                gc.freeze()  # or full collections walk all of them again and again, 0.3 s each for 300,000
        self._found = await loop.run_in_executor(self._executor, self._scan_own, folders)
        for batch in self._found.by_use(_LOCK_BATCH):
            with core.lock, core.step:
                recovering.sized(core.state, batch)
        with core.lock, core.step:
            recovering.all_sized(core.state)
        await loop.run_in_executor(self._executor, self._scan_archive)
        await loop.run_in_executor(self._executor, self._neighbours.look)
        accounts = core.state.accounts
        if accounts.total:
            logger.info(
                "found in %s: %d chunk(s) of %.3g GB; quarantined, archived or of other namespaces: %.3g GB; "
                "limit %.3g GB",
                self._directory, len(self._found), accounts.own / GIB, (accounts.total - accounts.own) / GIB,
                core.state.max_cold_bytes / GIB,
            )  # fmt: skip

    async def read_headers(self) -> None:
        """Read what the scan has left unread, most recently used first. What a failing disk hides stays unread."""
        found, self._found = self._found, FoundChunks()
        await self._read(self._unread(names) for names in found.names_by_use(_HEADERS_PER_HOP))

    async def read_left_headers(self) -> None:
        """Read what is unread still, in no order: a disk had failed, or a file was damaged."""
        loop, entries = asyncio.get_running_loop(), self._core.state.entries
        # Copying the names is one step of the interpreter; what changes meanwhile is looked at again.
        unread = await loop.run_in_executor(self._executor, lambda: self._unread(list(entries)))
        await self._read(_batches(unread, _HEADERS_PER_HOP))

    def _unread(self, names: Iterable[bytes]) -> list[ChunkEntry]:
        """Of these, the chunks in the cold order whose header is to be read: no rows of them wait to be written."""
        found = map(self._core.state.entries.get, names)
        return [entry for entry in found if entry is not None and entry.file is UNREAD and entry.older is not None]

    async def _read(self, batches: Iterable[list[ChunkEntry]]) -> None:
        loop = asyncio.get_running_loop()
        for batch in batches:
            if not self._core.disk.health.readable:
                return
            if batch:
                await loop.run_in_executor(self._executor, self._read_batch, batch)

    async def trim(self) -> None:
        """Bring what was found under the limit, which may be lower than it was."""
        loop = asyncio.get_running_loop()
        excess = self._core.state.accounts.total - self._core.state.max_cold_bytes
        if excess > 0:
            logger.info("%s: %.2f GB above max_cold_size leave, oldest first", self._directory, excess / GIB)
        while await loop.run_in_executor(self._executor, self._trim_batch):
            pass

    async def look_at_neighbours(self) -> None:
        """Count namespaces that have lost their owner, forget those that have one again."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._neighbours.look)

    # -- on an I/O thread --------------------------------------------------------------------------------

    def _scan_top(self) -> list[str]:
        """The fan-out directories of this namespace."""
        for file in scan_flat(self._directory):
            if is_temporary(os.path.basename(file.path)):
                _remove(file.path)
        return fan_out_folders(self._directory)

    def _scan_own(self, folders: Iterable[str]) -> FoundChunks:
        """The chunks of this namespace, in order; what a crash has left beside them goes."""
        found = FoundChunks()
        for file in itertools.chain.from_iterable(map(scan_folder, folders)):
            if file.name:
                found.add(file)
            else:
                _remove(file.path)
        found.sort()
        return found

    def _scan_archive(self) -> None:
        """The archive and the quarantine of this namespace."""
        accounts = self._core.state.accounts
        quarantined = sorted(scan_flat(os.path.join(self._directory, QUARANTINE)), key=lambda f: f.mtime_ns)
        archived = sorted(scan_chunks(os.path.join(self._directory, ARCHIVE)), key=lambda f: f.mtime_ns)
        with self._core.lock, self._core.step:
            known = {file.path for file in accounts.quarantined}  # quarantined since we started
            for file in quarantined:
                if file.path not in known:
                    accounts.add_quarantined(file)
            for file in archived:
                if file.name and file.name not in accounts.archived:
                    sharing.archived(self._core.state, file.name, file.size)
        for file in archived:
            if not file.name:
                _remove(file.path)

    def _read_batch(self, batch: Iterable[ChunkEntry]) -> None:
        core, state = self._core, self._core.state
        for entry in batch:
            if not core.disk.health.readable:
                return
            with core.lock, core.step:
                if entry.dropped or entry.file is not UNREAD or state.jobs.is_busy(entry.name):
                    continue  # it is being dealt with already
                state.jobs.claim(entry.name, time.monotonic())
            try:
                core.read_header(entry)
            finally:
                with core.lock, core.step:
                    state.jobs.finish(entry.name)
                    if state.jobs.ready:
                        core.wake()

    def _trim_batch(self) -> bool:
        return all(self._room.trim() for _ in range(_TRIMMED_PER_HOP))


def _remove(path: str) -> None:
    """Delete a left-over, but not what is being written: a chunk may be archived before the scan comes to it."""
    if is_in_the_making(os.path.basename(path)):
        return
    with contextlib.suppress(OSError):  # a left-over that cannot be removed is tried again at the next start
        os.unlink(path)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
