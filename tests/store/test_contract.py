"""TieredStore keeps the contract of a store, with its rows in RAM and with its rows on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.tiered import TieredStore
from tests.support.contract import Make, StoreContract, TieredContract, TieredSubject
from tests.support.prompts import chunk_files


class Tiered(TieredSubject):
    """``cold``: what is stored leaves RAM before it is read."""

    chunk, hidden = 16, 128

    def __init__(self, path: Path, *, cold: bool = False, room: int = 256, **settings: Any) -> None:
        self._path = path
        self._layer_bytes = self.chunk * self.hidden * 2
        self._store = TieredStore.open(
            path, model="org/contract", hot_size=room * self._layer_bytes / 2**30, chunk_size=self.chunk,
            max_cold_size=1, promote=not cold, **settings,
        )  # fmt: skip
        self._cold = cold

    def store(self, ids: list[int], layers: Mapping[int, torch.Tensor], offset: int = 0) -> int:
        stored = self._store.store(*self._store.prompt(ids), layers, offset)
        if self._cold:
            self.flush()
            self._store.debug.evict_clean()
        return stored

    def read(self, ids: list[int], layer_idx: int, dtype: torch.dtype | None = torch.float32) -> torch.Tensor | None:
        return self.read_layers(ids, [layer_idx], dtype).get(layer_idx)

    def read_layers(
        self, ids: list[int], layer_idxs: list[int], dtype: torch.dtype | None = None
    ) -> Mapping[int, torch.Tensor]:
        return self._store.retrieve(self._store.prompt(ids).refs, layer_idxs, dtype)

    def _has(self, ids: list[int], chunk: int, layer_idx: int) -> tuple[bool, bool]:
        return self._store.has(self._store.prompt(ids).refs[chunk].name, layer_idx)

    def has(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        hot, cold = self._has(ids, chunk, layer_idx)
        return cold if self._cold else hot

    def is_hot(self, ids: list[int], chunk: int, layer_idx: int) -> bool:
        return self._has(ids, chunk, layer_idx)[0]

    def drop(self, ids: list[int], chunk: int) -> bool:
        return self._store.drop([self._store.prompt(ids).refs[chunk].name]) == 1

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()

    def flush(self) -> None:
        assert self._store.flush(10) == 0

    def stats(self) -> Mapping[str, Any]:
        return self._store.stats()

    def held(self) -> float:
        return float(len(self._store))

    def written(self) -> float:
        stats = self._store.stats()
        if self._cold:
            assert len(chunk_files(self._path)) == stats["cold_chunks"]
            return float(stats["written_chunks"])
        return float(stats["hot_bytes"]) / self._layer_bytes

    def check(self) -> list[str]:
        return self._store.check()


class TestTieredStore(TieredContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Make]:
        made: list[Tiered] = []

        def build(**changes: Any) -> Tiered:
            made.append(Tiered(tmp_path, **changes))
            return made[-1]

        yield build
        for subject in made:
            subject.close()


class TestTieredStoreWithItsRowsOnDisk(StoreContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Make]:
        subject = Tiered(tmp_path, cold=True)
        yield lambda: subject
        subject.close()
