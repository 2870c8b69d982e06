"""TieredStore keeps the contract of a store, with its rows in RAM and with its rows on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.tiered import TieredStore
from tests.support.contract import StoreContract, Subject


class Tiered(Subject):
    """``cold``: what is stored leaves RAM before it is read."""

    chunk, hidden = 16, 128

    def __init__(self, path: Path, *, cold: bool) -> None:
        self._store = TieredStore.open(
            path, model="org/contract", hot_size=0.001, chunk_size=self.chunk, max_cold_size=1
        )
        self._cold = cold

    def store(self, ids: list[int], layers: dict[int, torch.Tensor]) -> None:
        self._store.store(*self._store.prompt(ids), layers)
        if self._cold and not self._store.closed:
            assert self._store.flush(10) == 0
            self._store.debug.evict_clean()

    def read(self, ids: list[int], layer_idx: int) -> torch.Tensor | None:
        return self._store.retrieve(self._store.prompt(ids).refs, [layer_idx]).get(layer_idx)

    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return any(self._store.has(self._store.prompt(ids).refs[chunk].name, layer_idx))

    def drop(self, ids: list[int], chunk: int) -> None:
        self._store.drop([self._store.prompt(ids).refs[chunk].name])

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()

    def written(self) -> float:
        stats = self._store.stats()
        return float(stats["written_chunks"]) if self._cold else float(stats["hot_bytes"])

    def check(self) -> list[str]:
        return self._store.check()


class TestTieredStore(StoreContract):
    @pytest.fixture(params=["hot", "cold"])
    def subject(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
        subject = Tiered(tmp_path, cold=request.param == "cold")
        yield subject
        subject.close()
