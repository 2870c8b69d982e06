"""Prepared datasets: rows of token ids and a loss mask, from a datasets folder, JSONL or Parquet.

Ids are ``input_ids``, flat or ``[1, N]``. The mask is the first of these columns that the dataset has: ``loss_mask``,
``assistant_masks`` (what transformers' ``apply_chat_template`` calls it), ``assistant_mask``, or ``labels``, which are
-100 where nothing is trained on. Rows are read one at a time, in any order, so a dataset may be larger than memory. A
row that cannot be used is a RowRejected, and loses itself only. ``datasets`` and ``pyarrow`` (the ``extract`` extra)
are needed for everything but JSONL.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected

MASK_COLUMNS = ("loss_mask", "assistant_masks", "assistant_mask", "labels")
#: A label of a token that is not trained on, as every loss function of torch has it.
IGNORED = -100
_LOOK_AT = 100  # rows of a JSONL file, for one that tells the columns


def needs_extra(module: str, purpose: str) -> DatasetError:
    """The error for a library that is not installed."""
    return DatasetError(f"{purpose} needs {module}, which is not installed: pip install 'lmcache-hs-backend[extract]'")


class Prepared(Protocol):
    """Rows by number: token ids, and what stands in the mask's column, as it is (None where nothing does)."""

    path: str
    mask_column: str | None

    def __len__(self) -> int: ...

    def row(self, number: int) -> tuple[Sequence[int], object]:
        """Raises RowRejected for a row without token ids, DatasetError when the dataset cannot be read."""


def ids_of(prepared: Prepared) -> Iterator[Sequence[int] | RowRejected]:
    """The token ids of every row, in order, or why there are none."""
    for number in range(len(prepared)):
        try:
            yield prepared.row(number)[0]
        except RowRejected as rejected:
            yield rejected


def given_mask(column: str | None, given: object, ids: Sequence[int]) -> list[int] | None:
    """The loss mask of a row, 0 or 1 for each of its ids; None where the row has none.

    Raises RowRejected when what the row has is no mask of these ids.
    """
    if given is None or column is None:
        return None
    values = _flat(given)
    if values is None:
        raise RowRejected("mask", f"{len(ids)} token ids, but a loss mask that is {given!r:.40}")
    if len(values) != len(ids):
        raise RowRejected("mask", f"{len(ids)} token ids, but a loss mask of {len(values)}")
    if column == "labels":
        for at, (label, token) in enumerate(zip(values, ids, strict=True)):
            if label not in (IGNORED, token):
                raise RowRejected(
                    "mask",
                    f"label {label} at token {at} is neither {IGNORED} nor the token's id {token}: moved by one?",
                )
        return [int(label != IGNORED) for label in values]
    if not all(value in (0, 1) for value in values):
        raise RowRejected("mask", "the loss mask has a value other than 0 and 1")
    return [int(value) for value in values]


def _ids(value: object) -> list[int]:
    ids = _flat(value)
    if ids is None or not all(type(token) is int and abs(token) < 2**63 for token in ids):
        raise RowRejected("row", f"input_ids are {value!r:.40}, not a list of integers, flat or [1, N]")
    return ids


def _flat(value: object) -> list[Any] | None:
    """A list of numbers, which may be the only one in another list; None for anything else."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    if not isinstance(value, list | tuple) or any(isinstance(item, list | tuple) for item in value):
        return None
    return list(value)


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


def _mask_column(names: Iterable[str]) -> str | None:
    present = set(names)
    return next((name for name in MASK_COLUMNS if name in present), None)


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
        if len(self._offsets) and "input_ids" not in names:
            raise DatasetError(f"{path}: no row is a JSON object with input_ids {_PREPARE}")
        self.mask_column = _mask_column(names)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, number: int) -> tuple[Sequence[int], object]:
        record = self._record(number)
        if not isinstance(record, dict) or "input_ids" not in record:
            raise RowRejected("row", "the line is not a JSON object with input_ids")
        return _ids(record["input_ids"]), None if self.mask_column is None else record.get(self.mask_column)

    def _record(self, number: int) -> Any:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offsets[number])
                return json.loads(file.readline())
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            return None


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
        self.mask_column = _mask_column(data.column_names)

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def row(self, number: int) -> tuple[Sequence[int], object]:
        row = self._data[number]
        return _ids(row["input_ids"]), None if self.mask_column is None else row[self.mask_column]


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
        self.mask_column = _mask_column(names)
        self._columns = ["input_ids", *filter(None, (self.mask_column,))]
        sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._size: int = sum(sizes)
        self._lock = threading.Lock()  # the file is read by one thread at a time
        self._group = -1
        self._table: Any = None

    def __len__(self) -> int:
        return self._size

    def row(self, number: int) -> tuple[Sequence[int], object]:
        group = bisect.bisect_right(self._starts, number) - 1
        with self._lock:
            if group != self._group:
                self._table = self._file.read_row_group(group, self._columns)
                self._group = group
            table = self._table
        at = number - self._starts[group]
        values = [table.column(name)[at].as_py() for name in self._columns]
        return _ids(values[0]), values[1] if len(values) > 1 else None

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _Parquet, (self.path,)


def _check_columns(path: str, names: Sequence[str]) -> None:
    if "input_ids" not in names:
        raise DatasetError(f"{path} has the columns {', '.join(names)}, but needs input_ids {_PREPARE}")


_PREPARE = (
    f"(and one of {', '.join(MASK_COLUMNS)}); conversations become token ids with the trainer's own preparation, such "
    f"as `speculators prepare-data`"
)
