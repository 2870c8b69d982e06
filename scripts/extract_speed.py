"""How fast `lmcache-hs-extract --format speculators` is beside `cp` of the bytes it writes, and what memory it takes.

Both read what is not in the page cache, on the same disk, one after the other in every round, and count until all that
they wrote is on it; the extractor's time includes starting Python. Prints one line for each round with speeds and CPU
time; exits with 1 when the median of the ratios is below --least. Run: python scripts/extract_speed.py FOLDER
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lmcache_hs_backend.chunk import KeyedChunk, chunk_refs, token_bytes
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore

CHUNK, HIDDEN, SLOTS = 256, 4096, (2, 16, 29, 32)
CAPTURE = '{"source": "bench", "layer_ids": "vllm", "last_layer": "pre-norm", "num_layers": 32}'


def fill(cold: Path, sequences: int, tokens: int) -> None:
    """Sequences without shared prefixes, so that as many bytes are read as are written."""
    config = TieredConfig(
        cold_path=str(cold),
        max_cold_size=60,
        min_free_disk=0,
        write_back_sec=0,
        close_timeout_sec=120,
        store_wait_ms=60000,
    )
    store = TieredStore(config, 1 << 30, NamespaceId(model="bench", chunk_size=CHUNK), capture=CAPTURE)
    noise = torch.randn(tokens, HIDDEN).bfloat16()
    for sequence in range(sequences):
        ids = token_bytes([sequence, *range(tokens - 1)])
        chunks = [
            KeyedChunk(start, start + CHUNK, f"bench@1@0@{sequence}-{start}@bfloat16", f"{sequence}-{start}", None)
            for start in range(0, tokens, CHUNK)
        ]
        rows = {slot: noise.roll(sequence, 0) for slot in SLOTS}
        assert store.store(chunk_refs(chunks, ids), ids, rows) == len(chunks)
    store.close()


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def forget(folder: Path) -> None:
    """Have the files of a folder leave the page cache."""
    for path in files_of(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cpu_seconds() -> float:
    """CPU time of all commands so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(command: list[str], written: Path) -> tuple[float, float]:
    """Seconds until the command has ended and what it wrote is on disk, and its CPU time."""
    os.sync()  # others' writes are not to be waited for here
    cpu, started = cpu_seconds(), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for path in files_of(written):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.monotonic() - started, cpu_seconds() - cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.7)
    args = parser.parse_args()
    cold, out, copy = (args.folder / name for name in ("cold", "out", "copy"))
    shutil.rmtree(args.folder, ignore_errors=True)
    fill(cold, args.sequences, args.tokens)
    extract = [
        sys.executable,
        "-m",
        "lmcache_hs_backend.cli.extract",
        str(cold),
        "--out",
        str(out),
        "--format",
        "speculators",
    ]
    ratios = []
    for _ in range(args.rounds):
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(copy, ignore_errors=True)
        forget(cold)
        extracted, extract_cpu = timed(extract, out)
        nbytes = sum(path.stat().st_size for path in files_of(out / "hidden_states"))
        forget(out)
        copied, copy_cpu = timed(["cp", "-r", str(out / "hidden_states"), str(copy)], copy)
        ratios.append(copied / extracted)
        print(
            f"{nbytes / 1e9:.2f} GB: extract {nbytes / extracted / 1e9:.2f} GB/s ({extract_cpu:.1f} s of CPU), "
            f"cp {nbytes / copied / 1e9:.2f} GB/s ({copy_cpu:.1f} s of CPU), ratio {ratios[-1]:.2f}",
            flush=True,
        )
    middle = statistics.median(ratios)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"ratios {min(ratios):.2f} to {max(ratios):.2f}, median {middle:.2f}; peak memory {peak:.0f} MiB")
    shutil.rmtree(args.folder)
    return middle < args.least


if __name__ == "__main__":
    raise SystemExit(main())
