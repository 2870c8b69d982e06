"""The request records of a namespace (``sequences/*.jsonl``), and whether the rows that they speak of are here.

The vLLM connector appends them; nothing deletes them. So a record whose rows have been evicted is no fault,
and neither is a last line that its process did not live to finish. Reads, and changes nothing.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_hs_backend.cli.coldpath import SEQUENCES, Namespace, Unreadable, files_in, open_chunk

SUFFIX = ".jsonl"
VERSION = 1

_MOST_BYTES = 1 << 20  # of a line: a real one has some hundreds


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
        self._folder = os.path.join(namespace.directory, SEQUENCES)
        self._wanted: dict[bytes, dict[tuple[int, bytes], _Wanted]] = defaultdict(dict)

    def read(self) -> Iterator[Bad]:
        """Go through the files; what is wrong with them."""
        for path, _, _ in files_in(self._folder):
            if path.endswith(SUFFIX):
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
        try:
            fd, _ = open_chunk(path)
        except FileNotFoundError:
            return
        except (Unreadable, OSError) as error:
            yield Bad(path, str(error))
            return
        wrong, first, number = 0, "", 0
        with open(fd, "rb") as file:
            while line := file.readline(_MOST_BYTES):
                number += 1
                try:
                    self._add(line)
                except ValueError as error:
                    if not line.endswith(b"\n") and not file.peek(1):
                        self.cut_short.append(path)
                        break
                    wrong += 1
                    first = first or f"line {number} is no request record: {error}"
        if wrong:
            yield Bad(path, first + (f"; {wrong - 1:,} more" if wrong > 1 else ""))

    def _add(self, line: bytes) -> None:
        tokens, prefix, before = parse(line)
        self.count += 1
        self._wanted[before].setdefault((tokens, prefix), _Wanted(tokens, prefix)).records += 1


def parse(line: bytes) -> tuple[int, bytes, bytes]:
    """``(tokens, prefix digest of them, that of the chunk before the last)``. Raises ValueError."""
    try:
        record = json.loads(line)
        if record.get("version") != VERSION:
            raise ValueError(f"version {record.get('version')!r}, this program knows {VERSION}")
        tokens, prompt = int(record["num_tokens"]), int(record["prompt_tokens"])
        prefix, before = bytes.fromhex(record["prefix"]), bytes.fromhex(record["parent_prefix"])
        str(record["request_id"]), str(record["last_chunk"])
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{error!r}") from None
    if tokens < 1 or prompt < 0 or len(prefix) != 16 or len(before) not in (0, 16):
        raise ValueError("a length or digest is impossible")
    return tokens, prefix, before
