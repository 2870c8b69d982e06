"""From rows in host memory to chunks in the tiers, and to request records.

The engine's thread asks whether a chunk is wanted and hands rows over; storing, dropping tails and writing
records happens on one thread here, in order. Rows that are in host memory already are stored by the engine's
thread itself, without a second copy; for room it waits ``store_wait_ms`` at most, and it never does file I/O. Memory
on the way is bounded: when the tiers are slower than the model for too long, chunks are dropped and counted, serving
goes on. This module imports no vLLM.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
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
from lmcache_hs_backend.integrations.vllm.worker_side.tails import MOST_PARENTS, MOST_RECENT, Tails, shorter
from lmcache_hs_backend.integrations.vllm.worker_side.threads import DaemonThreads
from lmcache_hs_backend.tiered import TieredStore

logger = logging.getLogger(__name__)

#: Rows on their way to the hot tier take at most this part of its size more.
_STAGED_PART = 4
_RECOVERY_SEC = 30.0
#: Shutdown waits this long for rows on their way to disk; vLLM gives its processes less only when killing them.
_DRAIN_SEC = 60.0
_STOP_SEC = 1.0  # a thread that only reads, and may hang in the disk, is not waited for
_RECORDS_PER_LOOK = 256


class CapturedModel(NamedTuple):
    """What is captured: who the rows belong to, and the storage slots of the cache's layers, in its order."""

    ident: NamespaceId
    key_format: KeyFormat
    layer_idxs: tuple[int, ...]
    capture: str
    labels: dict[str, object]


