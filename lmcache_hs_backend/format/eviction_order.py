"""The order in which files of a cold path leave when there are more bytes than the limit allows.

First what is of least use: damaged files, then namespaces that no process holds, then the archive, then the chunks of
the namespace itself; within each class the least recently used first, which a file's mtime says. The store
keeps to it while it runs, and ``lmcache-hs-inspect gc`` where no store runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TypeVar

from lmcache_hs_backend.format.layout import FoundFile


class FileClass(IntEnum):
    """What a file is to the process that makes room, in the order in which files leave."""

    QUARANTINED = 0
    DEAD = 1  # any file of a namespace that no process holds
    ARCHIVED = 2
    OWN = 3


T = TypeVar("T")


def leaving_order(file_class: FileClass, file: FoundFile) -> tuple[int, int, str]:
    """A sort key: what has the smallest leaves first. The path makes the order the same on every run."""
    return file_class, file.mtime_ns, file.path


def oldest_first(files: Iterable[FoundFile]) -> list[FoundFile]:
    """Files of one class in the order in which they leave."""
    return sorted(files, key=lambda file: (file.mtime_ns, file.path))


def over_limit(files: Iterable[tuple[FileClass, FoundFile, T]], limit: int) -> Iterator[tuple[FoundFile, T]]:
    """The files that must leave so that at most ``limit`` bytes remain, in order, each with what came with it."""
    ordered = sorted(files, key=lambda item: leaving_order(item[0], item[1]))
    excess = sum(file.size for _, file, _ in ordered) - limit
    for _, file, extra in ordered:
        if excess <= 0:
            return
        excess -= file.size
        yield file, extra
