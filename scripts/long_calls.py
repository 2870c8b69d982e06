"""What a call of one chunk waits for while another thread stores or retrieves a prompt of 4,096 chunks, over and over.

Usage: python scripts/long_calls.py [--seconds 4] [--chunks 4096] [--dir DIR]

One thread makes the long calls, another one a call of one chunk every 2 ms. A cold call reads what has just left RAM, a
store stores what has just been dropped. Prints p50, p99 and the maximum in ms, first without long calls. A chunk is one
page, so the long calls are nothing but the store's own work: the worst case. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import tempfile
import threading
import time
from collections.abc import Callable

import torch

from lmcache_hs_backend.chunk import Prompt
from lmcache_hs_backend.tiered import TieredStore

_TOKENS, _HIDDEN = 16, 128
_PAGE = _TOKENS * _HIDDEN * 2
_PAUSE_SEC = 0.002
_SMALL = 500


class Calls:
    """The calls of one size: hot, cold, and a store. Each returns what is to be timed, when all is prepared for it."""

    def __init__(self, store: TieredStore, prompts: list[Prompt]) -> None:
        self._store = store
        self._prompts = itertools.cycle(prompts)
        self._rows = {0: torch.randn(len(prompts[0].refs) * _TOKENS, _HIDDEN).bfloat16()}
        for prompt in prompts:
            self._stores(prompt)

    def hot(self) -> Callable[[], None]:
        """A retrieve from RAM."""
        prompt = next(self._prompts)
        self._retrieves(prompt)
        return lambda: self._retrieves(prompt)

    def cold(self) -> Callable[[], None]:
        """A retrieve from disk."""
        prompt = next(self._prompts)
        self._retrieves(prompt)
        names = [ref.name for ref in prompt.refs]
        while self._store.demote(names) < len(names):
            self._store.flush(60)
            self._retrieves(prompt)
        return lambda: self._retrieves(prompt)

    def store(self) -> Callable[[], None]:
        """A store of new rows."""
        prompt = next(self._prompts)
        self._store.drop([ref.name for ref in prompt.refs])
        return lambda: self._stores(prompt)

    def _retrieves(self, prompt: Prompt) -> None:
        tokens = len(self._store.retrieve(prompt.refs, [0], None).get(0, ()))
        if tokens != len(prompt.refs) * _TOKENS:
            raise SystemExit(f"{tokens} of {len(prompt.refs) * _TOKENS} tokens: {self._store.stats()}")

    def _stores(self, prompt: Prompt) -> None:
        kept = self._store.store(*prompt, self._rows)
        if kept != len(prompt.refs):
            raise SystemExit(f"{kept} of {len(prompt.refs)} chunks: {self._store.stats()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row")
    parser.add_argument("--chunks", type=int, default=4096, help="of the long prompt")
    parser.add_argument("--dir", help="where the cold tier goes")
    options = parser.parse_args()
    torch.set_num_threads(2)
    pool = 3 * (options.chunks + _SMALL) * _PAGE / 2**30
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as path,
        TieredStore.open(
            path, model="m", chunk_size=_TOKENS, hot_size=pool, min_free_disk=0, read_timeout_sec=60
        ) as store,
    ):
        numbers = itertools.count(1)

        def prompts(count: int, chunks: int) -> list[Prompt]:
            return [store.prompt([next(numbers), *range(1, chunks * _TOKENS)]) for _ in range(count)]

        small, long = Calls(store, prompts(_SMALL, 1)), Calls(store, prompts(1, options.chunks))
        store.flush(120)
        gc.collect()
        gc.freeze()  # as vLLM does; a full collection stops every thread for a third of a second
        print(f"{'long call':>10} {'small call':>10} {'calls':>6} {'p50':>8} {'p99':>8} {'max':>8}")
        for beside in (None, long.hot, long.cold, long.store):
            for call in (small.hot, small.cold, small.store):
                waits = sorted(_measure(call, beside, options.seconds))
                p50, p99, most = (waits[int(share * (len(waits) - 1))] * 1e3 for share in (0.5, 0.99, 1))
                name = beside.__name__ if beside else "none"
                print(f"{name:>10} {call.__name__:>10} {len(waits):6} {p50:8.2f} {p99:8.2f} {most:8.2f}", flush=True)
        store.clear()


def _measure(
    call: Callable[[], Callable[[], None]], beside: Callable[[], Callable[[], None]] | None, seconds: float
) -> list[float]:
    over = threading.Event()

    def long_calls() -> None:
        while beside is not None and not over.is_set():
            beside()()

    thread = threading.Thread(target=long_calls)
    thread.start()
    waits = []
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until and (thread.is_alive() or beside is None):
            timed = call()
            time.sleep(_PAUSE_SEC)
            started = time.perf_counter()
            timed()
            waits.append(time.perf_counter() - started)
    finally:
        over.set()
        thread.join()
    return waits


if __name__ == "__main__":
    main()
