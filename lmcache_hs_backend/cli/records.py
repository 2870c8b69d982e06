"""The request records of a namespace (``sequences/*.jsonl``), and whether the rows that they speak of are here.

The vLLM connector appends them; nothing deletes them. So a record whose rows have been evicted is no fault,
and neither is a last line that its process did not live to finish. Reads, and changes nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_hs_backend.cli.coldpath import Namespace
from lmcache_hs_backend.format.layout import SEQUENCES
from lmcache_hs_backend.format.request_log import BadLine, RequestRecord, read_records, record_files


class Bad(NamedTuple):
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


class Records:
    """The records of one namespace. ``count`` is of the good ones."""

    def __init__(self, namespace: Namespace) -> None:
        self.count = 0
        self.cut_short: list[str] = []  # files whose last line was never finished
        self._directory = namespace.directory
        self._wanted: dict[bytes, dict[tuple[int, bytes], _Wanted]] = defaultdict(dict)

    def read(self) -> Iterator[Bad]:
        """Go through the files; what is wrong with them."""
        try:
            paths = record_files(self._directory)
        except OSError as error:
            yield Bad(os.path.join(self._directory, SEQUENCES), str(error.strerror))
            return
        for path in paths:
            yield from self._read_file(path)

    def see(self, before: bytes, start: int, token_ids: bytes, digest: Any) -> None:
        """Told of a good chunk whose chain is whole: ``before`` is the prefix digest in front of it (empty for a
        first chunk), ``digest`` the xxh3_128 up to there."""
        for wanted in self._wanted.get(before, {}).values():
            rows = wanted.tokens - start
            if not wanted.found and 0 < 8 * rows <= len(token_ids):
                state = digest.copy()
                state.update(token_ids[: 8 * rows])
                wanted.found = state.digest() == wanted.prefix

    @property
    def gone(self) -> int:
        """Records whose rows are not (all) here, after every chunk has been seen."""
        every = (wanted for group in self._wanted.values() for wanted in group.values())
        return sum(wanted.records for wanted in every if not wanted.found)

    def _read_file(self, path: str) -> Iterator[Bad]:
        wrong: list[BadLine] = []
        try:
            for line in read_records(path):
                if isinstance(line, RequestRecord):
                    self._add(line)
                elif line.cut_short:
                    self.cut_short.append(path)
                else:
                    wrong.append(line)
        except FileNotFoundError:
            return
        except OSError as error:
            yield Bad(path, str(error.strerror))
        if wrong:
            number, problem, _ = wrong[0]
            first = f"line {number} is no request record: {problem}" if number else problem
            yield Bad(path, first + (f"; {len(wrong) - 1:,} more" if len(wrong) > 1 else ""))

    def _add(self, record: RequestRecord) -> None:
        self.count += 1
        tokens, prefix = record.num_tokens, record.prefix
        self._wanted[record.parent_prefix].setdefault((tokens, prefix), _Wanted(tokens, prefix)).records += 1
