"""The plugin that LMCache loads, and the two tiers as LMCache storage backends.

``HSTieredBackend`` is one of LMCache's storage backends, and holds no KV: it answers every question about KV
keys with no, keeps nothing that is put, and cannot fail, so it never delays KV. Its work is done in its
constructor: it finds the engine that is building it and puts ``TieredHiddenStateStore`` in the place of that
engine's RAM store. LMCache may build its backends again at any time; a second façade adopts the store that
is already running.

``HotTierBackend`` and ``ColdTierBackend`` present one tier each, addressed by ``HiddenStateKey``. They add
no state and no rule.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote

import torch

from lmcache_hs_backend.integrations.lmcache.compat import (
    STR_DTYPE_TO_TORCH_DTYPE,
    TORCH_DTYPE_TO_STR_DTYPE,
    CacheEngineKey,
    LMCacheEngineConfig,
    LMCacheMetadata,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    StorageBackendInterface,
    StoragePluginInterface,
    TensorMemoryObj,
    find_engine,
    init_logger,
)
from lmcache_hs_backend.integrations.lmcache.store import PACKAGE, TieredHiddenStateStore, key_name

logger = logging.getLogger(__name__)

_KEY = re.compile(r"hs@(-?\d+)@([^@]*)@(\d+)@(\d+)@(-?[0-9a-f]+)@(\w+)((?:@[^@=]*=[^@=]*)*)")
_TAG = "lmcache.tag."


class HiddenStateKey(CacheEngineKey):  # type: ignore[misc]
    """The key of one layer of hidden states of a chunk: the key of the chunk's KV, and ``layer_idx``.

    Equal only to its like, never to a KV key. ``to_string`` and ``from_string`` are inverse whatever the
    model's name or the tags contain (tag values become text).
    """

    __slots__ = ("layer_idx",)

    def __init__(self, kv_key: CacheEngineKey, layer_idx: int) -> None:
        tags = {f"{_TAG}{tag}": value for tag, value in kv_key.tags or ()}
        super().__init__(
            kv_key.model_name, kv_key.world_size, kv_key.worker_id, kv_key.chunk_hash, kv_key.dtype, tags or None
        )
        self.layer_idx = layer_idx

    @property
    def kv_key(self) -> CacheEngineKey:
        """The key of the KV of the same chunk."""
        return CacheEngineKey(
            self.model_name, self.world_size, self.worker_id, self.chunk_hash, self.dtype, self.request_configs
        )

    def __hash__(self) -> int:
        return hash((CacheEngineKey.__hash__(self), self.layer_idx))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HiddenStateKey) and super().__eq__(other) and self.layer_idx == other.layer_idx

    def to_string(self) -> str:
        """The key as text: ``hs@layer_idx@model@world_size@worker_id@chunk_hash@dtype`` and tags, escaped."""
        tags = "".join(f"@{quote(str(tag), '')}={quote(str(value), '')}" for tag, value in self.tags or ())
        return (
            f"hs@{self.layer_idx}@{quote(self.model_name, '/')}@{self.world_size}@{self.worker_id}"
            f"@{self.chunk_hash_hex}@{TORCH_DTYPE_TO_STR_DTYPE[self.dtype]}{tags}"
        )

    @staticmethod
    def from_string(text: str) -> HiddenStateKey:
        """The key that a text of ``to_string`` stands for.

        Raises:
            ValueError: ``to_string`` cannot have made this text.
        """
        match = _KEY.fullmatch(text)
        if match is None or match[6] not in STR_DTYPE_TO_TORCH_DTYPE:
            raise ValueError(f"not the key of hidden states: {text!r}")
        layer_idx, model, world_size, worker_id, chunk_hash, dtype, tags = match.groups()
        pairs = [tag.split("=") for tag in tags.split("@")[1:]]
        request_configs = {_TAG + unquote(tag): unquote(value) for tag, value in pairs}
        kv_key = CacheEngineKey(
            unquote(model),
            int(world_size),
            int(worker_id),
            int(chunk_hash, 16),
            STR_DTYPE_TO_TORCH_DTYPE[dtype],
            request_configs or None,
        )
        return HiddenStateKey(kv_key, int(layer_idx))


def _are_ours(keys: Sequence[Any]) -> bool:
    return bool(keys) and all(isinstance(key, HiddenStateKey) for key in keys)


class _NothingForKv:
    """What every backend here answers where LMCache asks about KV that is loaded, pinned or on its way."""

    #: For KvPresence: there is no KV here.
    holds_no_kv = True

    def __str__(self) -> str:
        return type(self).__name__

    def get_non_blocking(self, key: CacheEngineKey, location: str | None = None) -> None:
        return None

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return False  # a put is over when it returns

    def pin(self, key: CacheEngineKey) -> bool:
        return False

    def unpin(self, key: CacheEngineKey) -> bool:
        return False

    def touch_cache(self) -> None:
        return None

    def cancel_request(self, req_id: str) -> None:
        return None


class _TierBackend(_NothingForKv, StorageBackendInterface):  # type: ignore[misc]
    """What the two tiers have in common as storage backends. Other keys than HiddenStateKeys are not here."""

    #: Which tiers it looks at: (hot, cold).
    tiers: tuple[bool, bool]

    def __init__(self, store: TieredHiddenStateStore, allocator: Callable[[], Any]) -> None:
        super().__init__(dst_device="cpu")
        self._store = store
        self._allocator = allocator

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether this tier holds the layer."""
        if not isinstance(key, HiddenStateKey):
            return False
        held = self._store.tiers.has(key_name(key.kv_key), key.layer_idx)
        return any(here and asked for here, asked in zip(held, self.tiers, strict=True))

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """A MemoryObj ``[num_tokens, hidden_dim]`` that owns a copy of the rows, or None."""
        if not isinstance(key, HiddenStateKey):
            return None
        rows = self._store.tiers.read_layer(key_name(key.kv_key), key.layer_idx, key.kv_key, tiers=self.tiers)
        return None if rows is None else _memory_obj(rows)

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        return [self.get_blocking(key) for key in keys]

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False) -> int:
        return int(self.batched_contains(list(keys), pin))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        found = self.batched_get_blocking(keys)
        return [obj for obj in found if obj is not None]

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Add layers to chunks that are in RAM already. Of others the token ids are not known: left out.

        Raises ValueError for rows that a store would refuse.
        """
        for key, obj in zip(keys, objs, strict=True):
            if isinstance(key, HiddenStateKey):
                self._store.add_layer(key.kv_key, key.layer_idx, obj.tensor)
                if on_complete_callback is not None:
                    on_complete_callback(key)

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Delete the chunk of the layer, all layers of it, from both tiers: a chunk lives and dies as a whole."""
        return isinstance(key, HiddenStateKey) and self._store.drop_key(key.kv_key)

    def clear(self) -> int:
        """Delete all chunks from both tiers. 0, because no KV token was cleared."""
        self._store.clear()
        return 0

    def get_allocator_backend(self) -> Any:
        return self._allocator()

    def close(self) -> None:
        """The engine's store closes the tiers."""


