"""``TieredHiddenStateStore``: LMCache's HiddenStateStore, on two tiers.

It takes the place of ``engine.hidden_state_store`` and keeps that class's interface and behaviour
(lmcache/v1/hidden_state_store.py), with these differences: it is thread-safe, rows keep their dtype until
they are returned, what does not fit in RAM goes to disk, a chunk is dropped only when its KV is known to be
gone, and what a store returns (``store_count``) counts chunks that were here before too. Here token ids become
chunk references and tensors are checked; everything else is ``TieredStore``'s work.

Bad arguments raise ValueError and store nothing. A failure of the cache itself never reaches the caller: it is
logged, counted in ``errors_internal``, and looks like a miss.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from lmcache_hs_backend.chunk import ChunkRef, chunk_name, chunk_refs, token_bytes
from lmcache_hs_backend.config import TieredConfig, hot_tier_bytes, plugin_names
from lmcache_hs_backend.debug import StoreDebug
from lmcache_hs_backend.first_rank import FirstRankFiles
from lmcache_hs_backend.format.namespace import NamespaceId, local_model_revision
from lmcache_hs_backend.integrations.lmcache.compat import (
    TORCH_DTYPE_TO_STR_DTYPE,
    CacheEngineKey,
    LMCacheEngineConfig,
    LMCacheMetadata,
    labels,
)
from lmcache_hs_backend.integrations.lmcache.kv_presence import KvPresence, short_keys
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.memory.dtypes import checked_rows

logger = logging.getLogger(__name__)

TokenIds = torch.Tensor | Sequence[int]
T = TypeVar("T")

PACKAGE = "lmcache_hs_backend"
PLUGIN_CLASS = "HSTieredBackend"
DEFAULT_PLUGIN = "hs_tiered"

_MAX_LAYER_IDX = 2**63
#: Of prompts as short as this their token ids are kept as they were given: comparing them is all that a small call of
#: the same prompt does with them.
_FEW_CHUNKS = 64


class _HashedPrompt(NamedTuple):
    """A prompt whose chunks are known; never changed, so threads may share it."""

    token_ids: list[int] | None  # as they were given, when that was a list
    ids: bytes
    request_configs: dict[str, Any] | None
    refs: list[ChunkRef]


class TieredHiddenStateStore:
    """Hidden states of the chunks of one engine, in the place of ``engine.hidden_state_store``. Thread-safe.

    All of LMCache's ``HiddenStateStore`` interface works as there; see its methods below for what is added.
    Rows are float tensors ``[num_tokens, hidden_dim]``; token ids are always those of the whole prompt from
    position 0, as for the KV, so that chunks and keys are the same.

    Args:
        config: The engine's config: ``chunk_size``, ``max_hidden_state_cpu_size`` (GB), ``hidden_state_layers``,
            ``use_layerwise``, and our settings in ``extra_config``.
        token_database: The engine's own, so that chunks and keys are those of its KV.

    Raises:
        ConfigError: The settings cannot be used. A ValueError that names the setting.
    """

    def __init__(self, config: LMCacheEngineConfig, token_database: Any) -> None:
        metadata = token_database.metadata
        plugin = plugin_of(config)
        settings = TieredConfig.from_extra_config(config.extra_config, plugin)
        capacity = hot_tier_bytes(config.max_hidden_state_cpu_size)
        self._token_database = token_database
        self._last_prompt: _HashedPrompt | None = None
        self._allowed = None if config.hidden_state_layers is None else frozenset(config.hidden_state_layers)
        self._presence = KvPresence(bool(config.use_layerwise), settings.kv_presence_timeout_ms / 1000)
        ident = namespace_of(config, metadata, token_database, settings)
        #: The rank under whose keys rows are kept, where that is another one.
        self._keeper = keeping_rank(metadata) if settings.ranks == "first" else metadata.worker_id
        self.tiers: TieredStore | FirstRankFiles
        if self._keeper != metadata.worker_id:
            ident = dataclasses.replace(ident, worker_id=self._keeper)
            self.tiers = FirstRankFiles(settings, ident, ask=self._presence.ask, labels=labels(metadata))
            return
        self.tiers = TieredStore(
            settings,
            capacity,
            ident,
            ask=self._presence.ask,
            kv_keys=short_keys(),
            labels=labels(metadata),
            capture='{"source": "lmcache", "layer_ids": "storage slots"}',
            setting=lambda name: (
                "max_hidden_state_cpu_size" if name == "hot_size" else f"extra_config['storage_plugin.{plugin}.{name}']"
            ),
        )

    # -- LMCache's interface -----------------------------------------------------------------------------

    def bind_storage_manager(self, storage_manager: Any) -> None:
        """Ask this storage manager for the KV of chunks. Until then all KV counts as present."""
        self._presence.bind(storage_manager)

    def store_hidden_states(
        self,
        token_ids: TokenIds,
        hidden_states: torch.Tensor,
        *,
        layer_idx: int = 0,
        token_offset: int = 0,
        request_configs: dict[str, Any] | None = None,
    ) -> int:
        """Store the rows of one layer, chunk by chunk, under the keys of the KV.

        Args:
            token_ids: The whole prompt from position 0, as for the KV: a 1-D integer tensor or a list.
            hidden_states: ``[len(token_ids) - token_offset, hidden_dim]``, bfloat16, float16, float32 or float64
                (kept as float32), on any device.
            layer_idx: Storage slot of the rows, any int.
            token_offset: Tokens at the start that ``hidden_states`` does not have. Chunks that start before it are
                left alone.
            request_configs: As given to ``engine.store``, where the KV is tagged.

        Returns:
            The number of chunks, of those that start at or after ``token_offset``, that hold the layer when the call
            returns. What was not kept, for example because there was no room, is not counted. With
            ``store_count: new`` only chunks that did not hold it before count, as in LMCache's own store.

        Raises:
            ValueError: An argument is wrong; the text says what was given and what is allowed.
        """
        return self.store_layers(token_ids, {layer_idx: hidden_states}, token_offset, request_configs=request_configs)

    def retrieve_hidden_states(
        self, token_ids: TokenIds, *, layer_idx: int = 0, request_configs: dict[str, Any] | None = None
    ) -> torch.Tensor | None:
        """The rows of the longest prefix whose chunks have the layer and whose KV is present.

        Args:
            token_ids: The whole prompt from position 0: a 1-D integer tensor or a list.
            layer_idx: Storage slot of the rows.
            request_configs: As given to ``engine.store``, where the KV is tagged.

        Returns:
            Contiguous CPU float32 rows ``[num_tokens, hidden_dim]``, the caller's own to keep, or None when not even
            the first chunk is served. Why the prefix ended is counted in ``misses_*``.

        Raises:
            ValueError: An argument is wrong.
        """
        ids = self._token_bytes(token_ids)
        rows = self._retrieve(token_ids, ids, [_layer_idx(layer_idx)], torch.float32, request_configs)
        return rows.get(layer_idx)

    def num_cached_chunks(self) -> int:
        """Chunks in either tier."""
        return len(self.tiers)

    def has_chunk(self, key: CacheEngineKey, layer_idx: int = 0) -> bool:
        """Whether either tier holds the layer of a chunk."""
        return any(self.tiers.has(self._name(key), layer_idx))

    def drop_key(self, key: CacheEngineKey) -> bool:
        """Delete a chunk, with all its layers, from both tiers. Returns whether it was there."""
        return bool(self.tiers.drop([self._name(key)]))

    def close(self) -> None:
        """Write what is not on disk yet and end, within ``close_timeout_sec``. May be called again."""
        self._presence.close()
        self.tiers.close()

    # -- and beyond it -----------------------------------------------------------------------------------

    def coverage(self, chunks: Iterable[tuple[int, int, Any]], layer_idxs: Sequence[int] = (0,)) -> int:
        """Up to which token the tiers have every layer. Looks at the index only, from any thread.

        LMCache is not asked: the caller holds the KV.

        Args:
            chunks: ``(start, end, key)`` from the first chunk on; key is a CacheEngineKey or a chunk hash.
            layer_idxs: The layers.

        Returns:
            The end, in tokens, of the last chunk up to which every layer is there; 0 for none.
        """
        listed = list(chunks)
        names = [self._name(key) if hasattr(key, "to_string") else self._name_of_hash(key) for _, _, key in listed]
        covered = self.tiers.covered(names, layer_idxs)
        return listed[covered - 1][1] if covered else 0

    def store_layers(
        self,
        token_ids: TokenIds,
        layers: Mapping[int, torch.Tensor],
        token_offset: int = 0,
        *,
        request_configs: dict[str, Any] | None = None,
    ) -> int:
        """Store several layers of one prompt at once.

        Args:
            token_ids: The whole prompt from position 0: a 1-D integer tensor or a list.
            layers: ``layer_idx`` to rows ``[len(token_ids) - token_offset, hidden_dim]``, as in
                ``store_hidden_states``. Layers that ``hidden_state_layers`` does not name are left out.
            token_offset: Tokens at the start that the rows do not have.
            request_configs: As given to ``engine.store``, where the KV is tagged.

        Returns:
            The number of chunks that hold all of the layers when the call returns; with ``store_count: new``, of those
            that newly hold at least one of them.

        Raises:
            ValueError: An argument is wrong.
        """
        if self._allowed is not None:
            layers = {idx: rows for idx, rows in layers.items() if idx in self._allowed}
        if not layers:
            return 0
        num_tokens = len(token_ids)
        if not 0 <= token_offset <= num_tokens:
            raise ValueError(f"token_offset ({token_offset}) must be in [0, len(token_ids) ({num_tokens})]")
        ids = self._token_bytes(token_ids)
        rows = {_layer_idx(idx): checked_rows(tensor, num_tokens - token_offset) for idx, tensor in layers.items()}
        return self._store(token_ids, ids, rows, token_offset, request_configs)

    def retrieve_layers(
        self,
        token_ids: TokenIds,
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None = torch.float32,
        *,
        request_configs: dict[str, Any] | None = None,
    ) -> dict[int, torch.Tensor]:
        """The rows of several layers over their common prefix.

        Args:
            token_ids: The whole prompt from position 0: a 1-D integer tensor or a list.
            layer_idxs: The layers; the prefix ends where one of them does.
            dtype: Of the result; None: as the rows are kept (bfloat16, float16 or float32).
            request_configs: As given to ``engine.store``, where the KV is tagged.

        Returns:
            ``layer_idx`` to contiguous CPU rows ``[num_tokens, hidden_dim]``; empty when there is no such prefix.

        Raises:
            ValueError: An argument is wrong.
        """
        if dtype is not None and dtype is not torch.float32 and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a float dtype or None, got {dtype}")
        ids = self._token_bytes(token_ids)
        wanted = [_layer_idx(idx) for idx in layer_idxs]
        if len(wanted) > 1:
            wanted = list(dict.fromkeys(wanted))
        return self._retrieve(token_ids, ids, wanted, dtype, request_configs)

    def prefetch(
        self,
        token_ids: TokenIds,
        layer_idxs: Sequence[int] | None = None,
        *,
        request_configs: dict[str, Any] | None = None,
    ) -> None:
        """Bring what is on disk of a prompt into RAM, in the background; None: all layers. Returns at once."""
        ids = token_bytes(token_ids)
        try:
            self.tiers.prefetch(self.refs(token_ids, ids, request_configs), layer_idxs)
        except Exception as error:  # noqa: BLE001 - it is logged and counted
            self._failed("a prefetch", error, None)

    def flush(self, timeout: float) -> int:
        """Write everything that is dirty, waiting ``timeout`` seconds at most. Returns how many chunks still are."""
        return self.tiers.flush(timeout)

    def clear(self) -> int:
        """Delete all chunks from both tiers, and return how many there were. Needed after changing weights in place.

        Archive, quarantine and other namespaces stay.
        """
        return self.tiers.clear()

    def stats(self) -> dict[str, float | str | bool]:
        """All figures by name, as ``TieredStore.stats`` has them."""
        return self.tiers.stats()

    def check(self) -> list[str]:
        """Every violated invariant of the tiers, each as one sentence; empty when all hold. Takes time; for support."""
        return self.tiers.check()

    @property
    def debug(self) -> StoreDebug:
        """A look inside, for tests, benchmarks and support sessions; not for serving."""
        if isinstance(self.tiers, FirstRankFiles):
            raise TypeError("this rank keeps nothing to look into (ranks: first)")
        return self.tiers.debug

    # -- for the façade ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
        return self.tiers.closed

    def attach(self, engine: Any) -> None:
        """Belong to an engine: respect its health, and close when it is gone without having closed this store."""
        self._presence.watch(engine)
        # A finalizer runs on any thread and inside any lock: it may do nothing but start a thread.
        vanished = weakref.finalize(engine, _close_behind, self.tiers, self._presence)
        vanished.atexit = False  # TieredStore sees to the end of the process

    def add_layer(self, key: CacheEngineKey, layer_idx: int, rows: torch.Tensor) -> bool:
        """Add a layer to a chunk that is in RAM; False when it is not, or has the layer. Raises ValueError."""
        return self.tiers.add_layer(self._name(key), _layer_idx(layer_idx), checked_rows(rows, len(rows)), key)

    def kv_removed(self, keys: Iterable[Any]) -> None:
        """LMCache removes the KV of these keys everywhere."""
        self.tiers.kv_gone([self._name(key) for key in keys])

    # -- inside ------------------------------------------------------------------------------------------

    def _store(
        self,
        token_ids: TokenIds,
        ids: bytes,
        rows: Mapping[int, torch.Tensor],
        token_offset: int,
        request_configs: dict[str, Any] | None,
    ) -> int:
        try:
            stored = self.tiers.store_checked(self.refs(token_ids, ids, request_configs), ids, rows, token_offset)
        except Exception as error:  # noqa: BLE001 - it is logged and counted
            return self._failed("a store", error, 0)
        # A consumer takes less than its chunks for "pool full" and stores all of them again at every step, so chunks
        # that were here before count as well, unless ``store_count`` says otherwise.
        return stored.new if self.tiers.config.store_count == "new" else stored.held

    def _retrieve(
        self,
        token_ids: TokenIds,
        ids: bytes,
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None,
        request_configs: dict[str, Any] | None,
    ) -> dict[int, torch.Tensor]:
        try:
            return self.tiers.retrieve(self.refs(token_ids, ids, request_configs), layer_idxs, dtype)
        except Exception as error:  # noqa: BLE001 - it is logged and counted
            return self._failed("a retrieve", error, {})

    def _failed(self, what: str, error: Exception, miss: T) -> T:
        """A bug of ours, once the arguments have been checked, is not the engine's trouble: turn it into a miss."""
        logger.error("hidden states: %s failed; the caller sees a miss", what, exc_info=error)
        self.tiers.metrics.add("errors_internal")
        return miss

    def refs(self, token_ids: TokenIds, ids: bytes, request_configs: dict[str, Any] | None) -> list[ChunkRef]:
        """The chunks of a prompt, whose token ids are ``ids`` as bytes, under LMCache's keys.

        The layers of a prompt come one call after the other, so the last prompt is not hashed again.
        """
        last = self._last_prompt
        if last is not None and last.ids == ids and last.request_configs == request_configs:
            return last.refs
        # LMCache hashes a list in half the time that a tensor takes.
        if isinstance(token_ids, torch.Tensor):
            token_ids = token_ids.tolist()
        elif not isinstance(token_ids, list):
            token_ids = list(token_ids)
        chunks = self._token_database.process_tokens(tokens=token_ids, request_configs=request_configs)
        refs = chunk_refs(
            ((start, end, self._kept_as(key).to_string(), key.chunk_hash_hex, key) for start, end, key in chunks), ids
        )
        given = list(token_ids) if len(refs) <= _FEW_CHUNKS else None
        tags = request_configs if request_configs is None else copy.deepcopy(request_configs)
        self._last_prompt = _HashedPrompt(given, ids, tags, refs)
        return refs

    def _token_bytes(self, token_ids: TokenIds) -> bytes:
        """``chunk.token_bytes``, at once for the list of the last call. Raises ValueError."""
        last = self._last_prompt
        if last is not None and type(token_ids) is list:
            try:
                if token_ids == last.token_ids:
                    return last.ids
            except Exception:  # noqa: BLE001 - some arrays cannot be compared; what is wrong with them is said below
                pass
        return token_bytes(token_ids)

    def _name_of_hash(self, chunk_hash: int) -> bytes:
        return self._name(self._token_database._make_key_by_hash(chunk_hash))

    def _name(self, key: Any) -> bytes:
        """The name under which the rows of a chunk are kept."""
        return key_name(self._kept_as(key))

    def _kept_as(self, key: Any) -> Any:
        return key if key.worker_id == self._keeper else key.with_new_worker_id(self._keeper)


