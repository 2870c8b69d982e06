"""The two tiers as one store of chunks: what the integrations use, and its life from open to close.

``TieredStore`` puts the parts of ``tiers`` together and keeps them going: recovery, chores, figures,
flush, close. It talks in chunk references (see ``chunk``), so it serves LMCache, vLLM and any other caller
that can name chunks. It knows neither the callers nor how their keys are made.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmcache_hs_backend.chunk import (
    HASH_ALGORITHM,
    TOKEN_BYTES,
    WHOLE_KEYS,
    AskPresence,
    ChunkRef,
    KeyForm,
    Prompt,
    cut,
)
from lmcache_hs_backend.config import GIB, ConfigError, LocalConfig, TieredConfig
from lmcache_hs_backend.debug import StoreDebug
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.namespace import NamespaceId, local_model_revision
from lmcache_hs_backend.metrics import Metrics
from lmcache_hs_backend.tiers.disk.chunk_files import ChunkFiles
from lmcache_hs_backend.tiers.disk.owned_namespace import OwnedNamespace
from lmcache_hs_backend.tiers.flows.background import Background
from lmcache_hs_backend.tiers.flows.bell import Latch
from lmcache_hs_backend.tiers.flows.chores import TICK_SEC, Chores
from lmcache_hs_backend.tiers.flows.clear import Clear
from lmcache_hs_backend.tiers.flows.closing import Closing, end_threads
from lmcache_hs_backend.tiers.flows.copier import Copier
from lmcache_hs_backend.tiers.flows.core import Core, all_present
from lmcache_hs_backend.tiers.flows.drop_chunks import DropChunks
from lmcache_hs_backend.tiers.flows.gauges import gauges, publish
from lmcache_hs_backend.tiers.flows.interrupted import InterruptedCalls
from lmcache_hs_backend.tiers.flows.io_threads import IoExecutor, IoThreads
from lmcache_hs_backend.tiers.flows.make_room import MakeRoom
from lmcache_hs_backend.tiers.flows.neighbours import Neighbours
from lmcache_hs_backend.tiers.flows.opening import Opening
from lmcache_hs_backend.tiers.flows.read import HeaderJob, Headers, ReadJob, Reads
from lmcache_hs_backend.tiers.flows.retrieve_chunks import Outputs, Retrieve
from lmcache_hs_backend.tiers.flows.store_call import RowSource
from lmcache_hs_backend.tiers.flows.store_chunks import Store, Stored, TensorRows
from lmcache_hs_backend.tiers.flows.touch import touch_first, touch_rest
from lmcache_hs_backend.tiers.flows.write_back import WriteBack
from lmcache_hs_backend.tiers.memory.arena import MapMemory, map_memory
from lmcache_hs_backend.tiers.memory.dtypes import checked_rows
from lmcache_hs_backend.tiers.state import reading
from lmcache_hs_backend.tiers.state.checking import check

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lmcache_hs_backend.tiers.flows.share import Share

_PUBLISH_SEC = 1.0


class TieredStore:
    """A hot tier in RAM over a cold tier on disk, as one store of chunks. Thread-safe.

    ``TieredStore.open`` makes one for use on its own; the LMCache and vLLM integrations use the constructor.
    After ``close`` every method still returns: stores keep nothing, retrieves find nothing.
    """

    def __init__(
        self,
        config: TieredConfig,
        capacity: int,
        ident: NamespaceId,
        *,
        ask: AskPresence = all_present,
        kv_keys: KeyForm = WHOLE_KEYS,
        labels: Mapping[str, object] | None = None,
        capture: str = "{}",
        files: FileLayer | None = None,
        setting: Callable[[str], str] = str,
        map_hot: MapMemory = map_memory,
    ) -> None:
        """Open the cold tier, lock its namespace and begin to look at what is there, in the background.

        Args:
            config: The settings.
            capacity: Size of the hot tier in bytes.
            ident: Everything that must be equal for rows to be interchangeable. Names the directory.
            ask: Called with the ``kv_key`` of chunks to ask for their KV. By default all KV is present.
            kv_keys: What is kept of a ``kv_key`` for each chunk. By default the key itself.
            labels: Values of the Prometheus labels in ``metrics.LABELS``.
            capture: JSON object that each file carries: what the caller knows of the rows.
            files: The system calls on chunk files; tests replace it.
            setting: Turns the name of a setting into what the user wrote, for errors.
            map_hot: Maps the memory of the hot tier, which by default is the process's own.

        Raises:
            ConfigError: A setting cannot be used, or the cold path cannot and ``require_cold`` is set. Nothing is left
                behind.
        """
        self.config = config
        self.ident = ident
        self.metrics = Metrics(labels)
        files = files or FileLayer()
        share = self._shared_tier(capacity, setting)
        self._start_threads(lambda: Core(config, capacity, ask, self.metrics, map_hot, kv_keys), capacity, setting)
        core, io = self._core, self._io
        executor = IoExecutor(io)
        self._recovered = Latch()
        namespace = self._namespace = OwnedNamespace(config, ident, setting("cold_path"))
        core.disk = ChunkFiles(config, namespace, self.metrics, files)
        opening = Opening(core, namespace, self._background, executor, setting)
        try:
            opening.open()
            touch_first(core)
        except BaseException:
            end_threads(core, io, self._background, time.monotonic() + 1.0)
            namespace.close()
            raise
        self._copier, self._neighbours = Copier(core.arena, io), Neighbours(core, files)
        self._clear = Clear(core, io, self._neighbours)
        self._room = MakeRoom(core, files, self._neighbours)
        self._drop = DropChunks(core, io, self._neighbours)
        interrupted = InterruptedCalls(core, io)
        self._chores = Chores(core, self._clear, interrupted)
        headers, reads = Headers(core), Reads(core)
        io.register(ReadJob, reads.run)
        io.register(HeaderJob, headers.run)
        self._write_back = WriteBack(core, io, self._room)
        self._store = Store(core, self._copier, headers, ident.model, capture)
        self._retrieve = Retrieve(core, self._copier, reads, headers)
        self._background.start(opening.recover(self._room, self._neighbours, self._recovered))
        self._background.every(TICK_SEC, self._chores.tick)
        self._background.every(_PUBLISH_SEC, lambda: publish(core))
        self._closing = Closing(core, io, self._background, namespace, interrupted)
        touch_rest(core)
        self._share = core.share = share(core, self._store) if share is not None else None
        _open_stores.add(self)

    def _start_threads(self, make_core: Callable[[], Core], capacity: int, setting: Callable[[str], str]) -> None:
        """Reserve the hot tier and start the threads. Raises ConfigError, with nothing left behind."""
        try:
            self._core = make_core()
        except (ValueError, OverflowError, OSError) as error:
            raise ConfigError(
                f"{setting('hot_size')} is {capacity / GIB:g}, but that many GB cannot be reserved: {error}"
            ) from None
        try:
            self._io = IoThreads(self._core, self.config.io_threads)
            try:
                self._background = Background()
            except BaseException:
                self._io.stop()
                raise
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"{setting('io_threads')} is {self.config.io_threads}, but the system starts no more threads: {error}"
            ) from None

    def _shared_tier(self, capacity: int, setting: Callable[[str], str]) -> Callable[[Core, Store], Share] | None:
        """What starts the shared tier, None when there is none. Raises ConfigError."""
        if not self.config.has_shared_tier:
            return None
        from lmcache_hs_backend.tiers.flows.share import shared_tier  # obstore is imported only where it is used

        return shared_tier(self.config, self.ident, capacity, setting)

    @classmethod
    def open(
        cls,
        cold_path: str | os.PathLike[str],
        *,
        model: str,
        kv_dtype: str = "bfloat16",
        capture: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> TieredStore:
        """Open a store for the rows of one model, without LMCache or vLLM. Use it in a ``with`` statement.

        Waits up to ``read_timeout_sec`` until it is known what is on disk already.

        Args:
            cold_path: Directory of the cold tier, created when it is missing.
            model: Name or directory of the model. Rows of different models never meet.
            kv_dtype: Part of what names the rows. With the model's own, the chunks are the vLLM connector's.
            capture: What is known of the rows, for the extraction: ``{"layer_ids": "vllm", "num_layers": 30, …}``.
            **settings: ``hot_size`` (2 GB), ``chunk_size`` (256 tokens), and the fields of TieredConfig.

        Raises:
            ConfigError: A setting is unknown or wrong, or the directory cannot be used.
        """
        config = LocalConfig.from_mapping({"cold_path": os.fspath(cold_path), **settings}, str)
        assert isinstance(config, LocalConfig)
        revision = local_model_revision(model) if config.model_revision is None else config.model_revision
        ident = NamespaceId(
            model=model, model_revision=revision, kv_dtype=kv_dtype, chunk_size=config.chunk_size,
            hash_algorithm=HASH_ALGORITHM,
        )  # fmt: skip
        capacity, labels = int(config.hot_size * GIB), {"model_name": model, "role": "local"}
        store = cls(config, capacity, ident, labels=labels, capture=json.dumps(dict(capture or {})))
        store.pin()
        store.wait_recovered(config.read_timeout_sec)
        return store

    def prompt(self, token_ids: Sequence[int] | torch.Tensor, *, tail: bool = True) -> Prompt:
        """Cut token ids into this store's chunks, for callers that have no keys of their own; see ``chunk.cut``."""
        ident = self.ident
        return cut(token_ids, model=ident.model, kv_dtype=ident.kv_dtype, chunk_size=ident.chunk_size, tail=tail)

    # -- chunks ----------------------------------------------------------------------------------------

    def store(
        self,
        refs: Sequence[ChunkRef],
        ids: bytes,
        rows: Mapping[int, torch.Tensor],
        row_offset: int = 0,
        wait_sec: float | None = None,
    ) -> int:
        """Store rows of one or more layers for the chunks of a sequence. Copies them; reads no file.

        Args:
            refs: The chunks, in order. Those that start before ``row_offset`` are left alone.
            ids: All token ids of the sequence (``chunk.token_bytes``).
            rows: ``layer_idx`` to float rows ``[num_tokens, hidden_dim]``, on any device.
            row_offset: Position of the first row in the sequence, in tokens.
            wait_sec: Seconds to wait for room. None: ``store_wait_ms`` of the settings.

        Returns:
            How many chunks newly hold at least one of the layers; one recovered from disk counts once, too. When
            there is no room, a prefix is kept.

        Raises:
            ValueError: The rows are not floats, are fewer than the chunks have, or more than the token ids.
        """
        most = len(ids) // TOKEN_BYTES - row_offset
        least = max(refs[-1].end - row_offset, 0) if refs else 0
        rows = {layer_idx: checked_rows(tensor, least, most) for layer_idx, tensor in rows.items()}
        return self.store_checked(refs, ids, rows, row_offset, wait_sec).new

    def store_checked(
        self,
        refs: Sequence[ChunkRef],
        ids: bytes,
        rows: Mapping[int, torch.Tensor],
        row_offset: int = 0,
        wait_sec: float | None = None,
    ) -> Stored:
        """``store`` for rows that ``tiers.memory.dtypes.checked_rows`` has returned, with both counts."""
        return self.store_from(refs, ids, TensorRows(self._copier, rows), row_offset, wait_sec)

    def store_from(
        self,
        refs: Sequence[ChunkRef],
        ids: bytes,
        source: RowSource,
        row_offset: int = 0,
        wait_sec: float | None = None,
    ) -> Stored:
        """``store`` for rows that something else copies into the hot tier, such as another process that maps it.

        The source must have rows for every chunk that starts at or after ``row_offset``, and copies them on this
        thread. What it raises comes through.
        """
        self._core.called_at = started = time.monotonic()
        if self._core.closed:
            return Stored(0, 0)
        try:
            return self._store.store_from(refs, ids, source, row_offset, wait_sec)
        finally:
            self._ended("store_seconds", started)

    def retrieve(
        self,
        refs: Sequence[ChunkRef],
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None = torch.float32,
        outputs: Outputs | None = None,
    ) -> dict[int, torch.Tensor]:
        """The rows of the longest prefix of ``refs`` that has every layer and whose KV is present.

        Reads what is on disk, for ``read_timeout_sec`` at most, and keeps it in the hot tier (``promote``).

        Args:
            refs: The chunks, from the first of the sequence on.
            layer_idxs: The layers.
            dtype: Of the result; None: as the rows are kept (bfloat16, float16 or float32).
            outputs: Memory for the result. By default the store's own, recycled.

        Returns:
            ``layer_idx`` to contiguous CPU rows ``[num_tokens, hidden_dim]``, the caller's own. Empty when there
            is no such prefix; why it ended is counted in ``misses_*``.
        """
        self._core.called_at = started = time.monotonic()
        if not layer_idxs or self._core.closed:
            return {}
        try:
            if self._share is None:
                return self._retrieve.retrieve(refs, layer_idxs, dtype, outputs)
            return self._share.retrieve(refs, layer_idxs, dtype, self._retrieve, outputs)
        finally:
            self._ended("retrieve_seconds", started)

    def _ended(self, duration: str, started: float) -> None:
        self._core.called_at = now = time.monotonic()
        self.metrics.observe(duration, now - started)

    def prefetch(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int] | None = None) -> None:
        """Promote what is cold of a prompt's prefix, in the background. None: all layers. Returns at once."""
        if not self._core.closed:
            self._retrieve.prefetch(refs, layer_idxs)
            if self._share is not None:
                self._share.prefetch(refs, layer_idxs)

    def covered(self, names: Iterable[bytes], layer_idxs: Sequence[int]) -> int:
        """How many chunks, from the first on, have every layer where it can be read. Looks at the index only."""
        readable = self._core.disk.health.readable
        with self._core.lock, self._core.step:
            if self._core.closed:
                return 0
            return reading.covered(self._core.state, names, layer_idxs, readable=readable)

    def has(self, name: bytes, layer_idx: int) -> tuple[bool, bool]:
        """Whether the hot tier, and whether the cold tier, holds a layer of a chunk: ``(in_hot, in_cold)``."""
        with self._core.lock, self._core.step:
            entry = None if self._core.closed else self._core.state.entries.get(name)
            return (False, False) if entry is None else (layer_idx in entry.hot, entry.on_file(layer_idx))

    def touch(self, names: Sequence[bytes]) -> None:
        """Mark the chunks of a sequence as just used, the first one as youngest. Unknown names are ignored."""
        core = self._core
        for piece in core.pieces(names, from_end=True):
            with core.lock, core.step:
                if not core.closed:
                    entries = core.state.entries
                    core.state.orders.touch([entry for name in piece if (entry := entries.get(name)) is not None])

    @property
    def directory(self) -> str:
        """The namespace's directory. While the cold path cannot be used, the one that is wanted."""
        return self._namespace.directory

    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
        return self._core.closed

    @property
    def readable(self) -> bool:
        """Whether the disk answers."""
        return self._core.disk.health.readable

    def add_layer(self, name: bytes, layer_idx: int, rows: torch.Tensor, kv_key: object) -> bool:
        """Add a layer, ``[num_tokens, hidden_dim]``, to a chunk that is here. False when it is not, or has it."""
        with self._core.lock, self._core.step:
            entry = self._core.state.entries.get(name)
            if entry is None or entry.metadata is None or rows.shape[0] != entry.num_tokens:
                return False
            metadata = entry.metadata
        meta, ids = metadata.parts()
        end = meta.start + meta.num_tokens
        ref = ChunkRef(name, meta.start, end, meta.prefix, meta.key, meta.chunk_hash, meta.parent, kv_key)
        # A store takes all token ids of the prompt; of those in front of the chunk it reads none.
        return bool(self.store([ref], bytes(meta.start * TOKEN_BYTES) + ids, {layer_idx: rows}, meta.start))

    def read_layer(
        self, name: bytes, layer_idx: int, kv_key: object, *, tiers: tuple[bool, bool] = (True, True)
    ) -> torch.Tensor | None:
        """A copy of one layer of one chunk in the dtype it is kept in, or None.

        Args:
            name: The chunk's name.
            layer_idx: The layer.
            kv_key: Of its KV, which the entry of a recovered chunk does not know.
            tiers: Which tiers may serve it: ``(hot, cold)``.
        """
        hot, cold = self.has(name, layer_idx)
        with self._core.lock, self._core.step:
            entry = self._core.state.entries.get(name)
            if self._core.closed or entry is None or not entry.identified:
                return None
            if not (hot and tiers[0]) and not (cold and tiers[1]):
                return None
            num_tokens, prefix = entry.num_tokens, entry.prefix
        ref = ChunkRef(name, 0, num_tokens, prefix, "", "", "", kv_key)
        return self.retrieve([ref], [layer_idx], None).get(layer_idx)

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # a store without chunks is a store

    def __len__(self) -> int:
        """Chunks in either tier."""
        return 0 if self._core.closed else len(self._core.state.entries)

    # -- moving and dropping --------------------------------------------------------------------------------------

    def demote(self, names: Iterable[bytes]) -> int:
        """Evict chunks from RAM that are on disk and not in use, and return how many.

        For a writer that reads nothing back and would otherwise fill RAM.
        """
        return self._drop.demote(names)

    def kv_gone(self, names: Iterable[bytes]) -> int:
        """The KV of these chunks was deleted: they leave both tiers, or go to the archive. Returns how many."""
        return self._drop.kv_gone(names)

    def drop(self, names: Iterable[bytes], *, durable: bool = True) -> int:
        """Delete chunks from both tiers, and return how many were here.

        While it is not known yet what is on disk (at the start, or while the cold path cannot be used), files of these
        names are deleted as well, should there be any; they are not counted.

        Args:
            names: The chunks.
            durable: Wait until their files are deleted, for ``read_timeout_sec`` at most. Where that does not succeed,
                an ERROR is logged, and it is tried again until it does. Otherwise a process that is killed before the
                I/O threads have come to it finds them again at its next start.
        """
        return self._drop.drop(names, durable=durable)

    def clear(self) -> int:
        """Delete every chunk from both tiers, and return how many were here. Archive and quarantine stay.

        Durable when it returns: no later start finds them, also when the process is killed at that moment. The bytes
        on disk are deleted in the background. Where the disk does not allow it within ``read_timeout_sec``, an ERROR
        is logged, and it is tried again until it does.
        """
        return self._clear.clear()

    # -- figures ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | str | bool]:
        """All figures by name: those in ``metrics.COUNTERS`` and ``GAUGES``, and ``<histogram>_sum``, ``_count``.

        ``cold_state`` is ``online``, ``paused`` or ``offline``; sizes are in bytes, durations in seconds.
        """
        now = gauges(self._core)
        return {
            **now,
            "cold_state": self._core.disk.health.state.value,
            "pinned": bool(now["pinned"]),
            "write_bytes_per_sec": self._core.state.rate.bytes_per_sec,
            **self.metrics.snapshot(),
        }

    def check(self) -> list[str]:
        """Every violated invariant of the tiers, each as one sentence; empty when all hold. Takes time; for support.

        With ``HS_STRICT=1`` in the environment this is checked all the time.
        """
        with self._core.lock, self._core.step:
            return check(self._core.state)

    # -- life ------------------------------------------------------------------------------------------

    def pin(self) -> bool:
        """Pin the hot tier's memory where there is a GPU, and return whether it is pinned. Failing is a WARNING."""
        if torch.cuda.is_available():
            try:
                self._core.arena.pin()
            except RuntimeError as error:
                logger.warning(
                    "pinned: no. The hot tier stays in pageable memory, copies to the GPU are slower: %s", error
                )
        return self._core.arena.pinned

    def flush(self, timeout: float) -> int:
        """Write every dirty chunk, waiting ``timeout`` seconds at most. Returns how many still are to be written.

        Chunks that can never be written (see ``drops_too_large``, ``drops_cold_limit``) do not count.
        """
        return self._core.flush(timeout)

    def close(self) -> None:
        """Write what is dirty, as far as ``close_timeout_sec`` allows, and end. Idempotent; raises nothing of its own.

        Does not ask for KV. Memory that a caller, or an I/O thread in a system call that does not return, still
        uses is freed with its last user.
        """
        if self._share is not None:
            self._share.stop()  # what is not uploaded is on disk, and the next start finds it
        self._closing.close()

    @property
    def debug(self) -> StoreDebug:
        """A look inside, for tests, benchmarks and support sessions; not for serving."""
        return StoreDebug(self)

    def wait_recovered(self, timeout: float) -> bool:
        """Wait until what was on disk at start is known, headers included. Returns whether it is.

        A cold path that cannot be used yet is not waited for.
        """
        return self._recovered.wait(timeout if self._namespace.is_open else 0)


# A process that ends without closing still writes what is dirty: the threads are daemons and run until then.
_open_stores: weakref.WeakSet[TieredStore] = weakref.WeakSet()


# A fork takes each store's lock first, so that the child has a state that is whole and a lock that it can take: for one
# that another thread has at that moment, the child would wait forever.
_LOCK_FOR_FORK_SEC = 1.0
_forking = threading.local()


def _before_fork() -> None:
    cores = [store._core for store in list(_open_stores)]
    _forking.cores = [(core, core.lock.acquire(timeout=_LOCK_FOR_FORK_SEC)) for core in cores]


def _after_fork_in_parent() -> None:
    for core, held in vars(_forking).pop("cores", ()):
        if held:
            core.lock.release()


def _after_fork_in_child() -> None:
    for core, held in vars(_forking).pop("cores", ()):
        core.after_fork_in_child(held=held)
    _open_stores.clear()  # it has the objects but not the threads; closing them there would wait forever


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


@atexit.register
def _close_all() -> None:
    for store in list(_open_stores):
        store.close()
