"""Request records: one JSON line per finished request, under ``sequences/`` of the namespace.

The rows are in chunks; a record says which of them were one request, where its prompt ended and how it
ended, so that an extraction can mask losses. Fields:

====================  ===================================================================================
``version``           1
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
====================  ===================================================================================

A record is written when those rows are on disk. A request of which nothing was stored has none.
Files are ``requests-<number>.jsonl``; every process begins a new one, and one is closed at 64 MiB. A line
that does not end with a newline was being written when the process died. Nothing here deletes a file.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from lmcache_hs_backend.tiers.namespace import SEQUENCES

ROTATE_BYTES = 64 << 20
VERSION = 1


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
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_next(self) -> int:
        os.makedirs(self._directory, self._mode, exist_ok=True)
        numbers = [
            int(name[len("requests-") : -len(".jsonl")])
            for name in os.listdir(self._directory)
            if name.startswith("requests-") and name.endswith(".jsonl") and name[9:-6].isdigit()
        ]
        path = os.path.join(self._directory, f"requests-{max(numbers, default=0) + 1:06d}.jsonl")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
