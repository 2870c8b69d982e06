"""Request records: one JSON line per finished request, under ``sequences/`` of the namespace; written and read here.

The rows are in chunks; a record says which of them were one request, where its prompt ended and how it
ended, so that an extraction can mask losses. Fields:

====================  ===================================================================================
``version``           1. A line without it is no record: which version it is of cannot be known
``request_id``        vLLM's
``created_at``        when it ended, UTC
``finish_reason``     stop, length, abort, error or repetition
``prompt_tokens``     tokens of the prompt
``generated_tokens``  tokens sampled, the last one, which no forward has seen, included
``expected_tokens``   tokens whose rows the model has computed
``num_tokens``        tokens, from the first on, whose rows are in the tiers; fewer than expected: some were lost
``prefix``            prefix digest (hex) of exactly those tokens
``parent_prefix``     prefix digest of the chunk before the one they end in; empty when they end in the first
``last_chunk``        hash of the chunk they end in. When a longer chunk has replaced it since, the two
                      digests still find the rows: they are the first ones of a chunk after ``parent_prefix``
``capture``           as in the chunk files: source, layer ids and their convention, norm of the last layer
``loss_spans``        optional: the tokens to train on, half-open ``[begin, end]`` pairs of token positions, ascending
                      and apart, e.g. ``[[35, 41], [54, 66]]``; ``[]``: none. Absent: not known; then what was sampled
                      (from ``prompt_tokens`` on) is what is trained on. They may reach beyond ``num_tokens``
``cut_from``          optional: tokens that the row of a data set had before it was cut to fit the model
====================  ===================================================================================

A record is written when those rows are on disk. A request of which nothing was stored has none.
Files are ``requests-<number>.jsonl``; every process begins a new one, and one is closed at 64 MiB. A line
that does not end with a newline was being written when the process died: that is no fault of the file. Nothing deletes
records, so the rows of one may have been evicted since.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from lmcache_hs_backend.format.chunk_file import FileLayer, open_regular
from lmcache_hs_backend.format.header import BadChunk
from lmcache_hs_backend.format.layout import SEQUENCES

SUFFIX = ".jsonl"
VERSION = 1
ROTATE_BYTES = 64 << 20

_MAX_LINE_BYTES = 1 << 20  # a real one has some hundreds
_MAX_SPANS = 16_384  # written out they stay below that

#: Half-open ``[begin, end)`` positions of tokens, ascending and apart.
Spans = tuple[tuple[int, int], ...]


def parse_spans(value: object) -> Spans:
    """``loss_spans`` as they stand in JSON. Raises ValueError, with what is wrong, for anything else."""
    if not isinstance(value, list | tuple) or len(value) > _MAX_SPANS:
        raise ValueError(f"loss_spans must be a list of at most {_MAX_SPANS} [begin, end] pairs")
    spans, least = [], 0
    for pair in value:
        if not isinstance(pair, list | tuple) or [type(number) for number in pair] != [int, int]:
            raise ValueError(f"loss_spans has {pair!r:.60}, which is no [begin, end] pair of integers")
        begin, end = pair
        if not least <= begin < end:
            raise ValueError(f"loss_spans has [{begin}, {end}], but the pairs must be ascending, apart and not empty")
        spans.append((begin, end))
        least = end + 1  # pairs that touch are one
    return tuple(spans)


def client_fields(value: object) -> dict[str, Any]:
    """What a client may say of its own request's record: ``loss_spans`` and ``cut_from``. Raises ValueError."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not value.keys() <= {"loss_spans", "cut_from"}:
        raise ValueError("a record takes loss_spans and cut_from from a client, nothing else")
    fields: dict[str, Any] = {}
    if "loss_spans" in value:
        fields["loss_spans"] = [list(pair) for pair in parse_spans(value["loss_spans"])]
    if "cut_from" in value:
        if type(value["cut_from"]) is not int or value["cut_from"] < 1:
            raise ValueError(f"cut_from must be a number of tokens, not {value['cut_from']!r:.60}")
        fields["cut_from"] = value["cut_from"]
    return fields


