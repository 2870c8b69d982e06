"""The connections of one client: which one a call takes, and what is done when the server does not answer.

A connection on which a call was not answered in time is closed, and the server is left alone for a second; calls in
between are misses at once. A server that was started again is found by the next call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping

import torch

from lmcache_hs_backend.integrations.lmcache_mp import wire
from lmcache_hs_backend.integrations.lmcache_mp.channel import Channel, RefusedError
from lmcache_hs_backend.integrations.lmcache_mp.hot_memory import HotMemory
from lmcache_hs_backend.tiers.memory.buffers import BufferPool

logger = logging.getLogger(__name__)

_IDLE_BYTES = 256 << 20  # of memory for results that waits to be used again
_AGAIN_SEC = 1.0  # how long a server that did not answer is left alone
_HELLO_AGAIN_SEC = 0.05  # and how long it has to answer then


class UnavailableError(Exception):
    """The server cannot be reached, or has not answered in time."""


class Channels:
    """The connections of one client. Thread-safe; a forked child starts with none."""

    def __init__(self, name: str, hello: wire.HelloCall, timeout_sec: float) -> None:
        self._name = name
        self._hello = hello
        self._timeout_sec = timeout_sec
        self._memory = BufferPool(_IDLE_BYTES)  # of results
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._all: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._hot: weakref.WeakValueDictionary[tuple[int, int], HotMemory] = weakref.WeakValueDictionary()
        self._closed = False
        self._hung = False
        self._again_at = 0.0  # not before then, since it did not answer
        self._is_down = False  # and that has been logged
        _clients.add(self)

    def ask(
        self,
        call: wire.AnyCall,
        rows: Mapping[int, torch.Tensor] | None,
        result: dict[int, torch.Tensor] | None,
        deadline: float,
    ) -> wire.WireReply:
        """Raises UnavailableError."""
        while True:
            channel, fresh = self._take(deadline)
            try:
                reply = channel.ask(call, rows, result, deadline)
            except TimeoutError as error:
                channel.close()
                self._lost(error, hung=True)
                raise UnavailableError from None
            except (OSError, ValueError) as error:
                channel.close()
                self._lost(error, hung=False)
                if fresh or isinstance(error, ValueError):
                    raise UnavailableError from None
                continue  # the server was started again since: one that is new may answer
            except BaseException:
                channel.close()
                raise
            with self._lock:
                if not self._closed:
                    self._idle.append(channel)
                    return reply
            channel.close()
            return reply

    def close(self) -> None:
        """End the connections that are idle. The others end with their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._memory.close()
        for channel in idle:
            channel.close()

    def _take(self, deadline: float) -> tuple[Channel, bool]:
        """A channel, and whether it is new. Raises UnavailableError."""
        with self._lock:
            if self._closed:
                raise UnavailableError
            if self._idle:
                return self._idle.pop(), False
            if time.monotonic() < self._again_at:
                raise UnavailableError
            if self._hung:  # calls in the meantime do not wait
                self._again_at = time.monotonic() + _AGAIN_SEC
                deadline = min(deadline, time.monotonic() + _HELLO_AGAIN_SEC)
        try:
            channel = Channel(self._name, self._hello, deadline, self._map_hot, self._allocate)
            channel.watch(weakref.WeakMethod(self._ended))
        except (OSError, ValueError) as error:
            self._lost(error, hung=isinstance(error, TimeoutError))
            if isinstance(error, RefusedError):
                with self._lock:
                    self._again_at = time.monotonic() + _AGAIN_SEC
            raise UnavailableError from None
        with self._lock:
            if self._is_down:
                logger.info("the hidden-state server answers")
            self._hung = self._is_down = False
            self._again_at = 0.0
            self._all.add(channel)
        return channel, True

    def _map_hot(self, fd: int, nbytes: int) -> HotMemory:
        """The server's hot tier, mapped once for all channels, and unmapped with the last of them."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        with self._lock:
            hot = self._hot.get(key)
            if hot is None:
                hot = self._hot[key] = HotMemory(fd, nbytes)
            return hot

    def _allocate(self, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for rows of a result. Raises OSError, MemoryError or RuntimeError when there is none."""
        self._memory.trim()
        return self._memory.rows(num_tokens, hidden_dim, dtype)

    def _ended(self, channel: Channel) -> None:
        """The server has ended a connection. If it is idle, the memory that it maps is given up now."""
        with self._lock:
            if channel in self._idle:
                self._idle.remove(channel)
                channel.close()

    def after_fork(self) -> None:
        """In a forked child: the connections are the parent's."""
        for channel in list(self._all):  # before the last reference to one goes, which would end it for both
            channel.abandon()
        self._lock, self._idle, self._memory = threading.Lock(), [], BufferPool(_IDLE_BYTES)
        self._all.clear()

    def _lost(self, error: Exception, *, hung: bool) -> None:
        """Other connections to that server are no better."""
        with self._lock:
            idle, self._idle = self._idle, []
            if hung:
                self._hung = True
                self._again_at = time.monotonic() + _AGAIN_SEC
            was_down, self._is_down = self._is_down, True
        for channel in idle:
            channel.close()
        if not was_down:
            logger.warning(
                "no hidden states from the server at %s until it answers: %s",
                self._name.lstrip("\0"), error or type(error).__name__,
            )  # fmt: skip


_clients: weakref.WeakSet[Channels] = weakref.WeakSet()


def _after_fork() -> None:
    for channels in list(_clients):
        channels.after_fork()


os.register_at_fork(after_in_child=_after_fork)
