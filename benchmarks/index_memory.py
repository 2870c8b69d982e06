"""What the index keeps in RAM for chunks that are on disk only: entries as they are, and the memory of a process.

A program of its own (``python -m benchmarks.index_memory COUNT`` prints bytes per chunk for each kind), because only a
fresh heap tells. Knows the index and nothing else of the tiers.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.format.header import FileLayout
from lmcache_hs_backend.tiers.index import Entry, Index, Standing


def cold_entry(index: Index, kv_key: Any) -> Entry:
    """A chunk that is on disk only, as recovery or demotion leaves it."""
    layout = index.share(FileLayout(256, 4096, (LayerSpec(0, "BF16", 4096),)))
    name, prefix = random.randbytes(16), random.randbytes(16)
    # UNCONFIRMED: of a confirmed one the store's chores would find out that its KV is gone.
    digests = random.randbytes(16)
    return Entry(name, Standing.UNCONFIRMED, prefix, 256, kv_key, filed=layout, file_bytes=layout.size, digests=digests)


def _lmcache_key() -> Any:
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey("org/model", 1, 0, random.getrandbits(63), torch.bfloat16)


def _index(count: int, make_key: Callable[[], Any]) -> Index:
    index = Index()
    for _ in range(count):
        index.add(cold_entry(index, make_key()))
    return index


def main(count: int) -> None:
    build: dict[str, Callable[[int], object]] = {
        "recovered": lambda n: _index(n, lambda: None),
        "stored": lambda n: _index(n, _lmcache_key),
        "keys": lambda n: [_lmcache_key() for _ in range(n)],
    }
    for make in build.values():
        make(10)  # imports, and what is made once
    gc.collect()
    for kind, make in build.items():
        child = os.fork()  # each kind starts from the same heap
        if not child:
            before = _resident_bytes()
            kept = make(count)
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