class CaptureSink:
    """The tiers of one engine, filled from its requests.

    Figures: ``taken`` chunks copied off the device, ``reused`` ones that were stored already, ``lost``
    ones that the tiers did not keep, ``not_computed`` ones whose rows no forward has written, ``tails_dropped``,
    ``records``.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        model: CapturedModel,
        store: TieredStore | None = None,
        allowed: Collection[int] | None = None,
    ) -> None:
        """``store``: one that is there already, and that somebody else closes; None: the settings' own.

        ``allowed``: the only layers that it keeps; None: all. Raises ConfigError when the cold path cannot be used.
        """
        self._own: TieredStore | None = None
        if store is None:
            store = self._own = TieredStore(
                settings, settings.hot_bytes, model.ident, labels=model.labels, capture=model.capture, setting=label
            )
            store.pin()
        self.store = store
        kept = [(n, idx) for n, idx in enumerate(model.layer_idxs) if allowed is None or idx in allowed]
        #: Which of the cache's layers are kept: their positions in it, and (private) their storage slots.
        self.positions = [n for n, _ in kept]
        self._layer_idxs = [idx for _, idx in kept]
        self.figures: Counter[str] = Counter()
        self._settings = settings
        self._model = model
        self._tails = Tails(model.key_format, settings.chunk_size)
        self._records = RecordWriter(self.store.directory, settings.cold_dir_mode)
        # Guards figures, _tails, _staged, _staged_bytes and _closed; nothing slow happens under it.
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._staged: dict[bytes, int] = {}  # chunks on their way: name → bytes
        self._staged_bytes = 0
        self._closed = False
        # These are _thread's own:
        self._superseded: dict[bytes, list[bytes]] = {}  # chunk → tails to drop once its file is there
        self._unrecorded: list[Finish] = []  # finished requests whose rows are not all on disk
        self._in_ram: dict[bytes, None] = {}  # chunks that were not on disk when last seen, oldest first
        if not self.store.wait_recovered(_RECOVERY_SEC):
            logger.warning("%s: not all chunk files are known yet; some may be captured again", self.store.directory)
        self._thread = DaemonThreads(1, "hs-capture", self._chores)
        self._tail_loader = DaemonThreads(1, "hs-tails")
        if self._own is not None:  # in an LMCache engine's store tails have LMCache's names, and are LMCache's to drop
            self._tail_loader.submit(self._load_known_tails)

    @property
    def store_wait_sec(self) -> float:
        """How long one call of vLLM's may wait for room."""
        return self._settings.store_wait_ms / 1000

    def count(self, figure: str, chunks: int = 1) -> None:
        """Add to a figure, from any thread."""
        with self._lock:
            self.figures[figure] += chunks

    # -- on the engine's thread --------------------------------------------------------------------------

    def needs_copy(self, take: ReadyChunk) -> bool:
        """Whether the rows of a chunk have to be copied off the device: nobody has them yet."""
        ref = take.ref
        with self._lock:
            known = ref.name in self._staged
        if known or self.store.covered([ref.name], self._layer_idxs) or self._longer(take) is not None:
            self.count("reused")
            return False
        return True

    def wait_for_capacity(self, nbytes: int, deadline: float) -> bool:
        """Wait until so many more bytes may be on their way, until ``deadline`` (monotonic) at most."""
        limit = self._settings.hot_bytes // _STAGED_PART
        with self._room:
            if self._room.wait_for(
                lambda: not self._staged or self._staged_bytes + nbytes <= limit,
                max(0.0, deadline - time.monotonic()),
            ):
                return True
        self.count("lost")
        self.store.metrics.loss("no_room")
        return False

    def put(self, take: ReadyChunk, rows: HostRows, deadline: float) -> None:
        """Store a chunk: at once when its rows are there, behind when they are still on their way.

        At once waits for room until ``deadline`` (monotonic) at most.
        """
        self.count("taken")
        if rows.arrived is None:  # no second copy of them, and no second team of torch's threads to make it
            try:
                self._store(take, rows, max(0.0, deadline - time.monotonic()))
            except Exception:  # a bug of the tiers must not end vLLM; the chunk is counted as lost
                logger.exception("hidden states: storing a chunk failed")
            self._thread.submit(lambda: self._stored(take))
            return
        with self._lock:
            self._staged[take.ref.name] = rows.nbytes
            self._staged_bytes += rows.nbytes
        self._thread.submit(lambda: self._put(take, rows))

    def finished(self, finish: Finish) -> None:
        """Record a request, after all that was put before."""
        if finish.record is not None:
            self._thread.submit(lambda: self._unrecorded.append(finish))

    @property
    def idle(self) -> bool:
        """Whether everything that was put here is on disk and recorded."""
        return self._tail_loader.idle and self._thread.idle and not self._unrecorded

    def rows(self, refs: Sequence[ChunkRef]) -> dict[int, Any]:
        """The rows of a sequence as far as the tiers have them, native dtype: position of layer → rows.

        Waits for those that are on their way.
        """
        names = [ref.name for ref in refs]
        with self._room:
            self._room.wait_for(lambda: self._staged.keys().isdisjoint(names), self._settings.read_timeout_sec)
        found = self.store.retrieve(refs, self._layer_idxs, None)
        return {n: found[idx] for n, idx in zip(self.positions, self._layer_idxs, strict=True) if idx in found}

    def close(self) -> None:
        """Bring everything to disk and end. Idempotent; bounded in time, and says what was left behind."""
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
            self._drop_superseded()
            self._record(final=True)
        if self._own is not None:
            self._own.close()
        self._records.close()
        logger.info("hidden states of this run: %s", ", ".join(f"{k} {v}" for k, v in sorted(self.figures.items())))

    # -- on the capture's thread -------------------------------------------------------------------------

    def _put(self, take: ReadyChunk, rows: HostRows) -> None:
        try:
            self._store(take, rows, None)
        finally:
            with self._room:
                self._staged_bytes -= self._staged.pop(take.ref.name)
                self._room.notify_all()
            self._stored(take)

    def _store(self, take: ReadyChunk, rows: HostRows, wait_sec: float | None) -> None:
        """On any thread."""
        ref = take.ref
        layers = dict(zip(self._layer_idxs, rows.wait(), strict=True))
        # A store ready all token ids of the prompt; of those in front of the chunk it reads none.
        self.store.store([ref], bytes(ref.start * TOKEN_BYTES) + take.ids, layers, ref.start, wait_sec)

    def _stored(self, take: ReadyChunk) -> None:
        """The tiers have a chunk, or have not taken it."""
        ref = take.ref
        if not self.store.covered([ref.name], self._layer_idxs):
            self.count("lost")
            return
        self._in_ram[ref.name] = None
        with self._lock:
            lengths = self._tails.lengths(ref.parent)
            self._tails.add(ref.chunk_hash, ref.parent, take.ids)
        for ids, hash_hex in shorter(ref.chunk_hash, ref.parent, take.ids, lengths).items():
            self._supersede(self._tails.name(hash_hex), ref.name)
            with self._lock:
                self._tails.forget(ref.parent, ids)

    def _supersede(self, tail: bytes, longer: bytes) -> None:
        """There may be such a tail; the longer chunk has all that it has."""
        if any(self.store.has(tail, self._layer_idxs[0])):
            self._superseded.setdefault(longer, []).append(tail)

    def _longer(self, take: ReadyChunk) -> str | None:
        """The hash of a stored chunk that begins with all tokens of this one and goes on. Any thread."""
        ref = take.ref
        with self._lock:
            longer = self._tails.longer(ref.chunk_hash, ref.parent, take.ids)
        if longer is None or not self.store.covered([self._tails.name(longer)], self._layer_idxs):
            return None
        return longer

    def _chores(self) -> None:
        self._demote_written()
        self._drop_superseded()
        self._record(final=False)

    def _demote_written(self) -> None:
        """Let go of chunks that are on disk by now: they get there in about the order in which they came."""
        done, waiting = [], 0
        for name in self._in_ram:
            hot, cold = self.store.has(name, self._layer_idxs[0])
            if cold or not hot:
                done.append(name)
                continue
            waiting += 1
            if waiting > self._settings.io_threads:
                break
        for name in done:
            del self._in_ram[name]
        if self._own is not None:
            self._own.demote(done)

    def _drop_superseded(self) -> None:
        """Drop the tails of chunks that are on disk by now: before that, a crash would lose both."""
        first = self._layer_idxs[0]
        for name in [name for name in self._superseded if self.store.has(name, first)[1]]:
            self.count("tails_dropped", self.store.drop(self._superseded.pop(name)))

    def _record(self, *, final: bool) -> None:
        """Write the records of requests whose rows are on disk, so that a crash never leaves a record alone."""
        if not final and not self.store.readable:
            return  # what is on disk cannot be told from what is lost
        now = self._unrecorded if final else self._unrecorded[:_RECORDS_PER_LOOK]
        waiting = self._unrecorded[len(now) :]
        for finish in now:
            refs = self._successors(finish)
            if not final:
                refs = refs[: self.store.covered([ref.name for ref in refs], self._layer_idxs)]
            missing = [n for n, ref in enumerate(refs) if not self.store.has(ref.name, self._layer_idxs[0])[1]]
            if missing and not final:
                waiting.append(finish)
            else:
                self._write_record(finish, refs[: missing[0]] if missing else refs)
        self._unrecorded = waiting

    def _successors(self, finish: Finish) -> list[ChunkRef]:
        """The chunks of a request; where a longer one has made its tail superfluous, that one."""
        refs = list(finish.refs)
        if finish.ready:
            longer = self._longer(finish.ready[-1])
            if longer is not None:
                refs[-1] = refs[-1]._replace(chunk_hash=longer, name=self._tails.name(longer))
        return refs

    def _write_record(self, finish: Finish, refs: Sequence[ChunkRef]) -> None:
        if not refs:
            self.count("records_empty")
            return
        last = refs[-1]
        record = {
            **(finish.record or {}),
            "created_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "num_tokens": last.end,
            "prefix": last.prefix.hex(),
            "parent_prefix": refs[-2].prefix.hex() if len(refs) > 1 else "",
            "last_chunk": last.chunk_hash,
            "capture": json.loads(self._model.capture),
        }
        try:
            self._records.append(record)
            self.count("records")
        except OSError as error:
            self.count("records_lost")
            logger.warning("the record of request %s is not written: %s", finish.req_id, error)

    # -- on a thread of its own -------------------------------------------------------------------------

    def _load_known_tails(self) -> None:
        """Learn of the tails of earlier runs, so that they can go when they are outgrown, most recent last.

        Which files are tails, their sizes tell: a full chunk's is the largest there is.
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
        meta, ids = header.meta, header.token_ids
        with self._lock:
            longer = self._tails.longer(meta.chunk_hash, meta.parent, ids)
            self._tails.add(meta.chunk_hash, meta.parent, ids)
        if longer is not None:  # stored by this process, before this one was known
            names = self._tails.name(meta.chunk_hash), self._tails.name(longer)
            self._thread.submit(lambda: self._supersede(*names))
