"""The request records of a namespace (``sequences/*.jsonl``): are they records, and are their rows here?

The vLLM connector appends them; nothing deletes them. So a record whose rows have been evicted is no fault,
and neither is a last line that its process did not live to finish. Reads, and changes nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import TOKEN_BYTES
from lmcache_hs_backend.format.layout import SEQUENCES
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.reader import ColdTierReader
from lmcache_hs_backend.format.request_log import BadLine, RequestRecord, read_records


class BadLog(NamedTuple):
    """A file with lines that are no records: why, for the first, and how many there are."""

    path: str
    detail: str


@dataclass
class _Wanted:
    """Rows that a record speaks of, by the digest of the chunk in front of them."""

    tokens: int
    prefix: bytes
    records: int = 0
    found: bool = False


class RecordCheck:
    """The records of one namespace directory.

    Attributes:
        count: Good records.
        cut_short: Files whose last line was never finished.
    """

    def __init__(self, reader: ColdTierReader, namespace: NamespaceDirectory) -> None:
        self.count = 0
        self.cut_short: list[str] = []
        self._reader = reader
        self._namespace = namespace
        self._wanted: dict[bytes, dict[tuple[int, bytes], _Wanted]] = defaultdict(dict)

    def read(self) -> Iterator[BadLog]:
        """Go through the files; what is wrong with them."""
        try:
            paths = self._reader.source.records(self._namespace)
        except OSError as error:
            yield BadLog(os.path.join(self._namespace.directory, SEQUENCES), str(error.strerror))
            return
        for path in paths:
            yield from self._read_file(path)

    def see(self, before: bytes, start: int, token_ids: bytes, digest: Any) -> None:
        """Take note of a good chunk whose chain is whole.

        Args:
            before: The prefix digest in front of it; empty for a first chunk.
            start: Its first token.
            token_ids: Its own, as int64 bytes.
            digest: The xxh3_128 over everything in front of it.
        """
        for wanted in self._wanted.get(before, {}).values():
            rows = wanted.tokens - start
            if not wanted.found and 0 < TOKEN_BYTES * rows <= len(token_ids):
                state = digest.copy()
                state.update(token_ids[: TOKEN_BYTES * rows])
                wanted.found = state.digest() == wanted.prefix

    @property
    def gone(self) -> int:
        """Records whose rows are not (all) here, after every chunk has been seen."""
        every = (wanted for group in self._wanted.values() for wanted in group.values())
        return sum(wanted.records for wanted in every if not wanted.found)

    def _read_file(self, path: str) -> Iterator[BadLog]:
        wrong: list[BadLine] = []
        try:
            for line in read_records(path, self._reader.files):
                if isinstance(line, RequestRecord):
                    self._add(line)
                elif line.cut_short:
                    self.cut_short.append(path)
                else:
                    wrong.append(line)
        except FileNotFoundError:
            return
        except OSError as error:
            yield BadLog(path, str(error.strerror))
        if wrong:
            number, problem, _ = wrong[0]
            first = f"line {number} is no request record: {problem}" if number else problem
            yield BadLog(path, first + (f"; {len(wrong) - 1:,} more" if len(wrong) > 1 else ""))

    def _add(self, record: RequestRecord) -> None:
        self.count += 1
        tokens, prefix = record.num_tokens, record.prefix
        self._wanted[record.parent_prefix].setdefault((tokens, prefix), _Wanted(tokens, prefix)).records += 1
