"""The server's part of copies that a client makes: the server names places in the hot tier, the client copies.

For a store it reserves slots as for any store, and publishes the chunks when the client reports that the rows are
there. For a retrieve it pins the slots until the client reports that it has the rows.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence

import torch

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.integrations.lmcache_mp import wire
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import DTYPES
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES
from lmcache_hs_backend.tiers.memory.runs import Move, runs_of


class ClientCopies:
    """Copies between a client's memory and the hot tier, which it maps. For one connection, whose thread calls."""

    def __init__(self, connection: socket.socket, is_closing: Callable[[], bool]) -> None:
        """``is_closing``: whether this side ends the connection. It does so before anything else of the server ends."""
        self._connection = connection
        self._is_closing = is_closing

    def copy(self, moves: Mapping[int, Sequence[Move]]) -> None:
        """Have the client copy. Raises ConnectionError when it is gone."""
        copies = [
            wire.HotRun(layer_idx, row, tokens, offset, spec.hidden_dim, spec.dtype)
            for layer_idx, its_moves in moves.items()
            for row, tokens, offset, spec in runs_of(its_moves)
        ]
        wire.send(self._connection, wire.WireReply(copies=copies), [])
        answer, fds = wire.receive_call(self._connection)
        wire.close_all(fds)
        if not isinstance(answer, wire.Copied):
            raise wire.BrokenMessage("another message came while a client copies")

    def await_end(self) -> None:
        """Wait until the client's end of the connection is gone. Raises when it is this side that has ended it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(1 << 16):
                pass
        if self._is_closing():
            raise ConnectionAbortedError("the server is closing, and a client may still be copying")


class ClientRows:
    """Rows that a client is about to store: a ``RowSource``.

    Slots that a client was given are its own until it reports that it is done, or its end of the connection is gone: as
    long as it may write into them they are used for nothing else, however slow it is.
    """

    def __init__(self, layers: Sequence[wire.LayerRows], copies: ClientCopies) -> None:
        """Raises ValueError when these are no rows of distinct layers."""
        self.specs: Sequence[LayerSpec] = [_spec(layer) for layer in layers]
        if len({spec.layer_idx for spec in self.specs}) < len(self.specs) or not self.specs:
            raise ValueError("a store needs rows, and those of each layer once")
        self.num_tokens = min(layer.num_tokens for layer in layers)
        self._copies = copies

    def copy_in(self, moves: Mapping[int, Sequence[Move]]) -> None:
        """See RowSource. Raises ConnectionError when the client is gone."""
        self._copies.copy(moves)

    def settle(self) -> None:
        """See RowSource."""
        self._copies.await_end()


def _spec(layer: wire.LayerRows) -> LayerSpec:
    name = DTYPE_NAMES.get(DTYPES.get(layer.dtype, torch.float64))
    if name is None:
        raise ValueError(f"rows of dtype {layer.dtype!r}; kept are bfloat16, float16 and float32")
    return LayerSpec(layer.layer_idx, name, layer.hidden_dim)