class RequestRecord(NamedTuple):
    """What a reader needs of one record (fields: see above). Digests are 16 bytes; ``parent_prefix`` may be empty."""

    request_id: str
    prompt_tokens: int
    num_tokens: int
    prefix: bytes
    parent_prefix: bytes
    loss_spans: Spans | None = None  # None: not known

    @classmethod
    def parse(cls, line: str | bytes) -> RequestRecord:
        """Raises ValueError for a line that is no such record, or one of another version."""
        try:
            record: dict[str, Any] = json.loads(line)
            if record.get("version") != VERSION:
                raise ValueError(f"version {record.get('version')!r}, this program knows {VERSION}")
            result = cls(
                str(record["request_id"]),
                int(record["prompt_tokens"]),
                int(record["num_tokens"]),
                bytes.fromhex(record["prefix"]),
                bytes.fromhex(record["parent_prefix"]),
                parse_spans(record["loss_spans"]) if record.get("loss_spans") is not None else None,
            )
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{error!r}") from None
        if result.num_tokens < 1 or result.prompt_tokens < 0:
            raise ValueError("a number of tokens is impossible")
        if len(result.prefix) != 16 or len(result.parent_prefix) not in (0, 16):
            raise ValueError("a prefix digest is not 32 hex digits")
        return result


class BadLine(NamedTuple):
    """A line that is no record, and why. Number 0: the file is not a regular file, and was not opened."""

    number: int
    problem: str
    cut_short: bool = False  # the last line, without a newline: its process died while writing it


def record_files(directory: str) -> list[str]:
    """The files of request records of a namespace directory, in a fixed order. Raises OSError."""
    folder = os.path.join(directory, SEQUENCES)
    try:
        return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(SUFFIX))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_records(path: str, files: FileLayer | None = None) -> Iterator[RequestRecord | BadLine]:
    """Every line of one file. Raises OSError when it cannot be opened or read."""
    files = files or FileLayer()
    try:
        fd, _ = open_regular(files, path)
    except BadChunk as bad:
        yield BadLine(0, str(bad))
        return
    with io.BufferedReader(_Reading(files, fd), _MAX_LINE_BYTES) as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            try:
                yield RequestRecord.parse(line)
            except ValueError as error:
                yield BadLine(number, str(error), cut_short=not line.endswith(b"\n") and not file.peek(1))


class _Reading(io.RawIOBase):
    """An open file of a file layer, from its beginning on."""

    def __init__(self, files: FileLayer, fd: int) -> None:
        self._files, self._fd, self._position = files, fd, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._files.preadv(self._fd, [memoryview(buffer)], self._position)
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._files.close(self._fd)
        super().close()


class RecordWriter:
    """Appends records below one namespace directory. Not thread-safe; raises OSError."""

    def __init__(self, directory: str, mode: int, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._directory = os.path.join(directory, SEQUENCES)
        self._mode = mode
        self._rotate_bytes = rotate_bytes
        self._fd = -1
        self._size = 0

    def append(self, record: dict[str, Any]) -> None:
        """Write one record with a single system call, so that readers see whole lines."""
        line = json.dumps({"version": VERSION, **record}, separators=(",", ":")).encode() + b"\n"
        if self._fd < 0 or self._size + len(line) > self._rotate_bytes:
            self.close()
            self._fd = self._open_next()
            self._size = 0
        written = os.write(self._fd, line)
        if written != len(line):  # the next record would be glued to it
            self.close()
            raise OSError(errno.ENOSPC, "a record was cut short", self._directory)
        self._size += written

    def close(self) -> None:
        """Close the file. The next record goes to a new one."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_next(self) -> int:
        os.makedirs(self._directory, self._mode, exist_ok=True)
        numbers = [
            int(name[len("requests-") : -len(SUFFIX)])
            for name in os.listdir(self._directory)
            if name.startswith("requests-") and name.endswith(SUFFIX) and name[9:-6].isdigit()
        ]
        path = os.path.join(self._directory, f"requests-{max(numbers, default=0) + 1:06d}{SUFFIX}")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
