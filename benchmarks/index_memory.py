"""What a store keeps in RAM for chunks that are on disk only: the memory of a process with and without them.

A program of its own (``python -m benchmarks.index_memory COUNT`` prints bytes per chunk for each kind), because only a
fresh heap tells.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore


def _lmcache_key() -> Any:
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey("org/model", 1, 0, random.getrandbits(63), torch.bfloat16)


def _keys(store: TieredStore, count: int) -> list[Any]:
    return [_lmcache_key() for _ in range(count)]


_BUILD: dict[str, Callable[[TieredStore, int], Any]] = {
    "recovered": lambda store, count: store.debug.add_cold_chunks(count),
    "stored": lambda store, count: store.debug.add_cold_chunks(count, _lmcache_key),
    "keys": _keys,
}


def main(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hs-index-memory-") as folder:
        for kind, make in _BUILD.items():
            child = os.fork()  # each kind starts from the same heap
            if not child:
                config = TieredConfig(cold_path=os.path.join(folder, kind), max_cold_size=1, min_free_disk=0)
                store = TieredStore(
                    config, 1 << 20, NamespaceId(model="org/model", kv_dtype="bfloat16", chunk_size=256)
                )
                assert store.wait_recovered(20)
                _warmed_up = [build(store, 10) for build in _BUILD.values()]  # imports, and what is made once
                gc.collect()
                before = _resident_bytes()
                kept = make(store, count)
                print(kind, (_resident_bytes() - before) / count, flush=True)
                del kept
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status:
                raise SystemExit(f"{kind}: the child ended with status {status}")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(int(sys.argv[1]))
