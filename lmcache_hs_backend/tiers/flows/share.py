"""The shared tier at work: who uploads and who fetches, when, and on which thread.

Up: chunks whose file is on disk wait in an order of the index; a few threads of our own read each file, check it and
put it. Nothing waits for them, and an outage costs no memory: the disk is the queue.

Down: before a retrieve walks the local tiers, chunks that none of them has, and whose KV is present, are fetched side
by side. Each is kept like a store by the thread that fetched it, so what comes after ``shared_read_sec`` is there for
the next call. A bucket that does not answer costs the first call ``shared_read_sec`` at most, and the next ones
nothing: probes run on a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from lmcache_hs_backend.chunk import ChunkMeta, ChunkRef, Presence, chunk_name
from lmcache_hs_backend.config import ConfigError, TieredConfig
from lmcache_hs_backend.format import objects
from lmcache_hs_backend.format.header import BadChunk, FileLayout
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.format.objects import Answer, Objects, ObjectsError
from lmcache_hs_backend.format.shared_names import content_name, tags
from lmcache_hs_backend.tiers.flows.bell import Latch
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.retrieve_chunks import Outputs, Retrieve
from lmcache_hs_backend.tiers.flows.store_chunks import Store
from lmcache_hs_backend.tiers.memory.copies import work_alone
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES
from lmcache_hs_backend.tiers.shared.bucket import Bucket, Fetched
from lmcache_hs_backend.tiers.shared.records import RecordUploads
from lmcache_hs_backend.tiers.state import reading, sharing
from lmcache_hs_backend.tiers.state.sharing import Upload

logger = logging.getLogger(__name__)

#: Most chunks that one call asks for, and that all calls together wait for.
WINDOW = 64
_MOST_WAITING = 4 * WINDOW
_READERS = 32  # requests at a time; they mostly wait for the network
_UPLOADERS = 4
_REQUEST_PART = 0.75  # of shared_read_sec: so that a request that hangs ends before its call does
_UPLOAD_SEC = 30.0
_STORE_WAIT_SEC = 0.25
_LOOK_AGAIN_SEC = 0.1
_LIST_AGAIN_SEC = 5.0
_WARN_AGAIN_SEC = 10.0
_RECORDS_SEC = 5.0  # between two looks for new request records


def shared_tier(
    config: TieredConfig, ident: NamespaceId, capacity: int, setting: Callable[[str], str]
) -> Callable[[Core, Store], Share]:
    """Check the settings of the shared tier. What is returned starts it. Raises ConfigError."""
    if not ident.model_revision:
        raise ConfigError(
            f"{setting('model_revision')} is empty, but a shared tier needs one: in a bucket, rows of two revisions of "
            f"{ident.model!r} would be taken for each other. Name the model's commit or version"
        )
    if config.uploads == "archive" and config.on_kv_gone != "archive":
        raise ConfigError(
            f"{setting('shared_write')} is 'archive', but {setting('on_kv_gone')} is {config.on_kv_gone!r}: nothing "
            "would be uploaded. Set on_kv_gone to 'archive' as well"
        )
    try:
        reads, writes = (
            Objects(config.shared_url, config.shared_options, timeout_sec=seconds)
            for seconds in (config.shared_read_sec * _REQUEST_PART, _UPLOAD_SEC)
        )
    except ObjectsError as error:
        raise ConfigError(f"{setting('shared_url')} is {config.shared_url!r}, but must be {error}") from None
    bucket = Bucket(reads, writes, ident, capacity)
    with warnings.catch_warnings():  # torch warns, once, of a tensor over bytes that cannot be written; ours are read
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
    return lambda core, store: Share(core, store, bucket)


@dataclass(eq=False)
class _Fetch:
    """A chunk that is on its way, for as many calls as want it."""

    ref: ChunkRef
    name: bytes
    layer_idxs: frozenset[int] | None  # None: all
    epoch: int  # of the state when it was asked for: what was cleared since does not come back
    over: Latch = field(default_factory=Latch)
    queued: bool = False  # False also of one whose caller was interrupted before that: the next one does it
    came: bool = False
    unneeded: bool = False  # the chunk before it is not there


class Share:
    """See the module's text."""

    def __init__(self, core: Core, store: Store, bucket: Bucket) -> None:
        """Start the threads. No request is made on the caller's."""
        config = core.config
        self._core = core
        self._store = store
        self._bucket = bucket
        self._may_read = config.shared_access != "write"
        self._may_write = config.shared_access != "read"
        self._stopping = threading.Event()
        self._queue: SimpleQueue[_Fetch | None] = SimpleQueue()
        self._fetching = threading.Lock()  # guards the two below; held for nothing else
        self._fetches: dict[bytes, _Fetch] = {}
        self._warned_at = -_WARN_AGAIN_SEC
        self._uploading = threading.Condition()  # there may be something to upload
        self._listed: set[bytes] | None = None  # what the bucket held at the start; None: not known yet
        threads: list[tuple[str, Callable[[], None]]] = [("watch", self._watch)]
        threads += [("read", self._read_loop)] * (_READERS * self._may_read)
        threads += [("write", self._upload_loop)] * (_UPLOADERS * self._may_write)
        if self._may_write:
            threads.append(("list", self._introduce))
        if config.uploads in ("all", "archive"):  # then the rows of every request come to the bucket
            threads.append(("records", self._record_loop))
        for name, work in threads:
            threading.Thread(target=work, name=f"hs-shared-{name}", daemon=True).start()

    @property
    def reads_online(self) -> bool:
        """Whether the bucket is asked for chunks."""
        return self._may_read and self._bucket.reads.closed and objects.usable() and not self._stopping.is_set()

    @property
    def writes_online(self) -> bool:
        """Whether chunks are uploaded."""
        return self._may_write and self._bucket.writes.closed and objects.usable()

    def stop(self) -> None:
        """End the threads, each after the request that it is in. Does not wait for them; no call waits any longer."""
        self._stopping.set()
        with self._fetching:
            for fetch in self._fetches.values():
                fetch.over.set()
        for _ in range(_READERS * self._may_read):
            self._queue.put(None)

    # -- down --------------------------------------------------------------------------------------------

    def retrieve(
        self,
        refs: Sequence[ChunkRef],
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None,
        local: Retrieve,
        outputs: Outputs | None = None,
    ) -> dict[int, torch.Tensor]:
        """``Retrieve.retrieve``, after what the local tiers lack has come from the bucket."""
        if self._may_read:
            deadline = time.monotonic() + self._core.config.shared_read_sec
            self._await(self._ask(refs, frozenset(layer_idxs)), deadline)
        rows = local.retrieve(refs, layer_idxs, dtype, outputs)
        if rows and self._may_write and self._core.config.shared_write == "reused":
            tokens = next(iter(rows.values())).shape[0]
            with self._core.lock, self._core.step:
                sharing.reused(self._core.state, [ref.name for ref in refs if ref.end <= tokens])
        return rows

    def prefetch(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int] | None) -> None:
        """Fetch what the local tiers lack of a prompt, in the background."""
        if self._may_read:
            self._ask(refs, None if layer_idxs is None else frozenset(layer_idxs))

    def _ask(self, refs: Sequence[ChunkRef], layer_idxs: frozenset[int] | None) -> list[_Fetch]:
        """Have fetched what no local tier has, a prefix of it whose KV is present."""
        core, readable = self._core, self._core.disk.health.readable
        with core.lock, core.step:
            have = reading.covered(core.state, [ref.name for ref in refs], sorted(layer_idxs or ()), readable=readable)
            epoch = core.state.epoch
        missing = refs[have : have + WINDOW]
        if not missing:
            return []
        if not self.reads_online:
            core.metrics.add("shared_offline")
            return []
        answers = core.presence([ref.kv_key for ref in missing], False)
        wanted: list[_Fetch] = []
        model = self._bucket.ident.model
        for ref, answer in zip(missing, answers, strict=True):
            if answer is not Presence.PRESENT:
                break
            name = content_name(ref.prefix, ref.num_tokens, tags(ref.key, model))
            fetch = _Fetch(ref, name, layer_idxs, epoch)
            with self._fetching:
                running = self._fetches.get(ref.name)
                if running is not None and not running.unneeded and running.layer_idxs == layer_idxs:
                    wanted.append(running)
                    if not running.queued:
                        self._queue.put(running)
                        running.queued = True
                    continue
                if running is not None or len(self._fetches) >= _MOST_WAITING:
                    break
                self._fetches[ref.name] = fetch
                self._queue.put(fetch)
                fetch.queued = True
            wanted.append(fetch)
        return wanted

    def _await(self, wanted: Sequence[_Fetch], deadline: float) -> None:
        """Wait for chunks in their order, up to the first that does not come."""
        for position, fetch in enumerate(wanted):
            if not fetch.over.wait(max(0.0, deadline - time.monotonic())):
                self._core.metrics.add("shared_timeouts")
                if not position:
                    self._bucket.reads.open("no chunk has come in shared_read_sec")
                return
            if not fetch.came:
                for later in wanted[position:]:
                    later.unneeded = True
                return

    def _read_loop(self) -> None:
        work_alone()
        while (fetch := self._queue.get()) is not None and not self._stopping.is_set():
            try:
                if not fetch.unneeded and not fetch.over.is_set():
                    fetch.came = self._fetch(fetch)
            except Exception:
                self._core.metrics.add("errors_internal")
                logger.exception("a fetch from the shared tier failed")
            finally:
                with self._fetching:
                    self._fetches.pop(fetch.ref.name, None)
                fetch.over.set()

    def _fetch(self, fetch: _Fetch) -> bool:
        metrics, started = self._core.metrics, time.monotonic()
        try:
            answer, fetched = self._bucket.get(fetch.name, fetch.ref.prefix)
        except BadChunk as bad:
            metrics.add("errors_shared_bad")
            self._warn_of(fetch.name, bad)
            return False
        if answer is Answer.ABSENT:
            metrics.add("shared_absent")
        elif answer in (Answer.FAILED, Answer.DENIED):
            metrics.add("errors_shared_read")
        if fetched is None:
            return False
        nbytes = sum(len(view) for view in fetched.rows.values())
        metrics.observe("shared_get_seconds", time.monotonic() - started, shared_read_bytes=nbytes)
        return self._keep(fetch, fetched)

    def _keep(self, fetch: _Fetch, fetched: Fetched) -> bool:
        """Store what came, under the names that it has here. Whether every layer that was asked for is there."""
        core, ref = self._core, fetch.ref
        there = {spec.layer_idx for spec in fetched.rows}
        if fetch.layer_idxs is not None and not fetch.layer_idxs <= there:
            core.metrics.add("shared_absent")
            return False
        with core.lock, core.step:
            if core.closed or core.state.epoch != fetch.epoch:
                return False
            entry = core.state.entries.get(ref.name)
            held = set() if entry is None else entry.layer_idxs()
        tokens = fetched.header.layout.num_tokens
        rows = {
            spec.layer_idx: torch.frombuffer(view, dtype=TORCH_DTYPES[spec.dtype]).view(tokens, -1)
            for spec, view in fetched.rows.items()
            if spec.layer_idx not in held and (fetch.layer_idxs is None or spec.layer_idx in fetch.layer_idxs)
        }
        ids = fetched.header.token_ids
        stored = self._store.store([ref], ids, rows, ref.start, _STORE_WAIT_SEC, ref.start).new if rows else 1
        core.metrics.add("shared_hits", bool(stored))
        return bool(stored)

    def _warn_of(self, name: bytes, bad: BadChunk) -> None:
        now = time.monotonic()
        with self._fetching:
            recent, self._warned_at = now - self._warned_at < _WARN_AGAIN_SEC, now
        level = logging.DEBUG if recent else logging.WARNING
        logger.log(level, "object %s of %s is not used (%s): %s", name.hex(), self._bucket.objects.url, bad.reason, bad)

    # -- up ----------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        """Say what the namespace is, find out what the bucket is like, and what it holds. Then uploads start."""
        bucket, stopping = self._bucket, self._stopping
        while not stopping.is_set():
            if self.writes_online:
                answer = bucket.introduce().answer
                if answer in (Answer.OK, Answer.EXISTS):
                    break
            stopping.wait(_LOOK_AGAIN_SEC)
        if stopping.is_set():
            return
        if bucket.respects_conditions() is False:
            bucket.looks_first = True
            logger.warning(
                "%s ignores the condition of a put (if-none-match): each upload looks first, which costs a request. "
                "Of two that add layers to one chunk at the same moment, one may be lost",
                bucket.objects.url,
            )
        while not stopping.is_set():
            try:
                self._listed = set(bucket.listing())
                break
            except OSError as error:
                if not bucket.reads.closed:  # a key that may only write: each upload finds out for itself
                    logger.info("%s: uploads start without a listing", error)
                    self._listed = set()
                    break
                stopping.wait(_LIST_AGAIN_SEC)
        logger.info("%s holds %d chunk(s) of this namespace", bucket.objects.url, len(self._listed or ()))

    def _watch(self) -> None:
        """Probe a bucket that does not answer; wake the uploaders when there is something to do."""
        bucket, state = self._bucket, self._core.state
        while not self._stopping.wait(_LOOK_AGAIN_SEC):
            if not objects.usable():
                return
            try:
                now = time.monotonic()
                if self._may_read and bucket.reads.probe_due(now):
                    bucket.probe_reads()
                if self._may_write and bucket.writes.probe_due(now):
                    bucket.probe_writes()
            except Exception:
                self._core.metrics.add("errors_internal")
                logger.exception("a probe of the shared tier failed")
            if self._listed is not None and self.writes_online and sharing.waiting(state):
                with self._uploading:
                    self._uploading.notify_all()
        with self._uploading:
            self._uploading.notify_all()

    def _upload_loop(self) -> None:
        while not self._stopping.is_set():
            try:
                while not self._stopping.is_set() and self._upload_next():
                    pass
            except Exception:
                self._core.metrics.add("errors_internal")
                logger.exception("an upload to the shared tier failed")
            with self._uploading:
                if not self._stopping.is_set():
                    self._uploading.wait(1.0)

    def _upload_next(self) -> bool:
        """Upload one chunk. False when there is none for now, or the bucket does not take it."""
        core, state = self._core, self._core.state
        if self._listed is None or not self.writes_online:
            return False
        with core.lock, core.step:
            if core.closed:
                return False
            upload = sharing.prepare_upload(state, time.monotonic())
        if not isinstance(upload, Upload):
            return False
        answer, refused = Answer.FAILED, False
        path = core.disk.path(upload.name, archived=upload.archived)
        try:
            answer = self._upload(path, upload.layout, self._listed)
        except FileNotFoundError:
            refused = True  # gone, moved or replaced: then it is in a queue again already
        except (BadChunk, OSError, ValueError) as error:
            refused = True
            core.metrics.add("errors_shared_file")
            logger.warning("chunk file %s is not uploaded: %s", path, error)
        finally:
            with core.lock, core.step:
                if answer in (Answer.OK, Answer.EXISTS):
                    sharing.commit_upload(state, upload)
                else:
                    sharing.abort_upload(state, upload, refused=refused)
        return answer in (Answer.OK, Answer.EXISTS) or refused

    def _upload(self, path: str, layout: FileLayout | None, listed: set[bytes]) -> Answer:
        """Bring one file to the bucket. Of what was listed at the start, the rows are not read again."""
        bucket, metrics, started = self._bucket, self._core.metrics, time.monotonic()
        header = bucket.read_header(path, layout)
        name = bucket.name_of(header.meta)
        if name in listed:
            listed.discard(name)
            if bucket.holds(name, header):
                metrics.add("shared_exists")
                return Answer.EXISTS
        answer, nbytes = bucket.put(bucket.read_file(path, header), self._parent(header.meta))
        if answer is Answer.OK:
            metrics.observe("shared_put_seconds", time.monotonic() - started, shared_puts=1, shared_put_bytes=nbytes)
        else:
            metrics.add("shared_exists" if answer is Answer.EXISTS else "errors_shared_write")
        return answer

    def _record_loop(self) -> None:
        """Upload request records, in the background of everything else."""
        core, records = self._core, None
        while not self._stopping.wait(_RECORDS_SEC):
            if self._listed is None or not core.recovered or not self.writes_online:
                continue
            try:
                records = records or RecordUploads(self._bucket, core.disk.directory)
                core.metrics.add("shared_record_bytes", records.send(idle=not sharing.waiting(core.state)))
            except OSError as error:
                logger.debug("request records are not uploaded for now: %s", error)
            except Exception:
                core.metrics.add("errors_internal")
                logger.exception("an upload of request records failed")

    def _parent(self, meta: ChunkMeta) -> bytes:
        """Prefix digest of the chunk before; empty where there is none, or its file is not here any more.

        An object names it for good, so a header that is not read yet is read, and the archive is looked into.
        """
        if not meta.parent:
            return b""
        name = chunk_name(meta.key.replace(f"@{meta.chunk_hash}@", f"@{meta.parent}@", 1))
        with self._core.lock, self._core.step:
            prefix = sharing.prefix_of(self._core.state, name)
        for archived in (False, True):
            if prefix:
                break
            with contextlib.suppress(OSError, BadChunk):
                parent = self._bucket.read_header(self._core.disk.path(name, archived=archived)).meta
                prefix = parent.prefix if chunk_name(parent.key) == name else b""
        return prefix
