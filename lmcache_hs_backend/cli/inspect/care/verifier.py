"""Everything that can be wrong with a cold path, found without changing anything.

A file is judged by its own open descriptor, so that an engine which replaces or deletes it meanwhile does
no harm. Chains are checked by the prefix digest: it is carried on from chunk to chunk over the token
ids, so a chunk that is reached is really the continuation of its parent, and not of a hash collision.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from lmcache_hs_backend.cli.console import bytes_text
from lmcache_hs_backend.cli.inspect.care.record_check import RecordCheck
from lmcache_hs_backend.cli.inspect.stream import ChunkStream
from lmcache_hs_backend.cli.inspect.workers import in_threads
from lmcache_hs_backend.format.chunk_file import FileLayer, digest_layers, open_regular, read_header, read_open_header
from lmcache_hs_backend.format.header import BadChunk, Header, layer_tensor
from lmcache_hs_backend.format.namespace import NamespaceDirectory, in_use
from lmcache_hs_backend.format.reader import ColdTierReader, Place
from lmcache_hs_backend.format.shared_names import is_name_of

#: What can be wrong, and what it means.
KINDS = {
    "header": "the header of a chunk file cannot be read",
    "version": "a chunk file of a version that this program does not know",
    "size": "a chunk file is shorter or longer than its header says",
    "short": "a chunk file ended while it was read",
    "type": "something that is no regular file is named like a chunk",
    "checksum": "token ids or rows do not match their checksum",
    "key": "a file is not named after the chunk in it",
    "model": "a chunk of another model than its namespace's",
    "prefix": "the prefix digest of a first chunk does not match its token ids, or a later chunk names no parent",
    "unreadable": "the system refuses to read a file or directory",
    "misplaced": "a chunk file lies in the wrong one of the 256 directories, where nobody looks for it",
    "temporary": "left over from a write that was never finished",
    "foreign": "not a file of ours",
    "orphan": "the chunk before it is not here, so it is not served until that is stored again",
    "record": "lines of sequences/*.jsonl that are no request records",
    "namespace": "a namespace.json that this program cannot use",
}

#: These are harmless, and no reason for exit status 1.
NOTES = ("orphan",)

#: A write takes seconds. What is younger than this may be in the hands of an engine that we cannot see.
_IN_FLIGHT_SEC = 600
_READERS = 4
_REQUESTS = 16  # side by side, of objects
_WHOLE_BYTES = 8 << 20  # an object of up to so many bytes is read by one request


class Finding(NamedTuple):
    """One thing that is wrong. ``namespace`` is None where there is none to speak of."""

    kind: str
    path: str
    detail: str
    namespace: NamespaceDirectory | None


@dataclass
class Link:
    """What the check of chains needs to know of a good chunk."""

    chunk_hash: str
    parent: str
    prefix: bytes
    start: int
    end: int
    path: str


Advance = Callable[[int], None]


class Verifier:
    """One pass over a cold path. ``chunks`` and ``bytes`` count what was looked at, ``skipped`` what was not."""

    def __init__(self, reader: ColdTierReader) -> None:
        self.chunks = self.bytes = 0
        self.skipped: Counter[str] = Counter()
        self.unjudged: list[NamespaceDirectory] = []  # in use: the missing parents may be in RAM
        self.records = {namespace.directory: RecordCheck(reader, namespace) for namespace in reader.namespaces}
        self._reader = reader
        self._places: list[Place] = []
        self._refused: list[tuple[NamespaceDirectory, str, str]] = []
        self._links: dict[str, list[Link]] = defaultdict(list)  # by the directory of the namespace

    def find(self) -> int:
        """Find the files; how many bytes there are to read."""
        total = 0
        chunks = ChunkStream(self._reader, self._reader.namespaces)
        for place in chunks.places():
            self._places.append(place)
            total += _size(place)
        self._refused = chunks.refused
        return total

    def check_files(self, advance: Advance) -> Iterator[Finding]:
        """Every chunk file, rows included; then everything else that lies about."""
        for directory, why in self._reader.left_out:
            yield Finding("namespace", directory, why, None)
        for namespace, path, why in self._refused:
            yield Finding("unreadable", path, why, namespace)
        readers = _READERS if self._reader.source.is_local else _REQUESTS
        looked = in_threads(functools.partial(look, self._reader.files), self._places, readers)
        for place, (header, size, wrong) in zip(self._places, looked, strict=True):
            advance(size)
            if wrong is not None and wrong.reason == "vanished":
                self.skipped["vanished"] += 1
                continue
            self.chunks += 1
            self.bytes += size
            if wrong is not None:
                yield Finding(wrong.reason, place.file.path, str(wrong), place.namespace)
            elif header is not None:
                meta = header.meta
                end = meta.start + meta.num_tokens
                self._links[place.namespace.directory].append(
                    Link(meta.chunk_hash, meta.parent, meta.prefix, meta.start, end, place.file.path)
                )
        now = time.time_ns()
        known = {each.directory for each in self._reader.namespaces} | {
            each.directory for each in self._reader.left_out
        }
        for stray in self._reader.source.strays_beside(known):
            yield Finding(stray.kind, stray.path, f"{KINDS[stray.kind]}, {bytes_text(stray.size)}", None)
        for namespace in self._reader.namespaces:
            busy = in_use(namespace.directory)
            for stray in self._reader.source.strays(namespace):
                if stray.kind == "temporary" and busy and now - stray.mtime_ns < _IN_FLIGHT_SEC * 1e9:
                    continue
                yield Finding(stray.kind, stray.path, KINDS[stray.kind], namespace)

    def check_records(self) -> Iterator[Finding]:
        """The request records. Whether their rows are here is known when the chains have been checked."""
        for namespace in self._reader.namespaces:
            for path, detail in self.records[namespace.directory].read():
                yield Finding("record", path, detail, namespace)

    @property
    def links(self) -> int:
        return sum(map(len, self._links.values()))

    def check_chains(self, advance: Advance) -> Iterator[Finding]:
        """Every chunk must be reached from a first chunk. Of those that are not, the first of each branch."""
        for namespace in self._reader.namespaces:
            links = self._links.pop(namespace.directory, [])
            roots = [link for link in links if not link.parent and not link.start]
            children: dict[str, list[Link]] = defaultdict(list)
            for link in links:
                if link.parent:
                    children[link.parent].append(link)
                elif link.start:
                    yield Finding("prefix", link.path, f"starts at token {link.start}, but names no parent", namespace)
            reached: set[int] = set()
            for root in roots:
                if not self._walk(root, children, reached, self.records[namespace.directory], advance):
                    detail = "the prefix digest of a first chunk is not that of its token ids"
                    yield Finding("prefix", root.path, detail, namespace)
            yield from self._orphans(namespace, links, reached)

    def _walk(
        self, root: Link, children: dict[str, list[Link]], reached: set[int], records: RecordCheck, advance: Advance
    ) -> bool:
        """Mark what continues a first chunk, digest by digest. False when the first one already fails."""
        waiting = [(root, xxhash.xxh3_128())]
        while waiting:
            link, before = waiting.pop()
            try:
                token_ids = read_header(self._reader.files, link.path).token_ids
            except (BadChunk, OSError):  # it was good a moment ago: replaced or deleted meanwhile
                self.skipped["vanished"] += 1
                reached.add(id(link))
                continue
            digest = before.copy()
            digest.update(token_ids)
            if digest.digest() != link.prefix:
                if link is root:
                    return False
                continue  # of another parent with the same hash, perhaps
            reached.add(id(link))
            records.see(before.digest() if link.start else b"", link.start, token_ids, before)
            advance(1)
            for child in children.get(link.chunk_hash, ()):
                if child.start == link.end and id(child) not in reached:
                    waiting.append((child, digest))
        return True

    def _orphans(self, namespace: NamespaceDirectory, links: list[Link], reached: set[int]) -> Iterator[Finding]:
        lost = [link for link in links if id(link) not in reached and link.parent]
        if not lost:
            return
        if in_use(namespace.directory):
            self.unjudged.append(namespace)
            return
        here = {link.chunk_hash for link in links if id(link) in reached}
        among_lost = {link.chunk_hash for link in lost}
        behind = Counter(link.parent for link in lost)
        for link in lost:
            if link.parent in among_lost and link.parent not in here:
                continue
            why = "is here with other token ids" if link.parent in here else "is not here"
            more = behind[link.chunk_hash]
            after = f"; {more} more chunk(s) continue it" if more else ""
            yield Finding("orphan", link.path, f"its parent {link.parent} {why}{after}", namespace)


def look(files: FileLayer, place: Place) -> tuple[Header | None, int, BadChunk | None]:
    """A chunk's header, the bytes of its file, and what is wrong with it: "vanished" where it is not there."""
    path = place.file.path
    try:
        files.will_read(path, min(place.file.size, _WHOLE_BYTES))
        fd, info = open_regular(files, path)
    except BadChunk as wrong:
        return None, 0, wrong
    except FileNotFoundError as error:
        return None, 0, BadChunk("vanished", str(error))
    except OSError as error:
        return None, 0, BadChunk("unreadable", str(error.strerror))
    try:
        return check_open(files, fd, info.st_size, place), info.st_size, None
    except BadChunk as wrong:
        return None, info.st_size, wrong
    except OSError as error:
        return None, info.st_size, BadChunk("unreadable", str(error.strerror))
    finally:
        files.close(fd)


def check_open(files: FileLayer, fd: int, size: int, place: Place) -> Header:
    """Judge an open chunk file, rows included. Raises BadChunk or OSError."""
    header = read_open_header(files, fd, size, brief=True)
    if not is_name_of(header.meta, place.file.name):
        raise BadChunk("key", f"it holds the chunk {header.meta.key[:200]!r}")
    if header.meta.model != place.namespace.model:
        raise BadChunk("model", f"it is of model {header.meta.model[:200]!r}")
    for layer, checksum in digest_layers(files, fd, header.layout):
        if checksum != header.checksums.get(layer_tensor(layer.layer_idx)):
            raise BadChunk("checksum", f"the bytes of {layer_tensor(layer.layer_idx)} do not match their checksum")
    return header


def _size(place: Place) -> int:
    if place.file.size >= 0:
        return place.file.size
    try:
        return os.lstat(place.file.path).st_size
    except OSError:
        return 0


def summary(findings: list[Finding]) -> dict[str, int]:
    """How many of each kind, in the order of KINDS."""
    counts: Counter[Any] = Counter(finding.kind for finding in findings)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}
