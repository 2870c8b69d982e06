"""Which rows are done: those with a complete record, all of whose chunks are on disk with every layer.

A record alone proves nothing: its rows may have been evicted since. Reads, and changes nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from lmcache_hs_backend.capture.capture_settings import CaptureError, Settings
from lmcache_hs_backend.dataset.chains import Report, requests
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.forest import UsableForest
from lmcache_hs_backend.dataset.index import ChunkIndex, model_label
from lmcache_hs_backend.format.namespace import local_model_revision, namespaces
from lmcache_hs_backend.format.request_log import record_files

_ROW_ID = re.compile(r"hs([0-9a-f]{32})")


def row_of(request_id: str) -> str | None:
    """The row that a request was: vLLM adds to the ids that it is given."""
    found = _ROW_ID.search(request_id)
    return found[0] if found else None


class OnDisk(NamedTuple):
    """What an earlier run of a capture left.

    Attributes:
        rows: The ids of rows that are done, as numbers.
        prefixes: The prefix digests of all chunks that can be used, of whatever row: with every layer, and with the
            chunks before them.
    """

    rows: set[int]
    prefixes: set[bytes]


def look_at_disk(settings: Settings, *, served: bool = False) -> OnDisk:
    """Find what is there of this model.

    Args:
        settings: Which cold path, model and layers.
        served: See ``is_ours``.

    Raises:
        CaptureError: The cold path cannot be read.
    """
    found = OnDisk(set(), set())
    if not os.path.isdir(settings.cold_path):
        return found
    namespaces_of: dict[tuple[str, int], list[str]] = {}
    try:
        for directory, record in namespaces(settings.cold_path):
            if is_ours(record, settings, served=served):
                namespaces_of.setdefault((model_label(record), record["chunk_size"]), []).append(directory)
        for (label, chunk_size), directories in namespaces_of.items():
            whole = {row for directory in directories for row in _whole(directory)}
            intact = _intact(settings, label, chunk_size, found.prefixes)
            found.rows.update(int(row[2:], 16) for row in whole & intact)
    except OSError as error:
        raise CaptureError(f"{settings.cold_path} cannot be read: {error.strerror}") from None
    return found


def is_ours(record: dict[str, Any], settings: Settings, *, served: bool) -> bool:
    """Whether rows of a namespace are this model's, as far as its files can be compared, in chunks of this size.

    A server may know the model by another path, so of the name only the last part has to agree; and ``served`` rows
    may be in chunks of any size, since that is a setting of the server's.
    """
    facts, tiers = settings.facts, settings.tiers
    if not isinstance(record.get("chunk_size"), int) or record.get("kv_dtype") not in ("", None, facts.dtype):
        return False
    if record["chunk_size"] != tiers.chunk_size and not served:
        return False
    if os.path.basename(str(record.get("model")).rstrip("/")) != os.path.basename(settings.model.rstrip("/")):
        return False
    revision = tiers.model_revision
    if revision is None:
        revision = settings.engine.get("revision") or local_model_revision(settings.model)
    return not revision or record.get("model_revision") == revision


def _whole(directory: str) -> Iterator[str]:
    """Rows of a namespace whose records say that all they had was stored."""
    for path in record_files(directory):
        with open(path, "rb") as file:
            for line in file:
                row = whole_row(line)
                if row is not None:
                    yield row


def whole_row(line: bytes) -> str | None:
    """The row of a record's line, when all of it was stored; None for any other line."""
    try:
        record = json.loads(line)
        row = row_of(record["request_id"])
        whole = record["num_tokens"] == record["expected_tokens"] and record["finish_reason"] != "abort"
    except (ValueError, KeyError, TypeError):  # cut short when the process died, or of another kind
        return None
    return row if whole else None


def _intact(settings: Settings, label: str, chunk_size: int, prefixes: set[bytes]) -> set[str]:
    """Rows whose chunks are all there, from the first on, with the layers that are asked for.

    The prefix digests of all such chunks are added to ``prefixes``.
    """
    try:
        forest = UsableForest(ChunkIndex([settings.cold_path], label, chunk_size=chunk_size), settings.layers)
    except DatasetError:  # no chunk at all
        return set()
    prefixes.update(forest.prefixes())
    try:
        samples = requests(forest, Report("requests"))
    except DatasetError:  # no record
        return set()
    return {row for sample in samples if (row := row_of(sample.id)) is not None}


class Recorded(NamedTuple):
    """A record of a row. ``whole``: all that the row had is stored; ``directory``: of its namespace."""

    row_id: str
    whole: bool
    record: dict[str, Any]
    directory: str


class RecordTail:
    """The records that appear while a capture runs."""

    def __init__(self, cold_path: str) -> None:
        self._cold_path = cold_path
        self._read: dict[str, int] = {}
        for path in self._files():
            self._read[path] = os.path.getsize(path)

    def new(self) -> list[Recorded]:
        """Rows recorded since the last call."""
        found = []
        for path in self._files():
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            lines = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(lines)
            for line in lines.splitlines():
                try:
                    record = json.loads(line)
                    row = row_of(record["request_id"])
                except (ValueError, KeyError, TypeError):
                    continue
                if row is not None:
                    directory = os.path.dirname(os.path.dirname(path))
                    found.append(Recorded(row, whole_row(line) is not None, record, directory))
        return found

    def _files(self) -> list[str]:
        if not os.path.isdir(self._cold_path):
            return []
        return [path for directory, _ in namespaces(self._cold_path) for path in record_files(directory)]
