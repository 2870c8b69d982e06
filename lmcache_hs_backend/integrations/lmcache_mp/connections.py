"""The server's side of the socket: a thread for each connection of a client, which ends with it.

LMCache's own handlers are not used for this: by default one thread serves them all, lookups of KV included, and a cold
read would hold those up. A connection has one call at a time; its shared memory is freed when the other end is gone,
however it went.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from lmcache_hs_backend.chunk import chunk_name
from lmcache_hs_backend.config import GIB, ServerConfig
from lmcache_hs_backend.integrations.lmcache_mp import wire
from lmcache_hs_backend.integrations.lmcache_mp.client_copies import ClientCopies, ClientRows
from lmcache_hs_backend.integrations.lmcache_mp.results import ClientResults
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import DTYPES
from lmcache_hs_backend.integrations.lmcache_mp.spaces import Space, Spaces

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 512
_WARN_EVERY_SEC = 60.0


class Connections:
    """Accepts clients until ``close``."""

    def __init__(self, name: str, spaces: Spaces, config: ServerConfig) -> None:
        """``name``: of the socket. Raises OSError when it is taken."""
        self._spaces = spaces
        self._config = config
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._refusals: dict[str, float] = {}  # why, and until when it is not said again
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(name)
            self._listener.listen(64)
        except BaseException:
            self._listener.close()
            raise
        threading.Thread(target=self._accept, name="hs-mp-accept", daemon=True).start()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """Accept no more, and end the connections. Calls in progress lose their reply."""
        with self._lock:
            self._closed = True
            connections = [self._listener, *self._open]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("a client cannot be accepted: %s", error)  # out of descriptors, say
                threading.Event().wait(0.1)
                continue
            with self._lock:
                welcome = not self._closed and len(self._open) < _MOST_CONNECTIONS and wire.same_user(connection)
                if welcome:
                    self._open.add(connection)
            if not welcome:
                logger.warning("a client is refused: it runs as another user, or there are too many")
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="hs-mp-client", daemon=True).start()
            except RuntimeError as error:
                logger.warning("no thread for a client: %s", error)
                self._end(connection)

    def _serve(self, connection: socket.socket) -> None:
        memory = int(self._config.client_memory * GIB)
        session = Session(self._spaces, connection, memory, lambda: self._closed, self._refused)
        try:
            session.run()
        except OSError as error:  # the client is gone, or uses another protocol
            logger.debug("a client has left: %s", error)
        except Exception:
            logger.exception("a client's connection is closed")
        finally:
            session.close()
            self._end(connection)

    def _refused(self, reason: str) -> None:
        """Say it in the server's log as well, not each time that the client tries again."""
        now = time.monotonic()
        with self._lock:
            if now < self._refusals.get(reason, 0.0):
                return
            if len(self._refusals) >= _MOST_CONNECTIONS:
                self._refusals.clear()
            self._refusals[reason] = now + _WARN_EVERY_SEC
        logger.warning("a client is refused, and gets no hidden states: %s", reason)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()


