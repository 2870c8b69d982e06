"""Names and directories of a cold path, and what is found under them.

::

    <cold_path>/<namespace>/namespace.json  .lock
                           /<hh>/<32 hex>.safetensors            a chunk, named after its full key
                           /archive/<hh>/<32 hex>.safetensors    kept for extraction, never served
                           /quarantine/                          damaged files
                           /sequences/*.jsonl                    request records
                           /p1, /p2, …                           namespaces of further processes, laid out alike

Names, sizes and times only: nothing here opens a file. A running engine may write, rename and delete meanwhile, so
what vanishes is passed over. Links are not followed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
RECORD = "namespace.json"
LOCK = ".lock"
QUARANTINE = "quarantine"
ARCHIVE = "archive"
SEQUENCES = "sequences"
#: Directories of chunks that were cleared: never read again, deleted in the background and by the next start.
TRASH = "trash"

FAN_OUT = re.compile(r"[0-9a-f]{2}")
CHUNK_FILE = re.compile(r"([0-9a-f]{32})" + re.escape(SUFFIX))
SUBDIRECTORY = re.compile(r"p[1-9][0-9]{0,3}")
_TEMPORARY = re.compile(r"\..+\.([0-9]+)\.([0-9]+)\.tmp|\.tmp[A-Za-z0-9]{6}", re.DOTALL)


# -- names -------------------------------------------------------------------------------------------


def fan_out(directory: str, name: bytes) -> str:
    """The directory of a chunk's file: one of 256, by the first byte of its name."""
    return f"{directory}/{name[0]:02x}"


def chunk_path(directory: str, name: bytes) -> str:
    """The path of a chunk's file below a namespace (or archive) directory."""
    return f"{fan_out(directory, name)}/{name.hex()}{SUFFIX}"


def quarantine_name(file_name: str, reason: str) -> str:
    """A fresh name in the quarantine for a file (or for a chunk, by its hex name); ``reason``: of a BadChunk."""
    stem, suffix = os.path.splitext(file_name.lstrip("."))
    return f"{stem}.{time.time_ns():x}.{reason}{suffix}"


_FIRST = time.time_ns()  # in a container every run may have the same pid
_sequence = itertools.count(_FIRST)


def temporary_name(name: str) -> str:
    """A fresh name beside the file ``name``, which a later start recognises as left over."""
    return f".{name}.{os.getpid()}.{next(_sequence)}.tmp"


def is_temporary(name: str) -> bool:
    """Whether a file is a left-over of ours, or of safetensors' own ``save_file``."""
    return _TEMPORARY.fullmatch(name) is not None


def is_in_the_making(name: str) -> bool:
    """Whether a temporary file was made by this process, which may be writing it at this moment."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match[1] == str(os.getpid()) and int(match[2]) >= _FIRST


# -- files -------------------------------------------------------------------------------------------


class FoundFile(NamedTuple):
    """A file of a namespace. ``name`` is the chunk's (16 bytes), or empty for one that is no chunk."""

    path: str
    size: int
    mtime_ns: int
    name: bytes


def _listed(directory: str) -> Iterator[os.DirEntry[str]]:
    """The entries of a directory; none of one that is not there, or that cannot be listed, which the log says."""
    try:
        if os.path.islink(directory):
            raise NotADirectoryError("a symbolic link may lead anywhere")
        with os.scandir(directory) as entries:
            yield from entries
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s is passed over: %s", directory, error)


def _found(entry: os.DirEntry[str], name: bytes = b"") -> FoundFile | None:
    """What a file counts for; None for one that vanishes meanwhile, or that may not be looked at."""
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError as error:
        logger.debug("%s is passed over: %s", entry.path, error)
        return None
    return FoundFile(entry.path, info.st_size, info.st_mtime_ns, name)


def scan_chunks(directory: str) -> Iterator[FoundFile]:
    """The chunk files of ``<directory>/<hh>/`` and, nameless, left-over temporaries beside them.

    Names and sizes only; anything else in these directories (foreign files) is passed over, and whatever kind of
    thing is named like a chunk is reported as one: the reader looks before it opens.
    """
    for folder in fan_out_folders(directory):
        yield from scan_folder(folder)


def fan_out_folders(directory: str) -> list[str]:
    """The fan-out directories of a namespace (or archive) directory."""
    found = []
    for entry in _listed(directory):
        with contextlib.suppress(OSError):  # some filesystems have to look at it to say what it is
            if FAN_OUT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.append(entry.path)
    return sorted(found)


def chunk_names(folder: str) -> list[bytes]:
    """The chunks in one fan-out directory, by name alone: that costs no look at the files themselves."""
    first = os.path.basename(folder)
    matches = [CHUNK_FILE.fullmatch(entry.name) for entry in _listed(folder) if entry.name.startswith(first)]
    return [bytes.fromhex(match[1]) for match in matches if match is not None]


