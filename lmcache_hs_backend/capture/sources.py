"""Rows of data files, one after another, each with its file and line. Only the file format is judged here.

JSONL (one object a line), a JSON array, either of them gzipped, Parquet, a folder that ``datasets`` saved, or a folder
of such files. A UTF-8 byte order mark is passed over, and so are blank lines. Files are streamed: memory does not grow
with them. A line that cannot be read, or says a key twice, is reported in its place, and the next ones are read; a file
that cannot be opened, or a Parquet or ``datasets`` file that is damaged, raises ``SourceError``. What is passed over, a
file without a row or of another kind in a folder, is told to ``note``.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from lmcache_hs_backend.dataset.given_ids import Twice, object_of

FILE_TYPES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".ndjson", ".parquet")

_GZIP = b"\x1f\x8b"
#: How files begin that are none of ours, and what they are.
_OTHERS = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first (zstd -d), or use gzip",
    b"BZh": "compressed with bzip2; unpack it first (bunzip2), or use gzip",
    b"\xfd7zX": "compressed with xz; unpack it first (unxz), or use gzip",
    b"PK\x03\x04": "a zip file; unpack it first (unzip)",
    b"ARRO": "a bare Arrow file; name the folder that datasets saved it in, or write it as Parquet",
}
_PARQUET = b"PAR1"
_READ_BYTES = 1 << 20
_BATCH_ROWS = 256


class SourceError(Exception):
    """A data file cannot be used. The text names it and says why."""


class SourceRow(NamedTuple):
    """One row: its file, its number in it (of the line, or of the element or row; from 1), and what it is.

    ``problem`` says why a line could not be read; ``value`` is None then.
    """

    file: str
    number: int
    value: Any
    problem: str = ""


def read_rows(paths: Iterable[str], note: Callable[[str], None] = lambda text: None) -> Iterator[SourceRow]:
    """All rows of files and folders. Raises SourceError."""
    for path in paths:
        try:
            yield from _folder(path, note) if os.path.isdir(path) else _counted(path, note)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None
        except (EOFError, zlib.error) as error:
            raise SourceError(f"{path} is damaged: {error}") from None


def _counted(path: str, note: Callable[[str], None]) -> Iterator[SourceRow]:
    count = 0
    for count, row in enumerate(_file(path), 1):  # noqa: B007 - counted for what follows
        yield row
    if not count:
        note(f"{path} has no row")


def _file(path: str) -> Iterator[SourceRow]:
    with open(path, "rb") as raw:
        head = raw.read(6)
        raw.seek(0)
        other = next((what for begin, what in _OTHERS.items() if head.startswith(begin)), None)
        if other is not None:
            raise SourceError(f"{path} is {other}")
        if head[:4] == _PARQUET:
            yield from _parquet(path)
        elif head[:2] == _GZIP:
            with gzip.open(raw, "rb") as unpacked:
                yield from _text(path, io.BufferedReader(unpacked))
        else:
            yield from _text(path, raw)


def _text(path: str, file: BinaryIO) -> Iterator[SourceRow]:
    start = file.peek(4096) if isinstance(file, io.BufferedReader) else b""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SourceError(f"{path} is UTF-16; save it as UTF-8")
    if start.startswith(codecs.BOM_UTF8):
        file.read(3)
        start = start[3:]
    yield from _array(path, file) if start.lstrip().startswith(b"[") else _lines(path, file)


def _lines(path: str, file: BinaryIO) -> Iterator[SourceRow]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield SourceRow(path, number, json.loads(line.decode(), object_pairs_hook=object_of))
        except UnicodeDecodeError as error:
            bad = line[error.start]
            yield SourceRow(path, number, None, f"the line is not UTF-8: byte 0x{bad:02x} at position {error.start}")
        except Twice as error:
            yield SourceRow(path, number, None, str(error))
        except (ValueError, RecursionError) as error:
            yield SourceRow(path, number, None, f"the line is not JSON: {error}")


def _array(path: str, file: BinaryIO) -> Iterator[SourceRow]:
    """The elements of one JSON array, without having all of it in memory."""
    decoder, text, number = json.JSONDecoder(object_pairs_hook=object_of), "", 0
    plain = json.JSONDecoder()
    utf8 = codecs.getincrementaldecoder("utf-8")()
    separator = "["
    ended = False
    while True:
        text = text.lstrip()
        if text.startswith("]") and number:
            yield from _after_array(path, file, text[1:], number)
            return
        if text.startswith(separator):
            rest = text[1:].lstrip()
            if rest.startswith("]"):
                yield from _after_array(path, file, rest[1:], number)
                return
            try:
                problem = ""
                try:
                    value, end = decoder.raw_decode(rest)
                except Twice as error:
                    value, problem, end = None, str(error), plain.raw_decode(rest)[1]
                # A number, or a word, may go on in what has not been read yet; an object, list or text is whole.
                if ended or end < len(rest):
                    number, text, separator = number + 1, rest[end:], ","
                    yield SourceRow(path, number, value, problem)
                    continue
            except ValueError as error:
                if ended:
                    yield SourceRow(path, number + 1, None, f"the array breaks off or is no JSON here: {error}")
                    return
            except RecursionError as error:
                yield SourceRow(path, number + 1, None, f"not JSON: {error}; the rest of the file is not read")
                return
        elif text or ended:
            what = f"{text[0]!r} where {separator!r} should be" if text else "the array has no end"
            yield SourceRow(path, number + 1, None, f"not JSON: {what}; the rest of the file is not read")
            return
        block = file.read(max(_READ_BYTES, len(text)))  # twice as much each time, or a long element costs its square
        ended = not block
        try:
            text += utf8.decode(block, final=ended)
        except UnicodeDecodeError as error:
            problem = f"the file is not UTF-8 here or after: {error.reason}; the rest of the file is not read"
            yield SourceRow(path, number + 1, None, problem)
            return


def _after_array(path: str, file: BinaryIO, text: str, number: int) -> Iterator[SourceRow]:
    """What follows an array, such as another one, is not read, and that is said."""
    while not (rest := text.lstrip()):
        block = file.read(_READ_BYTES)
        if not block:
            return
        text = block.decode(errors="replace")
    yield SourceRow(path, number + 1, None, f"the array has ended, and {rest[:20]!r} follows; the rest is not read")


def _parquet(path: str) -> Iterator[SourceRow]:
    pq = _need("pyarrow.parquet", path)
    import pyarrow

    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield SourceRow(path, number, _without_nulls(value))
    except pyarrow.ArrowException as error:
        raise SourceError(f"{path} is no readable Parquet file: {error}") from None


def _folder(path: str, note: Callable[[str], None]) -> Iterator[SourceRow]:
    names = sorted(os.listdir(path))
    folders = [name for name in names if os.path.isdir(os.path.join(path, name))]
    if "dataset_dict.json" in names:
        if len(folders) == 1:
            yield from _folder(os.path.join(path, folders[0]), note)
            return
        raise SourceError(f"{path} has several splits; name one: {', '.join(os.path.join(path, s) for s in folders)}")
    if "state.json" in names and "dataset_info.json" in names:
        yield from _saved(path)
        return
    files = [name for name in names if name.lower().endswith(FILE_TYPES) and name not in folders]
    if not files:
        inside = f"; name one of its folders: {', '.join(folders[:8])}" if folders else ""
        raise SourceError(
            f"{path} has no data file ({', '.join(FILE_TYPES)}) and is no folder that datasets saved{inside}"
        )
    passed = [name for name in names if name not in files and not name.startswith(".")]
    if passed:
        more = f" and {len(passed) - 8} more" if len(passed) > 8 else ""
        note(f"{path}: not read, as no data files: {', '.join(passed[:8])}{more}")
    for name in files:
        yield from _counted(os.path.join(path, name), note)


def _saved(path: str) -> Iterator[SourceRow]:
    datasets = _need("datasets", path)
    try:
        data = datasets.load_from_disk(path)
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} is no folder that datasets can read: {error}") from None
    number = 0
    try:
        for batch in data.with_format(None).iter(_BATCH_ROWS):
            columns = list(batch)
            for values in zip(*(batch[name] for name in columns), strict=True):
                number += 1
                yield SourceRow(path, number, _without_nulls(dict(zip(columns, values, strict=True))))
    except (ValueError, TypeError, ImportError) as error:
        raise SourceError(f"{path} cannot be read after row {number}: {error}") from None


def _without_nulls(value: Any) -> Any:
    """A value of a column file without its nulls: each object there has the keys of all. ``content`` stays."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _need(module: str, path: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise SourceError(f"{path} needs {name}: pip install 'lmcache-hs-backend[extract]'") from None
