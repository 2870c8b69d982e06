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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lmcache_hs_backend.chunk import HASH_ALGORITHM, TOKEN_BYTES, AskPresence, ChunkRef, Presence, Prompt, cut
from lmcache_hs_backend.config import GIB, ConfigError, LocalConfig, TieredConfig
from lmcache_hs_backend.debug import StoreDebug
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.namespace import NamespaceId, local_model_revision
from lmcache_hs_backend.metrics import GAUGES, Metrics
from lmcache_hs_backend.tiers.background import Background
from lmcache_hs_backend.tiers.cleaner import Cleaner
from lmcache_hs_backend.tiers.gauges import gauges
from lmcache_hs_backend.tiers.index import Entry, Standing
from lmcache_hs_backend.tiers.intake import Intake
from lmcache_hs_backend.tiers.memory.dtypes import checked_rows
from lmcache_hs_backend.tiers.mover import Executor
from lmcache_hs_backend.tiers.namespace import Namespace
from lmcache_hs_backend.tiers.opening import Opening
from lmcache_hs_backend.tiers.pair import SaveUse, TierPair
from lmcache_hs_backend.tiers.serve import Serve

logger = logging.getLogger(__name__)

_TICK_SEC = 0.25
_PUBLISH_SEC = 1.0
_DELETE_AGAIN_SEC = 5.0
_STOP_SEC = 0.5  # what idle threads may take to end, however short close_timeout_sec is
_DROPPED_UNDER_ONE_LOCK = 1000
_SAVE_USE_SEC = 600
_VISITED_PER_TICK = 64


