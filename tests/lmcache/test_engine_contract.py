"""The store of a real engine, and both backends of the pair, keep the contract of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmcache_hs_backend.integrations.lmcache.tier_backends import HiddenStateKey
from tests.support.contract import StoreContract, Subject
from tests.support.engines import CHUNK, HIDDEN

pytestmark = pytest.mark.engine


class OfEngine(Subject):
    """``TieredHiddenStateStore`` as an engine has it. Its KV is stored with every prompt."""

    chunk, hidden = CHUNK, HIDDEN

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._store = engine.store

    def store(self, ids: list[int], layers: dict[int, torch.Tensor]) -> None:
        self.engine.store_kv(ids)
        self._store.store_layers(ids, layers)

    def read(self, ids: list[int], layer_idx: int) -> torch.Tensor | None:
        rows: torch.Tensor | None = self._store.retrieve_hidden_states(ids, layer_idx=layer_idx)
        return rows

    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return bool(self._store.has_chunk(self.engine.keys(ids)[chunk], layer_idx))

    def drop(self, ids: list[int], chunk: int) -> None:
        self._store.drop_key(self.engine.keys(ids)[chunk])

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()

    def written(self) -> float:
        return float(self._store.stats()["stored_chunks"])

    def check(self) -> list[str]:
        problems: list[str] = self._store.check()
        return problems


class OfTier(OfEngine):
    """One backend of the pair. What is stored is brought into its tier; rows are read chunk by chunk."""

    def __init__(self, engine: Any, *, cold: bool) -> None:
        super().__init__(engine)
        self._cold = cold
        self._tier = engine.plugin.cold if cold else engine.plugin.hot

    def store(self, ids: list[int], layers: dict[int, torch.Tensor]) -> None:
        super().store(ids, layers)
        if self._cold:
            assert self._store.flush(10) == 0
            self._store.debug.evict_clean()

    def read(self, ids: list[int], layer_idx: int) -> torch.Tensor | None:
        parts = []
        for key in self.engine.keys(ids):
            obj = self._tier.get_blocking(HiddenStateKey(key, layer_idx))
            if obj is None:
                break
            parts.append(obj.tensor.view(torch.bfloat16).view(CHUNK, HIDDEN))
        return torch.cat(parts) if parts else None

    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return bool(self._tier.contains(HiddenStateKey(self.engine.keys(ids)[chunk], layer_idx)))

    def drop(self, ids: list[int], chunk: int) -> None:
        key = self.engine.keys(ids)[chunk]
        for layer_idx in (0, 7, -1):
            self._tier.remove(HiddenStateKey(key, layer_idx))


class TestTieredHiddenStateStore(StoreContract):
    @pytest.fixture
    def subject(self, start: Callable[..., Any]) -> Subject:
        return OfEngine(start())


class TestHotTierBackend(StoreContract):
    @pytest.fixture
    def subject(self, start: Callable[..., Any]) -> Subject:
        return OfTier(start(), cold=False)


class TestColdTierBackend(StoreContract):
    @pytest.fixture
    def subject(self, start: Callable[..., Any]) -> Subject:
        return OfTier(start(settings={"promote": False}), cold=True)
