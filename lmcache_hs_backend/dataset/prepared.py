"""Prepared datasets: rows of ``input_ids`` and ``loss_mask``, from a datasets folder, JSONL or Parquet.

Rows are read one at a time, in any order, so a dataset may be larger than memory. ``datasets`` and
``pyarrow`` (the ``extract`` extra) are needed for everything but JSONL.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from lmcache_hs_backend.dataset.errors import DatasetError

COLUMNS = ("input_ids", "loss_mask")


def needs_extra(module: str, purpose: str) -> DatasetError:
    """The error for a library that is not installed."""
    return DatasetError(f"{purpose} needs {module}, which is not installed: pip install 'lmcache-hs-backend[extract]'")


class Prepared(Protocol):
    """Rows by number: token ids, and the loss mask (None where the dataset has none)."""

    path: str

    def __len__(self) -> int: ...

    def row(self, number: int) -> tuple[Sequence[int], Sequence[int] | None]: ...


def ids_of(prepared: Prepared) -> Iterator[Sequence[int]]:
    """The token ids of every row, in order."""
    for number in range(len(prepared)):
        yield prepared.row(number)[0]


def open_prepared(path: str) -> Prepared:
    """Open a dataset. Raises DatasetError, naming the path and what it should be."""
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(path):
        return _Folder(path)
    if not os.path.isfile(path):
        raise DatasetError(f"dataset:{path} does not exist; name a datasets folder, a JSONL or a Parquet file")
    if path.endswith(".parquet"):
        return _Parquet(path)
    return _JsonLines(path)


class _JsonLines:
    def __init__(self, path: str) -> None:
        self.path = path
        self._offsets = array("Q")
        with open(path, "rb") as file:
            offset = 0
            for line in file:
                if not line.isspace():
                    self._offsets.append(offset)
                offset += len(line)
        if self._offsets:
            self.row(0)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, number: int) -> tuple[Sequence[int], Sequence[int] | None]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offsets[number])
                line = file.readline()
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            record = json.loads(line)
            return record["input_ids"], record.get("loss_mask")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DatasetError(
                f"{self.path}, row {number}: not a JSON object with input_ids (and loss_mask); conversations become "
                f"token ids with the trainer's own preparation, such as `speculators prepare-data`"
            ) from None


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
        except (FileNotFoundError, ValueError) as error:
            raise DatasetError(f"{path} is not a datasets folder (Dataset.save_to_disk): {error}") from None
        if not isinstance(data, datasets.Dataset):
            raise DatasetError(f"{path} holds several splits; name the folder of one of them")
        _check_columns(path, data.column_names)
        self._data = data.with_format(None)
        self._has_mask = "loss_mask" in data.column_names

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def row(self, number: int) -> tuple[Sequence[int], Sequence[int] | None]:
        row = self._data[number]
        return row["input_ids"], row["loss_mask"] if self._has_mask else None


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
        self._columns = [name for name in COLUMNS if name in names]
        sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._size: int = sum(sizes)
        self._lock = threading.Lock()  # the file is read by one thread at a time
        self._group = -1
        self._table: Any = None

    def __len__(self) -> int:
        return self._size

    def row(self, number: int) -> tuple[Sequence[int], Sequence[int] | None]:
        group = bisect.bisect_right(self._starts, number) - 1
        with self._lock:
            if group != self._group:
                self._table = self._file.read_row_group(group, self._columns)
                self._group = group
            table = self._table
        at = number - self._starts[group]
        values = [table.column(name)[at].as_py() for name in self._columns]
        return values[0], values[1] if len(values) > 1 else None

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _Parquet, (self.path,)


def _check_columns(path: str, names: Sequence[str]) -> None:
    if "input_ids" not in names:
        raise DatasetError(
            f"{path} has the columns {', '.join(names)}, but needs input_ids (and loss_mask); conversations become "
            f"token ids with the trainer's own preparation, such as `speculators prepare-data`"
        )