def all_present(kv_keys: Sequence[object], memory_only: bool) -> Sequence[Presence]:
    """The answer of a store that is coupled to no KV cache."""
    return [Presence.PRESENT] * len(kv_keys)


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
        labels: Mapping[str, object] | None = None,
        capture: str = "{}",
        files: FileLayer | None = None,
        setting: Callable[[str], str] = str,
    ) -> None:
        """Open the cold tier, lock its namespace and begin to look at what is there, in the background.

        Args:
            config: The settings.
            capacity: Size of the hot tier in bytes.
            ident: Everything that must be equal for rows to be interchangeable. Names the directory.
            ask: Called with the ``kv_key`` of chunks to ask for their KV. By default all KV is present.
            labels: Values of the Prometheus labels in ``metrics.LABELS``.
            capture: JSON object that each file carries: what the caller knows of the rows.
            files: The system calls on chunk files; tests replace it.
            setting: Turns the name of a setting into what the user wrote, for errors.

        Raises:
            ConfigError: The cold path, or another setting, cannot be used. Nothing is left behind.
        """
        self.config = config
        self.ident = ident
        self.metrics = Metrics(labels)
        try:
            self._pair = TierPair(config, capacity, ask, self.metrics)
            self._background = self._start_background()
        except (ValueError, OverflowError, OSError) as error:
            raise ConfigError(
                f"{setting('hot_size')} is {capacity / GIB:g}, but that many GB cannot be reserved: {error}"
            ) from None
        except RuntimeError as error:
            raise ConfigError(
                f"{setting('io_threads')} is {config.io_threads}, but the system starts no more threads: {error}"
            ) from None
        self._executor = Executor(self._pair.mover)
        self._closing = threading.Lock()  # held by the one call of close() that does the work
        self._closed = False
        self._recovered = threading.Event()
        self._delete_again_at = 0.0
        self._callers = 0  # calls that are using slots; the pair's lock guards it
        self._namespace: Namespace | None = None
        try:
            opening = Opening(config, self._pair.mover, self._background, setting)
            namespace = self._namespace = opening.namespace(ident, self._executor)
            self.directory = namespace.directory
            opening.on_io_thread(lambda: self._pair.open(namespace, files or FileLayer()))
            opening.on_io_thread(lambda: opening.check_size(namespace.directory))
        except BaseException:
            self._stop(time.monotonic() + 1.0)
            if self._namespace is not None:
                self._namespace.close()
            raise
        self._cleaner = Cleaner(self._pair)
        self._intake = Intake(self._pair, self._cleaner, ident.model, capture)
        self._serve = Serve(self._pair)
        self._pair.mover.next_write = self._cleaner.next_write
        recovery = opening.recover(self._pair, self._cleaner, self.directory, self._executor, self._recovered)
        self._background.start(recovery)
        self._background.every(_TICK_SEC, self._tick)
        self._background.every(_PUBLISH_SEC, self._publish)
        _open_stores.add(self)

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
        started = time.monotonic()
        if not self._enter():
            return 0
        try:
            return self._intake.store(refs, ids, rows, row_offset, wait_sec)
        finally:
            self._leave("store_seconds", started)

    def retrieve(
        self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], dtype: torch.dtype | None = torch.float32
    ) -> dict[int, torch.Tensor]:
        """The rows of the longest prefix of ``refs`` that has every layer and whose KV is present.

        Reads what is on disk, for ``read_timeout_sec`` at most, and keeps it in the hot tier (``promote``).

        Args:
            refs: The chunks, from the first of the sequence on.
            layer_idxs: The layers.
            dtype: Of the result; None: as the rows are kept (bfloat16, float16 or float32).

        Returns:
            ``layer_idx`` to contiguous CPU rows ``[num_tokens, hidden_dim]``, the caller's own. Empty when there
            is no such prefix; why it ended is counted in ``misses_*``.
        """
        started = time.monotonic()
        if not layer_idxs or not self._enter():
            return {}
        try:
            return self._serve.retrieve(refs, layer_idxs, dtype)
        finally:
            self._leave("retrieve_seconds", started)

    def _enter(self) -> bool:
        """A call begins that may use slots; close() waits for its ``_leave``. False when it comes too late."""
        with self._pair.lock:
            self._callers += not self._closed
            return not self._closed

    def _leave(self, duration: str, started: float) -> None:
        with self._pair.lock:
            self._callers -= 1
            if self._closed:
                self._pair.room.notify_all()
        self.metrics.observe(duration, time.monotonic() - started)

    def prefetch(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int] | None = None) -> None:
        """Promote what is cold of a prompt's prefix, in the background. None: all layers. Returns at once."""
        if not self._closed:
            self._serve.prefetch(refs, layer_idxs)

    def covered(self, names: Iterable[bytes], layer_idxs: Sequence[int]) -> int:
        """How many chunks, from the first on, have every layer where it can be read. Looks at the index only."""
        pair, count = self._pair, 0
        with pair.lock:
            if self._closed:
                return 0
            readable = pair.cold.readable
            for name in names:
                entry = pair.index.get(name)
                if entry is None or entry.standing is Standing.UNREAD:
                    break
                if not all(idx in entry.hot or (readable and entry.on_file(idx)) for idx in layer_idxs):
                    break
                count += 1
        return count

    def held(self, refs: Iterable[ChunkRef], layer_idxs: Collection[int]) -> int:
        """Chunks, anywhere among ``refs``, that have every layer for just these tokens, in either tier. Index only."""
        return self._serve.held(refs, layer_idxs)

    def has(self, name: bytes, layer_idx: int) -> tuple[bool, bool]:
        """Whether the hot tier, and whether the cold tier, holds a layer of a chunk: ``(in_hot, in_cold)``."""
        with self._pair.lock:
            entry = None if self._closed else self._pair.index.get(name)
            return (False, False) if entry is None else (layer_idx in entry.hot, entry.on_file(layer_idx))

    def touch(self, names: Sequence[bytes]) -> None:
        """Mark the chunks of a sequence as just used, the first one as youngest. Unknown names are ignored."""
        with self._pair.lock:
            if not self._closed:
                self._pair.index.touch([*filter(None, map(self._pair.index.get, names))])

    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
        return self._closed

    @property
    def readable(self) -> bool:
        """Whether the disk answers."""
        return self._pair.cold.readable

    def add_layer(self, name: bytes, layer_idx: int, rows: torch.Tensor, kv_key: object) -> bool:
        """Add a layer, ``[num_tokens, hidden_dim]``, to a chunk that is here. False when it is not, or has it."""
        pair = self._pair
        with pair.lock:
            entry = pair.index.get(name)
            if entry is None or entry.described is None or rows.shape[0] != entry.num_tokens:
                return False
            described = entry.described
        meta, ids = described.parts()
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
        pair = self._pair
        hot, cold = self.has(name, layer_idx)
        with pair.lock:
            entry = pair.index.get(name)
            if self._closed or entry is None or entry.standing is Standing.UNREAD:
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
        return 0 if self._closed else len(self._pair.index.entries)

    # -- moving and dropping --------------------------------------------------------------------------------------

    def demote(self, names: Iterable[bytes]) -> int:
        """Evict chunks from RAM that are on disk and not in use, and return how many.

        For a writer that reads nothing back and would otherwise fill RAM.
        """
        pair, demoted = self._pair, 0
        with pair.lock:
            for name in names:
                entry = pair.index.clean.get(name)
                if entry is not None and not entry.dirty:
                    pair.hot.evict(entry)
                    demoted += 1
        return demoted

    def kv_gone(self, names: Iterable[bytes]) -> int:
        """The KV of these chunks was deleted: they leave both tiers, or go to the archive. Returns how many."""
        return self._drop(names, self._pair.kv_gone)

    def drop(self, names: Iterable[bytes]) -> int:
        """Delete chunks from both tiers, and return how many were here."""
        return self._drop(names, self._pair.forget)

    def clear(self) -> int:
        """Delete every chunk from both tiers, and return how many were here. Archive and quarantine stay."""
        pair = self._pair
        with pair.lock:
            entries = [] if self._closed else list(pair.index.entries.values())
            pair.cleared |= not self._cleaner.enabled
        for start in range(0, len(entries), _DROPPED_UNDER_ONE_LOCK):
            with pair.lock:
                for entry in entries[start : start + _DROPPED_UNDER_ONE_LOCK]:
                    if not entry.gone:
                        pair.forget(entry)
        return len(entries)

    def _drop(self, names: Iterable[bytes], how: Callable[[Entry], None]) -> int:
        dropped = 0
        with self._pair.lock:
            if self._closed:
                return 0
            for name in names:
                entry = self._pair.index.get(name)
                if entry is not None:
                    how(entry)
                    dropped += 1
        return dropped

    # -- figures ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | str | bool]:
        """All figures by name: those in ``metrics.COUNTERS`` and ``GAUGES``, and ``<histogram>_sum``, ``_count``.

        ``cold_state`` is ``online``, ``paused`` or ``offline``; sizes are in bytes, durations in seconds.
        """
        now = gauges(self._pair, self.config)
        return {
            **now,
            "cold_state": self._pair.cold.health.state.value,
            "pinned": bool(now["pinned"]),
            "write_bytes_per_sec": self._pair.rate.bytes_per_sec,
            **self.metrics.snapshot(),
        }

    # -- life ------------------------------------------------------------------------------------------

    def pin(self) -> bool:
        """Pin the hot tier's memory where there is a GPU, and return whether it is pinned. Failing is a WARNING."""
        if torch.cuda.is_available():
            try:
                self._pair.hot.arena.pin()
            except RuntimeError as error:
                logger.warning(
                    "pinned: no. The hot tier stays in pageable memory, copies to the GPU are slower: %s", error
                )
        return self._pair.hot.arena.pinned

    def flush(self, timeout: float) -> int:
        """Write every dirty chunk, waiting ``timeout`` seconds at most. Returns how many are still dirty."""
        pair = self._pair
        deadline = time.monotonic() + timeout
        with pair.lock:
            self._cleaner.flushing += 1
            pair.mover.wake()
            try:
                while pair.index.aging and pair.cold.writable and time.monotonic() < deadline:
                    pair.quiet.wait(min(0.1, max(0.0, deadline - time.monotonic())))
            finally:
                self._cleaner.flushing -= 1
            return pair.index.dirty_chunks

    def close(self) -> None:
        """Write what is dirty, as far as ``close_timeout_sec`` allows, and end. Idempotent; raises nothing of its own.

        Does not ask for KV. Memory that a caller, or an I/O thread in a system call that does not return, still
        uses is freed with its last user.
        """
        with self._closing:
            if self._closed:
                return
            deadline = time.monotonic() + self.config.close_timeout_sec
            try:
                self._finish(deadline - min(0.5, self.config.close_timeout_sec / 4))
            finally:  # also when somebody loses patience with it
                self._end(deadline)

    def _finish(self, deadline: float) -> None:
        """Let callers leave, and have written what can be."""
        with self._pair.lock:
            self._closed = self._serve.closed = self._intake.closed = True
            self._pair.ask = all_present
            while self._callers and time.monotonic() < deadline:
                self._pair.room.wait(0.05)
        self.flush(max(0.0, deadline - time.monotonic()))
        with self._pair.lock:
            self._pair.save_uses(deadline)

    def _end(self, deadline: float) -> None:
        index = self._pair.index
        with self._pair.lock:
            left = index.dirty_chunks
            losses = Counter(entry.refused for entry in index.clean.values() if entry.refused)
            losses["close"] = len(index.aging)
        for reason, chunks in losses.items():
            if chunks:
                self.metrics.loss(reason, chunks)
        ended = self._stop(max(deadline, time.monotonic() + _STOP_SEC))
        self._publish()
        self.metrics.publish(dict.fromkeys(GAUGES, 0))  # a store that is closed holds nothing
        if ended and not self._callers:
            self._pair.hot.arena.release()
            if self._namespace is not None:
                self._namespace.close()
        else:  # whoever is still at work there keeps the memory and the directory, until the process ends
            logger.warning("%s: an operation does not return; it is left behind", self.directory)
        logger.info("closed %s: %d chunk(s) not written", self.directory, left)

    @property
    def debug(self) -> StoreDebug:
        """A look inside, for tests, benchmarks and support sessions; not for serving."""
        return StoreDebug(self)

    def wait_recovered(self, timeout: float) -> bool:
        """Wait until what was on disk at start is known, headers included. Returns whether it is."""
        return self._recovered.wait(timeout)

    def _start_background(self) -> Background:
        try:
            return Background()
        except BaseException:
            self._pair.mover.stop()
            raise

    def _tick(self) -> None:
        """A few times a second: the disk's health, and a look at the next few chunks in turn."""
        pair = self._pair
        with pair.lock:
            stuck = pair.mover.stuck(self.config.read_timeout_sec)
            pair.mover.wake()
        pair.cold.health.check(stuck)
        now = time.monotonic()
        with pair.lock:
            if not pair.cold.writable:
                return
            if now > self._delete_again_at:
                self._delete_again_at = now + _DELETE_AGAIN_SEC
                pair.delete_again()
            turn = pair.index.in_turn(_VISITED_PER_TICK)
            old = time.time_ns() - _SAVE_USE_SEC * 10**9
            for entry in turn:
                if entry.file_bytes and entry.used_ns > entry.saved_ns and entry.saved_ns < old:
                    pair.mover.submit(SaveUse(pair, entry))
        self._drop_orphans(turn)

    def _publish(self) -> None:
        """Once a second: what others look at, and memory that nobody has needed for a while."""
        self.metrics.report_losses()
        self.metrics.publish(gauges(self._pair, self.config))
        self._pair.pool.trim()

    def _drop_orphans(self, turn: Sequence[Entry]) -> None:
        """Chunks that nobody retrieves any more, because their KV is gone."""
        suspects = [entry for entry in turn if entry.standing is Standing.CONFIRMED]
        asked_ns = time.monotonic_ns()
        answers = self._pair.presence([entry.kv_key for entry in suspects], True) if suspects else []
        with self._pair.lock:
            for entry, answer in zip(suspects, answers, strict=True):
                seen_since = entry.seen_ns >= asked_ns
                if answer is Presence.GONE and entry.standing is Standing.CONFIRMED and not seen_since:
                    self._pair.kv_gone(entry)

    def _stop(self, deadline: float) -> bool:
        self._background.stop(deadline)
        self._pair.mover.stop()
        ended = self._pair.mover.join(deadline)
        self._pair.pool.close()
        return ended


# A process that ends without closing still writes what is dirty: the threads are daemons and run until then.
_open_stores: weakref.WeakSet[TieredStore] = weakref.WeakSet()


# A forked child has the objects but not the threads; closing them there would wait for nobody.
os.register_at_fork(after_in_child=_open_stores.clear)


@atexit.register
def _close_all() -> None:
    for store in list(_open_stores):
        store.close()