def scan_folder(folder: str) -> Iterator[FoundFile]:
    """One fan-out directory; see scan_chunks. A folder or file that vanishes meanwhile is passed over."""
    first = os.path.basename(folder)
    for entry in _listed(folder):
        match = CHUNK_FILE.fullmatch(entry.name)
        name = bytes.fromhex(match[1]) if match is not None and entry.name.startswith(first) else b""
        if (name or is_temporary(entry.name)) and (file := _found(entry, name)) is not None:
            yield file


def scan_flat(directory: str) -> Iterator[FoundFile]:
    """Every file directly in a directory (quarantine), nameless."""
    return filter(None, map(_found, _listed(directory)))


# -- looking from outside: unlike the store, which goes on, a reader gets an error for what it may not open ------------


class ChunkPath(NamedTuple):
    """A chunk's file by its name, not looked at yet. ``size`` is -1 where the listing does not tell it."""

    path: str
    name: bytes
    size: int = -1
    mtime_ns: int = 0


def subdirectories(path: str) -> list[str]:
    """The directories directly in a directory, links left out. Raises OSError."""
    with os.scandir(path) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def chunk_folders(root: str) -> list[str]:
    """The fan-out directories below a namespace (or archive); none where it does not exist. Raises OSError."""
    try:
        return [path for path in subdirectories(root) if FAN_OUT.fullmatch(os.path.basename(path))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def chunk_files(folder: str) -> list[ChunkPath]:
    """What is named like a chunk in one fan-out directory, in the order of the files on disk. Raises OSError."""
    first = os.path.basename(folder)
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = CHUNK_FILE.fullmatch(entry.name)
            if match is not None and match[1].startswith(first):
                found.append((entry.inode(), entry.path, bytes.fromhex(match[1])))
    found.sort(key=lambda item: item[0])
    return [ChunkPath(path, name) for _, path, name in found]


class Stray(NamedTuple):
    """Something in a cold path that is no file of ours in its place."""

    kind: str  # "temporary", "misplaced" or "foreign"
    path: str
    size: int
    mtime_ns: int


def strays(directory: str) -> Iterator[Stray]:
    """Everything in a namespace directory that does not belong there."""
    ours = {RECORD, LOCK, QUARANTINE, ARCHIVE, SEQUENCES, TRASH}
    yield from _strays_in(directory, lambda name: name in ours or SUBDIRECTORY.fullmatch(name) is not None)
    yield from _strays_in(os.path.join(directory, ARCHIVE), lambda name: False)


def strays_beside(cold_path: str, namespace_directories: Collection[str]) -> Iterator[Stray]:
    """What is directly in a cold path besides the given directories, each with the bytes of all that is in it.

    ``lost+found`` belongs to the filesystem; empty directories are passed over, an engine may just be making them.
    """
    for entry in _sorted_entries(cold_path):
        if entry.path in namespace_directories or entry.name == "lost+found":
            continue
        if not entry.is_dir(follow_symlinks=False):
            yield from _stray("temporary" if is_temporary(entry.name) else "foreign", entry)
            continue
        files = size = newest = 0
        for folder, _, names in os.walk(entry.path):
            for name in names:
                with contextlib.suppress(OSError):
                    info = os.lstat(os.path.join(folder, name))
                    files, size, newest = files + 1, size + info.st_size, max(newest, info.st_mtime_ns)
        if files:
            yield Stray("foreign", entry.path, size, newest)


def files_in(directory: str) -> Iterator[FoundFile]:
    """Everything directly in a directory, nameless; nothing when it is not there, or may not be listed."""
    for entry in _sorted_entries(directory):
        file = _found(entry)
        if file is not None:
            yield file


def _strays_in(root: str, belongs: Callable[[str], bool]) -> Iterator[Stray]:
    folders = []
    for entry in _sorted_entries(root):
        if FAN_OUT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
        elif not belongs(entry.name):
            yield from _stray("temporary" if is_temporary(entry.name) else "foreign", entry)
    for folder in folders:
        first = os.path.basename(folder)
        for entry in _sorted_entries(folder):
            match = CHUNK_FILE.fullmatch(entry.name)
            if match is None:
                yield from _stray("temporary" if is_temporary(entry.name) else "foreign", entry)
            elif not match[1].startswith(first):
                yield from _stray("misplaced", entry)


def _sorted_entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # who looks for chunks there says so
        return []


def _stray(kind: str, entry: os.DirEntry[str]) -> Iterator[Stray]:
    with contextlib.suppress(FileNotFoundError):
        info = entry.stat(follow_symlinks=False)
        yield Stray(kind, entry.path, info.st_size, info.st_mtime_ns)