def _close_behind(tiers: TieredStore | FirstRankFiles, presence: KvPresence) -> None:
    def close() -> None:
        presence.close()
        tiers.close()

    threading.Thread(target=close, name="hs-close", daemon=True).start()


def key_name(key: Any) -> bytes:
    """The name of a chunk, from LMCache's key of its KV (a key of one KV layer stands for its chunk)."""
    if hasattr(key, "layer_id"):
        key = CacheEngineKey(
            key.model_name, key.world_size, key.worker_id, key.chunk_hash, key.dtype, key.request_configs
        )
    return chunk_name(key.to_string())


def plugin_of(config: LMCacheEngineConfig) -> str:
    """Under which plugin name our settings stand: the one whose class is ours."""
    names = plugin_names(config.extra_config, PACKAGE, PLUGIN_CLASS)
    listed = [name for name in names if name in (config.storage_plugins or ())]
    if len(listed) > 1:
        logger.warning("storage plugins %s are all ours; the settings of the first are used", listed)
    return (listed or names or [DEFAULT_PLUGIN])[0]


def namespace_of(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata, token_database: Any, settings: TieredConfig
) -> NamespaceId:
    """Everything that must be equal for two engines' rows to be interchangeable."""
    hash_function = getattr(token_database, "hash_func", hash)
    actual = f"{getattr(hash_function, '__module__', '')}.{getattr(hash_function, '__qualname__', hash_function)}"
    initial_hash = getattr(token_database, "_get_init_hash", lambda: "")
    revision = settings.model_revision
    return NamespaceId(
        model=metadata.model_name,
        model_revision=local_model_revision(metadata.model_name) if revision is None else revision,
        kv_dtype=TORCH_DTYPE_TO_STR_DTYPE.get(metadata.kv_dtype, str(metadata.kv_dtype)),
        chunk_size=config.chunk_size,
        world_size=metadata.world_size,
        worker_id=metadata.worker_id,
        hash_algorithm=f"{config.pre_caching_hash_algorithm} ({actual})",
        none_hash=str(initial_hash()),
    )


def keeping_rank(metadata: LMCacheMetadata) -> int:
    """The first rank of this node, which keeps the rows for all of them with ``ranks: first``."""
    return int(metadata.worker_id - metadata.local_worker_id)


def _layer_idx(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_MAX_LAYER_IDX <= value < _MAX_LAYER_IDX:
        raise ValueError(f"layer_idx must be an int of at most 64 bits, got {value!r}")
    return value
