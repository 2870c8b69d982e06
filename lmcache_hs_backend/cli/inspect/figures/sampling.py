"""What a report keeps of the chunks while they are read: how the cold path has grown, and a sample to read rows of.

The sample is drawn evenly on the way, and always the same for the same files in the same order. Needs no
torch: that is imported when the rows are read, after everything else is done and forgotten.
"""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import datetime

from lmcache_hs_backend.cli.inspect.stream import ReadableChunk


class ChunkSample:
    """Sees every chunk once. ``chunks`` are those whose rows are to be read."""

    def __init__(self, size: int) -> None:
        self.chunks: list[ReadableChunk] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(0)
        self._created: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def watch(self, chunk: ReadableChunk) -> None:
        """To be called for every chunk."""
        self._created[chunk.header.meta.model][chunk.header.meta.created_at[:16]] += chunk.file.size
        self._seen += 1
        if len(self.chunks) < self._size:
            self.chunks.append(chunk)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.chunks[place] = chunk

    def occupancy(self) -> dict[str, list[tuple[float, float]]]:
        """Model → ``(seconds since the epoch, bytes)``: how what is here now has grown, by its creation."""
        grown = {}
        for model, by_minute in sorted(self._created.items()):
            points, total = [], 0
            for minute in sorted(by_minute):
                total += by_minute[minute]
                try:
                    points.append((datetime.fromisoformat(minute + "+00:00").timestamp(), float(total)))
                except ValueError:  # a header may say anything
                    continue
            grown[model] = points
        return grown
