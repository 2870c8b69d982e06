"""What a store keeps in RAM for chunks that are on disk only: the memory of a process with and without them.

A program of its own, because only a fresh heap tells: ``python -m benchmarks.index_memory COUNT [KIND…]`` prints bytes
per chunk for each kind.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lmcache.utils import CacheEngineKey

from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.integrations.lmcache.kv_presence import short_keys
from lmcache_hs_backend.tiered import TieredStore

#: Small, for what the index keeps of a chunk does not depend on it.
_TOKENS = 16
_PROMPT_CHUNKS = 500


def _lmcache_key() -> Any:
    return CacheEngineKey("org/model", 1, 0, random.getrandbits(63), torch.bfloat16)


def _keys(store: TieredStore, count: int) -> list[Any]:
    return [_lmcache_key() for _ in range(count)]


def _used(store: TieredStore, count: int) -> None:
    """Chunks as use leaves them: stored in three layers, written, retrieved, out of RAM, stored again."""
    layers = {idx: torch.zeros(_PROMPT_CHUNKS * _TOKENS, 8, dtype=torch.bfloat16) for idx in range(3)}
    for _ in range(0, count, _PROMPT_CHUNKS):
        ids = torch.randint(1 << 40, (_PROMPT_CHUNKS * _TOKENS,))
        refs, data = store.prompt(ids)
        refs = [ref._replace(kv_key=_lmcache_key()) for ref in refs]
        assert store.store(refs, data, layers) == len(refs)
        assert store.flush(60) == 0
        store.demote([ref.name for ref in refs])
        assert len(store.retrieve(refs, [0], None)[0]) == len(ids)
        store.store(refs, data, layers)
        store.demote([ref.name for ref in refs])


_BUILD: dict[str, Callable[[TieredStore, int], Any]] = {
    "recovered": lambda store, count: store.debug.add_cold_chunks(count),
    "used": _used,
    "stored": lambda store, count: store.debug.add_cold_chunks(count, _lmcache_key),
    "keys": _keys,
}


def main(count: int, kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="hs-index-memory-") as folder:
        for kind in kinds or _BUILD:
            child = os.fork()  # each kind starts from the same heap
            if not child:
                path = os.path.join(folder, kind)
                config = TieredConfig(cold_path=path, max_cold_size=1, min_free_disk=0, touch_memory=False)
                ident = NamespaceId(model="org/model", kv_dtype="bfloat16", chunk_size=_TOKENS)
                store = TieredStore(config, 64 << 20, ident, kv_keys=short_keys())
                assert store.wait_recovered(20)
                _warmed_up = [build(store, 10) for build in _BUILD.values()]  # imports, and what is made once
                gc.collect()
                before = _resident_bytes()
                kept = _BUILD[kind](store, count)
                print(kind, (_resident_bytes() - before) / count, flush=True)
                del kept
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status:
                raise SystemExit(f"{kind}: the child ended with status {status}")


def _resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later calls is not the index's
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
