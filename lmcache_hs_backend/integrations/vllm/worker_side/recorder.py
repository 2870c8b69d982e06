"""When the record of a finished request is written, and what it says of the rows that are there.

A record is written when the request's rows are on disk, so that a crash never leaves a record without rows; what the
tiers lost in the meantime shortens it. A request of which nothing was stored has no record. All of it happens on the
sink's own thread.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from lmcache_hs_backend.chunk import ChunkRef
from lmcache_hs_backend.format.request_log import RecordWriter
from lmcache_hs_backend.integrations.vllm.protocol import Finish
from lmcache_hs_backend.integrations.vllm.worker_side.stored import PendingChunks, StoredChunks, StoredPlace

logger = logging.getLogger(__name__)

#: Requests that wait for a disk that is away, 10 KiB each when they have 32 chunks. The oldest are given up beyond it.
MOST_WAITING = 1 << 14


@dataclass(eq=False)
class _Waiting:
    """A finished request without its record."""

    finish: Finish
    unsettled: int = 0  # of its chunks, as PendingChunks counts them


class RequestRecorder:
    """Writes the records of one engine's requests. Not thread-safe."""

    def __init__(
        self,
        writer: RecordWriter,
        capture: str,
        chunks: StoredChunks,
        pending: PendingChunks,
        count: Callable[[str], None],
    ) -> None:
        """Start with no requests.

        Args:
            writer: Where the records go.
            capture: What the rows are, JSON; part of every record.
            chunks: What the tiers hold.
            pending: What is not on disk yet.
            count: Adds one to a figure: ``records``, ``records_empty``, ``records_lost``.
        """
        self._writer = writer
        self._capture = json.loads(capture)
        self._chunks = chunks
        self._pending = pending
        self._count = count
        self._unwritten: dict[_Waiting, None] = {}  # in the order in which the requests ended
        self._settled: deque[_Waiting] = deque()  # those whose chunks are all on disk or lost

    def __len__(self) -> int:
        return len(self._unwritten)

    def add(self, finish: Finish) -> None:
        """A request has ended, and everything of it that was put has been stored."""
        waiting = _Waiting(finish)
        self._unwritten[waiting] = None
        self._settled.append(waiting)  # looked at like one whose chunks have settled
        if len(self._unwritten) > MOST_WAITING:
            oldest = next(iter(self._unwritten))
            self._lose(oldest, f"{MOST_WAITING} requests wait for a disk that is away")

    def write(self, most: int) -> None:
        """Write records whose rows are on disk, after a look at so many requests at most."""
        for _ in range(min(most, len(self._settled))):
            waiting = self._settled.popleft()
            if waiting in self._unwritten:
                self._write_or_wait(waiting)

    def write_all(self) -> None:
        """At the end: write all records, as far as their rows are on disk now."""
        for waiting in list(self._unwritten):
            refs, _ = self._on_disk(waiting.finish)
            self._write(waiting, refs)

    def close(self) -> None:
        """Close the file of records."""
        self._writer.close()

    # -- inside ------------------------------------------------------------------------------------------

    def _write_or_wait(self, waiting: _Waiting) -> None:
        refs, in_ram = self._on_disk(waiting.finish)
        if not in_ram:
            self._write(waiting, refs)
            return
        waiting.unsettled = len(in_ram)
        for name in in_ram:
            self._pending.add(name, lambda _: self._one_settled(waiting))

    def _one_settled(self, waiting: _Waiting) -> None:
        waiting.unsettled -= 1
        if not waiting.unsettled:
            self._settled.append(waiting)

    def _on_disk(self, finish: Finish) -> tuple[list[ChunkRef], list[bytes]]:
        """The chunks of a request before the first lost one: those on disk in front of all others, and names in RAM."""
        on_disk: list[ChunkRef] = []
        in_ram: list[bytes] = []
        for ref in self._successors(finish):
            place = self._chunks.place(ref.name)
            if place is StoredPlace.NOWHERE:
                break
            if place is StoredPlace.RAM:
                in_ram.append(ref.name)
            elif not in_ram:
                on_disk.append(ref)
        return on_disk, in_ram

    def _successors(self, finish: Finish) -> list[ChunkRef]:
        """The chunks of a request; where a longer one has made its tail superfluous, that one."""
        refs = list(finish.refs)
        if finish.ready and refs:
            longer = self._chunks.longer(finish.ready[-1])
            if longer is not None:
                refs[-1] = refs[-1]._replace(chunk_hash=longer, name=self._chunks.name(longer))
        return refs

    def _write(self, waiting: _Waiting, refs: Sequence[ChunkRef]) -> None:
        if not refs:
            del self._unwritten[waiting]
            self._count("records_empty")
            return
        last = refs[-1]
        record = {
            **(waiting.finish.record or {}),
            "created_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "num_tokens": last.end,
            "prefix": last.prefix.hex(),
            "parent_prefix": refs[-2].prefix.hex() if len(refs) > 1 else "",
            "last_chunk": last.chunk_hash,
            "capture": self._capture,
        }
        try:
            self._writer.append(record)
        except OSError as error:
            self._lose(waiting, str(error))
        else:
            del self._unwritten[waiting]
            self._count("records")

    def _lose(self, waiting: _Waiting, reason: str) -> None:
        del self._unwritten[waiting]
        self._count("records_lost")
        logger.warning("the record of request %s is not written: %s", waiting.finish.req_id, reason)
