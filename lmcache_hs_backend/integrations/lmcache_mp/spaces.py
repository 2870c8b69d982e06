"""The stores of one server: one ``TieredStore`` for each namespace, opened when its first client comes.

Also what only the server can do: name chunks by the hashes under which it keeps their KV, and delete those whose KV is
gone.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkRef, chunk_name, chunk_refs
from lmcache_hs_backend.config import GIB, ServerConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import Segment
from lmcache_hs_backend.integrations.lmcache_mp.wire import HelloCall
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.memory.arena import MapMemory

logger = logging.getLogger(__name__)

_MAX_TOKEN = 2**32  # LMCache's MP server packs token ids into 32 bits


class _KeptPrompt(NamedTuple):
    """The chunks of the prompt that was named last: its layers are stored one by one. Never changed."""

    ids: bytes
    salt: str
    refs: list[ChunkRef]


class Space:
    """The rows of one model for one kind of worker, and the shared memory that its hot tier is."""

    def __init__(self, ident: NamespaceId, hasher: Any, open_tiers: Callable[[MapMemory], TieredStore]) -> None:
        """``open_tiers``: opens the store, with the hot tier in what it is given. What it raises comes through."""
        self.ident = ident
        self._hot_bytes = 0
        self._hot_fd = -1
        try:
            self.tiers = open_tiers(self._map_hot)
        finally:
            if self._hot_fd >= 0:
                weakref.finalize(self, os.close, self._hot_fd)
        self._hasher = hasher
        self._last: _KeptPrompt | None = None

    def refs(self, ids: bytes, salt: str) -> list[ChunkRef]:
        """The whole chunks of a prompt, by the server's own hashes. Raises ValueError for ids that it cannot hash."""
        last = self._last
        if last is not None and last.salt == salt and last.ids == ids:
            return last.refs
        if len(ids) % TOKEN_BYTES:
            raise ValueError(f"token ids of {len(ids)} bytes, which is no multiple of {TOKEN_BYTES}")
        tokens = array("q", ids).tolist()
        if tokens and not 0 <= min(tokens) <= max(tokens) < _MAX_TOKEN:
            raise ValueError(f"token ids must be in [0, {_MAX_TOKEN}), got {min(tokens)} to {max(tokens)}")
        chunk, chunks, previous = self.ident.chunk_size, [], None
        for start in range(0, len(tokens) // chunk * chunk, chunk):
            previous = self._hasher.hash_tokens(tokens[start : start + chunk], previous)
            text = _hex(previous)
            chunks.append((start, start + chunk, self._key(text, salt), text, None))
        refs = chunk_refs(chunks, ids)
        self._last = _KeptPrompt(ids, salt, refs)
        return refs

    def _map_hot(self, nbytes: int) -> memoryview:
        segment, self._hot_fd = Segment.create(nbytes, "hot")
        self._hot_bytes = nbytes
        return segment.view

    def duplicate_hot(self) -> tuple[int, int]:
        """The hot tier, for a client to map: its bytes and a descriptor, the caller's to close. Raises OSError."""
        return self._hot_bytes, os.dup(self._hot_fd)

    @property
    def is_current(self) -> bool:
        """Whether the server still cuts prompts into such chunks; the first engine that registers may change it."""
        return bool(self._hasher.chunk_size == self.ident.chunk_size)

    def name_of(self, chunk_hash: bytes, salt: str) -> bytes:
        """The name of the chunk whose KV LMCache keeps under this hash."""
        as_number = isinstance(self._hasher.none_hash, int)
        text = _hex(int.from_bytes(chunk_hash, "big", signed=True) if as_number else chunk_hash)
        return chunk_name(self._key(text, salt))

    def _key(self, chunk_hash: str, salt: str) -> str:
        # As LMCache's in-process engine writes keys, tags included, so that every tool reads both alike.
        ident = self.ident
        key = f"{ident.model}@{ident.world_size}@{ident.worker_id}@{chunk_hash}@{ident.kv_dtype}"
        return f"{key}@cache_salt%{salt}" if salt else key


class Spaces:
    """All of them. Thread-safe."""

    def __init__(self, context: Any, config: ServerConfig) -> None:
        """``context``: of LMCache's server; its chunk size and hashes are those of the KV."""
        self._context = context
        self._config = config
        self._lock = threading.Lock()
        self._opening: dict[NamespaceId, threading.Lock] = {}
        self._open: dict[NamespaceId, Space] = {}
        self._closed = False

    def open(self, hello: HelloCall) -> Space:
        """The space of a client.

        Raises:
            ValueError: Its store cannot be opened (a ConfigError), or the server is closing.
        """
        ident = self._ident(hello)
        with self._lock:
            opening = self._opening.setdefault(ident, threading.Lock())
        with opening:  # a disk that hangs holds up this namespace alone
            with self._lock:
                if self._closed:
                    raise ValueError("the server is closing")
                space = self._open.get(ident)
            if space is None:
                space = Space(ident, self._context.token_hasher, partial(self._store, ident))
                with self._lock:
                    if not self._closed:
                        self._open[ident] = space
                        return space
                space.tiers.close()
                raise ValueError("the server is closing")
            return space

    def kv_gone(self, chunks: Iterable[tuple[str, bytes, str]]) -> int:
        """The KV of these chunks (model, hash, salt) is gone: their rows leave. How many were here."""
        gone = list(chunks)
        dropped = 0
        for space in self._all():
            names = [space.name_of(chunk_hash, salt) for model, chunk_hash, salt in gone if model == space.ident.model]
            dropped += space.tiers.kv_gone(names) if names else 0
        return dropped

    def report(self) -> list[dict[str, Any]]:
        """Where each store is, and its figures."""
        return [
            {"model": space.ident.model, "directory": space.tiers.directory, **space.tiers.stats()}
            for space in self._all()
        ]

    def close(self) -> None:
        """Close all stores, each within ``close_timeout_sec``."""
        with self._lock:
            self._closed = True
            spaces, self._open = list(self._open.values()), {}
        for space in spaces:
            space.tiers.close()

    def _all(self) -> list[Space]:
        with self._lock:
            return list(self._open.values())

    def _ident(self, hello: HelloCall) -> NamespaceId:
        hasher = self._context.token_hasher
        # LMCache 0.5.7 has the name in its context, 0.5.6 in the hasher.
        named = self._context if hasattr(self._context, "hash_algorithm_name") else hasher
        name, function = named.hash_algorithm_name, hasher.hash_func
        if name != "blake3":  # as the in-process plugin names them
            actual = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
            name = f"{name} ({actual})"
        none_hash = hasher.none_hash
        revision = self._config.model_revision
        return NamespaceId(
            model=hello.model,
            model_revision=hello.model_revision if revision is None else revision,
            kv_dtype=hello.kv_dtype,
            chunk_size=hasher.chunk_size,
            world_size=hello.world_size,
            # One store for all of this node's ranks: their rows are equal.
            worker_id=0 if self._config.ranks == "first" else hello.worker_id,
            hash_algorithm=name,
            none_hash=none_hash.hex() if isinstance(none_hash, bytes) else str(none_hash),
        )

    def _store(self, ident: NamespaceId, map_hot: MapMemory) -> TieredStore:
        config = self._config
        tiers = TieredStore(
            config,
            int(config.hot_size * GIB),
            ident,
            labels={"model_name": ident.model, "worker_id": ident.worker_id, "role": "mp_server"},
            capture='{"source": "lmcache", "layer_ids": "storage slots"}',
            setting=lambda name: f"config[{name!r}] of the server module",
            map_hot=map_hot,
        )
        tiers.pin()
        logger.info(
            "hidden states of %s: hot tier %.3g GB, cold tier %s (limit %.3g GB)",
            ident.model, config.hot_size, tiers.directory, config.max_cold_size,
        )  # fmt: skip
        return tiers


def _hex(chunk_hash: Any) -> str:
    return chunk_hash.hex() if isinstance(chunk_hash, bytes) else f"{chunk_hash:x}"
