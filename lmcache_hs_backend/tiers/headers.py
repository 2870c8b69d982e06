"""Headers of files found at start: read behind, or at once when somebody asks for the chunk."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from queue import SimpleQueue

from lmcache_hs_backend.chunk import ChunkRef
from lmcache_hs_backend.tiers.index import Entry, Standing
from lmcache_hs_backend.tiers.mover import FileOp
from lmcache_hs_backend.tiers.pair import TierPair


def ensure_read(pair: TierPair, refs: Sequence[ChunkRef], seconds: float) -> None:
    """Have the headers of these chunks read, on the I/O threads, and wait for them, but not for longer."""
    if not pair.index.standings[Standing.UNREAD]:
        return
    done: SimpleQueue[None] = SimpleQueue()
    with pair.lock:
        entries = [pair.index.get(ref.name) for ref in refs]
        unread = [entry for entry in entries if entry is not None and entry.unread]
        if not pair.cold.readable:
            return
        for entry in unread:
            pair.mover.submit(ReadHeader(pair, entry, done))
    deadline = time.monotonic() + seconds
    try:
        for _ in unread:
            done.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return


class ReadHeader(FileOp):
    """Look into a file found at start, because somebody asks for its chunk now."""

    is_read = True

    def __init__(self, pair: TierPair, entry: Entry, done: SimpleQueue[None]) -> None:
        self.name = entry.name
        self._pair = pair
        self._entry = entry
        self._done = done

    def run(self) -> None:
        try:
            if self._entry.unread:
                self._pair.read_header(self._entry)
        finally:
            self._done.put(None)
