"""How much each subject measures: ``full`` for the documentation, ``quick`` for CI, ``tiny`` for the tests.

Only numbers. A figure means what the documentation says at ``full`` alone; the smaller sizes show that every subject
still runs and that the rows are right.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CallerCase:
    """One way in which a caller makes small calls; see subjects.callers."""

    hidden: int
    chunks: int
    layers: int = 3
    threads: int = 1
    busy: bool = False
    paced: bool = True
    room: bool = True


@dataclass(frozen=True, kw_only=True)
class Size:
    """``*_chunks`` and ``*_hidden`` describe prompts: chunks of ``chunk`` tokens, rows of ``hidden`` values."""

    name: str
    rounds: int
    chunk: int = 256
    chunks: int = 64
    hidden: int = 4096
    #: (chunks, hidden, layers, dtype) of the sweeps over hot and cold prompts, besides the main case.
    cases: tuple[tuple[int, int, int, str], ...]
    kept_results: int = 100
    depths: tuple[int, ...] = (1, 2, 4, 8)
    demoted_chunks: int = 256
    demote_rounds: int = 5
    first_row_calls: int = 300
    index_sizes: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    overhead_calls: int = 60
    open_files: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    zipf_hidden: int = 4096
    zipf_prefixes: int = 8
    zipf_documents: int = 56
    zipf_part_chunks: int = 8  # of a shared prefix, and of a document behind it
    zipf_requests: int = 400
    latency_blocks: int = 6
    latency_calls: int = 100  # per block
    latency_chunks: int = 4  # per call
    layer_cases: tuple[tuple[int, int], ...] = ((64, 576), (8, 576), (8, 4096), (1, 4096))  # (chunks, hidden)
    caller_cases: tuple[CallerCase, ...]
    caller_steps: int = 12
    threads: tuple[int, ...] = (1, 4, 16)
    thread_chunks: int = 8
    thread_calls: int = 24  # per round, over all threads

    @property
    def chunk_bytes(self) -> int:
        """Of one chunk's bfloat16 rows in the main case."""
        return self.chunk * self.hidden * 2


_SWEEP = (
    *((chunks, hidden, 1, "bfloat16") for hidden in (576, 4096, 8192) for chunks in (1, 4, 16, 64)),
    *((chunks, hidden, 1, "float32") for hidden in (576, 4096, 8192) for chunks in (1, 16, 64)),
    *((chunks, hidden, layers, "bfloat16") for hidden in (576, 4096) for layers in (4, 8) for chunks in (1, 16)),
)

_CALLER_SIZES = ((576, 1), (576, 4), (576, 16), (2048, 1), (2048, 4), (2048, 16), (3584, 4))
_CALLERS = (
    *(
        CallerCase(hidden=hidden, chunks=chunks, busy=busy)
        for busy in (False, True)
        for hidden, chunks in _CALLER_SIZES
    ),
    *(CallerCase(hidden=hidden, chunks=chunks, layers=1) for hidden, chunks in _CALLER_SIZES),
    *(CallerCase(hidden=hidden, chunks=chunks, threads=2) for hidden, chunks in _CALLER_SIZES),
    *(CallerCase(hidden=hidden, chunks=chunks, paced=False) for hidden, chunks in _CALLER_SIZES),
    *(CallerCase(hidden=hidden, chunks=4, room=False, busy=busy) for hidden in (576, 2048) for busy in (False, True)),
)

SIZES = {
    size.name: size
    for size in (
        Size(name="full", rounds=15, cases=_SWEEP, caller_cases=_CALLERS),
        Size(
            name="quick",
            rounds=3,
            chunks=32,
            cases=((1, 4096, 1, "bfloat16"), (16, 576, 1, "float32"), (4, 576, 4, "bfloat16")),
            caller_cases=(CallerCase(hidden=576, chunks=4), CallerCase(hidden=2048, chunks=1, busy=True)),
            caller_steps=10,
            kept_results=20,
            demoted_chunks=32,
            demote_rounds=2,
            first_row_calls=40,
            index_sizes=(1_000, 20_000),
            overhead_calls=20,
            open_files=(500, 2_000),
            zipf_hidden=1024,
            zipf_prefixes=4,
            zipf_documents=28,
            zipf_part_chunks=4,
            zipf_requests=60,
            latency_blocks=2,
            latency_calls=40,
            layer_cases=((32, 576), (1, 4096)),
            threads=(1, 4),
            thread_calls=8,
        ),
        Size(
            name="tiny",
            rounds=2,
            chunk=16,
            chunks=4,
            hidden=128,
            cases=((1, 128, 1, "float32"), (2, 128, 4, "bfloat16")),
            caller_cases=(CallerCase(hidden=128, chunks=2), CallerCase(hidden=128, chunks=1, busy=True, room=False)),
            caller_steps=4,
            kept_results=4,
            depths=(1, 2),
            demoted_chunks=8,
            demote_rounds=2,
            first_row_calls=4,
            index_sizes=(100, 1_000),
            overhead_calls=4,
            open_files=(50, 100),
            zipf_hidden=128,
            zipf_prefixes=2,
            zipf_documents=6,
            zipf_part_chunks=2,
            zipf_requests=16,
            latency_blocks=2,
            latency_calls=8,
            latency_chunks=2,
            layer_cases=((2, 128),),
            threads=(1, 2),
            thread_chunks=2,
            thread_calls=4,
        ),
    )
}
