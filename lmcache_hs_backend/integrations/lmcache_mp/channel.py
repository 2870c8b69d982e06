"""One connection of a client to the server: a call at a time, and the memory that both map.

Slots that the server has lent for a store are written by the calling thread only, before the connection is used again
or closed. So its end means to the server that nothing writes into them any more.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from lmcache_hs_backend.integrations.lmcache_mp import wire
from lmcache_hs_backend.integrations.lmcache_mp.hot_memory import HotMemory
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import DTYPES, Segment

logger = logging.getLogger(__name__)


class RefusedError(OSError):
    """The server does not serve this client: versions differ, say, or the cold path cannot be used."""


class Channel:
    """A connection and its shared memory. One call at a time."""

    def __init__(
        self,
        name: str,
        hello: wire.HelloCall,
        deadline: float,
        map_hot: Callable[[int, int], HotMemory],
        allocate: Callable[[int, int, torch.dtype], torch.Tensor],
    ) -> None:
        """Connect.

        Args:
            name: Of the server's socket.
            hello: The first message.
            deadline: For the answer, monotonic.
            map_hot: Maps a descriptor of so many bytes.
            allocate: Gives memory for rows of a result: ``[num_tokens, hidden_dim]`` of a dtype.

        Raises:
            OSError: It cannot connect, or not in time; RefusedError and TimeoutError are OSErrors.
            ValueError: What the server has sent cannot be mapped.
        """
        self._map_hot = map_hot
        self._allocate = allocate
        self._hot: HotMemory
        self._segments: list[Segment] = []  # of results, as the server numbers them from 1
        self._returned: deque[tuple[int, int]] = deque()  # results of which no view is left
        self._watched: socket.socket | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.connect(name)
            if not wire.same_user(self._socket):
                raise RefusedError("the server's socket belongs to another user")
            reply = self._exchange(hello, deadline)
            if reply.error:
                raise RefusedError(reply.error)
            if not reply.segments:
                raise wire.BrokenMessage("no hot tier came with the answer to hello")
        except BaseException:
            self._socket.close()
            raise

    def ask(
        self,
        call: wire.AnyCall,
        rows: Mapping[int, torch.Tensor] | None,
        result: dict[int, torch.Tensor] | None,
        deadline: float,
    ) -> wire.WireReply:
        """``rows`` are those of a StoreCall; what comes back goes into ``result``. Raises OSError, ValueError."""
        call.released = []
        with contextlib.suppress(IndexError):
            while len(call.released) < 4096:
                call.released.append(self._returned.popleft())
        reply = self._exchange(call, deadline)
        while reply.copies and isinstance(call, wire.StoreCall):
            self._hot.copy_in(rows or {}, reply.copies)
            reply = self._exchange(wire.Copied(), deadline)
        if reply.copies and isinstance(call, wire.RetrieveCall) and result is not None:
            result.update(self._copy_out(call, reply.copies))
            return reply
        if result is not None:
            for place in reply.rows:
                result[place.layer_idx] = self._segment(place.segment).rows(place, self._returned)
        return reply

    def watch(self, on_end: weakref.WeakMethod[Callable[[Channel], None]]) -> None:
        """Call ``on_end`` on a thread of its own when the server ends the connection, or has died.

        A worker without calls would otherwise keep the memory of a server that is gone. Raises OSError.
        """
        watched = self._socket.dup()
        self._watched = watched
        self._end = weakref.finalize(self, _shut_down, watched)  # ends the thread of a channel that was never closed
        self._end.atexit = False
        arguments = watched, weakref.ref(self), on_end
        try:
            threading.Thread(target=_watch, args=arguments, name="hs-mp-watch", daemon=True).start()
        except RuntimeError as error:
            raise OSError(f"no thread for a connection: {error}") from None

    def close(self) -> None:
        """End it. The server frees the memory; results keep theirs."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close it here, and leave it open for the parent."""
        self._socket.close()
        if self._watched is not None:
            self._end.detach()
            self._watched.close()

    def _segment(self, number: int) -> Segment:
        if not 1 <= number <= len(self._segments):
            raise wire.BrokenMessage(f"rows in segment {number} of {len(self._segments)}")
        return self._segments[number - 1]

    def _copy_out(self, call: wire.RetrieveCall, copies: Sequence[wire.HotRun]) -> dict[int, torch.Tensor]:
        """Copy a result out of the hot tier, and let the server unpin it. Raises ConnectionError."""
        dtype = None if call.dtype is None else DTYPES[call.dtype]
        copied: dict[int, torch.Tensor] = {}
        try:
            copied = self._hot.copy_out(copies, dtype, self._allocate)
        except wire.BrokenMessage:
            raise
        except (OSError, MemoryError, RuntimeError) as error:  # mmap's, Python's and torch's ways to say it
            logger.warning("no memory for a result of %d layer(s): %s", len(call.layer_idxs), error)
        # A server that ends shuts its connections before it unpins anything: this one was open until all was copied.
        ended = select.poll()
        ended.register(self._socket, select.POLLIN | select.POLLRDHUP)
        if ended.poll(0):
            raise wire.BrokenMessage("the server has ended while rows were copied")
        wire.send(self._socket, wire.Copied(), [])
        return copied

    def _exchange(self, call: wire.AnyCall, deadline: float) -> wire.WireReply:
        """The reply. Shared memory that comes with it is mapped."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        wire.send(self._socket, call, [])
        reply, fds = wire.receive_reply(self._socket, deadline)
        try:
            if len(fds) != len(reply.segments):
                raise wire.BrokenMessage(f"{len(reply.segments)} segments and {len(fds)} descriptors")
            for fd, size in zip(fds, reply.segments, strict=True):
                if isinstance(call, wire.HelloCall):
                    self._hot = self._map_hot(fd, size)
                else:
                    self._segments.append(Segment(fd, size))
                    self._segments[-1].populate()
        finally:
            wire.close_all(fds)
        return reply


def _watch(
    watched: socket.socket,
    channel: weakref.ref[Channel],
    on_end: weakref.WeakMethod[Callable[[Channel], None]],
) -> None:
    with watched:
        end = select.poll()
        end.register(watched, select.POLLRDHUP)
        end.poll()
    ended, call = channel(), on_end()
    if ended is not None and call is not None:
        call(ended)


def _shut_down(watched: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the thread has seen the end, and closed it
        watched.shutdown(socket.SHUT_RDWR)
