"""Start over many files: how soon a recovered chunk is served, and how long the headers take in the background.

The constructor returns at once, a chunk can be served as soon as the scan has found its file.

The kernel's caches are emptied before each start where that is allowed, those for directories and inodes too. The limit
is a bare scan of the same tree: names, and the stat that their sizes need.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from xxhash import xxh3_64_hexdigest

from benchmarks import disk
from benchmarks.context import Context
from benchmarks.figures import Result, Series, Table, WrongRows
from benchmarks.measuring import median, spread
from benchmarks.workload import wait_until
from lmcache_hs_backend.chunk import ChunkMeta, ChunkRef, LayerSpec, chunk_name
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.header import build_preamble, layer_tensor
from lmcache_hs_backend.format.layout import chunk_path
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore

TITLE = "Open"

_TOKENS, _HIDDEN = 8, 8
IDENT = NamespaceId(model="org/bench", chunk_size=_TOKENS)


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    table = Table(
        "seconds from nothing (medians)",
        ["files", "bare scan + stat", "constructor", "a recovered chunk served", "all headers read"],
        [],
    )
    series = Series("Open", "files", "seconds", [], {"bare scan + stat": [], "first chunk served": []}, log_y=True)
    emptied = True
    for count in size.open_files:
        with context.folder() as path:
            config = TieredConfig(cold_path=path, max_cold_size=16, min_free_disk=0)
            store = TieredStore(config, 1 << 20, IDENT)
            store.close()
            refs = list(make_files(store.directory, count))
            rounds = min(5, size.rounds) if count <= 10_000 else 3 if count <= 100_000 else 1
            scans, built, served, read = [], [], [], []
            for number in range(rounds):
                emptied = disk.drop_caches() and emptied
                scans.append(bare_scan(store.directory))
                emptied = disk.drop_caches() and emptied
                started = time.perf_counter()
                store = TieredStore(config, 1 << 20, IDENT)
                built.append(time.perf_counter() - started)
                serve_once(store, refs[number * 997 % count])
                served.append(time.perf_counter() - started)
                wait_until(lambda s=store: s.wait_recovered(0), 3600)
                read.append(time.perf_counter() - started)
                if len(store) != count:
                    raise WrongRows(f"{len(store)} of {count} files were recovered")
                store.close()
        table.rows.append([f"{count:,}", *(f"{median(values):.3f}" for values in (scans, built, served, read))])
        series.x.append(float(count))
        for line, values in zip(series.lines.values(), (scans, served), strict=True):
            line.append(median(values))
        if count == 100_000:
            result.figure("open.100k", "100,000 files, first chunk served", spread(served), unit="s", at_most=1.5)
        if count == size.open_files[-1]:
            ratios = [a / b for a, b in zip(served, scans, strict=True)]
            result.figure("open.vs_scan", f"{count:,} files, first chunk served, over a bare scan", ratios)
    if not emptied:
        result.notes.append("The kernel's caches could not be emptied (that takes root): these are warm starts.")
    result.tables.append(table)
    result.series.append(series)
    return result


def make_files(directory: str, count: int) -> Iterator[ChunkRef]:
    """Valid chunk files of one tiny chunk each."""
    spec = LayerSpec(0, "BF16", _HIDDEN)
    rows, ids = bytes(spec.nbytes(_TOKENS)), bytes(_TOKENS * 8)
    sums = {"token_ids": xxh3_64_hexdigest(ids), layer_tensor(0): xxh3_64_hexdigest(rows)}
    made = set()
    for number in range(count):
        key = f"org/bench@1@0@{number:x}@bfloat16"
        name, prefix = chunk_name(key), number.to_bytes(16, "little")
        meta = ChunkMeta(key, f"{number:x}", "", prefix, 0, _TOKENS, "org/bench", "2026-01-01T00:00:00Z")
        path = chunk_path(directory, name)
        folder = os.path.dirname(path)
        if folder not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, build_preamble(meta, [spec], sums, ids) + rows)
        os.close(fd)
        yield ChunkRef(name, 0, _TOKENS, prefix, key, f"{number:x}", "", None)


def bare_scan(directory: str) -> float:
    started = time.perf_counter()
    for folder in os.scandir(directory):
        if folder.is_dir():
            for entry in os.scandir(folder.path):
                entry.stat(follow_symlinks=False)
    return time.perf_counter() - started


def serve_once(store: TieredStore, ref: ChunkRef) -> None:
    """Ask for a recovered chunk until it is served."""
    deadline = time.monotonic() + 60
    while not store.retrieve([ref], [0]):
        if time.monotonic() > deadline:
            raise WrongRows("a recovered chunk was never served")
        time.sleep(0.001)  # the scan needs the interpreter
