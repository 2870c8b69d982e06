"""The store of a real engine, both backends of the pair, and LMCache's own store keep the contract of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.integrations.lmcache.tier_backends import HiddenStateKey
from tests.support.contract import Make, StoreContract, Subject, TieredContract, TieredSubject
from tests.support.engines import (
    CHUNK,
    CHUNK_BYTES,
    HIDDEN,
    ChunkedTokenDatabase,
    HiddenStateStore,
    make_config,
    make_metadata,
)

pytestmark = pytest.mark.engine


class OfEngine(TieredSubject):
    """``TieredHiddenStateStore`` as an engine has it. Its KV is stored with every prompt."""

    chunk, hidden = CHUNK, HIDDEN

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._store = engine.store

    def store(self, ids: list[int], layers: Mapping[int, torch.Tensor], offset: int = 0) -> int:
        if ids:
            self.engine.store_kv(ids)
        return int(self._store.store_layers(ids, layers, offset))

    def read(self, ids: list[int], layer_idx: int, dtype: torch.dtype | None = torch.float32) -> torch.Tensor | None:
        if dtype is None:
            return self.read_layers(ids, [layer_idx]).get(layer_idx)
        rows: torch.Tensor | None = self._store.retrieve_hidden_states(ids, layer_idx=layer_idx)
        return rows

    def read_layers(
        self, ids: list[int], layer_idxs: list[int], dtype: torch.dtype | None = None
    ) -> Mapping[int, torch.Tensor]:
        rows: Mapping[int, torch.Tensor] = self._store.retrieve_layers(ids, layer_idxs, dtype=dtype)
        return rows

    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return bool(self._store.has_chunk(self.engine.keys(ids)[chunk], layer_idx))

    def is_hot(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return bool(self.engine.tiers_of(self.engine.keys(ids)[chunk], layer_idx)[0])

    def drop(self, ids: list[int], chunk: int) -> bool:
        return bool(self._store.drop_key(self.engine.keys(ids)[chunk]))

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()

    def flush(self) -> None:
        assert self._store.flush(10) == 0

    def stats(self) -> Mapping[str, Any]:
        stats: Mapping[str, Any] = self._store.stats()
        return stats

    def held(self) -> float:
        return float(self._store.num_cached_chunks())

    def written(self) -> float:
        return float(self.stats()["stored_chunks"])

    def check(self) -> list[str]:
        problems: list[str] = self._store.check()
        return problems


class OfTier(OfEngine):
    """One backend of the pair. What is stored is brought into its tier; rows are read chunk by chunk."""

    def __init__(self, engine: Any, *, cold: bool) -> None:
        super().__init__(engine)
        self._cold = cold
        self._tier = engine.plugin.cold if cold else engine.plugin.hot

    def store(self, ids: list[int], layers: Mapping[int, torch.Tensor], offset: int = 0) -> int:
        stored = super().store(ids, layers, offset)
        if self._cold:
            self.flush()
            self._store.debug.evict_clean()
        return stored

    def read(self, ids: list[int], layer_idx: int, dtype: torch.dtype | None = torch.float32) -> torch.Tensor | None:
        parts = []
        for key in self.engine.keys(ids):
            obj = self._tier.get_blocking(HiddenStateKey(key, layer_idx))
            if obj is None:
                break
            parts.append(obj.tensor.view(obj.metadata.dtype).view(obj.metadata.shape).to(dtype or obj.metadata.dtype))
        return torch.cat(parts) if parts else None

    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return bool(self._tier.contains(HiddenStateKey(self.engine.keys(ids)[chunk], layer_idx)))

    def drop(self, ids: list[int], chunk: int) -> bool:
        key = self.engine.keys(ids)[chunk]
        return max([self._tier.remove(HiddenStateKey(key, layer_idx)) for layer_idx in (0, 7, -1)])

    def held(self) -> float:
        if self._store.tiers.closed:
            return super().held()
        return float(self.stats()["cold_chunks" if self._cold else "hot_chunks"])

    def written(self) -> float:
        if not self._cold:
            return super().written()
        assert len(self.engine.files) == self.held()
        return float(self.stats()["written_chunks"])


class Upstreams(Subject):
    """LMCache's own ``HiddenStateStore``. It has no disk, and keeps everything as float32. All KV counts as present."""

    chunk, hidden = 8, 16
    keeps_dtype = False

    def __init__(self, cold_path: Path) -> None:
        config = make_config(cold_path, hot_bytes=1 << 20, chunk_size=self.chunk)
        self._database = ChunkedTokenDatabase(config, make_metadata(chunk=self.chunk))
        self._store = HiddenStateStore(config, self._database)
        self._written = 0

    def _keys(self, ids: list[int]) -> list[Any]:
        return [key for _, _, key in self._database.process_tokens(tokens=ids)]

    def store(self, ids: list[int], layers: Mapping[int, torch.Tensor], offset: int = 0) -> int:
        stored = max(
            self._store.store_hidden_states(ids, rows, layer_idx=idx, token_offset=offset)
            for idx, rows in layers.items()
        )
        self._written += stored
        return int(stored)

    def read(self, ids: list[int], layer_idx: int, dtype: torch.dtype | None = torch.float32) -> torch.Tensor | None:
        rows: torch.Tensor | None = self._store.retrieve_hidden_states(ids, layer_idx=layer_idx)
        return rows

    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return bool(self._store.has_chunk(self._keys(ids)[chunk], layer_idx))

    def drop(self, ids: list[int], chunk: int) -> bool:
        return bool(self._store.drop_key(self._keys(ids)[chunk]))

    def clear(self) -> None:
        for key in list(self._store._chunks):
            self._store.drop_key(key)

    def close(self) -> None:
        self._store.close()

    def held(self) -> float:
        return float(self._store.num_cached_chunks())

    def written(self) -> float:
        return float(self._written)

    def check(self) -> list[str]:
        return []


NEW = {"store_count": "new"}  # only what a call adds, as upstream; ours by default also counts the rest


class TestTieredHiddenStateStore(TieredContract):
    @pytest.fixture
    def make(self, start: Callable[..., Any]) -> Make:
        def build(room: int = 256, **settings: Any) -> OfEngine:
            return OfEngine(start(hot_bytes=room * CHUNK_BYTES, settings=NEW | settings))

        return build


class TestHotTierBackend(StoreContract):
    @pytest.fixture
    def make(self, start: Callable[..., Any]) -> Make:
        return lambda: OfTier(start(settings=NEW), cold=False)


class TestColdTierBackend(StoreContract):
    @pytest.fixture
    def make(self, start: Callable[..., Any]) -> Make:
        return lambda: OfTier(start(settings=NEW | {"promote": False}), cold=True)


class TestUpstreamsHiddenStateStore(StoreContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        return lambda: Upstreams(tmp_path)
