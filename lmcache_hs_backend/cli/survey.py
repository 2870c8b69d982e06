"""What a report tells beyond the counts of ``stats``: growth over time, and what the rows look like.

Rows are read of a sample of chunks only; the sample is drawn evenly on the way, and always the same for
the same files in the same order.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch

from lmcache_hs_backend.cli.chunks import Chunk
from lmcache_hs_backend.cli.coldpath import Unreadable
from lmcache_hs_backend.cli.rows import as_tensor, read_rows

#: A layer of which no sampled row varies more than this (relative to its largest value) is dead.
_DEAD = 1e-6


@dataclass
class LayerSurvey:
    """The sampled rows of one layer of one model: norms by position, and what is strange about them."""

    model: str
    layer: int
    rows: int = 0
    non_finite_rows: int = 0
    zero_rows: int = 0
    constant_rows: int = 0
    spread: float = 0.0  # the largest standard deviation of a row over its largest value
    norms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by position

    def add(self, start: int, tensor: torch.Tensor) -> None:
        rows = tensor.float()
        finite = rows.isfinite().all(dim=1)
        largest = rows.abs().amax(dim=1)
        deviation = rows.std(dim=1, correction=0)
        zero = finite & (largest == 0)
        constant = finite & ~zero & (rows.amax(dim=1) == rows.amin(dim=1)) & torch.tensor(rows.shape[1] > 1)
        self.rows += len(rows)
        self.non_finite_rows += int((~finite).sum())
        self.zero_rows += int(zero.sum())
        self.constant_rows += int(constant.sum())
        varied = (deviation / largest)[finite & ~zero]
        if len(varied):
            self.spread = max(self.spread, varied.max().item())
        norms = torch.linalg.vector_norm(rows, dim=1)
        for offset in finite.nonzero().flatten().tolist():
            self.norms[_position(start + offset)].append(norms[offset].item())

    @property
    def dead(self) -> bool:
        return self.rows > 0 and self.rows > self.non_finite_rows and self.spread <= _DEAD

    def anomalies(self) -> list[str]:
        """What is strange, in words."""
        found = []
        if self.dead:
            found.append("dead layer: no sampled row varies")
        for count, what in (
            (self.non_finite_rows, "rows with values that are not finite"),
            (self.zero_rows, "rows of zeros"),
            (self.constant_rows, "constant rows"),
        ):
            if count:
                found.append(f"{count:,} of {self.rows:,} sampled: {what}")
        return found

    def norms_by_position(self) -> list[tuple[int, float, float, float]]:
        """``(position, 5 %, median, 95 %)``; a position stands for all up to twice itself."""
        points = []
        for position in sorted(self.norms):
            values = torch.tensor(self.norms[position])
            low, median, high = values.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
            points.append((position, low, median, high))
        return points


def _position(token: int) -> int:
    """0, 1, 2, 4, 8, …: the first token has a norm of its own in most models, the later ones differ little."""
    return 0 if token == 0 else 1 << (token.bit_length() - 1)


class Survey:
    """Watches chunks go by, then looks at the rows of some."""

    def __init__(self, sample: int) -> None:
        self.sampled = 0
        self.unreadable = 0
        self._size = sample
        self._sample: list[Chunk] = []
        self._seen = 0
        self._random = random.Random(0)
        self._created: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def watch(self, chunk: Chunk) -> None:
        """To be called for every chunk."""
        self._created[chunk.head.model][chunk.head.created_at[:16]] += chunk.file.size
        self._seen += 1
        kept = chunk._replace(head=chunk.head._replace(token_ids=b""))
        if len(self._sample) < self._size:
            self._sample.append(kept)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self._sample[place] = kept

    def occupancy(self) -> dict[str, list[tuple[float, int]]]:
        """Model → ``(seconds since the epoch, bytes)``: how what is here now has grown, by its creation."""
        grown = {}
        for model, by_minute in sorted(self._created.items()):
            points, total = [], 0
            for minute in sorted(by_minute):
                total += by_minute[minute]
                try:
                    points.append((datetime.fromisoformat(minute + "+00:00").timestamp(), total))
                except ValueError:  # a header may say anything
                    continue
            grown[model] = points
        return grown

    def layers(self) -> list[LayerSurvey]:
        """Read the sample. Chunks that have gone meanwhile are counted in ``unreadable``."""
        found: dict[tuple[str, int], LayerSurvey] = {}
        for chunk in self._sample:
            try:
                rows = read_rows(chunk)
            except (Unreadable, OSError):
                self.unreadable += 1
                continue
            self.sampled += 1
            for layer, data in rows:
                key = (chunk.head.model, layer.layer_idx)
                survey = found.setdefault(key, LayerSurvey(*key))
                survey.add(chunk.head.start, as_tensor(chunk, layer, data))
        return [found[key] for key in sorted(found)]


def as_json(layers: list[LayerSurvey]) -> list[dict[str, Any]]:
    """The survey in figures."""
    return [
        {
            "model": layer.model,
            "layer": layer.layer,
            "sampled_rows": layer.rows,
            "non_finite_rows": layer.non_finite_rows,
            "zero_rows": layer.zero_rows,
            "constant_rows": layer.constant_rows,
            "dead": layer.dead,
            "norms_by_position": [
                {"position": position, "p5": low, "median": median, "p95": high}
                for position, low, median, high in layer.norms_by_position()
            ],
        }
        for layer in layers
    ]
