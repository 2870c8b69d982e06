"""The worker's half of the connector: copies final rows off the device, and passes them on.

It runs on the engine's thread of the process that has the device, and only on the tensor-parallel rank that writes
(rank 0; all ranks have the same rows). Each step says which rows have become final; they are copied between two
forwards. It does no file I/O, and waits at most ``store_wait_ms`` per call: for room, or for the lock of a file.

Rows are read only where a forward has written them. Three things leave blocks of the cache without rows: KV that
another connector loads (the scheduler's half names those blocks), steps in which vLLM leaves the hidden states out
(its runner does when a request of the batch is too long for the "drafter"; with one length limit for both, as vLLM
sets it up, that should not happen), and sleep, which discards the cache. Such blocks are remembered until they are
written anew from their first token on, since vLLM's prefix cache gives them to later requests as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from lmcache_hs_backend.integrations.vllm.protocol import Finish, ReadyChunk, RequestFile, Step
from lmcache_hs_backend.integrations.vllm.worker_side.device import HiddenStatesCache, HostRows
from lmcache_hs_backend.integrations.vllm.worker_side.lmcache_engine import EngineChunks
from lmcache_hs_backend.integrations.vllm.worker_side.request_files import RequestFiles
from lmcache_hs_backend.integrations.vllm.worker_side.server_sink import ServerChunks, ServerSink
from lmcache_hs_backend.integrations.vllm.worker_side.sink import CaptureSink

logger = logging.getLogger(__name__)

_FILES_CLOSE_SEC = 30.0
_WARN_EVERY_SEC = 60.0


class Worker:
    """Copies rows out of one engine's cache. Called from the engine's thread only."""

    def __init__(
        self,
        cache: HiddenStatesCache,
        sink: CaptureSink | ServerSink | None,
        files: RequestFiles | None,
        engine: EngineChunks | ServerChunks | None = None,
        wait_sec: float = 0.5,
    ) -> None:
        """Set up, without starting anything.

        Args:
            cache: vLLM's cache of hidden states.
            sink: Where chunks go; None with ``emit: files``.
            files: Where one file per request goes; None with ``emit: tiers``.
            engine: Set when the sink's store is that of an LMCache engine or server; gives chunks their names there.
            wait_sec: How long one call of vLLM's may wait for room and for locks (``store_wait_ms``).
        """
        self.sink = sink
        self._engine = engine
        self._cache = cache
        self._files = files
        self._wait_sec = wait_sec
        self._unwritten: set[int] = set()  # blocks whose rows no forward has written
        self._wrote = False  # the hidden states of this step are in the cache
        self._copies: dict[str, list[torch.cuda.Event]] = {}  # request → copies that may still read its blocks
        self._ended: set[str] = set()  # finished requests whose blocks wait for their copies
        self._warned = 0.0
        self._deadline = 0.0

    def before_step(self, step: Step) -> None:
        """A forward is about to run: copy what preempted requests have in blocks that others will write.

        The locks of new requests' files are opened in the background, while the forward runs.
        """
        self._start_waiting()
        if self._files is not None:
            for req_id, path in step.new_files.items():
                self._files.open_lock(req_id, path)
        open_chunks = step.open_chunks
        if self._engine is not None:
            open_chunks = self._engine.open_chunks(open_chunks)
        for chunk in open_chunks:
            self._copy(chunk)
        if step.preempted:
            self._cache.protect()

    def wrote_hidden_states(self) -> None:
        """The forward of this step has put its hidden states into the cache."""
        self._wrote = True

    def after_step(self, step: Step) -> None:
        """The rows of a step are in the cache: copy what has become final.

        A client knows the path of its file after the request's first step at the earliest, so the lock is held by then.
        """
        self._start_waiting()
        self._update_unwritten_blocks(step)
        ready = step.ready
        if self._engine is not None:
            self._engine.name(step.named)
            ready = self._engine.renamed(ready)
        for chunk in ready:
            self._copy(chunk)
        self._wrote = False
        if self._files is not None and step.new_files:
            self._files.wait_for_locks(step.new_files, self._deadline)

    def finish(self, finish: Finish) -> bool:
        """A request has ended: copy its last rows.

        Returns:
            Whether its blocks are needed until ``pop_finished`` names it.
        """
        self._start_waiting()
        if self._engine is not None:
            finish = self._engine.finish(finish)
        for chunk in finish.ready:
            if chunk.blocks:
                self._copy(chunk)
        if finish.file is not None and self._files is not None:
            self._write_file(finish, finish.file, self._files)
        if self.sink is not None:
            self.sink.finish(finish)
        self._drop_arrived_copies(finish.req_id)
        if finish.req_id not in self._copies:
            return False
        self._ended.add(finish.req_id)
        return True

    def defer_free(self, req_id: str) -> None:
        """Have ``pop_finished`` name a finished request, whether or not copies of its rows are under way."""
        self._ended.add(req_id)

    def pop_finished(self) -> set[str]:
        """Finished requests whose blocks may be freed now. Each is named once."""
        for req_id in list(self._copies):
            self._drop_arrived_copies(req_id)
        done = {req_id for req_id in self._ended if req_id not in self._copies}
        self._ended -= done
        return done

    def release_cache(self) -> None:
        """The cache's memory is about to be given away (sleep, discard).

        Copies under way are waited for. No row is read from then on, not even after the memory is back, until a
        forward has written it: requests that ended before the sleep are reported after it.
        """
        self._cache.wait_for_copies()
        self._unwritten.update(range(self._cache.num_blocks))

    def close(self) -> None:
        """Finish what is under way. Idempotent."""
        if self._files is not None:
            if not self._files.close(_FILES_CLOSE_SEC):
                logger.warning("hidden states: not all files are written")
            self._files = None
        if self.sink is not None:
            self.sink.close()

    # -- inside ------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """vLLM has called: what the call may wait in all, however many chunks it has."""
        self._deadline = time.monotonic() + self._wait_sec

    def _update_unwritten_blocks(self, step: Step) -> None:
        self._unwritten.update(step.foreign)
        if not step.tokens:
            return
        if self._wrote:
            self._unwritten.difference_update(block for block, from_start in step.written if from_start)
            return
        self._unwritten.update(block for block, _ in step.written)
        if time.monotonic() > self._warned + _WARN_EVERY_SEC:
            self._warned = time.monotonic()
            logger.warning(
                "vLLM computed %d token(s) without their hidden states, as it does for a whole batch when one of its "
                "requests is too long for the drafter; those rows are missing",
                step.tokens,
            )

    def _copy(self, chunk: ReadyChunk) -> None:
        sink = self.sink
        if sink is None or not sink.needs_copy(chunk):
            return
        if not self._unwritten.isdisjoint(chunk.blocks):
            sink.count("not_computed")
            return
        num_tokens = chunk.ref.num_tokens
        nbytes = num_tokens * len(sink.positions) * self._cache.hidden_dim * self._cache.dtype.itemsize
        if sink.wait_for_capacity(nbytes, self._deadline):
            rows = self._cache.layers(chunk.blocks, chunk.ref.start, num_tokens, sink.positions)
            self._track_copy(chunk.req_id, rows)
            sink.put(chunk, rows, self._deadline)

    def _write_file(self, finish: Finish, file: RequestFile, files: RequestFiles) -> None:
        if file.problem is not None:
            files.fail(finish.req_id, file.path, file.problem)
            return
        num_tokens = len(file.ids) // 8
        source: Callable[[], torch.Tensor]
        if self._unwritten.isdisjoint(file.blocks):
            rows = self._cache.tokens(file.blocks, num_tokens)
            self._track_copy(finish.req_id, rows)
            source = lambda: rows.wait()[0]  # noqa: E731 - two sources of one type
        else:
            source = lambda: self._from_tiers(finish, num_tokens)  # noqa: E731
        files.write(finish.req_id, file.path, source, file.ids)

    def _from_tiers(self, finish: Finish, num_tokens: int) -> torch.Tensor:
        """Rows that this engine has not computed. Raises LookupError when the tiers do not have them all."""
        found = self.sink.rows(finish.refs) if self.sink is not None else {}
        have = min(rows.shape[0] for rows in found.values()) if len(found) == self._cache.num_layers else 0
        if have < num_tokens:
            raise LookupError(
                f"not covered: of the {num_tokens} tokens, some had KV from another connector, or were computed "
                f"without hidden states, or lost them when vLLM slept; the tiers have the rows of {have} of them"
            )
        return torch.stack([found[layer][:num_tokens] for layer in range(self._cache.num_layers)], dim=1)

    def _track_copy(self, req_id: str, rows: HostRows) -> None:
        if rows.arrived is not None:
            self._copies.setdefault(req_id, []).append(rows.arrived)

    def _drop_arrived_copies(self, req_id: str) -> None:
        under_way = [e for e in self._copies.get(req_id, ()) if not e.query()]  # type: ignore[no-untyped-call]
        if under_way:
            self._copies[req_id] = under_way
        else:
            self._copies.pop(req_id, None)
