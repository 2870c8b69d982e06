"""What the rows of some chunks look like: norms by layer and position, and everything that is strange about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lmcache_hs_backend.cli.inspect.figures.charts import Spread
from lmcache_hs_backend.cli.inspect.row_figures import as_tensor, read_rows
from lmcache_hs_backend.cli.inspect.stream import ReadableChunk
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.header import BadChunk

#: A layer of which no sampled row varies more than this (relative to its largest value) is dead.
_DEAD = 1e-6


@dataclass
class RowAnomaly:
    """Rows with something strange about them: how many, and the hash of the first chunk with one."""

    rows: int = 0
    chunk: str = ""

    def add(self, marked: torch.Tensor, chunk_hash: str) -> None:
        """Count the rows of a chunk that are marked: ``[num_tokens]``, bool."""
        rows = int(marked.sum())
        if rows and not self.rows:
            self.chunk = chunk_hash
        self.rows += rows


@dataclass
class LayerSurvey:
    """The sampled rows of one layer of one model."""

    model: str
    layer: int
    rows: int = 0
    non_finite: RowAnomaly = field(default_factory=RowAnomaly)
    zero: RowAnomaly = field(default_factory=RowAnomaly)
    constant: RowAnomaly = field(default_factory=RowAnomaly)
    spread: float = 0.0  # the largest standard deviation of a row over its largest value
    norms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by position

    def add(self, chunk: ReadableChunk, tensor: torch.Tensor) -> None:
        """Take in the rows of a chunk: ``[num_tokens, hidden_dim]``, any float dtype."""
        rows = tensor.float()
        finite = rows.isfinite().all(dim=1)
        largest = rows.abs().amax(dim=1)
        deviation = rows.std(dim=1, correction=0)
        zero = finite & (largest == 0)
        constant = finite & ~zero & (rows.amax(dim=1) == rows.amin(dim=1)) & torch.tensor(rows.shape[1] > 1)
        self.rows += len(rows)
        for strange, marked in ((self.non_finite, ~finite), (self.zero, zero), (self.constant, constant)):
            strange.add(marked, chunk.header.meta.chunk_hash)
        varied = (deviation / largest)[finite & ~zero]
        if len(varied):
            self.spread = max(self.spread, varied.max().item())
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)  # finite where the row is
        for offset in finite.nonzero().flatten().tolist():
            self.norms[_position(chunk.header.meta.start + offset)].append(norms[offset].item())

    @property
    def dead(self) -> bool:
        """Whether no row varies along its hidden dimension."""
        return self.rows > self.non_finite.rows and self.spread <= _DEAD

    def anomalies(self) -> list[str]:
        """What is strange, in words."""
        found = []
        if self.dead:
            found.append("dead layer: no sampled row varies")
        for strange, what in (
            (self.non_finite, "hold values that are not finite"),
            (self.zero, "are all zeros"),
            (self.constant, "are constant"),
        ):
            if strange.rows:
                where = f"the first in chunk {strange.chunk}"
                found.append(f"{strange.rows:,} of {self.rows:,} sampled rows {what}, {where}")
        return found

    def norms_by_position(self) -> list[Spread]:
        """5 %, median and 95 % by position; a position stands for all up to twice itself."""
        points = []
        for position in sorted(self.norms):
            values = torch.tensor(self.norms[position], dtype=torch.float64)
            quantiles = values.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
            points.append(Spread(position, *quantiles.tolist()))
        return points


def _position(token: int) -> int:
    """0, 1, 2, 4, 8, …: the first token has a norm of its own in most models, the later ones differ little."""
    return 0 if token == 0 else 1 << (token.bit_length() - 1)


class Survey:
    """The rows of a sample. Chunks that have gone meanwhile are counted in ``unreadable``."""

    def __init__(self, files: FileLayer, chunks: Iterable[ReadableChunk]) -> None:
        self.sampled = self.unreadable = 0
        found: dict[tuple[str, int], LayerSurvey] = {}
        for chunk in chunks:
            try:
                rows = read_rows(files, chunk)
            except (BadChunk, OSError):
                self.unreadable += 1
                continue
            self.sampled += 1
            for layer, data in rows:
                key = (chunk.header.meta.model, layer.layer_idx)
                found.setdefault(key, LayerSurvey(*key)).add(chunk, as_tensor(layer, data))
        self.layers = [found[key] for key in sorted(found)]

    def anomalies(self) -> list[tuple[LayerSurvey, str]]:
        """What is strange, layer by layer, in words."""
        return [(layer, what) for layer in self.layers for what in layer.anomalies()]

    def as_json(self) -> list[dict[str, Any]]:
        """The layers in figures."""
        return [
            {
                "model": layer.model,
                "layer": layer.layer,
                "sampled_rows": layer.rows,
                "non_finite_rows": layer.non_finite.rows,
                "zero_rows": layer.zero.rows,
                "constant_rows": layer.constant.rows,
                "dead": layer.dead,
                "norms_by_position": [
                    {"position": position, "p5": low, "median": median, "p95": high}
                    for position, low, median, high in layer.norms_by_position()
                ],
            }
            for layer in self.layers
        ]
