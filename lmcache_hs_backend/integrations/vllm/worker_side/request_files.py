"""One file per request, as vLLM's ExampleHiddenStatesConnector writes it, for clients made for that.

A file is safetensors: ``hidden_states`` ``[num_tokens, num_layers, hidden_dim]`` in the model's dtype and
``token_ids`` int64 ``[num_tokens]``. Beside it is ``<path>.lock``, locked before the client can know the path and
released when the file is there. Unlike the example's, files appear whole, by rename, and a request without a file
gets ``<path>.error``, JSON with an ``error`` text, before the lock is released.

All file I/O, opening locks included, is on threads of its own: the caller is the engine's thread.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait

import torch
from safetensors.torch import save_file

from lmcache_hs_backend.format.layout import temporary_name
from lmcache_hs_backend.integrations.vllm.paths import ERROR, LOCK, confined
from lmcache_hs_backend.integrations.vllm.worker_side.threads import DaemonThreads

logger = logging.getLogger(__name__)

#: The open lock file of a request, or None: it could not be opened, or there is to be none.
_Lock = Future[int | None]


class RequestFiles:
    """Locks and writes the files of requests. Called from one thread; works on others."""

    def __init__(self, roots: Sequence[str], threads: int, *, lock: bool) -> None:
        """Start the threads.

        Args:
            roots: Directories that files may be in, symbolic links resolved.
            threads: How many files are written at a time.
            lock: Whether to hold ``<path>.lock`` until a file is there.
        """
        self._roots = roots
        self._lock = lock
        self._locks: dict[str, _Lock] = {}  # by request id
        self._overdue: _Lock | None = None  # a lock that did not open in time: no call waits again until it does
        self._threads = DaemonThreads(threads, "hs-files")
        self._opening = DaemonThreads(1, "hs-locks")  # of its own: a lock must not queue after the writing of files

    def open_lock(self, req_id: str, path: str) -> None:
        """Begin to lock the file of a new request. Raises nothing that a request could cause."""
        if not self._lock or req_id in self._locks:
            return
        opened = self._locks[req_id] = _Lock()
        self._opening.submit(lambda: self._open_lock(req_id, path, opened))

    def wait_for_locks(self, req_ids: Iterable[str], deadline: float) -> None:
        """Wait until the locks of requests are held, until ``deadline`` (monotonic) at most.

        A disk that does not open a lock in time is not waited for again until it has.
        """
        if self._overdue is not None and not self._overdue.done():
            return
        self._overdue = None
        opening = [self._locks[req_id] for req_id in req_ids if req_id in self._locks]
        late = wait(opening, max(0.0, deadline - time.monotonic())).not_done
        if late:
            self._overdue = next(iter(late))
            logger.warning("hidden states: the locks of %d file(s) are not held yet, the disk is slow", len(late))

    def write(self, req_id: str, path: str, rows: Callable[[], torch.Tensor], ids: bytes) -> None:
        """Publish a file.

        Args:
            req_id: The request whose lock is released afterwards.
            path: Where the file is to be.
            rows: Gives ``[num_tokens, num_layers, hidden_dim]``. Called on a writing thread; may raise LookupError,
                whose text then is the reason why there is no file.
            ids: The token ids of the rows, int64.
        """
        lock = self._locks.pop(req_id, None)
        self._threads.submit(lambda: self._write(path, rows, ids, lock))

    def fail(self, req_id: str, path: str, problem: str) -> None:
        """There will be no file: leave a marker with the problem, or nothing at all when the text is empty."""
        lock = self._locks.pop(req_id, None)
        self._threads.submit(lambda: self._fail(path, problem, lock))

    def close(self, timeout: float) -> bool:
        """Finish what is under way and release the locks of other requests; False when that did not end in time."""
        deadline = time.monotonic() + timeout
        ended = self._opening.close(timeout)
        ended = self._threads.close(max(0.0, deadline - time.monotonic())) and ended
        while self._locks:
            _, lock = self._locks.popitem()
            if lock.done():
                self._release(lock.result())
        return ended

    # -- on a writing thread -----------------------------------------------------------------------------

    def _write(self, path: str, rows: Callable[[], torch.Tensor], ids: bytes, lock: _Lock | None) -> None:
        held = None if lock is None else lock.result()  # a client must not find the file before its lock
        directory, name = os.path.split(path)
        temporary = os.path.join(directory, temporary_name(name))
        try:
            if not confined(path, self._roots):  # it was when the request came: a directory has been moved since
                raise PermissionError(errno.EACCES, "outside the directories that files may lie in", path)
            os.makedirs(directory, exist_ok=True)
            token_ids = (
                torch.frombuffer(bytearray(ids), dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64)
            )
            save_file({"hidden_states": rows(), "token_ids": token_ids}, temporary)
            os.replace(temporary, path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting client has to learn of it
            logger.error("hidden states are not in %s: %s", path, error)
            if os.path.exists(temporary):
                os.unlink(temporary)
            self._mark(path, str(error))
        finally:
            self._release(held)

    def _fail(self, path: str, problem: str, lock: _Lock | None) -> None:
        held = None if lock is None else lock.result()
        try:
            if problem:
                logger.error("hidden states are not in %s: %s", path, problem)
                self._mark(path, problem)
            elif held is not None:
                os.unlink(path + LOCK)
        except OSError as error:
            logger.warning("%s%s stays: %s", path, LOCK, error)
        finally:
            self._release(held)

    def _mark(self, path: str, problem: str) -> None:
        """Leave ``<path>.error``, if the disk allows it; otherwise the missing file says enough."""
        marker = path + ERROR
        temporary = os.path.join(os.path.dirname(path), temporary_name(os.path.basename(marker)))
        try:
            if confined(path, self._roots):
                with open(temporary, "x") as file:
                    json.dump({"error": problem}, file)
                os.replace(temporary, marker)
        except OSError as error:
            logger.error("cannot leave %s: %s", marker, error)

    # -- locks -------------------------------------------------------------------------------------------

    @staticmethod
    def _open_lock(req_id: str, path: str, opened: _Lock) -> None:
        fd = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(path + LOCK, flags, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            logger.warning("hidden states of request %s: no lock beside %s: %s", req_id, path, error)
            if fd is not None:
                os.close(fd)
                fd = None
        finally:
            opened.set_result(fd)

    @staticmethod
    def _release(held: int | None) -> None:
        if held is not None:
            os.close(held)
