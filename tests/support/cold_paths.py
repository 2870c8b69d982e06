"""Cold paths with real chunk files, made without an engine: for tests of what reads them from outside.

Run as a program it makes a large one::

    python -m tests.support.cold_paths /tmp/cold --chunks 100000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from lmcache_hs_backend.chunk import ChunkMeta, ChunkRef, KeyedChunk, LayerSpec, chunk_refs, token_bytes
from lmcache_hs_backend.format.header import build_preamble, file_order, layer_tensor
from lmcache_hs_backend.format.layout import LOCK, RECORD, chunk_path
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES

MODEL = "org/test-model"
CHUNK = 64
HIDDEN = 32


def tokens_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt; the same for the same seed."""
    return random.Random(seed).choices(range(50_000), k=num_tokens)


def namespace(cold_path: Path | str, model: str = MODEL, **ident: Any) -> Path:
    """Make the directory of a namespace, as an engine does, and return it. Nobody holds its lock."""
    described = NamespaceId(**{"model": model, "kv_dtype": "bfloat16", "chunk_size": CHUNK, **ident})
    directory = Path(cold_path) / described.directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RECORD).write_text(json.dumps(described.record(), indent=2))
    (directory / LOCK).touch()
    return directory


def refs_of(tokens: Sequence[int], *, chunk: int = CHUNK, model: str = MODEL) -> list[ChunkRef]:
    """The chunks of a prompt, as a token database would name them."""
    ids = token_bytes(list(tokens))
    keyed = []
    chunk_hash = ""
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        chunk_hash = xxhash.xxh3_64_hexdigest(chunk_hash.encode() + ids[8 * start : 8 * end])
        keyed.append(KeyedChunk(start, end, f"{model}@1@0@{chunk_hash}@bfloat16", chunk_hash, None))
    return chunk_refs(keyed, ids)


@dataclass
class Prompt:
    """A prompt whose chunks are on disk: their files in order, and what is in them."""

    tokens: list[int]
    files: list[Path] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    rows: list[dict[int, torch.Tensor]] = field(default_factory=list)


def add_prompt(
    directory: Path,
    tokens: Sequence[int],
    *,
    layers: Sequence[int] = (0,),
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
    chunk: int = CHUNK,
    model: str = MODEL,
    created_at: str = "2026-01-02T03:04:05Z",
    used_at: float | None = None,
    seed: int = 0,
) -> Prompt:
    """Write the chunks of a prompt, a shorter tail included. Chunks that are there already are left alone.

    ``used_at`` is the time of their last use in seconds since the epoch.
    """
    ids = token_bytes(list(tokens))
    prompt = Prompt(list(tokens))
    generator = torch.Generator().manual_seed(seed)
    for ref in refs_of(tokens, chunk=chunk, model=model):
        rows = {idx: torch.randn(ref.num_tokens, hidden, generator=generator).to(dtype) for idx in layers}
        path = Path(chunk_path(str(directory), ref.name))
        prompt.files.append(path)
        prompt.hashes.append(ref.chunk_hash)
        prompt.rows.append(rows)
        if path.exists():
            continue
        meta = ChunkMeta(
            ref.key, ref.chunk_hash, ref.parent, ref.prefix, ref.start, ref.num_tokens, model, created_at,
            '{"source": "lmcache", "layer_ids": "storage slots"}',
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file_bytes(meta, ids[8 * ref.start : 8 * ref.end], rows))
        if used_at is not None:
            os.utime(path, (used_at, used_at))
    return prompt


def file_bytes(meta: ChunkMeta, ids: bytes, rows: dict[int, torch.Tensor]) -> bytes:
    """A chunk file, by the package's own header."""
    by_spec = {
        LayerSpec(idx, DTYPE_NAMES[part.dtype], part.shape[1]): part.contiguous().view(torch.uint8).numpy().tobytes()
        for idx, part in rows.items()
    }
    specs = file_order(list(by_spec))
    checksums = {"token_ids": xxhash.xxh3_64_hexdigest(ids)}
    checksums |= {layer_tensor(spec.layer_idx): xxhash.xxh3_64_hexdigest(by_spec[spec]) for spec in specs}
    return build_preamble(meta, specs, checksums, ids) + b"".join(by_spec[spec] for spec in specs)


def make_large(cold_path: Path, num_chunks: int, *, models: int = 2, shared: int = 8, length: int = 24) -> None:
    """Prompts of ``length`` chunks, of which ten at a time share the first ``shared``, up to ``num_chunks`` in all."""
    directories = [namespace(cold_path, f"org/model-{number}") for number in range(models)]
    made = number = 0
    while made < num_chunks:
        group, member = divmod(number, 10)
        tokens = tokens_of(shared * CHUNK, group) + tokens_of((length - shared) * CHUNK, 10_000_000 + number)
        fresh = length if member == 0 else length - shared
        wanted = min(fresh, num_chunks - made) + (0 if member == 0 else shared)
        model = f"org/model-{group % models}"
        used_at = time.time() - number % 1000 * 600
        add_prompt(directories[group % models], tokens[: wanted * CHUNK], model=model, used_at=used_at, seed=number)
        made += min(fresh, num_chunks - made)
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a large cold path with real, small chunk files.")
    parser.add_argument("cold_path", type=Path)
    parser.add_argument("--chunks", type=int, default=100_000)
    args = parser.parse_args()
    make_large(args.cold_path, args.chunks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
