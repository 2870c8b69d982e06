"""Asks LMCache's backends that may block whether they hold KV: within a deadline, all keys at once, with a breaker.

``KvPresence`` decides what the answers mean; here each key gets True, False or None, and None is the answer of a
backend that cannot be trusted to know, raised, or did not answer in time. What LMCache's connectors answer when they
fail was read in the sources of 0.5.6 and 0.5.7rc2; most have no timeout, and some block the storage
manager's event loop, on which every put and get of KV runs too, so those are asked from threads of our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_hs_backend.integrations.lmcache.compat import real_backend
from lmcache_hs_backend.tiers.flows.bell import Latch

logger = logging.getLogger(__name__)

#: Connectors whose ``exists`` raises when the remote fails, so that False means absent. Not among them, because
#: they answer False instead: S3 (any failed HEAD, and for ever after three connection errors), Azure, Bigtable,
#: SageMaker HyperPod, EIC; because a False may be old: HFBucket (cached), RedisSentinel (asks a replica); because their
#: libraries were not read: InfiniStore and whatever comes from elsewhere. Blackhole keeps nothing, and says so.
_RAISES = frozenset(
    {
        "RedisConnector",
        "RedisClusterConnector",
        "RESPConnector",
        "ValkeyConnector",
        "MooncakestoreConnector",
        "LMCServerConnector",
        "MockConnector",
        "BlackholeConnector",
    }
)
#: Connectors over a directory. ``os.path.exists`` is False for every error, so their False is looked into.
_ON_A_FILESYSTEM = frozenset({"FSConnector", "HF3fsConnector"})
#: Connectors whose coroutine blocks the event loop that runs it; their ``exists_sync`` needs no loop.
_BLOCKS_THE_LOOP = frozenset({"S3Connector", "RedisSentinelConnector", "MooncakestoreConnector", "EICConnector"})

_THREADS = 16
_LATE_CALLS = 2  # after so many calls in a row that a backend has not answered in time, it is not asked any more
_PROBE_SEC = 1.0


@dataclass
class _Breaker:
    """Of one backend. ``SlowBackends`` guards it."""

    late: int = 0  # calls in a row that were not answered in time
    target: tuple[Any, Any] | None = None  # the backend and the key to probe with
    is_open: bool = False


class SlowBackends:
    """Asks backends for KV and waits ``timeout_sec`` for all of their answers together. Thread-safe."""

    def __init__(self, timeout_sec: float) -> None:
        self._timeout_sec = timeout_sec
        self._threads = _Threads(_THREADS)
        self._lock = threading.Lock()
        self._breakers: dict[str, _Breaker] = {}
        self._closed = threading.Event()

    def ask(self, backends: Mapping[str, Any], keys: Sequence[Any]) -> list[bool | None]:
        """For each key: True if a backend holds it, False if none does, None if that is not known."""
        deadline = time.monotonic() + self._timeout_sec
        asked: dict[str, list[_Answer] | None] = {}
        for name, backend in backends.items():
            asked[name] = [self._submit(backend, key) for key in keys] if self._may_ask(name, backend, keys) else None
        for answers in asked.values():
            for answer in answers or ():
                answer.wait(deadline - time.monotonic())
        held: list[bool | None] = [False] * len(keys)
        for name, answers in asked.items():
            late = False
            for number in range(len(keys)):
                here = None
                if answers is not None:
                    late |= not answers[number].has_come
                    here = answers[number].take()
                if here or (here is None and not held[number]):
                    held[number] = here
            if answers is not None:
                self._judge(name, late)
        return held

    def close(self) -> None:
        """Ask no more. Threads that wait for a backend end when it answers."""
        self._closed.set()
        self._threads.close()

    # -- the breaker -----------------------------------------------------------------------------------------

    def _may_ask(self, name: str, backend: Any, keys: Sequence[Any]) -> bool:
        with self._lock:
            breaker = self._breakers.setdefault(name, _Breaker())
            breaker.target = (backend, keys[0])
            return not breaker.is_open and not self._closed.is_set()

    def _judge(self, name: str, late: bool) -> None:
        """After a call: open the breaker of a backend that is late again and again, and probe it from then on."""
        with self._lock:
            breaker = self._breakers[name]
            breaker.late = breaker.late + 1 if late else 0
            if breaker.late < _LATE_CALLS or breaker.is_open:
                return
            breaker.is_open = True
        logger.warning(
            "%s has not answered within kv_presence_timeout_ms (%g) in %d calls: until it does, hidden states whose KV "
            "only it may hold are not served",
            name, self._timeout_sec * 1000, _LATE_CALLS,
        )  # fmt: skip
        try:
            threading.Thread(target=self._probe, args=(name, breaker), name="hs-kv-probe", daemon=True).start()
        except RuntimeError as error:  # then calls are the probes
            breaker.is_open = False
            logger.warning("no thread to probe %s with: %s", name, error)

    def _probe(self, name: str, breaker: _Breaker) -> None:
        while not self._closed.wait(_PROBE_SEC):
            with self._lock:
                assert breaker.target is not None
                backend, key = breaker.target
            try:
                answer = self._submit(backend, key)
            except Exception as error:  # noqa: BLE001 - its loop is closed, say; whatever it is, it may be over next time
                logger.debug("%s cannot be probed: %r", name, error)
                continue
            answered = answer.wait(self._timeout_sec)
            answer.take()
            if answered:
                with self._lock:
                    breaker.is_open, breaker.late = False, 0
                logger.info("%s answers again", name)
                return

    # -- one question ----------------------------------------------------------------------------------------

    def _submit(self, backend: Any, key: Any) -> _Answer:
        real = real_backend(backend)
        connection = getattr(real, "connection", None)
        if connection is None or not hasattr(connection, "exists"):
            return self._threads.submit(lambda: bool(backend.contains(key)))
        # RemoteBackend.contains turns every error into False and has no timeout, so its connection is asked.
        if getattr(real, "_mla_worker_id_as0_mode", False):
            key = key.with_new_worker_id(0)
        connector = _innermost(connection)
        kind = type(connector).__name__
        if kind in _BLOCKS_THE_LOOP:
            return self._threads.submit(lambda: _meant(kind, connection.exists_sync(key)))
        answer, loop = _Answer(), real.loop
        asked = asyncio.run_coroutine_threadsafe(_answer(answer, _exists(connection, connector, key)), loop)
        answer.on_giving_up = lambda: loop.call_soon_threadsafe(asked.cancel)
        return answer


class _Answer:
    """What one backend says of one key.

    Not a Future: a caller who is interrupted while it waits for one may leave the Future's lock taken, and then the
    thread or the event loop that has the answer would wait for that lock for ever.
    """

    def __init__(self) -> None:
        self.held: bool | None = None
        self.given_up = False  # no caller waits for it any more
        self.on_giving_up: Callable[[], object] = bool
        self._come = Latch()

    @property
    def has_come(self) -> bool:
        """Whether there is an answer, if only that it is not known."""
        return self._come.is_set()

    def give(self, held: bool | None) -> None:
        """This is the answer."""
        self.held = held
        self._come.set()

    def wait(self, timeout: float) -> bool:
        """Wait for it, ``timeout`` seconds at most. Returns whether it has come."""
        return self._come.wait(timeout)

    def take(self) -> bool | None:
        """The answer; None when it has not come, and then it need not come any more."""
        if not self.has_come:
            self.given_up = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.on_giving_up()
        return self.held


async def _answer(answer: _Answer, question: Coroutine[Any, Any, bool | None]) -> None:
    held: bool | None = None
    try:
        held = await question
    except Exception as error:  # noqa: BLE001 - whatever a third party's backend raises, it does not know
        logger.debug("a backend cannot be asked: %r", error)
    finally:
        answer.give(held)


async def _exists(connection: Any, connector: Any, key: Any) -> bool | None:
    kind, held = type(connector).__name__, await connection.exists(key)
    if not held and kind in _ON_A_FILESYSTEM:
        return await asyncio.to_thread(_on_the_filesystem, connector, key)
    return _meant(kind, held)


def _meant(kind: str, held: Any) -> bool | None:
    """What an answer of a connector is worth: a True counts from any, a False only from those that would raise."""
    return True if held else False if kind in _RAISES else None


def _on_the_filesystem(connector: Any, key: Any) -> bool | None:
    """A file is absent only if its directory is there: an unmounted or broken filesystem raises, or has neither."""
    path = connector._get_file_path(key)
    try:
        os.stat(path)
    except FileNotFoundError:
        return False if os.path.isdir(os.path.dirname(path)) else None
    return True


def _innermost(connection: Any) -> Any:
    """The connector inside LMCache's wrappers for metrics and audits."""
    while True:
        unwrap = getattr(connection, "getWrappedConnector", None)
        inner = unwrap() if callable(unwrap) else getattr(connection, "real_connector", None)
        if inner is None or inner is connection:
            return connection
        connection = inner


class _Threads:
    """Daemon threads, started as needed, for questions that block: those of an executor would hold up the exit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._started = self._idle = 0
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[_Answer, Callable[[], bool | None]] | None] = queue.SimpleQueue()

    def submit(self, question: Callable[[], bool | None]) -> _Answer:
        answer = _Answer()
        with self._lock:
            if self._closed:
                answer.give(None)
                return answer
            self._jobs.put((answer, question))
            if self._jobs.qsize() > self._idle and self._started < self._most:
                with contextlib.suppress(RuntimeError):  # out of threads: one that there is takes it, or nobody in time
                    threading.Thread(target=self._work, name="hs-kv-asker", daemon=True).start()
                    self._started += 1
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _ in range(self._started):
                self._jobs.put(None)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            answer, question = job
            if answer.given_up:
                continue
            held: bool | None = None
            try:
                held = question()
            except BaseException as error:  # noqa: BLE001 - whatever a third party's backend raises, it does not know
                logger.debug("a backend cannot be asked: %r", error)
            finally:
                answer.give(held)
