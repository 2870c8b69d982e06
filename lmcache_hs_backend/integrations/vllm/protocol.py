"""What the scheduler's half of the connector sends the worker's half, once per step.

Plain data that vLLM may pickle between processes. Blocks are numbers of the hidden-states cache group.
It imports no vLLM.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import ChunkRef

#: The workers of this process, by engine id. A scheduler in the same process passes finished requests to its worker
#: at once: without vLLM's own engine process no further step follows the last request, which would carry them.
workers_here: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class ReadyChunk(NamedTuple):
    """A chunk whose rows are final. ``blocks`` hold tokens ``ref.start`` to ``ref.end``, in order.

    No blocks: the rows were copied before.
    """

    req_id: str
    ref: ChunkRef
    ids: bytes  # the chunk's token ids, int64
    blocks: list[int]


class KeyInputs(NamedTuple):
    """What LMCache's keys of a request's chunks depend on, beside its tokens."""

    configs: dict[str, Any] | None  # the ``lmcache.…`` parameters of the request
    first_image: int | None  # the position of its first image placeholder
    cache_salt: str = ""  # vLLM's own, which LMCache's MP server puts into keys


class RequestFile(NamedTuple):
    """The file of one request. ``problem``: there will be none, and why; empty text: no client waits for it."""

    path: str
    ids: bytes  # token ids of its rows, from token 0 on
    blocks: list[int]
    problem: str | None = None


class Finish(NamedTuple):
    """A request has ended.

    ``ready``: its last chunks; ``refs``: all its chunks, when they go to the tiers; ``record``: see the request log.
    """

    req_id: str
    ready: list[ReadyChunk]
    refs: list[ChunkRef]
    record: dict[str, Any] | None
    file: RequestFile | None


@dataclass
class Step:
    """One scheduler step.

    Attributes:
        tokens: How many tokens its forward computes.
        ready: Chunks whose rows are final after this step.
        finished: Requests that have ended since the step before.
        new_files: Request id and path of the files that clients may ask for from now on.
        written: The blocks that its forward writes, and whether from their first token on.
        foreign: Blocks whose KV another connector loads, so that no forward ever writes their rows.
        open_chunks: Rows of requests that are preempted in this step. Their blocks hold them until its forward.
        named: What LMCache's keys depend on, for new requests where that is more than tokens.
        preempted: Whether any request was preempted.
    """

    tokens: int = 0
    ready: list[ReadyChunk] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    new_files: dict[str, str] = field(default_factory=dict)
    written: list[tuple[int, bool]] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)
    open_chunks: list[ReadyChunk] = field(default_factory=list)
    named: dict[str, KeyInputs] = field(default_factory=dict)
    preempted: bool = False
