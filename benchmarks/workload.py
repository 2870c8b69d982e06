"""What the subjects work on: prompts, rows, and the two stores over one token database.

The stores are built the way LMCache builds them, from a config, through the tests' own builders; ``leave_ram`` and
``delete_all`` bring ours into a known state between rounds. Whoever measures decides what is timed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import WrongRows
from lmcache_hs_backend.integrations.lmcache.store import TieredHiddenStateStore
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from tests.support.engines import ChunkedTokenDatabase, Engine, HiddenStateStore, make_config, make_metadata
from tests.support.waiting import wait_until

__all__ = [
    "LAZY",
    "ChunkedTokenDatabase",
    "Engine",
    "Stores",
    "expect",
    "huge_rows",
    "make_config",
    "make_metadata",
    "new_prompt",
    "random_rows",
    "wait_until",
]

#: Nothing is written before somebody asks for it: what is written when is the subject's choice.
LAZY: dict[str, Any] = {"write_back_sec": 3600, "clean_fraction": 0, "max_cold_size": 16}

_prompts = itertools.count(1)


def random_rows(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, hidden).to(dtype)


def huge_rows(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows in touched memory of huge pages, as our own results are in."""
    return BufferPool(0).get(tokens * hidden * dtype.itemsize).rows(tokens, hidden, dtype).zero_()


def new_prompt(tokens: int) -> list[int]:
    """Token ids that share no chunk with any other prompt of this process."""
    return [next(_prompts), *range(1, tokens)]


class Stores:
    """Ours and upstream's over the same token database, on a directory of their own."""

    def __init__(self, cold_path: str, chunk: int, hot_bytes: int, upstream_bytes: int = 0, **settings: Any) -> None:
        """``upstream_bytes`` 0: without upstream's."""
        self.cold_path = cold_path
        self.metadata = make_metadata(chunk=chunk)
        config = make_config(cold_path, chunk_size=chunk, hot_bytes=hot_bytes, settings=LAZY | settings)
        self.database = ChunkedTokenDatabase(config, self.metadata)
        self.ours = TieredHiddenStateStore(config, self.database)
        self.upstream: Any = None
        if upstream_bytes:
            theirs = make_config(cold_path, chunk_size=chunk, hot_bytes=upstream_bytes)
            self.upstream = HiddenStateStore(theirs, self.database)

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self.ours.clear()  # what is dirty is not worth writing now
        self.ours.close()
        if self.upstream is not None:
            self.upstream.close()

    def keys(self, ids: list[int]) -> list[Any]:
        return [key for _, _, key in self.database.process_tokens(tokens=ids)]

    def forget(self, store: Any, ids: list[int]) -> None:
        """One of the stores loses a prompt."""
        for key in self.keys(ids):
            store.drop_key(key)

    def write_all(self) -> None:
        """Everything dirty goes to disk; it stays in RAM, clean."""
        if left := self.ours.flush(300):
            raise RuntimeError(f"{left} chunks could not be written: {self.ours.stats()}")

    def leave_ram(self) -> None:
        """Everything clean leaves RAM, as it would for a newcomer; the files stay."""
        self.ours.debug.evict_clean()
        if self.ours.stats()["hot_chunks"]:
            raise RuntimeError("a chunk has not left RAM")

    def delete_all(self) -> None:
        """Ours forgets every chunk, and their files are really gone."""
        self.ours.clear()
        wait_until(lambda: not self.ours.stats()["cold_bytes"], 300)

    def files(self) -> list[str]:
        """The paths of our chunk files."""
        return [str(path) for path in sorted(Path(self.ours.tiers.directory).glob("??/*.safetensors"))]


def expect(got: torch.Tensor | None, rows: torch.Tensor, what: str) -> None:
    """Raises WrongRows unless ``got`` are exactly these rows."""
    if got is None or not torch.equal(got, rows.to(got.dtype)):
        raise WrongRows(f"{what}: the rows that came back are not those that were stored")
