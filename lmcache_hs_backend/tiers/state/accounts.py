"""Which bytes on disk count against ``max_cold_size``.

Bytes count from the moment they are reserved for a write until the file is really gone. ``own`` is the sum of the
sizes of all chunks in the index and of ``leftover``; the other kinds are sums over the lists beside them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from lmcache_hs_backend.format.layout import FoundFile


@dataclass
class DiskAccounts:
    """Bytes by kind, and the files that they belong to, in the order in which they leave."""

    own: int = 0
    reserved: int = 0  # promised to writes that are under way
    archive: int = 0
    quarantine: int = 0
    dead: int = 0
    trash: int = 0  # of everything that was cleared, until it is deleted
    #: Files of chunks that have been dropped, until they are deleted: name → bytes.
    leftover: dict[bytes, int] = field(default_factory=dict)
    quarantined: deque[FoundFile] = field(default_factory=deque)
    archived: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    #: Those of them that the bucket of the shared tier is to get, and those that it has (see ``sharing``).
    archive_to_share: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    archive_shared: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    dead_bytes: dict[str, int] = field(default_factory=dict)  # of namespaces that no process holds, by directory
    #: The sizes of what was found at start are known: before, none of our own chunks is evicted.
    sized: bool = False

    @property
    def total(self) -> int:
        """All bytes that count against ``max_cold_size``."""
        return self.own + self.reserved + self.archive + self.quarantine + self.dead + self.trash

    def add_archived(self, name: bytes, size: int) -> None:
        """A chunk's file is in the archive, in place of the one that may have been there."""
        self.archive += size - self.take_archived(name)
        self.archived[name] = size

    def take_archived(self, name: bytes) -> int:
        """An archived file is about to leave, or to be replaced; the bytes that it counts for."""
        self.archive_to_share.pop(name, None)
        self.archive_shared.pop(name, None)
        return self.archived.pop(name, 0)

    def add_quarantined(self, file: FoundFile) -> None:
        """A file has been moved to the quarantine."""
        self.quarantine += file.size
        self.quarantined.append(file)

    def set_leftover(self, name: bytes, size: int) -> None:
        """A file on disk belongs to no chunk any more; its bytes count until ``remove_leftover``."""
        self.own += size - self.leftover.get(name, 0)
        self.leftover[name] = size

    def remove_leftover(self, name: bytes) -> None:
        """That file is gone, or another one has been renamed over it. Nothing happens when there is none."""
        self.own -= self.leftover.pop(name, 0)

    def add_dead(self, directory: str, nbytes: int) -> None:
        """A namespace has no owner: its files count, and leave before our own."""
        self.dead += nbytes - self.dead_bytes.get(directory, 0)
        self.dead_bytes[directory] = nbytes

    def dead_deleted(self, directory: str, nbytes: int) -> None:
        """A file of a dead namespace is gone."""
        nbytes = min(nbytes, self.dead_bytes.get(directory, 0))
        self.dead -= nbytes
        if directory in self.dead_bytes:
            self.dead_bytes[directory] -= nbytes

    def empty_dead(self, directory: str) -> None:
        """A dead namespace has no files that could leave. It is remembered, and not counted again."""
        if directory in self.dead_bytes:
            self.dead -= self.dead_bytes[directory]
            self.dead_bytes[directory] = 0

    def mend(self, chunks: int, leaving_archive: int, leaving_quarantine: int) -> None:
        """Add up everything again. See ``mending``.

        ``chunks``: bytes of all files of chunks in the index; the other two: of files that are being deleted for room.
        """
        self.own = chunks + sum(self.leftover.values())
        self.archive = leaving_archive + sum(self.archived.values())
        self.quarantine = leaving_quarantine + sum(file.size for file in self.quarantined)
        self.dead = sum(self.dead_bytes.values())
        self.reserved, self.trash = max(0, self.reserved), max(0, self.trash)

    def clear(self) -> None:
        """All chunks' files are trash, those of dropped ones included."""
        self.trash += self.own
        self.own = 0
        self.leftover.clear()

    def dead_cleared(self, directory: str) -> None:
        """The chunks of a dead namespace are in our trash. What else it has is counted when it is next looked at."""
        self.trash += self.dead_bytes.get(directory, 0)
        self.forget_dead(directory)

    def trash_deleted(self, nbytes: int, *, more: bool) -> None:
        """So many bytes of trash are gone; ``more``: whether there is any left."""
        self.trash = max(0, self.trash - nbytes) if more else 0

    def forget_dead(self, directory: str) -> None:
        """A namespace that was dead has an owner again, or is gone: it is not ours to count."""
        self.dead -= self.dead_bytes.pop(directory, 0)
