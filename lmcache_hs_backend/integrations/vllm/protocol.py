"""What the scheduler's half of the connector tells the worker's half, once per step.

Plain data that vLLM may pickle between processes. Blocks are numbers of the hidden-states cache group.
It imports no vLLM.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import ChunkRef

#: Workers of this process by engine. A scheduler in the same process hands finished requests over at once:
#: without vLLM's own engine process there is no further step after the last request, which would tell them.
workers_here: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class ReadyChunk(NamedTuple):
    """Rows that are final: those of one chunk. ``blocks`` hold tokens ``ref.start`` to ``ref.end``, in order.

    No blocks: the rows have been taken before.
    """

    req_id: str
    ref: ChunkRef
    ids: bytes  # the chunk's token ids, int64
    blocks: list[int]


class KeyInputs(NamedTuple):
    """What the names that LMCache gives to a request's chunks depend on, beside its tokens."""

    configs: dict[str, Any] | None  # the ``lmcache.…`` parameters of the request
    first_image: int | None  # the position of its first image placeholder


class RequestFile(NamedTuple):
    """The file of one request. ``problem``: there will be none, and why; empty text: nobody waits for it."""

    path: str
    ids: bytes  # token ids of its rows, from token 0 on
    blocks: list[int]
    problem: str | None = None


class Finish(NamedTuple):
    """A request has ended. ``refs``: all its chunks, when they go to the tiers; ``record``: see records."""

    req_id: str
    ready: list[ReadyChunk]
    refs: list[ChunkRef]
    record: dict[str, Any] | None
    file: RequestFile | None


@dataclass
class Step:
    """One scheduler step.

    ``written``: the blocks that this step's forward writes, and whether from their first token on.
    ``foreign``: blocks whose KV another connector loads, so that no forward ever writes their rows.
    ``open_chunks``: rows of requests that are preempted in this step; their blocks still hold them until its forward.
    ``named``: for LMCache's names, what is special about requests that are new.
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
