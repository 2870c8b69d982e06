"""The plugin that LMCache loads.

``HSTieredBackend`` is one of LMCache's storage backends, and holds no KV: it answers every question about KV
keys with no, keeps nothing that is put, and cannot fail, so it never delays KV. Its work is done in its
constructor: it finds the engine that is building it and puts ``TieredHiddenStateStore`` in the place of that
engine's RAM store. LMCache may build its backends again at any time; a second façade adopts the store that
is already running.

The two tiers themselves are presented by the pair in ``tier_backends``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_hs_backend.first_rank import FirstRankFiles
from lmcache_hs_backend.integrations.lmcache.compat import (
    CacheEngineKey,
    LMCacheEngineConfig,
    LMCacheMetadata,
    MemoryObj,
    StoragePluginInterface,
    find_engine,
    init_logger,
)
from lmcache_hs_backend.integrations.lmcache.store import PACKAGE, TieredHiddenStateStore
from lmcache_hs_backend.integrations.lmcache.tier_backends import (
    ColdTierBackend,
    HiddenStateKey,
    HotTierBackend,
    NothingForKv,
    TierBackend,
    are_ours,
)

logger = logging.getLogger(__name__)


class HSTieredBackend(NothingForKv, StoragePluginInterface):  # type: ignore[misc]
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
        if isinstance(store.tiers, FirstRankFiles):
            logger.info(
                "hs_tiered loaded: this rank keeps nothing (ranks: first); it reads what rank %s keeps in %s",
                store.tiers.ident.worker_id, store.tiers.directory,
            )  # fmt: skip
            return store
        pinned = store.tiers.pin()
        settings = store.tiers.config
        logger.info(
            "hs_tiered loaded: hot tier %.3g GB (pinned: %s), cold tier %s (%slimit %.3g GB), layers %s, on_kv_gone %s",
            config.max_hidden_state_cpu_size,
            "yes" if pinned else "no",
            store.tiers.directory,
            "" if store.tiers.readable else "offline, ",
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
        if not are_ours(keys):
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
        return [self.get_blocking(key) for key in keys] if are_ours(keys) else []

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
        if hot is not None and are_ours(keys):
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

    def _asks(self, key: CacheEngineKey, question: Callable[[TierBackend], Any]) -> Any:
        """The first answer of hot and cold that is one; None for KV keys."""
        if isinstance(key, HiddenStateKey):
            for tier in (self.hot, self.cold):
                answer = question(tier) if tier is not None else None
                if answer:
                    return answer
        return None
