"""A stream of prompts that share prefixes, by Zipf's law, with RAM for a quarter of what they need.

Each request restores what is there and stores what is missing, as an engine would, on ours and on upstream's in turn,
with the same RAM. Upstream's hit rate is what RAM alone gives; a cache without any limit says what there is to hit.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

import torch

from benchmarks.context import Context
from benchmarks.disk import RawDisk, leave_page_cache, takes_direct
from benchmarks.figures import Result, Table
from benchmarks.measuring import median
from benchmarks.workload import Stores, expect, huge_rows
from lmcache_hs_backend.tiers.memory.copies import alone, copy_alone

TITLE = "Zipf stream, pool of a quarter"

_SAMPLES = 12
_BANK = 16  # different chunks of rows; a chunk has those of its number modulo this


class _Prompts:
    """Documents behind a few shared prefixes, drawn by Zipf's law with exponent 1."""

    def __init__(self, context: Context) -> None:
        size = context.size
        self._rng = random.Random(7)
        self.part = size.zipf_part_chunks
        self._chunk = size.chunk
        self._bank = torch.randn(_BANK, size.chunk, size.zipf_hidden).bfloat16()
        self._prefix_of = [self._rng.randrange(size.zipf_prefixes) for _ in range(size.zipf_documents)]
        self._weights = [1 / (rank + 1) for rank in range(size.zipf_documents)]
        self.chunks = (len(set(self._prefix_of)) + size.zipf_documents) * self.part

    def draw(self) -> tuple[list[int], torch.Tensor]:
        """Token ids and rows of the next prompt."""
        (document,) = self._rng.choices(range(len(self._weights)), self._weights)
        prefix = self._prefix_of[document]
        half = self.part * self._chunk
        ids = [prefix + 1] * half + [1000 + document] * half
        numbers = [(prefix + n) % _BANK for n in range(self.part)] + [
            (document + 3 * n) % _BANK for n in range(self.part)
        ]
        return ids, self._bank[numbers].reshape(2 * half, -1)


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    prompts = _Prompts(context)
    nbytes = size.chunk * size.zipf_hidden * 2
    pool = max(prompts.chunks * nbytes // 4, 2 * prompts.part * nbytes * 2)
    memory = _Ram(pool, 2 * prompts.part * size.chunk, size.zipf_hidden)
    ram: list[float] = []  # bytes of float32 per second, as copied
    raw: dict[int, list[float]] = {depth: [] for depth in size.depths}
    asked = unlimited = 0
    hits = {"upstream": 0, "ours": 0}
    spent = {"upstream": 0.0, "ours": 0.0}
    restores: list[tuple[float, float, float]] = []  # seconds, hot bytes, cold bytes
    bare: list[tuple[float, float, float]] = []  # the same of a bare loop
    seen: set[bytes] = set()
    with context.folder() as path:
        settings = {"write_back_sec": 30, "clean_fraction": 0.25, "store_wait_ms": 5000}
        with Stores(os.path.join(path, "cold"), size.chunk, pool, pool, **settings) as stores:
            limits: RawDisk | None = None
            files: list[str] = []
            for number in range(size.zipf_requests):
                ids, rows = prompts.draw()
                chunks = len(ids) // size.chunk
                asked += chunks
                names = [key.to_string().encode() for key in stores.keys(ids)]
                unlimited += sum(name in seen for name in names)
                seen.update(names)

                started = time.perf_counter()
                got = stores.upstream.retrieve_hidden_states(ids)
                spent["upstream"] += time.perf_counter() - started
                found = 0 if got is None else len(got) // size.chunk
                hits["upstream"] += found
                if found < chunks:
                    stores.upstream.store_hidden_states(ids, rows)
                del got

                before = stores.ours.stats()
                started = time.perf_counter()
                mine = stores.ours.retrieve_hidden_states(ids)
                seconds = time.perf_counter() - started
                after = stores.ours.stats()
                spent["ours"] += seconds
                found = 0 if mine is None else len(mine) // size.chunk
                hits["ours"] += found
                if mine is not None:
                    expect(mine, rows[: len(mine)], "Zipf stream")
                    parts = [float(after[name]) - float(before[name]) for name in ("hits_hot", "hits_cold")]
                    restores.append((seconds, parts[0] * nbytes, parts[1] * nbytes))
                if found < chunks:
                    stores.ours.store_hidden_states(ids, rows)
                del mine

                if number % max(1, size.zipf_requests // _SAMPLES) == 0:
                    ram.append(memory.rate())
                    if not files and len(stores.files()) >= 2 * prompts.part:
                        files = stores.files()[: 2 * prompts.part]
                        direct = takes_direct(path)
                        limits = RawDisk(size.depths, os.path.getsize(files[0]), len(files), direct=direct)
                    if limits is not None:
                        files = [file for file in files if os.path.exists(file)]
                        _disk_rates(limits, files, nbytes, raw)
                        half = files[len(files) // 2 :]
                        bare.append(memory.half_from_disk(limits, half, size.depths[-2], size.chunk))
            if limits is not None:
                limits.close()

    infinite = unlimited / asked
    table = Table(
        f"{size.zipf_requests} requests, {prompts.chunks} chunks of {nbytes / 2**20:g} MiB, RAM for a quarter",
        ["", "hit rate", "ms per request, restore"],
        [["a cache without limit", f"{infinite:.3f}", ""]],
    )
    for name in hits:
        milliseconds = spent[name] / size.zipf_requests * 1e3
        table.rows.append([name, f"{hits[name] / asked:.3f}", f"{milliseconds:.1f}"])
    result.tables.append(table)
    result.figure(
        "zipf.hit_rate", "hit rate, share of a cache without limit", [hits["ours"] / max(1, unlimited)], at_least=0.99
    )
    result.figure(
        "zipf.hits_vs_upstream", "hits, times upstream's", [hits["ours"] / max(1, hits["upstream"])], at_least=1.0
    )
    if restores and any(raw.values()):
        disk_rate = max(median(rates) for rates in raw.values() if rates)
        bounds = [max(2 * hot / median(ram), cold / disk_rate) for _, hot, cold in restores]
        taken = sum(seconds for seconds, _, _ in restores)
        result.figure(
            "zipf.restore", "mean restore time over max(hot part at RAM speed, cold part at disk speed)",
            [taken / sum(bounds)], at_most=1.3,
        )  # fmt: skip
        bare_bounds = [max(2 * hot / median(ram), cold / disk_rate) for _, hot, cold in bare]
        result.figure(
            "zipf.restore_limit", "… the limit: of a prompt that is half hot, by a bare loop",
            [seconds / bound for (seconds, _, _), bound in zip(bare, bare_bounds, strict=True)],
        )  # fmt: skip
        settled = slice(len(restores) // 2, None)
        result.figure(
            "zipf.restore_settled", "the same in the second half of the stream",
            [sum(seconds for seconds, _, _ in restores[settled]) / sum(bounds[settled])],
        )  # fmt: skip
        cold = sum(c for _, _, c in restores) / max(1.0, sum(h + c for _, h, c in restores))
        result.notes.append(
            f"Of the bytes restored, {cold:.0%} came from disk. RAM {median(ram) / 1e9:.1f} GB/s of float32, "
            f"raw disk {disk_rate / 1e9:.2f} GB/s."
        )
    return result


class _Ram:
    """As much memory as the pool has, in huge pages too. Each sample copies what was left alone the longest."""

    def __init__(self, nbytes: int, tokens: int, hidden: int) -> None:
        self._rows = huge_rows(nbytes // (2 * hidden), hidden, torch.bfloat16)
        self._wide = huge_rows(tokens, hidden, torch.float32)
        self._next = 0

    def rate(self) -> float:
        """Bytes of float32 per second."""
        rows = self._take(len(self._wide))
        started = time.perf_counter()
        self._wide.copy_(rows)
        return self._wide.numel() * 4 / (time.perf_counter() - started)

    def _take(self, tokens: int) -> torch.Tensor:
        if self._next + tokens > len(self._rows):
            self._next = 0
        self._next += tokens
        return self._rows[self._next - tokens : self._next]

    def half_from_disk(self, disk: RawDisk, files: Sequence[str], depth: int, chunk: int) -> tuple[float, float, float]:
        """A prompt of which the second half is on disk, by a bare loop: its seconds, and the bytes of both halves."""
        tokens, hidden = len(files) * chunk, self._rows.shape[1]
        nbytes = tokens * hidden * 2
        rows = self._take(tokens)

        def use(number: int) -> None:
            target = self._wide[tokens + number * chunk : tokens + (number + 1) * chunk]
            disk.check_and_copy(number, [target], torch.bfloat16)

        leave_page_cache(files)
        started = time.perf_counter()
        with alone():
            disk.read_and(files, depth, use, lambda: copy_alone(self._wide[:tokens], rows))
        return time.perf_counter() - started, nbytes, nbytes


def _disk_rates(limits: RawDisk, files: list[str], nbytes: int, rates: dict[int, list[float]]) -> None:
    for depth, found in rates.items():
        leave_page_cache(files)
        started = time.perf_counter()
        limits.read(files, depth)
        found.append(len(files) * nbytes / (time.perf_counter() - started))
