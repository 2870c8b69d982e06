"""What a capture will take, counted row by row: tokens, tokens after shared prefixes, bytes on disk. No I/O.

Every figure is exact for rows that are only read, except that a short tail is counted although a longer chunk may hold
it; what the model will answer is counted at its longest. So the bytes are an upper bound. Chunks that are on disk
already, also those of rows that are not done, are not part of what is still needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
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

    def chunks(self, token_ids: list[int], end: int) -> Iterator[tuple[bytes | None, int]]:
        """Prefix digest and number of tokens of each chunk of a row that ends at ``end``.

        The digest is None where the model's answer, which begins after ``token_ids``, is part of the chunk.
        """
        digest = xxhash.xxh3_128()
        for start in range(0, end, self.chunk_size):
            stop = min(start + self.chunk_size, end)
            digest.update(array("q", token_ids[start:stop]).tobytes())
            yield digest.digest() if stop <= len(token_ids) else None, stop - start

    def missing(self, token_ids: list[int], end: int, on_disk: Collection[bytes]) -> int:
        """Bytes of those chunks of a row whose prefix digests are not in ``on_disk``."""
        return sum(self.of(tokens) for prefix, tokens in self.chunks(token_ids, end) if prefix not in on_disk)


@dataclass
class Estimate:
    """Figures of the rows that were added. Sizes are those of different rows; ``done`` ones are part of them.

    ``on_disk`` are the prefix digests of the chunks that are there with every layer. ``needed_bytes`` counts neither
    them nor anything of rows that are done.
    """

    sizes: ChunkSizes
    answer_tokens: int
    max_tokens: int | None
    on_disk: Collection[bytes] = ()
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
    remarks: dict[str, int] = field(default_factory=dict)
    _seen: set[bytes] = field(default_factory=set)

    def add(self, row: EncodedRow, *, again: bool, done: bool) -> None:
        """Count a row. ``again``: an equal one was added before; ``done``: its chunks are on disk."""
        self.rows += 1
        self.columns[row.column] = self.columns.get(row.column, 0) + 1
        for name in row.beside:
            self.beside[name] = self.beside.get(name, 0) + 1
        for name in row.remarks:
            self.remarks[name] = self.remarks.get(name, 0) + 1
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
        for prefix, tokens in self.sizes.chunks(row.token_ids, count + answer):
            if prefix in self._seen:
                continue
            nbytes = self.sizes.of(tokens)
            self.stored_tokens += tokens
            self.nbytes += nbytes
            if not done and prefix not in self.on_disk:
                self.needed_bytes += nbytes
            if prefix is not None:  # no other row has what the model answers
                self._seen.add(prefix)
