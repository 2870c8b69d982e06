"""With an LMCache engine beside us: its store, and its names for chunks.

When vLLM runs LMCache's connector and this one together (MultiConnector), rows belong into the engine's own
hidden-state store, so that they live and die with their KV. That store is two tiers like ours, only its
chunks are named after LMCache's keys; here chunks get those names, and nothing else changes. LMCache itself
is never imported: what is found is recognised by the tiers inside.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkRef
from lmcache_hs_backend.integrations.vllm.messages import Finish, Take
from lmcache_hs_backend.tiered import TieredStore


class EngineStore(NamedTuple):
    """The store of an LMCache engine (a TieredHiddenStateStore), and the engine's chunk size."""

    store: Any
    chunk_size: int

    @property
    def tiers(self) -> TieredStore:
        tiers: TieredStore = self.store.tiers
        return tiers


def find_store(connectors: Iterable[Any]) -> EngineStore | None:
    """The store of an LMCache engine behind one of vLLM's connectors, or None."""
    for connector in connectors:
        engine: Any = getattr(getattr(connector, "_lmcache_engine", None), "lmcache_engine", None)
        store = getattr(engine, "hidden_state_store", None)
        if isinstance(getattr(store, "tiers", None), TieredStore):
            return EngineStore(store, engine.config.chunk_size)
    return None


class EngineChunks:
    """Renames the chunks of requests. Not thread-safe.

    A chunk that LMCache would not make (the tail, unless ``save_unfull_chunk``) is left out.
    """

    def __init__(self, store: EngineStore) -> None:
        self._store = store.store
        self._ids: dict[str, bytearray] = {}
        self._refs: dict[str, list[ChunkRef]] = {}

    def takes(self, takes: Sequence[Take]) -> list[Take]:
        """The same chunks under LMCache's names. Those of a request must come in order, from its first on."""
        by_request: dict[str, list[Take]] = {}
        for take in takes:
            by_request.setdefault(take.req_id, []).append(take)
        renamed = []
        for req_id, group in by_request.items():
            ids = self._ids.setdefault(req_id, bytearray())
            for take in group:
                ids += take.ids
            token_ids = array("q", bytes(ids)).tolist()
            theirs = {(ref.start, ref.end): ref for ref in self._store.refs(token_ids, bytes(ids), None)}
            for take in group:
                ref = theirs.get((take.ref.start, take.ref.end))
                if ref is not None and len(take.ids) == ref.num_tokens * TOKEN_BYTES:
                    renamed.append(take._replace(ref=ref))
                    self._refs.setdefault(req_id, []).append(ref)
        return renamed

    def finish(self, finish: Finish) -> Finish:
        """The end of a request under LMCache's names; its chunks are forgotten here."""
        takes = self.takes(finish.takes)
        self._ids.pop(finish.req_id, None)
        return finish._replace(takes=takes, refs=self._refs.pop(finish.req_id, []))
