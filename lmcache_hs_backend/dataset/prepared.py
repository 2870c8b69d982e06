"""Prepared datasets: rows of token ids and a loss mask, from a datasets folder, JSONL or Parquet.

Ids are ``input_ids``, flat or ``[1, N]``, without the padding that ``attention_mask`` names. A token is trained on
where all of these columns that a row has say so: ``loss_mask``, ``assistant_masks`` (what transformers'
``apply_chat_template`` calls it), ``assistant_mask``, ``completion_mask``, and ``labels``, which are -100 where nothing
is trained on. Rows are read one at a time, in any order, so a dataset may be larger than memory. A row that cannot be
used is a RowRejected, and loses itself only. ``datasets`` and ``pyarrow`` (the ``extract`` extra) are needed for
everything but JSONL.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lmcache_hs_backend.dataset import given_ids
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected
from lmcache_hs_backend.dataset.given_ids import MASK_COLUMNS, PADDING

IDS = "input_ids"
_LOOK_AT = 100  # rows of a JSONL file, for one that tells the columns


def needs_extra(module: str, purpose: str) -> DatasetError:
    """The error for a library that is not installed."""
    return DatasetError(f"{purpose} needs {module}, which is not installed: pip install 'lmcache-hs-backend[extract]'")


class PreparedRow(NamedTuple):
    """A row: its token ids, without padding, and its columns as they are, of which ``kept`` are its own tokens."""

    ids: list[int]
    columns: Mapping[str, object]
    kept: slice

    def mask(self) -> list[int] | None:
        """The loss mask, 0 or 1 for each of the ids; None where the row has none.

        Raises RowRejected when what the row has is no mask of these ids.
        """
        whole = given_mask(self.columns, given_ids.ids_of(self.columns[IDS], IDS))
        return None if whole is None else whole[self.kept]


class Prepared(Protocol):
    """Rows by number. ``mask_columns``: those of ``MASK_COLUMNS`` that there are."""

    path: str
    mask_columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def row(self, number: int) -> PreparedRow:
        """Raises RowRejected for a row without token ids, DatasetError when the dataset cannot be read."""


def ids_of(prepared: Prepared) -> Iterator[Sequence[int] | RowRejected]:
    """The token ids of every row, in order, or why there are none."""
    for number in range(len(prepared)):
        try:
            yield prepared.row(number).ids
        except RowRejected as rejected:
            yield rejected


def given_mask(columns: Mapping[str, object], ids: Sequence[int]) -> list[int] | None:
    """``given_ids.given_mask``, as a check of a row: raises RowRejected."""
    try:
        return given_ids.given_mask(columns, ids)
    except ValueError as error:
        raise RowRejected("mask", str(error)) from None


def _row(columns: Mapping[str, object]) -> PreparedRow:
    """Raises RowRejected."""
    try:
        ids = given_ids.ids_of(columns[IDS], IDS)
        kept = given_ids.unpadded(len(ids), columns.get(PADDING))
    except ValueError as error:
        raise RowRejected("row", str(error)) from None
    return PreparedRow(ids[kept], columns, kept)


def open_prepared(path: str) -> Prepared:
    """Open a dataset. Raises DatasetError, naming the path and what it should be."""
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(path):
        return _Folder(path)
    if not os.path.isfile(path):
        raise DatasetError(f"dataset:{path} does not exist; name a datasets folder, a JSONL or a Parquet file")
    try:
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    if path.endswith(".parquet") or start.startswith(b"PAR1"):
        return _Parquet(path)
    start = b"".join(start.removeprefix(b"\xef\xbb\xbf").split())  # whatever white space is between
    for begin, what in _OTHERS.items():
        if start.startswith(begin):
            raise DatasetError(f"{path} is {what}")
    return _JsonLines(path)


#: How files begin that are no JSONL, and what to do about them.
_OTHERS = {
    b"\x1f\x8b": "gzipped, and rows are read in any order: unpack it first (gunzip)",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first (zstd -d)",
    b"[{": "one JSON array, but has to have an object in each line (jq -c '.[]' makes that of it)",
}


def _mask_columns(names: Iterable[str]) -> tuple[str, ...]:
    present = set(names)
    return tuple(name for name in MASK_COLUMNS if name in present)


class _JsonLines:
    def __init__(self, path: str) -> None:
        self.path = path
        self._offsets = array("Q")
        try:
            with open(path, "rb") as file:
                offset = 0
                for line in file:
                    if not line.isspace():
                        self._offsets.append(offset)
                    offset += len(line)
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
        names: set[str] = set()
        for number in range(min(len(self._offsets), _LOOK_AT)):
            record = self._record(number)
            if isinstance(record, dict):
                names |= record.keys()
        if not self._offsets:
            raise DatasetError(f"{path} has no row")
        if "input_ids" not in names:
            raise DatasetError(f"{path}: no row is a JSON object with input_ids {_PREPARE}")
        self.mask_columns = _mask_columns(names)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, number: int) -> PreparedRow:
        record = self._record(number)
        if not isinstance(record, dict) or "input_ids" not in record:
            why = f": {record}" if isinstance(record, Exception) else ""
            raise RowRejected("row", f"the line is not a JSON object with input_ids{why}")
        return _row(record)

    def _record(self, number: int) -> Any:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offsets[number])
                return json.loads(file.readline(), object_pairs_hook=given_ids.object_of)
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            return error


class _Folder:
    """What ``datasets.Dataset.save_to_disk`` wrote."""

    def __init__(self, path: str) -> None:
        try:
            import datasets
        except ImportError:
            raise needs_extra("datasets", "a datasets folder") from None
        self.path = path
        try:
            data: Any = datasets.load_from_disk(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{path} is not a datasets folder (Dataset.save_to_disk): {error}") from None
        if isinstance(data, datasets.DatasetDict) and len(data) == 1:
            (data,) = data.values()
        if not isinstance(data, datasets.Dataset):
            raise DatasetError(f"{path} holds several splits; name the folder of one of them")
        _check_columns(path, data.column_names)
        names = [name for name in (IDS, PADDING, *MASK_COLUMNS) if name in data.column_names]
        self._data = data.select_columns(names).with_format(None)
        self.mask_columns = _mask_columns(data.column_names)

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def row(self, number: int) -> PreparedRow:
        try:
            row = self._data[number]
        except (OSError, ValueError) as error:
            raise DatasetError(f"{self.path} cannot be read at row {number}: {error}") from None
        return _row(row)


class _Parquet:
    """Row groups are read as they are needed; the last one stays."""

    def __init__(self, path: str) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise needs_extra("pyarrow", "a Parquet file") from None
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DatasetError(f"{path} is not a Parquet file: {error}") from None
        names = self._file.schema_arrow.names
        _check_columns(path, names)
        self.mask_columns = _mask_columns(names)
        self._columns = [name for name in (IDS, PADDING, *MASK_COLUMNS) if name in names]
        sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._size: int = sum(sizes)
        self._lock = threading.Lock()  # the file is read by one thread at a time
        self._group = -1
        self._table: Any = None

    def __len__(self) -> int:
        return self._size

    def row(self, number: int) -> PreparedRow:
        group = bisect.bisect_right(self._starts, number) - 1
        with self._lock:
            if group != self._group:
                try:
                    self._table = self._file.read_row_group(group, self._columns)
                except (OSError, ValueError) as error:  # of pyarrow's, too
                    raise DatasetError(f"{self.path} cannot be read at row {number}: {error}") from None
                self._group = group
            table = self._table
        at = number - self._starts[group]
        return _row({name: table.column(name)[at].as_py() for name in self._columns})

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _Parquet, (self.path,)


def _check_columns(path: str, names: Sequence[str]) -> None:
    if "input_ids" not in names:
        raise DatasetError(f"{path} has the columns {', '.join(names)}, but needs input_ids {_PREPARE}")


_PREPARE = (
    f"(and one of {', '.join(MASK_COLUMNS)}); conversations become token ids with the trainer's own preparation, such "
    f"as `speculators prepare-data`"
)