class HotTierBackend(_TierBackend):
    """The pinned-CPU tier."""

    tiers = (True, False)


class ColdTierBackend(_TierBackend):
    """The safetensors-on-disk tier."""

    tiers = (False, True)


def _memory_obj(rows: torch.Tensor) -> MemoryObj:
    shape = rows.shape
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=rows.dtype,
        address=0,
        phy_size=rows.nbytes,
        ref_count=1,
        fmt=MemoryFormat.HS_TD,
        shapes=[shape],
        dtypes=[rows.dtype],
    )
    return TensorMemoryObj(rows.view(torch.uint8).flatten(), metadata, parent_allocator=None)


class HSTieredBackend(_NothingForKv, StoragePluginInterface):  # type: ignore[misc]
    """The storage plugin that LMCache loads for ``storage_plugins: [hs_tiered]``.

    Its constructor replaces the engine's hidden-state store by a ``TieredHiddenStateStore``. Where there is nothing
    to serve (scheduler role, ``enable_hidden_state_cache: false``, blending, no engine) it does nothing, and one log
    line says why. Towards KV it holds nothing.

    Args:
        dst_device: As LMCache passes it; not used.
        config: The engine's config, with our settings in ``extra_config``.
        metadata: The engine's metadata; identifies the engine.
        local_cpu_backend: LMCache's CPU backend, for ``get_allocator_backend``.
        loop: LMCache's event loop; not used.

    Attributes:
        hot: The hot tier as a ``StorageBackendInterface`` over ``HiddenStateKey``, None when inert or closed.
        cold: The cold tier likewise.

    Raises:
        ConfigError: A setting is wrong. LMCache logs it and goes on with its own RAM store.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(
            dst_device=dst_device, config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, loop=loop
        )
        init_logger(PACKAGE)
        self.hot: HotTierBackend | None = None
        self.cold: ColdTierBackend | None = None
        self._store: TieredHiddenStateStore | None = None
        # Weak: LMCache's own metrics keep its backends alive, and would keep the engine alive through us.
        self._engine: Callable[[], Any] = lambda: None
        engine = self._find_engine()
        if engine is None:
            return
        self._engine = weakref.ref(engine)
        self._store = self._adopt(engine) or self._install(engine)
        if engine.storage_manager is not None:  # built again: LMCache binds only once, after the first time
            self._store.bind_storage_manager(engine.storage_manager)
        self.hot = HotTierBackend(self._store, self.get_allocator_backend)
        self.cold = ColdTierBackend(self._store, self.get_allocator_backend)

    def _find_engine(self) -> Any | None:
        """The engine to serve, or None: then this instance does nothing at all, and says why."""
        config, metadata = self.config, self.metadata
        if config is None or metadata is None:
            logger.warning("hs_tiered is inert: it was built without a config or metadata")
            return None
        if metadata.role == "scheduler":
            logger.info("hs_tiered is inert in the scheduler process: the workers keep the hidden states")
            return None
        if not config.enable_hidden_state_cache:
            logger.warning("hs_tiered is inert: enable_hidden_state_cache is false")
            return None
        if config.enable_blending:
            logger.warning("hs_tiered is inert: with enable_blending, chunks have no prefix that their rows depend on")
            return None
        engine = find_engine(metadata)
        if engine is None or getattr(engine, "hidden_state_store", None) is None:
            logger.warning("hs_tiered is inert: no engine with a hidden-state store is building it")
            return None
        return engine

    @staticmethod
    def _adopt(engine: Any) -> TieredHiddenStateStore | None:
        running = engine.hidden_state_store
        if not isinstance(running, TieredHiddenStateStore) or running.closed:
            return None
        logger.info("hs_tiered: built again, goes on with the store that is running")
        return running

    def _install(self, engine: Any) -> TieredHiddenStateStore:
        """Build the store, put it in place, then let LMCache's own go. Nothing is changed when this raises."""
        config = self.config
        store = TieredHiddenStateStore(config, engine.token_database)
        replaced, engine.hidden_state_store = engine.hidden_state_store, store
        store.attach(engine)
        # Its pool is touched from end to end; ours is virtual until used. Close first, pin afterwards.
        try:
            replaced.close()
        except Exception:  # it is LMCache's, and already out of use
            logger.exception("hs_tiered: LMCache's own hidden-state store cannot be closed")
        pinned = store.tiers.pin()
        settings = store.tiers.config
        logger.info(
            "hs_tiered loaded: hot tier %.3g GB (pinned: %s), cold tier %s (limit %.3g GB), layers %s, on_kv_gone %s",
            config.max_hidden_state_cpu_size,
            "yes" if pinned else "no",
            store.tiers.directory,
            settings.max_cold_size,
            config.hidden_state_layers if config.hidden_state_layers is not None else "all",
            settings.on_kv_gone,
        )
        return store

    # -- towards KV: nothing ---------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether either tier has the layer of a HiddenStateKey; False for every KV key."""
        return bool(self._asks(key, lambda tier: tier.contains(key)))

    def batched_contains(self, keys: Sequence[CacheEngineKey], pin: bool = False) -> int:
        """How many keys, from the first on, are HiddenStateKeys that a tier has; 0 for KV keys."""
        if not _are_ours(keys):
            return 0
        return int(super().batched_contains(list(keys), pin))

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False) -> int:
        """As ``batched_contains``."""
        return self.batched_contains(keys, pin)

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """A copy of the rows of a HiddenStateKey, or None; None for KV keys."""
        return self._asks(key, lambda tier: tier.get_blocking(key))

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Copies of the rows, in the order of the keys; an empty list for KV keys."""
        # A list of None would count as an answer, and LMCache would not ask the next backend.
        return [self.get_blocking(key) for key in keys] if _are_ours(keys) else []

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Copies of those rows that are there; an empty list for KV keys."""
        return [obj for obj in self.batched_get_blocking(keys) if obj is not None]

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Nothing for KV keys: no reference is kept, and nothing can raise."""
        hot = self.hot
        if hot is not None and _are_ours(keys):
            hot.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def get_allocator_backend(self) -> Any:
        """The storage manager's present allocator, so that LMCache copies no KV because of this backend."""
        manager = getattr(self._engine(), "storage_manager", None)
        return getattr(manager, "allocator_backend", None) or self.local_cpu_backend

    # -- from KV: what is removed there leaves here ------------------------------------------------------

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """The KV of a chunk is removed, so the chunk leaves both tiers. False: no KV was removed here."""
        if isinstance(key, HiddenStateKey):
            hot = self.hot
            return hot is not None and hot.remove(key)
        store = self._store
        if store is not None:
            store.kv_removed([key])
        return False

    def batched_remove(self, keys: Sequence[CacheEngineKey], force: bool = True) -> int:
        """``remove`` for each key. Returns 0 for KV keys."""
        return sum(self.remove(key, force) for key in keys)

    def clear(self) -> int:
        """All KV is cleared, so both tiers are. 0: no KV token was cleared here."""
        store = self._store
        if store is not None:
            store.clear()
        return 0

    def close(self) -> None:
        """Detach. The engine closes the store; until then it goes on serving, for the next façade to adopt."""
        self._store = self.hot = self.cold = None

    def _asks(self, key: CacheEngineKey, question: Callable[[_TierBackend], Any]) -> Any:
        """The first answer of hot and cold that is one; None for KV keys."""
        if isinstance(key, HiddenStateKey):
            for tier in (self.hot, self.cold):
                answer = question(tier) if tier is not None else None
                if answer:
                    return answer
        return None
