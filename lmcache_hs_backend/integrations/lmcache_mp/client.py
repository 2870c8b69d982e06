"""``HiddenStateClient``: what a worker calls in MP mode, with the interface of the in-process store.

Rows that are stored are copied straight into the server's hot tier, which the client maps, and results straight out of
it. A result with rows from disk is a tensor over memory that the server has written it into, and that it recycles when
the last view of the tensor is gone. A connection serves one call at a time; calls from several threads have one each.

Bad arguments raise ValueError. A server that is absent, stopped or hung is a miss: None or 0, within
``read_timeout_sec``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache_hs_backend.chunk import token_bytes
from lmcache_hs_backend.format.namespace import local_model_revision
from lmcache_hs_backend.integrations.lmcache_mp import wire
from lmcache_hs_backend.integrations.lmcache_mp.channels import Channels, UnavailableError
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import DTYPE_NAMES
from lmcache_hs_backend.tiers.memory.dtypes import checked_rows

logger = logging.getLogger(__name__)

TokenIds = torch.Tensor | Sequence[int]


class HiddenStateClient:
    """Hidden states of one model in the tiers of LMCache's MP server on this machine. Thread-safe.

    Args:
        url: Of the LMCache server, as workers have it: ``tcp://127.0.0.1:5555``. Only its port is used.
        model: Name of the model, as the engine registers its KV.
        kv_dtype: Of its KV; part of what names the rows.
        world_size: Of the engine; with ``worker_id``, part of the name. Workers that give the same share their rows,
            and tensor-parallel ranks compute equal rows, so leave both as they are unless you mean otherwise.
        worker_id: See ``world_size``.
        model_revision: What tells two versions of the model apart; default: a digest of a local model directory.
        read_timeout_sec: Seconds after which a call gives up.
        socket_name: Of the server's socket, instead of the one that follows from ``url``.

    Raises:
        ValueError: ``url`` or ``model`` cannot be used. A server that is not there yet is no error.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        kv_dtype: str = "bfloat16",
        world_size: int = 1,
        worker_id: int = 0,
        model_revision: str | None = None,
        read_timeout_sec: float = 5.0,
        socket_name: str | None = None,
    ) -> None:
        if not model or "@" in model:
            raise ValueError(f"model is {model!r}, but must be a name without '@'")
        if not read_timeout_sec > 0:
            raise ValueError(f"read_timeout_sec is {read_timeout_sec!r}, but must be a number above 0")
        hello = wire.HelloCall(
            version=wire.VERSION,
            model=model,
            model_revision=local_model_revision(model) if model_revision is None else model_revision,
            kv_dtype=kv_dtype,
            world_size=world_size,
            worker_id=worker_id,
        )
        wire.check(hello)
        name = wire.socket_name(url) if socket_name is None else socket_name
        self._timeout_sec = read_timeout_sec
        self._channels = Channels(name, hello, read_timeout_sec)

    # -- LMCache's interface -----------------------------------------------------------------------------

    def store_hidden_states(
        self,
        token_ids: TokenIds,
        hidden_states: torch.Tensor,
        *,
        layer_idx: int = 0,
        token_offset: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Store the rows of one layer, in whole chunks. Arguments and result as ``TieredHiddenStateStore`` has them.

        Args:
            token_ids: The whole prompt from position 0: a 1-D integer tensor or a list.
            hidden_states: ``[len(token_ids) - token_offset, hidden_dim]``, float, on any device.
            layer_idx: Storage slot of the rows, any int.
            token_offset: Tokens at the start that ``hidden_states`` does not have.
            cache_salt: The salt of the KV, where users are kept apart.

        Returns:
            How many chunks of the range hold the layer now; 0 when the server is not there.

        Raises:
            ValueError: An argument is wrong.
        """
        return self.store_layers(token_ids, {layer_idx: hidden_states}, token_offset, cache_salt=cache_salt)

    def retrieve_hidden_states(
        self, token_ids: TokenIds, *, layer_idx: int = 0, cache_salt: str = ""
    ) -> torch.Tensor | None:
        """The rows of the longest prefix whose chunks have the layer.

        Returns:
            Contiguous CPU float32 rows ``[num_tokens, hidden_dim]`` that are the caller's to keep; None when there are
            none, or the server is not there.

        Raises:
            ValueError: An argument is wrong.
        """
        return self.retrieve_layers(token_ids, [layer_idx], cache_salt=cache_salt).get(layer_idx)

    def num_cached_chunks(self) -> int:
        """Chunks in either tier; 0 when the server is not there."""
        reply = self._ask(wire.LengthCall())
        return 0 if reply is None else reply.count

    def has_chunk(self, key: Any, layer_idx: int = 0) -> bool:
        """Whether either tier holds the layer of a chunk; False when the server is not there.

        Args:
            key: As ``chunks`` returns it, or an object whose ``to_string`` does.
            layer_idx: The layer.
        """
        reply = self._ask(wire.HasCall(key=_key_text(key), layer_idx=_layer_idx(layer_idx)))
        return reply is not None and reply.count > 0

    def drop_key(self, key: Any) -> bool:
        """Delete a chunk, with all its layers, from both tiers. Returns whether it was there.

        Args:
            key: As in ``has_chunk``.
        """
        reply = self._ask(wire.DropCall(key=_key_text(key)))
        return reply is not None and reply.count > 0

    # -- and beyond it -----------------------------------------------------------------------------------

    def store_layers(
        self,
        token_ids: TokenIds,
        layers: Mapping[int, torch.Tensor],
        token_offset: int = 0,
        *,
        cache_salt: str = "",
    ) -> int:
        """Store several layers of one prompt at once; see ``store_hidden_states``.

        Returns:
            How many chunks of the range hold all of the layers now; 0 when the server is not there.
        """
        ids = token_bytes(token_ids)
        num_tokens = len(token_ids)
        if not 0 <= token_offset <= num_tokens:
            raise ValueError(f"token_offset ({token_offset}) must be in [0, len(token_ids) ({num_tokens})]")
        rows = {_layer_idx(idx): checked_rows(tensor, num_tokens - token_offset) for idx, tensor in layers.items()}
        if not rows or token_offset == num_tokens:
            return 0
        described = [
            wire.LayerRows(layer_idx, tensor.shape[0], tensor.shape[1], DTYPE_NAMES[tensor.dtype])
            for layer_idx, tensor in rows.items()
        ]
        call = wire.StoreCall(ids=ids, token_offset=token_offset, layers=described, salt=cache_salt)
        reply = self._ask(call, rows)
        return 0 if reply is None else reply.count

    def retrieve_layers(
        self,
        token_ids: TokenIds,
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None = torch.float32,
        *,
        cache_salt: str = "",
    ) -> dict[int, torch.Tensor]:
        """The rows of several layers over their common prefix.

        Args:
            token_ids: The whole prompt from position 0.
            layer_idxs: The layers; the prefix ends where one of them does.
            dtype: Of the result; None: as the rows are kept.
            cache_salt: The salt of the KV.

        Returns:
            ``layer_idx`` to contiguous CPU rows; empty when there are none, or the server is not there.
        """
        if dtype is not None and dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAMES.values())} or None, got {dtype}")
        wanted = list(dict.fromkeys(map(_layer_idx, layer_idxs)))
        call = wire.RetrieveCall(
            ids=token_bytes(token_ids),
            layer_idxs=wanted,
            dtype=None if dtype is None else DTYPE_NAMES[dtype],
            salt=cache_salt,
        )
        result: dict[int, torch.Tensor] = {}
        self._ask(call, result=result)
        return result

    def coverage(self, token_ids: TokenIds, layer_idxs: Sequence[int] = (0,), *, cache_salt: str = "") -> int:
        """Up to which token the tiers have every layer: the end of a chunk, 0 for none or without the server."""
        ids, wanted = token_bytes(token_ids), list(map(_layer_idx, layer_idxs))
        reply = self._ask(wire.CoverageCall(ids=ids, layer_idxs=wanted, salt=cache_salt))
        return 0 if reply is None else reply.count

    def chunk_size(self) -> int:
        """Tokens of a chunk, as LMCache's server cuts prompts; 0 when the server is not there."""
        reply = self._ask(wire.LengthCall())
        return 0 if reply is None else reply.chunk_size

    def chunks(self, token_ids: TokenIds, *, cache_salt: str = "") -> list[tuple[int, int, str]]:
        """The whole chunks of a prompt as ``(start, end, key)``, as LMCache's ``process_tokens`` gives them in process.

        The server cuts and names them like the KV that it keeps. Empty when it is not there.
        """
        reply = self._ask(wire.ChunksCall(ids=token_bytes(token_ids), salt=cache_salt))
        return [] if reply is None else reply.chunks

    def prefetch(self, token_ids: TokenIds, layer_idxs: Sequence[int] | None = None, *, cache_salt: str = "") -> None:
        """Bring what is on disk of a prompt into RAM, in the background; None: all layers."""
        wanted = None if layer_idxs is None else list(map(_layer_idx, layer_idxs))
        self._ask(wire.PrefetchCall(ids=token_bytes(token_ids), layer_idxs=wanted, salt=cache_salt))

    def flush(self, timeout: float) -> int:
        """Write everything that is dirty, waiting ``timeout`` seconds at most. How many chunks still are."""
        timeout = min(max(float(timeout), 0.0), wire.MAX_SECONDS)
        reply = self._ask(wire.FlushCall(timeout=timeout), more_sec=timeout)
        return 0 if reply is None else reply.count

    def clear(self) -> int:
        """Delete all chunks of this model, and return how many there were. Needed after changing weights in place."""
        reply = self._ask(wire.ClearCall())
        return 0 if reply is None else reply.count

    def stats(self) -> dict[str, float | str | bool]:
        """All figures of the store, as ``TieredStore.stats`` has them; empty when the server is not there."""
        reply = self._ask(wire.StatsCall())
        return {} if reply is None else reply.figures

    def close(self) -> None:
        """End the connections. Results stay valid. Calls afterwards are misses."""
        self._channels.close()

    def _ask(
        self,
        call: wire.AnyCall,
        rows: Mapping[int, torch.Tensor] | None = None,
        result: dict[int, torch.Tensor] | None = None,
        more_sec: float = 0.0,
    ) -> wire.WireReply | None:
        """The reply; None when there is none. Raises ValueError when an argument is wrong, as the server says, too."""
        wire.check(call)
        deadline = time.monotonic() + self._timeout_sec + more_sec
        try:
            reply = self._channels.ask(call, rows, result, deadline)
        except UnavailableError:
            return None
        if reply.is_argument:
            raise ValueError(reply.error)
        if reply.error:
            logger.warning("the hidden-state server failed: %s", reply.error)
            return None
        return reply


def _layer_idx(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"layer_idx must be an int of at most 64 bits, got {value!r}")
    return value


def _key_text(key: Any) -> str:
    text = key.to_string() if hasattr(key, "to_string") else key
    if not isinstance(text, str) or not 0 < len(text) <= wire.MAX_NAME:
        raise ValueError(f"a chunk's key must be a string, as chunks() returns it, got {key!r}")
    return text
