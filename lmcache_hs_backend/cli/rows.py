"""Figures of the rows of one chunk, layer by layer. Reads them with plain system calls, and judges them."""

from __future__ import annotations

import os
from typing import Any

import torch
import xxhash

from lmcache_hs_backend.cli.chunks import Chunk
from lmcache_hs_backend.cli.coldpath import Layer, Unreadable, open_chunk
from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


def layer_figures(chunk: Chunk) -> list[dict[str, Any]]:
    """For each layer: shape, dtype, mean, std, quantiles of the rows' norms, what is not finite, checksum.

    Mean, std and norms are of the finite rows alone, computed in float32. Raises CommandError when the file has
    gone meanwhile.
    """
    try:
        return [_figures(chunk, layer, data) for layer, data in read_rows(chunk)]
    except (Unreadable, OSError) as error:
        raise CommandError(f"{chunk.file.path} cannot be read any more: {error}") from None


def read_rows(chunk: Chunk) -> list[tuple[Layer, bytearray]]:
    """The bytes of all layers. Raises Unreadable or OSError."""
    fd, _ = open_chunk(chunk.file.path)
    try:
        offset, rows = chunk.head.head_bytes, []
        for layer in chunk.head.layers:
            data = bytearray(layer.row_bytes * chunk.head.num_tokens)
            done = 0
            while done < len(data):
                moved = os.preadv(fd, [memoryview(data)[done:]], offset + done)
                if not moved:
                    raise Unreadable("short", "the file ends before its rows do")
                done += moved
            offset += len(data)
            rows.append((layer, data))
        return rows
    finally:
        os.close(fd)


def as_tensor(chunk: Chunk, layer: Layer, data: bytearray) -> torch.Tensor:
    """Rows ``[num_tokens, hidden_dim]`` in the dtype of the file."""
    return torch.frombuffer(data, dtype=TORCH_DTYPES[layer.dtype]).view(chunk.head.num_tokens, layer.hidden_dim)


def _figures(chunk: Chunk, layer: Layer, data: bytearray) -> dict[str, Any]:
    rows = as_tensor(chunk, layer, data).float()
    finite = rows.isfinite()
    good = rows[finite.all(dim=1)]
    norms = torch.linalg.vector_norm(good, dim=1, dtype=torch.float64) if len(good) else torch.zeros(1)
    return {
        "layer": layer.layer_idx,
        "dtype": layer.dtype_name,
        "shape": [chunk.head.num_tokens, layer.hidden_dim],
        "mean": good.mean().item() if len(good) else 0.0,
        "std": good.std(correction=0).item() if len(good) else 0.0,
        "norm_quantiles": {name: norms.quantile(q).item() for name, q in QUANTILES.items()},
        "non_finite": int((~finite).sum()),
        "checksum_ok": xxhash.xxh3_64_hexdigest(data) == chunk.head.checksums.get(f"layer.{layer.layer_idx}"),
    }
