"""One file per request, as vLLM's ExampleHiddenStatesConnector writes it, for clients made for that.

A file is safetensors: ``hidden_states`` ``[num_tokens, num_layers, hidden_dim]`` in the model's dtype and
``token_ids`` int64 ``[num_tokens]``. Beside it lies ``<path>.lock``, locked before the client can know the
path and released when the file is there. Unlike the example's, files appear whole, by rename, and a
request without a file gets ``<path>.error``, JSON with an ``error`` text, before the lock is released.

A path that a client asks for is data from outside: it is used only inside the configured roots, symbolic
links resolved, and judged again when the file is written.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Sequence

import torch
from safetensors.torch import save_file

from lmcache_hs_backend.format.layout import temporary_name
from lmcache_hs_backend.integrations.vllm.paths import ERROR, LOCK, confined
from lmcache_hs_backend.integrations.vllm.worker_side.threads import DaemonThreads

logger = logging.getLogger(__name__)


class RequestFiles:
    """Locks and writes the files of requests. Called from one thread; writes on others."""

    def __init__(self, roots: Sequence[str], threads: int, *, lock: bool) -> None:
        self._roots = roots
        self._lock = lock
        self._locks: dict[str, int] = {}  # request id → open lock file
        self._threads = DaemonThreads(threads, "hs-files")

    def announce(self, req_id: str, path: str) -> None:
        """The client may soon know the path: hold its lock. Raises nothing that a request could cause."""
        if not self._lock or req_id in self._locks:
            return
        try:
            self._locks[req_id] = self._open_lock(path)
        except OSError as error:
            logger.warning("hidden states of request %s: no lock beside %s: %s", req_id, path, error)

    def write(self, req_id: str, path: str, rows: Callable[[], torch.Tensor], ids: bytes) -> None:
        """Publish a file. ``rows`` is called on a writing thread and may raise LookupError: no file, and why."""
        lock = self._locks.pop(req_id, None)
        self._threads.submit(lambda: self._write(path, rows, ids, lock))

    def fail(self, req_id: str, path: str, problem: str) -> None:
        """There will be no file: leave a marker, or, when nobody waits for it (empty text), nothing at all."""
        lock = self._locks.pop(req_id, None)
        self._threads.submit(lambda: self._fail(path, problem, lock))

    def close(self, timeout: float) -> bool:
        """Finish what is under way; False when that did not end in time. Locks of other requests go away."""
        ended = self._threads.close(timeout)
        while self._locks:
            self._release(self._locks.popitem()[1])
        return ended

    # -- on a writing thread -----------------------------------------------------------------------------

    def _write(self, path: str, rows: Callable[[], torch.Tensor], ids: bytes, lock: int | None) -> None:
        directory, name = os.path.split(path)
        temporary = os.path.join(directory, temporary_name(name))
        try:
            if not confined(path, self._roots):  # it was, when the request came: somebody moved a directory
                raise PermissionError(errno.EACCES, "outside the directories that files may lie in", path)
            os.makedirs(directory, exist_ok=True)
            token_ids = (
                torch.frombuffer(bytearray(ids), dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64)
            )
            save_file({"hidden_states": rows(), "token_ids": token_ids}, temporary)
            os.replace(temporary, path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client that waits must be told
            logger.error("hidden states are not in %s: %s", path, error)
            if os.path.exists(temporary):
                os.unlink(temporary)
            self._mark(path, str(error))
        finally:
            self._release(lock)

    def _fail(self, path: str, problem: str, lock: int | None) -> None:
        try:
            if problem:
                logger.error("hidden states are not in %s: %s", path, problem)
                self._mark(path, problem)
            elif lock is not None:
                os.unlink(path + LOCK)
        except OSError as error:
            logger.warning("%s%s stays: %s", path, LOCK, error)
        finally:
            self._release(lock)

    def _mark(self, path: str, problem: str) -> None:
        """Leave ``<path>.error``, if the disk lets us; the missing file tells the rest."""
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

    def _open_lock(self, path: str) -> int:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path + LOCK, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def _release(lock: int | None) -> None:
        if lock is not None:
            os.close(lock)
