"""What a capture will take, counted row by row: tokens, tokens after shared prefixes, bytes on disk. No I/O.

Every figure is exact for rows that are only read, except that a short tail is counted although a longer chunk may hold
it; what the model will answer is counted at its longest. So the bytes are an upper bound.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import lru_cache

import xxhash

from lmcache_hs_backend.capture.capture_settings import Settings
from lmcache_hs_backend.capture.encode import EncodedRow
from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec
from lmcache_hs_backend.format.header import build_preamble, file_order

_CAPTURE_TEXT = " " * 250  # about what the connector writes about a chunk


class ChunkSizes:
    """Bytes of a chunk's file, by its number of tokens."""

    def __init__(self, settings: Settings) -> None:
        facts = settings.facts
        self.chunk_size = settings.tiers.chunk_size
        self._specs = file_order([LayerSpec(k, facts.safetensors_dtype, facts.hidden_size) for k in settings.layers])
        self._model = settings.model
        self.of = lru_cache(maxsize=None)(self._of)

    def _of(self, tokens: int) -> int:
        key = f"{self._model}@1@0@{'0' * 32}@bfloat16"
        meta = ChunkMeta(
            key, "0" * 32, "0" * 32, bytes(16), 10**6, tokens, self._model, "2000-01-01T00:00:00Z", _CAPTURE_TEXT
        )
        checksums = {f"layer.{spec.layer_idx}": "0" * 16 for spec in self._specs} | {"token_ids": "0" * 16}
        preamble = build_preamble(meta, self._specs, checksums, bytes(8 * tokens))
        return len(preamble) + sum(spec.nbytes(tokens) for spec in self._specs)

    def of_row(self, tokens: int) -> int:
        """Bytes of a row on its own, shared with no other."""
        full, tail = divmod(tokens, self.chunk_size)
        return full * self.of(self.chunk_size) + (self.of(tail) if tail else 0)


@dataclass
class Estimate:
    """Figures of the rows that were added. Sizes are those of different rows; ``done`` ones are part of them."""

    sizes: ChunkSizes
    answer_tokens: int
    max_tokens: int | None
    rows: int = 0
    different: int = 0
    done: int = 0
    complete: int = 0
    answered: int = 0
    cut: int = 0
    without_loss: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    most_answer_tokens: int = 0
    stored_tokens: int = 0
    nbytes: int = 0
    needed_bytes: int = 0
    longest: int = 0
    columns: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def add(self, row: EncodedRow, *, again: bool, done: bool) -> None:
        """Count a row. ``again``: an equal one was added before; ``done``: its chunks are on disk."""
        self.rows += 1
        self.columns[row.column] = self.columns.get(row.column, 0) + 1
        for name in row.beside:
            self.beside[name] = self.beside.get(name, 0) + 1
        if again:
            return
        self.different += 1
        self.done += done
        count = len(row.token_ids)
        self.longest = max(self.longest, count)
        self.tokens += count
        self.cut += row.cut_from is not None
        answer = 0
        if row.complete:
            self.complete += 1
            self.trained_tokens += sum(end - begin for begin, end in row.loss_spans or ())
            self.without_loss += not row.loss_spans
        else:
            self.answered += 1
            room = self.answer_tokens if self.max_tokens is None else self.max_tokens + 1 - count
            answer = max(0, min(self.answer_tokens, room) - 1)  # the last token sampled has no rows
            self.most_answer_tokens += answer
        new_tokens, new_bytes = self._new(row.token_ids, count + answer)
        self.stored_tokens += new_tokens
        self.nbytes += new_bytes
        if not done:
            self.needed_bytes += new_bytes

    def _new(self, token_ids: list[int], end: int) -> tuple[int, int]:
        """Tokens and bytes of the chunks of a row that no row before had."""
        size = self.sizes.chunk_size
        digest, tokens, nbytes = xxhash.xxh3_64(), 0, 0
        for start in range(0, end, size):
            stop = min(start + size, end)
            part = token_ids[start:stop]
            digest.update(array("q", part).tobytes())
            if len(part) == stop - start:  # else the model's answer is in it, and no other row has that
                identity = digest.intdigest()
                if identity in self._seen:
                    continue
                self._seen.add(identity)
            tokens += stop - start
            nbytes += self.sizes.of(stop - start)
        return tokens, nbytes
