"""The scheduler's half of the connector: which rows are final, step by step, and what a request was.

It follows each request's tokens and blocks, and sends the worker's half each chunk that is complete. It holds no rows
and does no I/O. It imports no vLLM: requests and scheduler outputs are vLLM's, by duck typing.

A row is final when its token is known and a forward has seen it. Tokens that are only proposed (the
``extract_hidden_states`` method proposes one per step) are not known yet, and their rows are overwritten when they
turn out wrong, so nothing beyond the known tokens is ever copied.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_hs_backend.chunk import ChunkRef
from lmcache_hs_backend.format.request_log import client_fields
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat
from lmcache_hs_backend.integrations.vllm.paths import confined, default_path
from lmcache_hs_backend.integrations.vllm.protocol import Finish, KeyInputs, ReadyChunk, RequestFile, Step
from lmcache_hs_backend.integrations.vllm.scheduler_side.sequence import ChunkedSequence, images_of
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Tracked:
    """A request that has been scheduled, or is about to be."""

    request: Any
    sequence: ChunkedSequence | None  # None: its rows go to no tier
    blocks: list[int] = field(default_factory=list)
    started: bool = False  # rows have been computed for it
    has_new_blocks: bool = True  # its blocks are of this step: it starts, or goes on after a preemption
    end: int = 0  # tokens whose rows are final after the last step
    preempted_chunk: ReadyChunk | None = None  # its open chunk, copied when it was preempted
    path: str = ""


class RequestTracker:
    """Follows the requests of one engine."""

    def __init__(
        self,
        settings: ConnectorSettings,
        key_format: KeyFormat,
        group: int,
        block_size: int,
        finish_here: Callable[[Finish], bool | None],
    ) -> None:
        """Start with no requests.

        Args:
            settings: The connector's.
            key_format: How chunks are named.
            group: Which of vLLM's cache groups holds the hidden states.
            block_size: Tokens in a block of that group.
            finish_here: Passes a finished request to the worker of this process, and returns whether its blocks are
                still needed; None when this process has no worker.
        """
        self._settings = settings
        self._key_format = key_format
        self._group = group
        self._block_size = block_size
        self._finish_here = finish_here
        self._tracked: dict[str, _Tracked] = {}
        self._local: dict[str, int] = {}  # request → tokens found in vLLM's own prefix cache
        self._finished: list[Finish] = []

    def found_locally(self, request: Any, num_tokens: int) -> None:
        """vLLM's own prefix cache has the first ``num_tokens`` of a request that is about to start."""
        self._local[request.request_id] = num_tokens

    def allocated(self, request: Any) -> None:
        """A request has got blocks: it starts, or starts again."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self._tracked[request.request_id] = _Tracked(request, self._sequence(request))
        else:
            tracked.has_new_blocks = True
            if tracked.sequence is not None:  # a further input of a session may have brought some
                tracked.sequence.images = images_of(request.mm_features)

    def reset(self) -> None:
        """The rows in the cache are about to go: give up those of chunks that are not complete yet.

        Requests that have ended, but whose end no step has carried to the worker, lose their last rows likewise: it
        would read them from memory that may be gone by then.
        """
        for n, finish in enumerate(self._finished):
            self._finished[n] = _without_cache(finish)
        for tracked in self._tracked.values():
            if tracked.sequence is not None and tracked.end > tracked.sequence.end:
                logger.info(
                    "request %s: the rows of tokens %d to %d were given up with the cache",
                    tracked.request.request_id, tracked.sequence.end, tracked.end,
                )  # fmt: skip
                tracked.end = tracked.sequence.end

    def step(self, output: Any) -> Step:
        """What the worker needs to know about a step that is about to run."""
        step = Step(tokens=output.total_num_scheduled_tokens, preempted=bool(output.preempted_req_ids))
        step.finished, self._finished = self._finished, []
        for req_id in output.preempted_req_ids or ():
            self._copy_open_chunk(req_id, step)  # before new blocks take the place of those that it has lost
        self._follow_blocks(output, step)
        for req_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(req_id)
            if tracked is not None:
                self._follow(req_id, tracked, scheduled, step)
        return step

    def finish(self, request: Any, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; its ``blocks`` still hold its rows.

        Returns:
            Whether they are still needed, and the ``kv_transfer_params`` that its client gets.
        """
        req_id = request.request_id
        self._local.pop(req_id, None)
        tracked = self._tracked.pop(req_id, None)
        if tracked is None or not tracked.started:
            return False, None
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        if tracked.has_new_blocks:  # it has blocks, perhaps with another connector's KV, but has not run
            computed = 0
        end = min(computed, request.num_tokens - 1)
        ready: list[ReadyChunk] = []
        refs: list[ChunkRef] = []
        record = None
        answer: dict[str, Any] = {}
        if tracked.sequence is not None:
            ready = self._last_chunks(tracked, tracked.sequence, end, blocks)
            refs = tracked.sequence.refs + [chunk.ref for chunk in ready if not chunk.blocks]
            record = self._record(request, max([end, *(ref.end for ref in refs[-1:])]))
            if refs and not self._settings.to_server:  # which names chunks in its own way
                answer["hidden_states_last_chunk"] = refs[-1].chunk_hash
        elif self._settings.to_tiers:
            answer["hidden_states_not_covered"] = _other_inputs(request)
        file = self._file(tracked, end, blocks) if tracked.path else None
        if file is not None:
            answer["hidden_states_path"] = file.path
        finish = Finish(req_id, ready, refs, record, file)
        needed = self._finish_here(finish)
        if needed is None:
            self._finished.append(finish)
        return needed is not False, answer or None

    # -- inside ------------------------------------------------------------------------------------------

    def _sequence(self, request: Any) -> ChunkedSequence | None:
        if not self._settings.to_tiers:
            return None
        beside = _other_inputs(request)
        if beside:
            logger.info("the rows of request %s go to no tier: %s", request.request_id, beside)
            return None
        return ChunkedSequence(self._key_format, self._settings.chunk_size, images_of(request.mm_features))

    def _follow_blocks(self, output: Any, step: Step) -> None:
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is None:
                continue
            tracked.blocks = list(new.block_ids[self._group])
            key_inputs = _key_inputs(tracked.request)
            if key_inputs is not None:
                step.named[new.req_id] = key_inputs
            if self._settings.to_files and not tracked.path:  # a resumed request may come as new again
                tracked.path = step.new_files[new.req_id] = self._path(tracked.request)
        cached = output.scheduled_cached_reqs
        for req_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracked = self._tracked.get(req_id)
            if tracked is None or new_blocks is None:
                continue
            if req_id in cached.resumed_req_ids:
                tracked.blocks = list(new_blocks[self._group])
            else:
                tracked.blocks.extend(new_blocks[self._group])

    def _follow(self, req_id: str, tracked: _Tracked, scheduled: int, step: Step) -> None:
        request, size = tracked.request, self._block_size
        computed = request.num_computed_tokens  # before this step
        end = computed + scheduled
        tracked.started = True
        if tracked.has_new_blocks:
            tracked.has_new_blocks = False
            local = self._local.pop(req_id, computed)
            step.foreign += self._blocks(tracked.blocks, local, computed)
        # With asynchronous scheduling "computed" counts proposed tokens that may yet be rejected: begin before them.
        begin = max(0, computed - request.num_in_flight_tokens)
        written = self._blocks(tracked.blocks, begin, end)
        step.written += [(block, (begin // size + n) * size >= computed) for n, block in enumerate(written)]
        tracked.end = min(end, request.num_tokens)
        if tracked.sequence is not None:
            for ref, ids in tracked.sequence.advance(request.all_token_ids, tracked.end):
                step.ready.append(ReadyChunk(req_id, ref, ids, self._blocks(tracked.blocks, ref.start, ref.end)))

    def _copy_open_chunk(self, req_id: str, step: Step) -> None:
        """A request loses its blocks. It may never run again, so the rows that no full chunk has are copied now."""
        tracked = self._tracked.get(req_id)
        if tracked is None or tracked.sequence is None or tracked.end <= tracked.sequence.end:
            return
        ref, ids = tracked.sequence.open_chunk(tracked.request.all_token_ids, tracked.end)
        step.open_chunks.append(ReadyChunk(req_id, ref, ids, self._blocks(tracked.blocks, ref.start, ref.end)))
        tracked.preempted_chunk = step.open_chunks[-1]._replace(blocks=[])

    def _last_chunks(
        self, tracked: _Tracked, sequence: ChunkedSequence, end: int, blocks: Sequence[int]
    ) -> list[ReadyChunk]:
        """What is left of a request that has ended after ``end`` tokens, which lie in ``blocks``."""
        end, preempted = max(end, sequence.end), tracked.preempted_chunk
        if preempted is not None and preempted.ref.end > end:  # it has not run far enough since
            return [preempted]
        req_id = tracked.request.request_id
        return [
            ReadyChunk(req_id, ref, ids, self._blocks(blocks, ref.start, ref.end))
            for ref, ids in sequence.close(tracked.request.all_token_ids, end)
        ]

    def _blocks(self, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """The blocks that hold tokens ``start`` to ``end``."""
        return list(blocks[start // self._block_size : -(-end // self._block_size)]) if start < end else []

    def _path(self, request: Any) -> str:
        settings = self._settings
        default = default_path(settings.shared_storage_path, request.request_id)
        asked = (request.kv_transfer_params or {}).get("hidden_states_path")
        if asked is None:
            return default
        if not settings.allow_custom_save_path:
            reason = "allow_custom_save_path is off"
        elif confined(asked, settings.save_roots):
            return str(asked)
        else:
            reason = f"it must be an absolute path inside {', '.join(settings.save_roots)}"
        logger.warning(
            "request %s: hidden_states_path is ignored (%s), %s is used", request.request_id, reason, default
        )
        return default

    def _file(self, tracked: _Tracked, end: int, blocks: Sequence[int]) -> RequestFile:
        request = tracked.request
        if (request.kv_transfer_params or {}).get("include_output_tokens", False):
            # Not the last token: it was sampled, and no forward has seen it.
            token_ids = list(request.all_token_ids)[:-1]
        else:
            token_ids = list(request.prompt_token_ids or ())
        problem = None
        if _reason(request) == "abort":
            problem = ""  # its client has gone
        elif len(token_ids) > end:
            problem = f"the request ended ({_reason(request)}) after {end} of {len(token_ids)} tokens"
        ids = array("q", token_ids).tobytes()
        return RequestFile(tracked.path, ids, self._blocks(blocks, 0, len(token_ids)), problem)

    def _record(self, request: Any, end: int) -> dict[str, Any]:
        return {
            "request_id": request.request_id,
            "prompt_tokens": request.num_prompt_tokens,
            "generated_tokens": request.num_output_tokens,
            "expected_tokens": end,
            "finish_reason": _reason(request),
            **_said_by_client(request),
        }


def _without_cache(finish: Finish) -> Finish:
    """The end of a request, without what would have to be read from the cache."""
    refs = {chunk.ref for chunk in finish.ready if chunk.blocks}
    file = finish.file
    if file is not None and file.blocks and file.problem is None:
        file = file._replace(problem="vLLM gave the cache away before its rows were copied")
    return finish._replace(
        ready=[chunk for chunk in finish.ready if not chunk.blocks],
        refs=[ref for ref in finish.refs if ref not in refs],
        file=file,
    )


def _reason(request: Any) -> str:
    return str(request.get_finished_reason())


def _said_by_client(request: Any) -> dict[str, Any]:
    """What the client wants its record to say: data from outside, left out with a warning when it is malformed."""
    try:
        return client_fields((request.kv_transfer_params or {}).get("hidden_states_record"))
    except ValueError as error:
        logger.warning("request %s: hidden_states_record is ignored: %s", request.request_id, error)
        return {}


def _other_inputs(request: Any) -> str:
    """What a request's rows depend on that its tokens do not tell, in words; empty for nothing."""
    if request.prompt_embeds is not None:
        return "the prompt is embeddings, not tokens"
    if request.lora_request is not None:
        return "a LoRA adapter computes other rows for the same tokens"
    return ""


def _key_inputs(request: Any) -> KeyInputs | None:
    """None when LMCache names the chunks of a request by its tokens alone."""
    params = request.kv_transfer_params or {}
    configs = {key: value for key, value in params.items() if isinstance(key, str) and key.startswith("lmcache.")}
    images = images_of(request.mm_features)
    salt = getattr(request, "cache_salt", None) or ""
    if not configs and not images and not salt:
        return None
    return KeyInputs(configs or None, min((image.start for image in images), default=None), salt)
