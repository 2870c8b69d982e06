"""vLLM's file tier as a peer: a child process of an interpreter that has vLLM, and the program that runs in it.

vLLM brings its own environment and takes many seconds to import, so its I/O (``vllm/v1/kv_offload/tiering/fs/io.py``)
is driven over a pipe and timed where it runs. The child imports nothing of this project.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from typing import Any


class VllmFiles:
    """Blocks of equal size, stored and loaded as vLLM's file tier does it. Use as a context manager."""

    def __init__(self, python: str, directory: str, block_bytes: int, blocks: int) -> None:
        """``python`` is an interpreter that can import vLLM. Raises RuntimeError when it cannot."""
        arguments = [python, os.path.abspath(__file__), directory, str(block_bytes), str(blocks)]
        self._child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.native: bool = self._answer()["native"]
        except RuntimeError:
            self.close()
            raise

    def __enter__(self) -> VllmFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def store(self, threads: int) -> float:
        """Seconds to write all blocks; former files are removed before the clock starts."""
        return float(self._ask("store", threads)["seconds"])

    def load(self, threads: int) -> float:
        """Seconds to read all blocks."""
        return float(self._ask("load", threads)["seconds"])

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)

    def _ask(self, what: str, threads: int) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": what, "threads": threads}) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the process with vLLM's file tier has ended; its own output says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(directory: str, block_bytes: int, blocks: int) -> None:
    """The child: answers one JSON line for each that it gets."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints must not come between our answers
    from vllm.v1.kv_offload.tiering.fs import io

    direct = io.probe_o_direct(directory)
    # Memory and contents as favourable, and as hard to compress, as those that it is compared with.
    memory = mmap.mmap(-1, block_bytes * blocks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    noise = os.urandom(block_bytes - 1)
    for block in range(blocks):
        view[block * block_bytes : (block + 1) * block_bytes] = bytes([block % 251 + 1]) + noise
    paths = [os.path.join(directory, f"block-{block}") for block in range(blocks)]
    move = {"store": io.batch_store_block, "load": io.batch_load_block}

    def run(what: str, threads: int) -> float:
        numbers = itertools.count()

        def some() -> None:
            while (block := next(numbers)) < blocks:
                move[what]([paths[block]], view, [block * block_bytes], block_bytes, direct)

        workers = [threading.Thread(target=some) for _ in range(threads)]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - started

    print(json.dumps({"native": io._HAS_FSIO_C, "direct": direct}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "store":
            for path in paths:
                if os.path.exists(path):
                    os.unlink(path)
        seconds = run(order["do"], order["threads"])
        wrong = [b for b in range(blocks) if view[b * block_bytes] != b % 251 + 1]
        if wrong:
            raise SystemExit(f"blocks {wrong} came back wrong")
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
