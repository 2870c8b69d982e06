"""Between a GPU and the hot tier: ``python -m benchmarks.gpu``; it says so and ends where there is no GPU.

Device to host: ``store_hidden_states`` of rows on the device, straight into pinned slots. Host to device: a retrieve
into pinned memory and a non-blocking copy, alone and while the device computes. Beside each stands a bare non-blocking
copy of the same bytes between the device and pinned memory. Every byte is compared. Under three minutes; no LMCache is
needed, only the tiers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Result, WrongRows, times_table
from benchmarks.folders import folder
from benchmarks.measuring import Step, Times, interleaved, quotients
from benchmarks.report import show
from lmcache_hs_backend.chunk import ChunkRef, KeyedChunk, chunk_refs, token_bytes
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore

TITLE = "Device to host and back"

_CHUNK = 256


def _refs(chunks: int) -> tuple[list[ChunkRef], bytes]:
    ids = token_bytes(range(chunks * _CHUNK))
    keyed = [
        KeyedChunk(start, start + _CHUNK, f"org/bench@1@0@{start:x}@bfloat16", f"{start:x}", None)
        for start in range(0, chunks * _CHUNK, _CHUNK)
    ]
    return chunk_refs(keyed, ids), ids


def _until_done(call: Callable[[], object]) -> Callable[[], object]:
    """The call, and whatever it has started on the device."""

    def run() -> object:
        result = call()
        torch.cuda.synchronize()
        return result

    return run


class _Compute:
    """Matrix products on a stream of their own: what the copies are to overlap with."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def start(self, products: int) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(products):
                torch.mm(self._matrix, self._matrix)

    def products_lasting(self, seconds: float) -> int:
        """How many products take about so long."""
        self.start(10)
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.start(50)
        torch.cuda.synchronize()
        return max(1, int(50 * seconds / (time.perf_counter() - started)))


def measure(cold_path: str, chunks: int, hidden: int, rounds: int) -> Result:
    """Raises WrongRows when a byte differs."""
    result = Result(TITLE)
    tokens = chunks * _CHUNK
    refs, ids = _refs(chunks)
    nbytes = tokens * hidden * 2
    rows = torch.randn(tokens, hidden, device="cuda").bfloat16()
    back = torch.zeros_like(rows)
    pinned = torch.empty(tokens, hidden, dtype=rows.dtype, pin_memory=True)
    config = TieredConfig(
        cold_path=cold_path, max_cold_size=1, min_free_disk=0, write_back_sec=3600, clean_fraction=0
    )  # fmt: skip
    store = TieredStore(config, nbytes * 5 // 4, NamespaceId(model="org/bench", chunk_size=_CHUNK))
    try:
        result.notes.append(f"{torch.cuda.get_device_name()}; hot tier pinned: {'yes' if store.pin() else 'no'}.")
        compute = _Compute()

        def restore() -> None:
            back.copy_(store.retrieve(refs, [0], None)[0], non_blocking=True)

        def check() -> None:
            got = store.retrieve(refs, [0], None)[0]
            if not torch.equal(got, rows.cpu()):
                raise WrongRows("the rows that were stored from the device")
            back.zero_()
            restore()
            torch.cuda.synchronize()
            if not torch.equal(back, rows):
                raise WrongRows("the rows that were restored to the device")

        steps = {
            "device to pinned memory, bare": Step(_until_done(lambda: pinned.copy_(rows, non_blocking=True))),
            "store": Step(_until_done(lambda: store.store(refs, ids, {0: rows})), store.clear),
            "pinned memory to device, bare": Step(_until_done(lambda: back.copy_(pinned, non_blocking=True))),
            "retrieve and copy to device": Step(_until_done(restore)),
        }
        times = interleaved(steps, rounds, warmups=3)
        check()
        result.tables.append(times_table(f"{tokens:,} × {hidden} bfloat16", times, nbytes))
        _bare(result, times)
        _overlapped(result, compute, store, refs, ids, rows, restore, rounds)
        check()
    finally:
        store.clear()
        store.close()
    return result


def _bare(result: Result, times: Times) -> None:
    for key, bare, ours in (
        ("store", "device to pinned memory, bare", "store"),
        ("restore", "pinned memory to device, bare", "retrieve and copy to device"),
    ):
        result.figure(f"gpu.{key}", f"{ours}, share of the bare copy", quotients(times[bare], times[ours]))


def _overlapped(
    result: Result, compute: _Compute, store: TieredStore, refs: list[ChunkRef], ids: bytes, rows: torch.Tensor,
    restore: Callable[[], None], rounds: int,
) -> None:  # fmt: skip
    """How much longer compute takes with our copies beside it: 1 is a perfect overlap."""
    products = compute.products_lasting(0.05)
    steps = {
        "compute alone": Step(_until_done(lambda: compute.start(products))),
        "compute and store": Step(
            _until_done(lambda: (compute.start(products), store.store(refs, ids, {0: rows}))), store.clear
        ),
        "compute and restore": Step(_until_done(lambda: (compute.start(products), restore()))),
    }
    times = interleaved(steps, rounds)
    result.tables.append(times_table("beside compute on another stream", times))
    for key in ("store", "restore"):
        ratios = quotients(times[f"compute and {key}"], times["compute alone"])
        result.figure(f"gpu.overlap_{key}", f"compute and {key} at once, over compute alone", ratios)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the result there, as JSON")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.gpu: skipped, torch sees no CUDA device here")
        return 0
    started = time.monotonic()
    with folder(None) as path:
        try:
            result = measure(path, options.chunks, options.hidden, options.rounds)
        except WrongRows as wrong:
            print(f"benchmarks.gpu: WRONG ROWS: {wrong}", file=sys.stderr)
            return 1
    show("gpu", result, time.monotonic() - started)
    if options.out is not None:
        record: dict[str, Any] = result.to_json()
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
