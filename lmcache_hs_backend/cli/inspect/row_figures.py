"""Figures of the rows of one chunk, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.cli.inspect.stream import ReadableChunk
from lmcache_hs_backend.format.chunk_file import FileLayer, open_regular, read_layers
from lmcache_hs_backend.format.header import BadChunk, layer_tensor
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


def layer_figures(files: FileLayer, chunk: ReadableChunk) -> list[dict[str, Any]]:
    """For each layer: shape, dtype, mean, std, quantiles of the rows' norms, what is not finite, checksum.

    Mean, std and norms are of the finite rows alone, computed in float32. Raises CommandError when the file has
    gone meanwhile.
    """
    try:
        return [_figures(chunk, layer, data) for layer, data in read_rows(files, chunk)]
    except (BadChunk, OSError) as error:
        raise CommandError(f"{chunk.file.path} cannot be read any more: {error}") from None


def read_rows(files: FileLayer, chunk: ReadableChunk) -> list[tuple[LayerSpec, bytearray]]:
    """The bytes of all layers, their checksums not compared. Raises BadChunk or OSError."""
    files.will_read(chunk.file.path, chunk.file.size)
    fd, _ = open_regular(files, chunk.file.path)
    try:
        return read_layers(files, fd, chunk.header.layout)
    finally:
        files.close(fd)


def as_tensor(layer: LayerSpec, data: bytearray) -> torch.Tensor:
    """Rows ``[num_tokens, hidden_dim]`` in the dtype of the file."""
    return torch.frombuffer(data, dtype=TORCH_DTYPES[layer.dtype]).view(-1, layer.hidden_dim)


def _figures(chunk: ReadableChunk, layer: LayerSpec, data: bytearray) -> dict[str, Any]:
    rows = as_tensor(layer, data).float()
    finite = rows.isfinite()
    good = rows[finite.all(dim=1)]
    norms = torch.linalg.vector_norm(good, dim=1, dtype=torch.float64) if len(good) else torch.zeros(1)
    checksum = chunk.header.checksums.get(layer_tensor(layer.layer_idx))
    return {
        "layer": layer.layer_idx,
        "dtype": layer.dtype_name,
        "shape": list(rows.shape),
        "mean": good.mean().item() if len(good) else 0.0,
        "std": good.std(correction=0).item() if len(good) else 0.0,
        "norm_quantiles": {name: norms.quantile(q).item() for name, q in QUANTILES.items()},
        "non_finite": int((~finite).sum()),
        "checksum_ok": xxhash.xxh3_64_hexdigest(data) == checksum,
    }
