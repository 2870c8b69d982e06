"""With an LMCache engine in the same process: its store, and its names for chunks.

When vLLM runs LMCache's connector and this one together (MultiConnector), rows belong into the engine's own
hidden-state store, so that they live and die with their KV. That store is two tiers like ours, only its
chunks are named after LMCache's keys; here chunks get those names, and nothing else changes. LMCache itself
is never imported: it is recognised by the tiers inside its store.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkRef
from lmcache_hs_backend.integrations.vllm.protocol import Finish, KeyInputs, ReadyChunk
from lmcache_hs_backend.tiered import TieredStore


class EngineStore(NamedTuple):
    """The store of an LMCache engine (a TieredHiddenStateStore), and what the engine's settings say of it."""

    store: Any
    chunk_size: int
    allowed: frozenset[int] | None  # the only layers that it keeps; None: all

    @property
    def tiers(self) -> TieredStore:
        """The tiers below the engine's store."""
        tiers: TieredStore = self.store.tiers
        return tiers


def find_store(connectors: Iterable[Any]) -> EngineStore | None:
    """The store of an LMCache engine behind one of vLLM's connectors, or None.

    An engine has it only after its connector has been given vLLM's caches.
    """
    for connector in connectors:
        engine: Any = getattr(getattr(connector, "_lmcache_engine", None), "lmcache_engine", None)
        store = getattr(engine, "hidden_state_store", None)
        if isinstance(getattr(store, "tiers", None), TieredStore):
            layers = engine.config.hidden_state_layers
            return EngineStore(store, engine.config.chunk_size, None if layers is None else frozenset(layers))
    return None


class _Named:
    """A request: its token ids so far, its chunks, and what names them beside tokens."""

    def __init__(self, key_inputs: KeyInputs) -> None:
        self.ids = bytearray()
        self.refs: list[ChunkRef] = []
        self.key_inputs = key_inputs


class EngineChunks:
    """Renames the chunks of requests. Not thread-safe.

    Left out are chunks that LMCache would not make (the tail, unless ``save_unfull_chunk``), and those from the
    first image of a request on: LMCache names them after the image, in a way of its own.
    """

    def __init__(self, store: EngineStore) -> None:
        self._store = store.store
        self._requests: dict[str, _Named] = {}

    def name(self, inputs: Mapping[str, KeyInputs]) -> None:
        """Requests whose chunks are named after more than their tokens. Before their first chunk."""
        for req_id, key_inputs in inputs.items():
            self._requests.setdefault(req_id, _Named(key_inputs))

    def renamed(self, ready: Sequence[ReadyChunk]) -> list[ReadyChunk]:
        """The same chunks under LMCache's names. Those of a request must come in order, from its first on."""
        by_request: dict[str, list[ReadyChunk]] = {}
        for chunk in ready:
            by_request.setdefault(chunk.req_id, []).append(chunk)
        renamed = []
        for req_id, group in by_request.items():
            request = self._requests.setdefault(req_id, _Named(KeyInputs(None, None)))
            for chunk in group:
                request.ids += chunk.ids
            found = self._renamed(group, request, bytes(request.ids))
            request.refs += [chunk.ref for chunk in found]
            renamed += found
        return renamed

    def open_chunks(self, ready: Sequence[ReadyChunk]) -> list[ReadyChunk]:
        """Chunks of requests that may go on: nothing is remembered of them."""
        renamed = []
        for chunk in ready:
            request = self._requests.get(chunk.req_id) or _Named(KeyInputs(None, None))
            renamed += self._renamed([chunk], request, bytes(request.ids) + chunk.ids)
        return renamed

    def finish(self, finish: Finish) -> Finish:
        """The end of a request under LMCache's names; its chunks are forgotten here."""
        ready = self.renamed(finish.ready)
        request = self._requests.pop(finish.req_id, None)
        return finish._replace(ready=ready, refs=[] if request is None else request.refs)

    def _renamed(self, ready: Sequence[ReadyChunk], request: _Named, ids: bytes) -> list[ReadyChunk]:
        """``ids``: the token ids of the request as far as the last of its ``ready``."""
        key_inputs = request.key_inputs
        refs = self._store.refs(array("q", ids).tolist(), ids, key_inputs.configs)
        theirs = {(ref.start, ref.end): ref for ref in refs}
        renamed = []
        for chunk in ready:
            ref = theirs.get((chunk.ref.start, chunk.ref.end))
            if ref is None or len(chunk.ids) != ref.num_tokens * TOKEN_BYTES:
                continue
            if key_inputs.first_image is None or ref.end <= key_inputs.first_image:
                renamed.append(chunk._replace(ref=ref))
        return renamed
