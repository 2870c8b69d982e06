"""What every format does: encode a sample in any thread, publish samples in order, finish the folder.

A format never sees an unchecked row and decides nothing about which samples there are. What it writes
appears under its final name only when it is whole: encoding goes to a temporary file, publishing renames.
"""

from __future__ import annotations

import abc
import errno
import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, cast

import torch
import xxhash

from lmcache_hs_backend.dataset.capture_info import Layers
from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.rows import Rows
from lmcache_hs_backend.format.pages import ALIGN

TRAIN, VAL = "train", "val"


@dataclass(frozen=True)
class Job:
    """What a format has to know about the dataset as a whole.

    ``normed``: whether the last layer, as it is handed over, is after the final norm. ``split``: whether
    there are validation samples. ``state``: a folder for unfinished files, on the filesystem of ``out``.
    """

    out: str
    state: str
    model: str
    layers: Layers
    hidden_size: int
    dtype: str
    normed: bool
    split: bool


class Encoded(NamedTuple):
    """A sample ready to be published: in the file ``path``, or as ``parts`` in memory; ``facts`` go along."""

    nbytes: int
    checksum: str
    path: str = ""
    parts: tuple[memoryview, ...] = ()
    facts: dict[str, Any] = {}  # noqa: RUF012 - never changed: every format that has facts makes a dict of its own


class Entry(NamedTuple):
    """A published sample, as the journal keeps it. ``loss``: the runs of ones of its mask."""

    file: str
    nbytes: int
    checksum: str
    tokens: int
    loss: list[list[int]]
    split: str
    facts: dict[str, Any]


class Format(abc.ABC):
    """One output format, for one folder."""

    #: Whether the last layer is stored before the final norm (False), after it (True), or as the flag says (None).
    wants_normed: bool | None
    #: Whether the last layer is stored at all.
    uses_last = True
    #: Whether all layers of a token lie beside each other.
    stacked = False
    #: Whether the trainer can do without auxiliary layers.
    aux_optional = False
    dtypes: tuple[str, ...] = ("bf16",)
    #: Whether several samples go into one file, so that they are copied, not renamed, to their place.
    in_shards = False

    def __init__(self, job: Job) -> None:
        """Raises DatasetError when something that the format needs is not installed."""
        self.job = job

    @abc.abstractmethod
    def nbytes(self, tokens: int) -> int:
        """About how many bytes a sample of so many tokens takes."""

    def promise(self, sample: Sample, mask: torch.Tensor) -> None:  # noqa: B027 - most formats take every sample
        """Raises RowRejected when ``encode`` will refuse the sample, whatever its rows are."""

    @abc.abstractmethod
    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        """Make the bytes of a sample, in any thread. Raises OSError."""

    def publish(self, encoded: Encoded, split: str, number: int) -> str:
        """Give a sample its place, in order: ``number`` counts from 0, within ``split`` where folders are split.

        Returns the path relative to the folder. Raises OSError. Here for formats in which each has a file of its own.
        """
        relative = self.place_of(split, number)
        assert relative is not None, "a format without such files has a publish of its own"
        return self.place(encoded, relative)

    def place_of(self, split: str, number: int) -> str | None:
        """Where ``publish`` puts a sample, where each has a file of its own."""
        return None

    def is_whole(self, entry: Entry) -> bool:
        """Whether a published sample is still where it was put, with all its bytes."""
        path = os.path.join(self.job.out, entry.file)
        return os.path.exists(path) and os.path.getsize(path) == entry.nbytes

    def rewind(self, entries: Sequence[Entry]) -> None:  # noqa: B027 - most formats have nothing to go back to
        """Go on after these samples, the last published of each split; what was written after them is overwritten."""

    def finish(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """Write what describes the folder as a whole; gives the fields that the manifest must have as well."""
        return {}

    def close(self) -> None:  # noqa: B027 - most formats keep nothing open
        """Close open files, finished or not."""

    def folder(self, split: str) -> str:
        """Where the samples of a split go, relative to the folder."""
        return split if self.job.split else ""

    def place(self, encoded: Encoded, relative: str) -> str:
        """Rename the file of an encoded sample to its final path."""
        path = os.path.join(self.job.out, relative)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.replace(encoded.path, path)
        except FileNotFoundError:  # a part's, which a run has put there that was killed before it said so
            if not os.path.exists(path) or os.path.getsize(path) != encoded.nbytes:
                raise
        return relative


class HashingFile:
    """A new file whose bytes are counted and digested as they are written.

    ``direct``: past the page cache, as far as memory, lengths and the disk allow; one copy less, and no
    backlog of dirty pages. What does not lie on page boundaries is written through the cache.
    """

    def __init__(self, path: str, *, direct: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._direct = direct
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            self._direct = False  # a filesystem without O_DIRECT, which may have made the file all the same
            self._fd = os.open(path, flags & ~os.O_EXCL | os.O_TRUNC, 0o666)
        self._digest = xxhash.xxh3_64()
        self.nbytes = 0
        self.error: OSError | None = None  # what the system said, for callers that only see that writing failed

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, *_: object) -> None:
        # The file is not read soon, and the disk can start on it now; on Linux this does not wait.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._fd)

    def write(self, data: Any) -> int:
        """Write all bytes of a buffer, and return how many they are. Raises OSError."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):  # the kernel may take less at a time
                done += self._write_some(view[done:])
        except OSError as error:
            self.error = error
            raise
        self._digest.update(view)
        self.nbytes += len(view)
        return len(view)

    def _write_some(self, view: memoryview) -> int:
        pages = len(view) // ALIGN * ALIGN
        if self._direct and pages:
            try:
                return os.write(self._fd, view[:pages])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if self._direct:
            self._direct = False
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return os.write(self._fd, view)

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def checksum(self) -> str:
        """xxh3_64 of what has been written, in hexadecimal."""
        return self._digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without copying."""
    flat = tensor.view(torch.uint8).reshape(-1).numpy()
    return memoryview(cast("Any", flat))


def save_torch(value: Mapping[Any, Any], path: str) -> Encoded:
    """``torch.save`` into a file, with its checksum. The same value gives the same bytes."""
    with HashingFile(path) as file:
        try:
            torch.save(value, cast("IO[bytes]", file))
        except RuntimeError:  # torch's own complaint about a file that took too little
            if file.error is not None:
                raise file.error from None
            raise
    return Encoded(file.nbytes, file.checksum, path)
