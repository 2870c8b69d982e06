"""Prompts, keys and rows for tests of the tiers alone, without LMCache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from lmcache_hs_backend.chunk import ChunkRef, KeyedChunk, chunk_refs, token_bytes
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore
from tests.support.figures import count_drops

CHUNK = 32
HIDDEN = 128
LAYER_BYTES = CHUNK * HIDDEN * 2  # of one bfloat16 layer of one chunk: two pages

IDENT = NamespaceId(model="org/test-model", kv_dtype="bfloat16", chunk_size=CHUNK, hash_algorithm="xxh3", none_hash="0")


def tokens(num_chunks: float, seed: int = 0) -> list[int]:
    """The token ids of a prompt of so many chunks; prompts of different seeds share nothing."""
    count = int(num_chunks * CHUNK)
    return torch.randint(0, 2**31, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows(num_tokens: int, seed: int = 0, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random rows, the same for the same seed."""
    return torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def honest_rows(ids: list[int], layer_idx: int = 0, hidden: int = HIDDEN) -> torch.Tensor:
    """bfloat16 rows that are a function of the tokens up to each position, as a model's are.

    So whoever gets rows for some tokens can say whether they are right, whoever stored them.
    """
    digest = xxhash.xxh3_64(seed=layer_idx % 2**64)
    values = []
    for token in ids:
        digest.update(token.to_bytes(8, "little"))
        values.append(digest.intdigest() % 251)
    first = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
    return (first + torch.arange(hidden) % 5).to(torch.bfloat16)


class Prompt:
    """Token ids with their chunk references."""

    def __init__(self, ids: list[int], key_of: Callable[[int, int], str] | None = None, tail: bool = False) -> None:
        """``key_of(chunk number, honest hash)`` names chunks otherwise: for collisions."""
        self.ids = ids
        self.bytes = token_bytes(ids)
        chunks, value = [], 0
        end = len(ids) if tail else len(ids) // CHUNK * CHUNK
        for number, start in enumerate(range(0, end, CHUNK)):
            stop = min(start + CHUNK, end)
            value = xxhash.xxh3_64_intdigest(self.bytes[start * 8 : stop * 8], seed=value)
            name = key_of(number, value) if key_of else f"{value:x}"
            chunks.append(KeyedChunk(start, stop, f"org/test-model@1@0@{name}@bfloat16", name, f"{value:x}"))
        self.refs: list[ChunkRef] = chunk_refs(chunks, self.bytes)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def names(self) -> list[bytes]:
        return [ref.name for ref in self.refs]


_seeds = itertools.count(1)


def prompt(num_chunks: float, **kwargs: Any) -> Prompt:
    """A prompt like no other."""
    return Prompt(tokens(num_chunks, next(_seeds)), **kwargs)


def settings(cold_path: object, **changes: Any) -> TieredConfig:
    values: dict[str, Any] = {"cold_path": str(cold_path), "max_cold_size": 1, "min_free_disk": 0}
    return TieredConfig(**(values | changes))


@contextmanager
def opened(
    cold_path: object, *, chunks: int = 8, layers: int = 1, ident: NamespaceId = IDENT, **changes: Any
) -> Iterator[TieredStore]:
    """A store whose hot tier holds ``chunks`` chunks of ``layers`` layers, closed at the end."""
    extra = {name: changes.pop(name) for name in ("ask", "files", "labels") if name in changes}
    store = TieredStore(settings(cold_path, **changes), chunks * layers * LAYER_BYTES, ident, **extra)
    try:
        assert store.wait_recovered(20)
        yield store
    finally:
        store.close()
        count_drops(store.stats())


def on_disk(store: TieredStore, num_chunks: int, seed: int = 0, *, in_ram: bool = False) -> tuple[Prompt, torch.Tensor]:
    """A prompt whose rows are on disk, and in RAM as well only if that is wanted."""
    p, x = prompt(num_chunks), rows(num_chunks * CHUNK, seed=seed)
    assert store.store(p.refs, p.bytes, {0: x}) == num_chunks
    assert store.flush(10) == 0
    if not in_ram:
        store.debug.evict_clean()
    return p, x


def chunk_files(cold_path: Any) -> list[Any]:
    """The chunk files that a cold path serves from."""
    return sorted(cold_path.glob("*/[0-9a-f][0-9a-f]/*.safetensors"))


def check_balance(store: TieredStore, damaged: Collection[str] = ()) -> None:
    """Slots, leases and bytes add up; what the accounts say is on disk is on disk. Only for a store at rest.

    ``damaged``: names (hex) of files that somebody has changed behind the store's back.
    """
    debug, stats = store.debug, store.stats()
    chunks = debug.chunks()
    disk, memory = debug.disk(), debug.memory()
    assert memory.used == stats["hot_bytes"] == sum(chunk.hot_bytes for chunk in chunks.values())
    assert all(chunk.pins == 0 for chunk in chunks.values())
    free = stats["capacity_bytes"] - memory.used
    assert memory.ready == free + sum(chunk.hot_bytes for chunk in chunks.values() if chunk.evictable)
    assert stats["hot_chunks"] == sum(bool(chunk.hot) for chunk in chunks.values())
    assert stats["dirty_chunks"] == sum(chunk.dirty for chunk in chunks.values())
    assert disk.own == sum(chunk.size for chunk in chunks.values())
    assert disk.reserved == 0
    for name, chunk in chunks.items():
        if chunk.size and name.hex() not in damaged:
            assert os.stat(debug.path(name)).st_size == chunk.size
