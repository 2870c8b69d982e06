"""The plan and the journal of an extraction: what makes it end with the same bytes however often it is killed.

Both lie in a folder inside the output folder that goes away when all is done. The plan says which samples
there are, and is written once, before the first; the journal says what became of each, in order. Lines are
appended after a sample is in its place, so a sample without a line is done again, with the same result.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.formats.base import Entry
from lmcache_hs_backend.dataset.index import ChunkIndex, IndexedChunk

STATE = ".lmcache-hs-extract"
_PLAN = "plan.jsonl"


def read_head(out: str) -> dict[str, Any] | None:
    """What an earlier, unfinished run into a folder has planned, without its samples; None when there was none."""
    try:
        with open(os.path.join(out, STATE, _PLAN), encoding="utf-8") as file:
            head: dict[str, Any] = json.loads(file.readline())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(out, error) from None
    return head


def _damaged(out: str, error: Exception) -> DatasetError:
    path = os.path.join(out, STATE)
    return DatasetError(f"{path}/{_PLAN} is damaged ({error}); remove {path}, and begin again")


def read_plan(out: str, chunks: Sequence[IndexedChunk]) -> tuple[dict[str, Any], list[Sample]]:
    """The plan in a folder; a sample whose last chunk is not among these has ``last`` -1."""
    where = {(chunk.prefix, chunk.start): position for position, chunk in enumerate(chunks)}
    with open(os.path.join(out, STATE, _PLAN), encoding="utf-8") as file:
        try:
            head = json.loads(file.readline())
            samples = []
            for line in file:
                name, prefix, start, tokens, prompt_tokens, row, spans = json.loads(line)
                last = where.get((bytes.fromhex(prefix), start), -1)
                loss_spans = None if spans is None else tuple((begin, end) for begin, end in spans)
                samples.append(Sample(name, last, tokens, prompt_tokens, row, loss_spans))
        except (ValueError, TypeError) as error:
            raise _damaged(out, error) from None
    return head, samples


class Rejected(NamedTuple):
    """A sample that failed a check."""

    id: str
    tokens: int
    reason: str
    detail: str


class Journal:
    """The state folder of one output folder, held by this process."""

    def __init__(self, out: str) -> None:
        """Raises DatasetError when another process is writing there, OSError when nothing can be written."""
        self.directory = os.path.join(out, STATE)
        self.temporary = os.path.join(self.directory, "tmp")
        os.makedirs(self.directory, exist_ok=True)
        self._lock = os.open(os.path.join(self.directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DatasetError(f"another extraction is writing to {out}") from None
        shutil.rmtree(self.temporary, ignore_errors=True)
        os.makedirs(self.temporary)
        self._plan = os.path.join(self.directory, _PLAN)
        self._path = os.path.join(self.directory, "journal.jsonl")
        self._bad_rows = os.path.join(self.directory, "bad-rows.jsonl")
        self._fd = -1

    def has_plan(self) -> bool:
        """Whether an earlier run has written its plan."""
        return os.path.exists(self._plan)

    def write_plan(
        self, head: dict[str, Any], samples: Sequence[Sample], index: ChunkIndex, bad_rows: Sequence[Rejected] = ()
    ) -> None:
        """File the plan, whole or not at all. Chunks are named by their prefix digests.

        ``bad_rows``: what is rejected before any sample is read, as there is nothing to look for.
        """
        with open(self._bad_rows, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(rejected) + "\n" for rejected in bad_rows)
        path = os.path.join(self.temporary, "plan")
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(head) + "\n")
            for sample in samples:
                chunk = index.chunks[sample.last]
                line = [sample.id, chunk.prefix.hex(), chunk.start, *sample[2:]]
                file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, self._plan)

    def read_plan(self, index: ChunkIndex) -> tuple[dict[str, Any], list[Sample]]:
        """See ``read_plan``."""
        return read_plan(os.path.dirname(self.directory), index.chunks)

    def results(self) -> Iterator[Entry | Rejected]:
        """What became of the samples so far, in order. Ends before a line that a crash has cut short."""
        if not os.path.exists(self._path):
            return
        with open(self._path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                kind, *values = json.loads(line)
                yield Entry(*values) if kind == "ok" else Rejected(*values)

    def entries(self) -> Iterator[Entry]:
        """The samples that were published, in order."""
        return (result for result in self.results() if isinstance(result, Entry))

    def rejected(self) -> Iterator[Rejected]:
        """The rows that were no rows, then the samples that failed a check."""
        with open(self._bad_rows, encoding="utf-8") as file:
            for line in file:
                yield Rejected(*json.loads(line))
        yield from (result for result in self.results() if isinstance(result, Rejected))

    def keep(self, count: int) -> None:
        """Go on after the first ``count`` results."""
        size = 0
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                for _, line in zip(range(count), file, strict=False):
                    size += len(line)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, size)

    def append(self, result: Entry | Rejected) -> None:
        """Add a result, whole or not at all. Raises OSError."""
        line = ["ok" if isinstance(result, Entry) else "rejected", *result]
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError(f"{self._path} could not be written")

    def close(self) -> None:
        """Leave the folder as it is, for a later run to go on."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def remove(self) -> None:
        """All is done: the folder is no longer needed."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)