class Session:
    """One connection: its space, and the memory of its results. One thread."""

    def __init__(
        self,
        spaces: Spaces,
        connection: socket.socket,
        client_memory: int,
        is_closing: Callable[[], bool],
        refused: Callable[[str], None],
    ) -> None:
        """Start with no space.

        Args:
            spaces: All of the server.
            connection: The client's.
            client_memory: Bytes of results.
            is_closing: Whether this side has ended the connection.
            refused: Is told why a client cannot be served.
        """
        self._spaces = spaces
        self._refused = refused
        self._connection = connection
        self._copies = ClientCopies(connection, is_closing)
        self._space: Space | None = None
        self._results = ClientResults(client_memory, self._copies)

    def run(self) -> NoReturn:
        """Answer calls. Ends with an OSError when the client is gone."""
        while True:
            call, fds = wire.receive_call(self._connection)
            wire.close_all(fds)  # clients send none
            new: list[int] = []
            try:
                reply = self._answer(call, new)
                if reply is not None:
                    wire.send(self._connection, reply, new)
            finally:
                wire.close_all(new)

    def close(self) -> None:
        """Let go of the memory."""
        self._results.close()

    def _answer(self, call: wire.AnyCall, new: list[int]) -> wire.WireReply | None:
        """The reply, None if there is none. Descriptors that go with it are appended to ``new``."""
        try:
            self._results.release(call.released)
            if isinstance(call, wire.HelloCall):
                return self._welcome(call, new)
            if self._space is None:
                raise ValueError("the first message must be hello")
            if not self._space.is_current:
                raise wire.BrokenMessage("LMCache has settled on another chunk size: connect again")
            return self._handle(self._space, call, new)
        except ConnectionError:  # it is at its end
            raise
        except ValueError as error:
            return wire.WireReply(error=str(error), is_argument=True)
        except Exception as error:
            logger.exception("a client's call failed")
            if self._space is not None:
                self._space.tiers.metrics.add("errors_internal")
            return wire.WireReply(error=f"{type(error).__name__}: {error}")

    def _welcome(self, call: wire.HelloCall, new: list[int]) -> wire.WireReply:
        try:
            return self._hello(call, new)
        except ValueError as error:
            self._refused(f"{call.model}: {error}")
            raise

    def _hello(self, call: wire.HelloCall, new: list[int]) -> wire.WireReply:
        if call.version != wire.VERSION:
            raise ValueError(f"the client speaks version {call.version}, the server {wire.VERSION}: install the same")
        if "@" in call.model or "@" in call.kv_dtype:
            raise ValueError(f"the model {call.model!r} or kv_dtype {call.kv_dtype!r} contains '@'")
        space = self._spaces.open(call)
        hot_bytes, hot_fd = space.duplicate_hot()
        new.append(hot_fd)
        self._space = space
        return wire.WireReply(count=space.ident.chunk_size, segments=[hot_bytes])

    def _handle(self, space: Space, call: wire.AnyCall, new: list[int]) -> wire.WireReply | None:
        tiers = space.tiers
        if isinstance(call, wire.StoreCall):
            return wire.WireReply(count=self._store(space, call))
        if isinstance(call, wire.RetrieveCall):
            return self._retrieve(space, call, new)
        if isinstance(call, wire.CoverageCall):
            refs = space.refs(call.ids, call.salt)
            covered = tiers.covered([ref.name for ref in refs], call.layer_idxs)
            return wire.WireReply(count=refs[covered - 1].end if covered else 0)
        if isinstance(call, wire.PrefetchCall):
            tiers.prefetch(space.refs(call.ids, call.salt), call.layer_idxs)
            return wire.WireReply()
        if isinstance(call, wire.ChunksCall):
            chunks = [(ref.start, ref.end, ref.key) for ref in space.refs(call.ids, call.salt)]
            return wire.WireReply(chunks=chunks)
        if isinstance(call, wire.HasCall):
            return wire.WireReply(count=int(any(tiers.has(chunk_name(call.key), call.layer_idx))))
        if isinstance(call, wire.DropCall):
            return wire.WireReply(count=tiers.drop([chunk_name(call.key)]))
        if isinstance(call, wire.LengthCall):
            return wire.WireReply(count=len(tiers), chunk_size=space.ident.chunk_size)
        if isinstance(call, wire.FlushCall):
            return wire.WireReply(count=tiers.flush(call.timeout))
        if isinstance(call, wire.ClearCall):
            return wire.WireReply(count=tiers.clear())
        if isinstance(call, wire.Copied):
            raise wire.BrokenMessage("copied, and nothing was to be copied")
        return wire.WireReply(figures=tiers.stats())

    def _store(self, space: Space, call: wire.StoreCall) -> int:
        refs = [ref for ref in space.refs(call.ids, call.salt) if ref.start >= call.token_offset]
        source = ClientRows(call.layers, self._copies)
        if refs and source.num_tokens < refs[-1].end - call.token_offset:
            raise ValueError(f"{source.num_tokens} rows, and chunks up to token {refs[-1].end}")
        stored = space.tiers.store_from(refs, call.ids, source, call.token_offset)
        return stored.new if space.tiers.config.store_count == "new" else stored.held

    def _retrieve(self, space: Space, call: wire.RetrieveCall, new: list[int]) -> wire.WireReply | None:
        dtype = None if call.dtype is None else DTYPES.get(call.dtype)
        if dtype is None and call.dtype is not None:
            raise ValueError(f"dtype is {call.dtype!r}, but must be one of {', '.join(DTYPES)}")
        refs, results = space.refs(call.ids, call.salt), self._results
        results.begin()
        rows = {}
        try:
            rows = space.tiers.retrieve(refs, list(dict.fromkeys(call.layer_idxs)), dtype, results)
        finally:
            places = results.hand_over(rows)
        if results.copied:
            return None
        segments = results.take_new()
        new += [fd for fd, _ in segments]
        return wire.WireReply(rows=places, segments=[size for _, size in segments])
