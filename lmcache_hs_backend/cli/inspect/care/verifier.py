"""Everything that can be wrong with a cold path, found without changing anything.

A file is judged by its own open descriptor, so that an engine which replaces or deletes it meanwhile does
no harm. Chains are checked by the prefix digest: it is carried on from chunk to chunk over the token
ids, so a chunk that is reached is really the continuation of its parent, and not of a hash collision.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from lmcache_hs_backend.cli.console import bytes_text
from lmcache_hs_backend.cli.inspect.care.record_check import RecordCheck
from lmcache_hs_backend.cli.inspect.stream import ChunkStream, file_size
from lmcache_hs_backend.cli.inspect.workers import in_threads
from lmcache_hs_backend.format.chunk_file import FileLayer, digest_layers, open_regular, read_header, read_open_header
from lmcache_hs_backend.format.header import BadChunk, Header, layer_tensor
from lmcache_hs_backend.format.namespace import NamespaceDirectory, in_use
from lmcache_hs_backend.format.reader import STATES, ColdTierReader, Place
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
    "misplaced": "a chunk file lies in the wrong one of the 256 directories, where it is never looked for",
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
_HEADER_BYTES = 8192  # a header has seldom more
IDS_BYTES = 1 << 30  # of token ids from a URL, which to read again would be a request for each chunk


class Finding(NamedTuple):
    """One thing that is wrong. ``namespace`` is None where there is none to speak of."""

    kind: str
    path: str
    detail: str
    namespace: NamespaceDirectory | None


@dataclass(slots=True)
class Link:
    """What the check of chains needs to know of a good chunk."""

    chunk_hash: str
    parent: str
    prefix: bytes
    start: int
    end: int
    path: str
    token_ids: bytes  # empty: they are read again


@dataclass
class FilesAndBytes:
    """So many chunk files, and their bytes."""

    chunks: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> FilesAndBytes:
        """Files of such sizes."""
        result = cls()
        for size in sizes:
            result.add(size)
        return result

    def add(self, size: int) -> None:
        """Count a file of so many bytes."""
        self.chunks += 1
        self.bytes += size

    @classmethod
    def sum(cls, parts: Iterable[FilesAndBytes]) -> FilesAndBytes:
        """All of them together."""
        result = cls()
        for part in parts:
            result.chunks += part.chunks
            result.bytes += part.bytes
        return result

    def minus(self, *others: FilesAndBytes) -> FilesAndBytes:
        """This without some others; at least 0, as files may appear and vanish meanwhile."""
        taken = FilesAndBytes.sum(others)
        return FilesAndBytes(max(0, self.chunks - taken.chunks), max(0, self.bytes - taken.bytes))


class Extent(NamedTuple):
    """How much of a cold path one pass is to check.

    Attributes:
        sample: So many chunk files (an int) or such a share of them (a float) are read whole, drawn evenly. None: all.
        after: Where an earlier pass stopped: only files after this one are read whole.
        in_order: In the order of names rather than of the files on disk, so that a later pass can go on from
            ``Verifier.place``.
        until: When to stop, by ``time.monotonic()``.
    """

    sample: int | float | None = None
    after: FilePlace | None = None
    in_order: bool = False
    until: float = math.inf


_EVERYTHING = Extent()

#: Where a chunk file is in the order of names: its namespace, the number of its state, its name in hex.
FilePlace = tuple[str, int, str]

Advance = Callable[[int], None]

#: What a look at a file gives: header, bytes of the file, what is wrong with it.
Looked = tuple[Header | None, int, BadChunk | None]


class _TimeOver(Exception):
    """The time for a pass has passed."""


class Verifier:
    """One pass over a cold path. Call ``find``, then the checks in their order.

    Of files that are not to be read whole (not in the sample, or read by an earlier pass) only the header is read, so
    that chains are followed over all chunks. When the time is over, or a bucket breaks off its listing, the check under
    way ends early, and those of headers and chains are not to be called any more; ``not_reached`` counts the files that
    were not looked at.

    Attributes:
        found: Every chunk file.
        read: Those that were read whole.
        headers: Those of which only the header was read.
        read_before: Those that an earlier pass has read, by ``Extent.after``.
        skipped: Those that vanished.
        place: The last file up to which all that were to be read whole have been.
        time_over: Whether the time was over before everything was checked.
        broken_off: Whether a bucket has broken off its listing before everything was checked.
        chains_followed: Whether chains have been followed, which is what request records are looked up by, too.
    """

    def __init__(self, reader: ColdTierReader, extent: Extent = _EVERYTHING, *, ids_bytes: int = IDS_BYTES) -> None:
        """``ids_bytes``: of token ids of objects, how many are kept rather than fetched twice."""
        self.found, self.read, self.headers, self.read_before = (
            FilesAndBytes(),
            FilesAndBytes(),
            FilesAndBytes(),
            FilesAndBytes(),
        )
        self.skipped: Counter[str] = Counter()
        self.place = extent.after
        self.time_over = self.broken_off = self.chains_followed = False
        self.unjudged: list[NamespaceDirectory] = []  # in use: the missing parents may be in RAM
        self.records = {namespace.directory: RecordCheck(reader, namespace) for namespace in reader.namespaces}
        self.reader = reader
        self._extent = extent
        self._sampled: set[str] | None = None
        self._refused: list[tuple[NamespaceDirectory, str, str]] = []
        self._links: dict[str, list[Link]] = defaultdict(list)  # by the directory of the namespace
        self._ids_room = 0 if reader.source.is_local else IDS_BYTES

    def find(self) -> FilesAndBytes:
        """Find the chunk files, and draw the sample; what is to be read whole."""
        files = self.find_files()
        if self._extent.sample is None:
            return FilesAndBytes.of(size for _, size in files)
        return self.read_only(draw(files, self._extent.sample))

    def find_files(self) -> Iterator[tuple[str, int]]:
        """Find the chunk files; path and size of those that are to be read whole unless there is a sample."""
        chunks = self._stream()
        for place in chunks.places():
            size = file_size(place)
            self.found.add(size)
            if self._was_read(place):
                self.read_before.add(size)
            else:
                yield place.file.path, size
        self._refused = chunks.refused

    def read_only(self, drawn: Mapping[str, int]) -> FilesAndBytes:
        """Of the files that were found, only some (path → size) are to be read whole: the sample."""
        self._sampled = set(drawn)
        return FilesAndBytes.of(drawn.values())

    def out_of_time(self) -> None:
        """The time is over before this pass has come to its turn: what follows is cut short."""
        self.time_over = True

    @property
    def cut_short(self) -> bool:
        """Whether not everything was checked that should have been."""
        return self.time_over or self.broken_off

    @property
    def not_reached(self) -> FilesAndBytes:
        """Files that were not looked at because the checks were cut short."""
        if not self.cut_short:
            return FilesAndBytes()
        return self.found.minus(self.read, self.headers, self.read_before, FilesAndBytes(sum(self.skipped.values())))

    def check_rest(self) -> Iterator[Finding]:
        """What is no chunk in its place: directories that cannot be used or listed, left-overs, foreign files."""
        for directory, why in self.reader.left_out:
            yield Finding("namespace", directory, why, None)
        for namespace, path, why in self._refused:
            yield Finding("unreadable", path, why, namespace)
        now = time.time_ns()
        known = {each.directory for each in self.reader.namespaces} | {each.directory for each in self.reader.left_out}
        for stray in self.reader.source.strays_beside(known):
            yield Finding(stray.kind, stray.path, f"{KINDS[stray.kind]}, {bytes_text(stray.size)}", None)
        for namespace in self.reader.namespaces:
            busy = in_use(namespace.directory)
            for stray in self.reader.source.strays(namespace):
                if stray.kind == "temporary" and busy and now - stray.mtime_ns < _IN_FLIGHT_SEC * 1e9:
                    continue
                yield Finding(stray.kind, stray.path, KINDS[stray.kind], namespace)

    def check_rows(self, advance: Advance) -> Iterator[Finding]:
        """Read files whole, and compare every checksum. ``advance`` is called with the bytes of each."""
        stream = self._stream()
        for place, looked in self._looks(self._places(stream, self._is_to_read), rows=True):
            advance(looked[1])
            if self._extent.in_order:
                self.place = _place_of(place)
            yield from self._judge(place, looked, self.read)
        yield from self._breaks(stream)

    def check_headers(self, advance: Advance) -> Iterator[Finding]:
        """Read the headers of the other files. ``advance`` is called with 1 for each."""
        if self._sampled is None and self._extent.after is None:
            return
        stream = self._stream()
        others = self._places(stream, lambda place: not self._is_to_read(place))
        for place, looked in self._looks(others, rows=False):
            advance(1)
            # Those that an earlier pass has read are counted as such already.
            yield from self._judge(place, looked, FilesAndBytes() if self._was_read(place) else self.headers)
        yield from self._breaks(stream)

    def _stream(self) -> ChunkStream:
        namespaces = sorted(self.reader.namespaces, key=lambda namespace: namespace.label)
        return ChunkStream(self.reader, namespaces, by_name=self._extent.in_order)

    def _was_read(self, place: Place) -> bool:
        return self._extent.after is not None and _place_of(place) <= self._extent.after

    def _is_to_read(self, place: Place) -> bool:
        if self._sampled is not None:
            return place.file.path in self._sampled
        return not self._was_read(place)

    def _places(self, stream: ChunkStream, wanted: Callable[[Place], bool]) -> Iterator[Place]:
        """Those that are wanted. A bucket that breaks off its listing has not said what comes before the next part."""
        for place in stream.places():
            if stream.refused and not self.reader.source.is_local:
                return
            if wanted(place):
                yield place

    def _breaks(self, stream: ChunkStream) -> Iterator[Finding]:
        """A bucket that has broken off its listing, if it had not when the files were found."""
        if stream.refused and not self.reader.source.is_local:
            self.broken_off = True
            known = {path for _, path, _ in self._refused}
            for namespace, path, why in stream.refused:
                if path not in known:
                    yield Finding("unreadable", path, why, namespace)

    def _looks(self, places: Iterator[Place], *, rows: bool) -> Iterator[tuple[Place, Looked]]:
        readers = _READERS if self.reader.source.is_local else _REQUESTS
        files = self.reader.files
        brief = self.reader.source.is_local

        def look_at(place: Place) -> tuple[Place, Looked]:
            return place, look(files, place, rows=rows, brief=brief)

        for place, looked in in_threads(look_at, places, readers):
            yield place, looked
            if time.monotonic() >= self._extent.until:
                self.time_over = True
                return

    def _judge(self, place: Place, looked: Looked, tally: FilesAndBytes) -> Iterator[Finding]:
        header, size, wrong = looked
        if wrong is not None and wrong.reason == "vanished":
            self.skipped["vanished"] += 1
            return
        tally.add(size)
        if wrong is not None:
            yield Finding(wrong.reason, place.file.path, str(wrong), place.namespace)
        elif header is not None:
            meta = header.meta
            end = meta.start + meta.num_tokens
            chunk_hash, parent = sys.intern(meta.chunk_hash), sys.intern(meta.parent)  # each is named more than once
            token_ids = header.token_ids if len(header.token_ids) <= self._ids_room else b""
            self._ids_room -= len(token_ids)
            self._links[place.namespace.directory].append(
                Link(chunk_hash, parent, meta.prefix, meta.start, end, place.file.path, token_ids)
            )

    def check_records(self) -> Iterator[Finding]:
        """The request records. Whether their rows are here is known when the chains have been checked."""
        for namespace in self.reader.namespaces:
            for path, detail in self.records[namespace.directory].read():
                yield Finding("record", path, detail, namespace)

    @property
    def links(self) -> int:
        """How many chunks there are to follow chains over."""
        return sum(map(len, self._links.values()))

    def check_chains(self, advance: Advance) -> Iterator[Finding]:
        """Every chunk must be reached from a first chunk. Of those that are not, the first of each branch."""
        try:
            yield from self._check_chains(advance)
            self.chains_followed = True
        except _TimeOver:
            self.time_over = True

    def _check_chains(self, advance: Advance) -> Iterator[Finding]:
        for namespace in self.reader.namespaces:
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
            if time.monotonic() >= self._extent.until:
                raise _TimeOver
            link, before = waiting.pop()
            try:
                token_ids = link.token_ids or read_header(self.reader.files, link.path).token_ids
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


def draw(files: Iterable[tuple[str, int]], amount: int | float) -> dict[str, int]:
    """Draw evenly from files: so many (an int), or such a share of them (a float) and at least one.

    Args:
        files: Path and size of each, read once.
        amount: How many, or which share.

    Returns:
        Path → size of those drawn.
    """
    drawn: list[tuple[str, int]] = []
    chosen = random.Random()
    offset = chosen.random()
    number, file = 0, None
    for number, file in enumerate(files):
        if isinstance(amount, float):  # at equal distances, from a random one on
            if math.floor((number + 1) * amount + offset) > math.floor(number * amount + offset):
                drawn.append(file)
        elif number < amount:
            drawn.append(file)
        elif (at := chosen.randrange(number + 1)) < amount:
            drawn[at] = file
    if not drawn and file is not None:
        drawn.append(file)
    return dict(drawn)


def look(files: FileLayer, place: Place, *, rows: bool = True, brief: bool = True) -> Looked:
    """A chunk's header, the bytes of its file, and what is wrong with it: "vanished" where it is not there.

    Args:
        files: Opens it.
        place: Where it is.
        rows: Whether to read the rows as well, and compare their checksums.
        brief: Leave the token ids out of the header, when they have been checked.
    """
    path = place.file.path
    try:
        files.will_read(path, min(place.file.size, _WHOLE_BYTES if rows else _HEADER_BYTES))
        fd, info = open_regular(files, path)
    except BadChunk as wrong:
        return None, 0, wrong
    except FileNotFoundError as error:
        return None, 0, BadChunk("vanished", str(error))
    except OSError as error:
        return None, 0, BadChunk("unreadable", str(error.strerror))
    try:
        return check_open(files, fd, info.st_size, place, rows=rows, brief=brief), info.st_size, None
    except BadChunk as wrong:
        return None, info.st_size, wrong
    except OSError as error:
        return None, info.st_size, BadChunk("unreadable", str(error.strerror))
    finally:
        files.close(fd)


def check_open(files: FileLayer, fd: int, size: int, place: Place, *, rows: bool = True, brief: bool = True) -> Header:
    """Judge an open chunk file, with or without its rows. Raises BadChunk or OSError."""
    header = read_open_header(files, fd, size, brief=brief)
    if not is_name_of(header.meta, place.file.name):
        raise BadChunk("key", f"it holds the chunk {header.meta.key[:200]!r}")
    if header.meta.model != place.namespace.model:
        raise BadChunk("model", f"it is of model {header.meta.model[:200]!r}")
    for layer, checksum in digest_layers(files, fd, header.layout) if rows else ():
        if checksum != header.checksums.get(layer_tensor(layer.layer_idx)):
            raise BadChunk("checksum", f"the bytes of {layer_tensor(layer.layer_idx)} do not match their checksum")
    return header


def _place_of(place: Place) -> FilePlace:
    return place.namespace.label, STATES.index(place.state), place.file.name.hex()


def summary(findings: list[Finding]) -> dict[str, int]:
    """How many of each kind, in the order of KINDS."""
    counts: Counter[Any] = Counter(finding.kind for finding in findings)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}
