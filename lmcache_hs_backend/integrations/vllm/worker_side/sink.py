"""From rows in host memory to chunks in the tiers, and to request records.

The engine's thread asks whether a chunk has to be copied, and passes rows on; everything that follows from a stored
chunk (dropping tails, leaving RAM, records) happens on one thread here, in order. Rows that are in host memory already
are stored by the engine's thread itself, without a second copy; for room it waits ``store_wait_ms`` at most, and it
never does file I/O. Memory on the way is bounded: when the tiers are slower than the model for too long, chunks are
dropped and counted, and serving goes on. This module imports no vLLM.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkRef
from lmcache_hs_backend.format.chunk_file import FileLayer, read_header
from lmcache_hs_backend.format.header import BadChunk, Header
from lmcache_hs_backend.format.layout import scan_chunks
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.format.request_log import RecordWriter
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat
from lmcache_hs_backend.integrations.vllm.protocol import Finish, ReadyChunk
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings, label
from lmcache_hs_backend.integrations.vllm.worker_side.device import HostRows
from lmcache_hs_backend.integrations.vllm.worker_side.recorder import RequestRecorder
from lmcache_hs_backend.integrations.vllm.worker_side.stored import PendingChunks, StoredChunks, StoredPlace
from lmcache_hs_backend.integrations.vllm.worker_side.tails import MOST_PARENTS, MOST_RECENT, Tails
from lmcache_hs_backend.integrations.vllm.worker_side.threads import DaemonThreads
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.flows.bell import Bell

logger = logging.getLogger(__name__)

#: Rows on their way to the hot tier take at most this part of its size more.
_STAGED_PART = 4
_RECOVERY_SEC = 30.0
#: Shutdown waits this long for rows on their way to disk; vLLM gives its processes less only when killing them.
_DRAIN_SEC = 60.0
_STOP_SEC = 1.0  # a thread that only reads, and may hang in the disk, is not waited for
# After a stored chunk, and while none comes: how many settled chunks are dealt with, and records written.
_SETTLED_PER_CHUNK, _SETTLED_WHEN_IDLE = 64, 4096
_RECORDS_PER_CHUNK, _RECORDS_WHEN_IDLE = 4, 256
_WAITING_WHEN_IDLE = 1024  # how many of those that still wait are looked at in between


class CapturedModel(NamedTuple):
    """What is captured: whose rows they are, and the storage slots of the cache's layers, in its order."""

    ident: NamespaceId
    key_format: KeyFormat
    layer_idxs: tuple[int, ...]
    capture: str
    labels: dict[str, object]


