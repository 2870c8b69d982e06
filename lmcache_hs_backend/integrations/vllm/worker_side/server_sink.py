"""From rows in host memory to the store of LMCache's MP server, when vLLM's KV goes there (``mp_server_url``).

The server names chunks as it names their KV, so rows live and die with it, and its clients find them. A chunk is stored
with all token ids of its prompt, on a thread of its own; the engine's thread only gathers rows. What the server does
not take, because it is down, hangs or has no room, is counted as lost, and serving goes on. No request records are
written. This module imports no vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_hs_backend.chunk import TOKEN_BYTES, ChunkRef
from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.integrations.vllm.protocol import Finish, KeyInputs, ReadyChunk
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings, label
from lmcache_hs_backend.integrations.vllm.worker_side.device import HostRows
from lmcache_hs_backend.integrations.vllm.worker_side.sink import CapturedModel
from lmcache_hs_backend.integrations.vllm.worker_side.threads import DaemonThreads
from lmcache_hs_backend.tiers.flows.bell import Bell

logger = logging.getLogger(__name__)

#: Rows on their way take at most this part of ``hot_size``.
_STAGED_PART = 4
_DRAIN_SEC = 10.0
_WARN_EVERY_SEC = 60.0


def open_server(settings: ConnectorSettings, model: CapturedModel) -> tuple[ServerSink, ServerChunks]:
    """What goes to LMCache's MP server. One that is not there yet is no error; chunks until then are lost.

    Raises:
        ConfigError: Its chunks have another size.
    """
    from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient  # needs LMCache, which is here in MP mode

    client = HiddenStateClient(
        settings.mp_server_url,
        model=model.ident.model,
        kv_dtype=model.ident.kv_dtype,
        model_revision=model.ident.model_revision,
        read_timeout_sec=settings.read_timeout_sec,
    )
    chunk_size = client.chunk_size()
    if chunk_size not in (0, settings.chunk_size):
        client.close()
        raise ConfigError(
            f"{label('chunk_size')} is {settings.chunk_size}, but must be {chunk_size} as in LMCache's server at "
            f"{settings.mp_server_url}"
        )
    staged_bytes = settings.hot_bytes // _STAGED_PART
    return ServerSink(client, model.layer_idxs, staged_bytes), ServerChunks(settings.chunk_size)


class ServerChunks:
    """Turns the chunks of requests into what the server needs. Not thread-safe.

    Each gets all token ids from position 0 to its end, and the salt of its request as ``kv_key``. Left out are chunks
    that LMCache would not make: unfinished ones, and those from the first image of a request on.
    """

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._ids: dict[str, bytearray] = {}
        self._inputs: dict[str, KeyInputs] = {}

    def name(self, inputs: Mapping[str, KeyInputs]) -> None:
        """Requests whose chunks are named after more than their tokens. Before their first chunk."""
        self._inputs.update(inputs)

    def renamed(self, ready: Sequence[ReadyChunk]) -> list[ReadyChunk]:
        """The whole chunks. Those of a request must come in order, from its first on."""
        whole = []
        for chunk in ready:
            ids = self._ids.setdefault(chunk.req_id, bytearray())
            ids += chunk.ids
            ref, inputs = chunk.ref, self._inputs.get(chunk.req_id)
            first_image = None if inputs is None else inputs.first_image
            if ref.num_tokens < self._chunk_size or len(ids) != ref.end * TOKEN_BYTES:
                continue
            if first_image is None or ref.end <= first_image:
                salt = "" if inputs is None else inputs.cache_salt
                whole.append(chunk._replace(ids=bytes(ids), ref=ref._replace(kv_key=salt)))
        return whole

    def open_chunks(self, ready: Sequence[ReadyChunk]) -> list[ReadyChunk]:
        """None: chunks of requests that may go on are unfinished."""
        return []

    def finish(self, finish: Finish) -> Finish:
        """The end of a request: its last chunks, and it is forgotten."""
        ready = self.renamed(finish.ready)
        self._ids.pop(finish.req_id, None)
        self._inputs.pop(finish.req_id, None)
        return finish._replace(ready=ready, refs=[])


class ServerSink:
    """The server's store, filled from the requests of one engine.

    Attributes:
        positions: Which of the cache's layers are kept, as positions in it: all.
        figures: ``taken`` chunks copied off the device, ``lost`` ones that the server did not keep, ``not_computed``
            ones whose rows no forward has written.
    """

    def __init__(self, client: Any, layer_idxs: Sequence[int], staged_bytes: int) -> None:
        """Start the thread.

        Args:
            client: A HiddenStateClient, closed with this sink.
            layer_idxs: Storage slots of the cache's layers, in its order.
            staged_bytes: How many bytes of rows may be on their way.
        """
        self.positions = list(range(len(layer_idxs)))
        self.figures: Counter[str] = Counter()
        self._client = client
        self._layer_idxs = layer_idxs
        self._limit = staged_bytes
        # Guards figures, _staged_bytes and _closed.
        self._lock = threading.Lock()
        self._space_freed = Bell()
        self._staged_bytes = 0
        self._closed = False
        self._warned = 0.0
        self._thread = DaemonThreads(1, "hs-server")

    def count(self, figure: str, chunks: int = 1) -> None:
        """Add to a figure, from any thread."""
        with self._lock:
            self.figures[figure] += chunks

    def needs_copy(self, chunk: ReadyChunk) -> bool:
        """Always: what the server holds it may have dropped by now, and the engine's thread does not wait for it."""
        return True

    def wait_for_capacity(self, nbytes: int, deadline: float) -> bool:
        """Wait until ``nbytes`` more may be on their way, until ``deadline`` (monotonic) at most.

        Returns:
            False when there was no room in time; the chunk is counted as lost.
        """
        if self._space_freed.wait_for(
            lambda: not self._staged_bytes or self._staged_bytes + nbytes <= self._limit, deadline
        ):
            return True
        self.count("lost")
        return False

    def put(self, chunk: ReadyChunk, rows: HostRows, deadline: float) -> None:
        """Store a chunk, in the background. Waits for nothing."""
        with self._lock:
            self.figures["taken"] += 1
            self._staged_bytes += rows.nbytes
        self._thread.submit(lambda: self._store(chunk, rows))

    def finish(self, finish: Finish) -> None:
        """A request has ended."""

    def rows(self, refs: Sequence[ChunkRef]) -> dict[int, Any]:
        """None: rows are read by the server's clients, not through the connector."""
        return {}

    @property
    def idle(self) -> bool:
        """Whether everything that was put here has been sent."""
        return self._thread.idle

    def close(self) -> None:
        """Send what is on its way, and end. Idempotent; bounded in time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self._thread.close(_DRAIN_SEC):
            logger.warning("hidden states: rows of %d bytes on their way to the server are lost", self._staged_bytes)
        self._client.close()
        logger.info("hidden states of this run: %s", ", ".join(f"{k} {v}" for k, v in sorted(self.figures.items())))

    def _store(self, chunk: ReadyChunk, rows: HostRows) -> None:
        kept = 0
        try:
            layers = dict(zip(self._layer_idxs, rows.wait(), strict=True))
            ids = memoryview(chunk.ids).cast("q").tolist()
            kept = self._client.store_layers(ids, layers, chunk.ref.start, cache_salt=chunk.ref.kv_key)
        finally:
            with self._lock:
                self._staged_bytes -= rows.nbytes
                self.figures["lost"] += not kept
            self._space_freed.ring()
            if not kept and time.monotonic() > self._warned + _WARN_EVERY_SEC:
                self._warned = time.monotonic()
                logger.warning("the hidden-state server has not kept a chunk (%d so far)", self.figures["lost"])