class CaptureSink:
    """The tiers of one engine, filled from its requests.

    Attributes:
        store: The tiers.
        positions: Which of the cache's layers are kept, as positions in it.
        figures: ``taken`` chunks copied off the device, ``reused`` ones that were stored already, ``lost`` ones that
            the tiers did not keep, ``not_computed`` ones whose rows no forward has written, ``tails_dropped``,
            ``records``, ``records_empty`` and ``records_lost``.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        model: CapturedModel,
        store: TieredStore | None = None,
        allowed: Collection[int] | None = None,
    ) -> None:
        """Open the tiers, unless there are some, and start the threads.

        Args:
            settings: The connector's.
            model: What is captured.
            store: Tiers that exist already, and are closed by their owner; None: the settings' own.
            allowed: The only layers that they keep; None: all.

        Raises:
            ConfigError: The cold path cannot be used.
        """
        self._own: TieredStore | None = None
        if store is None:
            store = self._own = TieredStore(
                settings, settings.hot_bytes, model.ident, labels=model.labels, capture=model.capture, setting=label
            )
            store.pin()
        self.store = store
        kept = [(n, idx) for n, idx in enumerate(model.layer_idxs) if allowed is None or idx in allowed]
        self.positions = [n for n, _ in kept]
        self._layer_idxs = [idx for _, idx in kept]
        self.figures: Counter[str] = Counter()
        self._settings = settings
        self._chunks = StoredChunks(store, self._layer_idxs, Tails(model.key_format, settings.chunk_size))
        # Guards figures, _staged, _staged_bytes and _closed; nothing slow happens under it.
        self._lock = threading.Lock()
        self._space_freed = Bell()
        self._staged: dict[bytes, int] = {}  # chunks on their way: name → bytes
        self._staged_bytes = 0
        self._closed = False
        # These are _thread's own:
        self._pending = PendingChunks(self._chunks)
        self._recorder = RequestRecorder(
            RecordWriter(store.directory, settings.cold_dir_mode),
            model.capture, self._chunks, self._pending, self.count,
        )  # fmt: skip
        if not store.wait_recovered(_RECOVERY_SEC):
            logger.warning("%s: not all chunk files are known yet; some may be captured again", store.directory)
        self._thread = DaemonThreads(1, "hs-capture", self._chores)
        self._tail_loader = DaemonThreads(1, "hs-tails")
        if self._own is not None:  # in an LMCache engine's store tails have LMCache's names, and are LMCache's to drop
            self._tail_loader.submit(self._load_known_tails)

    def count(self, figure: str, chunks: int = 1) -> None:
        """Add to a figure, from any thread."""
        with self._lock:
            self.figures[figure] += chunks

    # -- on the engine's thread --------------------------------------------------------------------------

    def needs_copy(self, chunk: ReadyChunk) -> bool:
        """Whether the rows of a chunk have to be copied off the device: they are neither stored nor on their way."""
        name = chunk.ref.name
        with self._lock:
            staged = name in self._staged
        if not staged and not self._chunks.readable(name):
            longer = self._chunks.longer(chunk)
            if longer is None:
                return True
            name = self._chunks.name(longer)
        self.store.touch([name])
        self.count("reused")
        return False

    def wait_for_capacity(self, nbytes: int, deadline: float) -> bool:
        """Wait until ``nbytes`` more may be on their way, until ``deadline`` (monotonic) at most.

        Returns:
            False when there was no room in time; the chunk is counted as lost.
        """
        limit = self._settings.hot_bytes // _STAGED_PART
        if self._space_freed.wait_for(lambda: not self._staged or self._staged_bytes + nbytes <= limit, deadline):
            return True
        self.count("lost")
        self.store.metrics.loss("no_room")
        return False

    def put(self, chunk: ReadyChunk, rows: HostRows, deadline: float) -> None:
        """Store a chunk: now when its rows are in host memory, in the background when they are still on their way.

        Now waits for room until ``deadline`` (monotonic) at most.
        """
        self.count("taken")
        if rows.arrived is None:  # no second copy of them, and no second team of torch's threads to make it
            try:
                self._store(chunk, rows, max(0.0, deadline - time.monotonic()))
            except Exception:  # a bug of the tiers must not end vLLM; the chunk is counted as lost
                logger.exception("hidden states: storing a chunk failed")
            self._thread.submit(lambda: self._stored(chunk))
            return
        with self._lock:
            self._staged[chunk.ref.name] = rows.nbytes
            self._staged_bytes += rows.nbytes
        self._thread.submit(lambda: self._put(chunk, rows))

    def finish(self, finish: Finish) -> None:
        """A request has ended: record it, after all that was put before."""
        if finish.record is not None:
            self._thread.submit(lambda: self._finished(finish))

    @property
    def idle(self) -> bool:
        """Whether everything that was put here is on disk and recorded."""
        return self._tail_loader.idle and self._thread.idle and not len(self._recorder)

    def rows(self, refs: Sequence[ChunkRef]) -> dict[int, Any]:
        """The rows of a sequence as far as the tiers have them.

        Waits for those that are on their way, ``read_timeout_sec`` at most.

        Returns:
            Position of a layer in the cache → its rows, in their own dtype.
        """
        names = [ref.name for ref in refs]
        deadline = time.monotonic() + self._settings.read_timeout_sec
        self._space_freed.wait_for(lambda: not any(name in self._staged for name in names), deadline)
        found = self.store.retrieve(refs, self._layer_idxs, None)
        return {n: found[idx] for n, idx in zip(self.positions, self._layer_idxs, strict=True) if idx in found}

    def close(self) -> None:
        """Bring everything to disk and end. Idempotent; bounded in time; logs what was not written."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + _DRAIN_SEC
        ended = self._thread.close(_DRAIN_SEC)
        if not ended:
            logger.warning("hidden states: %d chunk(s) on their way are lost", len(self._staged))
        self._tail_loader.close(_STOP_SEC)
        self.store.flush(max(0.0, deadline - time.monotonic()))
        if ended:  # else these are the thread's still, and it is stuck in the disk that they would go to
            self._pending.look(len(self._pending), len(self._pending))
            self._recorder.write_all()
            self._recorder.close()
        if self._own is not None:
            self._own.close()
        logger.info("hidden states of this run: %s", ", ".join(f"{k} {v}" for k, v in sorted(self.figures.items())))

    # -- on the sink's thread ----------------------------------------------------------------------------

    def _put(self, chunk: ReadyChunk, rows: HostRows) -> None:
        try:
            self._store(chunk, rows, None)
        finally:
            with self._lock:
                self._staged_bytes -= self._staged.pop(chunk.ref.name)
            self._space_freed.ring()
            self._stored(chunk)

    def _store(self, chunk: ReadyChunk, rows: HostRows, wait_sec: float | None) -> None:
        """On any thread."""
        ref = chunk.ref
        layers = dict(zip(self._layer_idxs, rows.wait(), strict=True))
        # A store takes all token ids of the prompt; of those in front of the chunk it reads none.
        self.store.store([ref], bytes(ref.start * TOKEN_BYTES) + chunk.ids, layers, ref.start, wait_sec)

    def _stored(self, chunk: ReadyChunk) -> None:
        """The tiers have a chunk, or have not taken it."""
        name = chunk.ref.name
        if not self._chunks.readable(name):
            self.count("lost")
            return
        self._pending.add(name)
        for tail in self._chunks.add(chunk):
            self._supersede(tail, name)

    def _supersede(self, tail: bytes, longer: bytes) -> None:
        """Drop a tail once the longer chunk, which has all its rows, is on disk: before that, a crash loses both."""
        if self._chunks.place(tail) is not StoredPlace.NOWHERE:
            self._pending.add(longer, lambda on_disk: self._drop_tail(tail) if on_disk else None)

    def _drop_tail(self, tail: bytes) -> None:
        self.count("tails_dropped", self.store.drop([tail], durable=False))

    def _finished(self, finish: Finish) -> None:
        # The order in which the tiers drop chunks: a conversation's end before what it began with.
        self.store.touch([ref.name for ref in finish.refs])
        self._recorder.add(finish)

    def _chores(self, idle: bool) -> None:
        """What follows from chunks that have reached the disk. After every chunk, so its cost must not grow."""
        if idle:
            on_disk = self._pending.look(_SETTLED_WHEN_IDLE, _WAITING_WHEN_IDLE)
        else:  # chunks get to disk in about the order in which they came, some at a time
            on_disk = self._pending.look(_SETTLED_PER_CHUNK, self._settings.io_threads)
        if self._own is not None:
            self._own.demote(on_disk)
        if self.store.readable:  # else a record could not be written
            self._recorder.write(_RECORDS_WHEN_IDLE if idle else _RECORDS_PER_CHUNK)

    # -- on a thread of its own --------------------------------------------------------------------------

    def _load_known_tails(self) -> None:
        """Learn of the tails of earlier runs, so that they can be dropped when outgrown, most recent last.

        Their sizes say which files are tails: a full chunk's is the largest there is.
        """
        files = FileLayer()
        found = sorted(
            (file for file in scan_chunks(self.store.directory) if file.name), key=lambda file: file.mtime_ns
        )
        full = max((file.size for file in found), default=0)
        first_recent = len(found) - MOST_RECENT
        wanted = [file for n, file in enumerate(found) if file.size < full or n >= first_recent]
        for file in wanted[-MOST_PARENTS:]:
            if self._closed:
                return
            try:
                header = read_header(files, file.path)
            except (BadChunk, OSError) as error:
                logger.debug("%s is passed over: %s", os.path.basename(file.path), error)
                continue
            self._add_known_tail(header)

    def _add_known_tail(self, header: Header) -> None:
        meta = header.meta
        longer = self._chunks.add_earlier(meta.chunk_hash, meta.parent, header.token_ids)
        if longer is not None:  # stored by this run, before the tail was known
            tail, of_this_run = self._chunks.name(meta.chunk_hash), longer
            self._thread.submit(lambda: self._supersede(tail, of_this_run))
