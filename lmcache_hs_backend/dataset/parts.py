"""An extraction by several machines: one plans, each writes a part of the samples, one puts them all in order.

They share the output folder and nothing else: no lock, no server. In the state folder inside it:

====================  ===========================================================================================
``plan.jsonl``        the samples, in the order of the set (see ``journal``)
``index.jsonl``       the chunks that they lie in, so that no part has to read all headers again
``parts/rows/…``      the bytes of each sample that is written, named by its place in the plan
``parts/*.jsonl``     what became of samples: one file for each run of a part, so that no two processes write one
====================  ===========================================================================================

A part is a contiguous share of the samples in depth-first order, in which samples that share a prefix are neighbours: a
chunk is read by few parts. A part that was killed is run again; it goes on after what it wrote. Two runs of one part at
the same time write the same bytes. Numbers are given at the end, when it is known which samples were rejected, so they
have no holes; a sample then gets its place by a rename.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.dataset.chains import Sample, neighbours, share
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected, Unreachable
from lmcache_hs_backend.dataset.export import Encoder, Outcome, Progress
from lmcache_hs_backend.dataset.formats.base import Encoded
from lmcache_hs_backend.dataset.index import ChunkFile, ChunkIndex, IndexedChunk
from lmcache_hs_backend.dataset.journal import STATE
from lmcache_hs_backend.format.header import FileLayout
from lmcache_hs_backend.format.url_files import UrlOptions

_INDEX = "index.jsonl"
_PARTS = "parts"
_FOLDER = 1000  # samples in one


# -- the index -----------------------------------------------------------------------------------------------


class PlannedIndex(NamedTuple):
    """What a plan keeps of the chunks. ``stored_normed``: whether their last layer is after the final norm."""

    chunks: ChunkIndex
    stored_normed: bool


def write_index(out: str, index: ChunkIndex, samples: Sequence[Sample], stored_normed: bool) -> None:
    """File the chunks that samples lie in. Raises OSError."""
    used: set[int] = set()
    for sample in samples:
        position = sample.last
        while position >= 0 and position not in used:
            used.add(position)
            position = index.chunks[position].parent
    order = sorted(used)
    places = {position: place for place, position in enumerate(order)}
    roots: dict[str, int] = {}
    layouts: dict[FileLayout, int] = {}
    captures = {text: number for number, text in enumerate(index.captures)}
    path = os.path.join(out, STATE, _INDEX)
    temporary = f"{path}.{uuid.uuid4().hex}"
    with open(temporary, "w", encoding="utf-8") as file:
        for position in order:
            chunk = index.chunks[position]
            files = [
                [roots.setdefault(f.root, len(roots)), f.name.hex(), layouts.setdefault(f.layout, len(layouts))]
                for f in chunk.files
            ]
            parent = places.get(chunk.parent, chunk.parent)
            line = [chunk.prefix.hex(), chunk.start, chunk.num_tokens, parent, files, captures[chunk.capture]]
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        tables = {
            "model": index.model, "namespaces": index.namespaces, "num_files": index.num_files,
            "problems": dict(index.problems), "captures": index.captures, "urls": list(index.urls),
            "roots": list(roots), "layouts": list(layouts), "stored_normed": stored_normed,
        }  # fmt: skip
        file.write(json.dumps(tables) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_index(out: str, urls: UrlOptions | None) -> PlannedIndex:
    """The index as it was filed; without ``urls`` none of it is to be read. Raises DatasetError when there is none."""
    path = os.path.join(out, STATE, _INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
        tables = json.loads(lines.pop())
        layouts = [
            FileLayout(n, start, tuple(LayerSpec(*spec) for spec in specs)) for n, start, specs in tables["layouts"]
        ]
        captures, roots = tables["captures"], tables["roots"]
        chunks = []
        for line in lines:
            prefix, start, num_tokens, parent, files, capture = json.loads(line)
            of_chunk = tuple(
                ChunkFile(roots[root], bytes.fromhex(name), layouts[number]) for root, name, number in files
            )
            chunks.append(IndexedChunk(bytes.fromhex(prefix), start, num_tokens, parent, of_chunk, captures[capture]))
    except FileNotFoundError:
        raise DatasetError(f"{out} was not planned with --plan, so it has no parts") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DatasetError(f"{path} cannot be read: {error!r}; begin again in another folder") from None
    index = ChunkIndex.from_plan(
        chunks, model=tables["model"], namespaces=tables["namespaces"], num_files=tables["num_files"],
        problems=tables["problems"], captures=captures, roots=tables["urls"], urls=urls,
    )  # fmt: skip
    if urls is not None:
        index.check_urls()
    return PlannedIndex(index, tables["stored_normed"])


# -- a part --------------------------------------------------------------------------------------------------


def places_of(index: ChunkIndex, samples: Sequence[Sample], number: int, of: int) -> list[int]:
    """The places in the plan of one part's samples, ascending. Every place is in one of the ``of`` parts."""
    return sorted(share(neighbours(index, samples), number, of))


class PartRun:
    """One run of a part. Several may run at the same time, also of the same part."""

    def __init__(self, out: str, number: int, of: int) -> None:
        """Nothing is written before ``run``."""
        self._out = out
        self._folder = os.path.join(out, STATE, _PARTS)
        self._name = f"{number}-of-{of}"

    def run(
        self,
        samples: Sequence[Sample],
        places: Sequence[int],
        encoder: Encoder,
        workers: int,
        show: Callable[[Progress], None],
    ) -> Progress:
        """Write the samples at these places that no earlier run of the part has written. Raises DatasetError."""
        progress = Progress(len(places))
        todo = []
        try:
            done = read_results(self._out, f"{self._name}.")
            for place in places:
                result = done.get(place)
                if result is not None and result.is_there(self._out):
                    progress.add(result.encoded(self._out) if not result.rejected else None, samples[place])
                else:
                    todo.append(place)
            show(progress)
            if todo:
                self._write(samples, todo, encoder, workers, progress, show)
        except OSError as error:
            raise DatasetError(
                f"{self._out} cannot be written: {error.strerror or error}; run the same part again to go on"
            ) from None
        return progress

    def _write(
        self,
        samples: Sequence[Sample],
        todo: Sequence[int],
        encoder: Encoder,
        workers: int,
        progress: Progress,
        show: Callable[[Progress], None],
    ) -> None:
        unique = uuid.uuid4().hex
        scratch = os.path.join(self._folder, "tmp", unique)
        os.makedirs(scratch)
        for folder in {os.path.dirname(staged_path(self._out, place)) for place in todo}:
            os.makedirs(folder, exist_ok=True)
        pool = ThreadPoolExecutor(workers, thread_name_prefix="hs-extract")
        pending: deque[tuple[int, Future[tuple[Encoded, list[list[int]]]]]] = deque()
        ahead = iter(todo)
        try:
            with open(os.path.join(self._folder, f"{self._name}.{unique}.jsonl"), "xb", buffering=0) as log:
                while True:
                    while len(pending) <= 2 * workers and (place := next(ahead, None)) is not None:
                        temporary = os.path.join(scratch, str(place))
                        pending.append((place, pool.submit(self._stage, encoder, samples[place], place, temporary)))
                    if not pending:
                        return
                    place, future = pending.popleft()
                    encoded: Encoded | None = None
                    try:
                        encoded, runs = future.result()
                        line: list[Any] = [place, "ok", encoded.nbytes, encoded.checksum, runs, encoded.facts]
                    except Unreachable as trouble:
                        raise DatasetError(f"{trouble}; run the same part again to go on") from None
                    except RowRejected as rejected:
                        line = [place, "rejected", rejected.reason, str(rejected)]
                    log.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                    progress.add(encoded, samples[place])
                    show(progress)
        finally:
            pool.shutdown(cancel_futures=True)
            with contextlib.suppress(OSError):
                os.rmdir(scratch)

    def _stage(self, encoder: Encoder, sample: Sample, place: int, temporary: str) -> tuple[Encoded, list[list[int]]]:
        encoded, runs = encoder.encode(sample, temporary)
        if not encoded.path:
            with open(temporary, "xb") as file:
                file.writelines(encoded.parts)
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)  # what another machine counts on must be on disk
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, staged_path(self._out, place))
        return encoded._replace(path="", parts=()), runs


def staged_path(out: str, place: int) -> str:
    """Where a sample is that a part has written."""
    return os.path.join(out, STATE, _PARTS, "rows", str(place // _FOLDER), str(place))


# -- the end -------------------------------------------------------------------------------------------------


class PartResult(NamedTuple):
    """What became of the sample at a place, as a part has said."""

    place: int
    line: bytes

    @property
    def rejected(self) -> bool:
        """Whether it failed a check."""
        return bool(json.loads(self.line)[1] == "rejected")

    def is_there(self, out: str) -> bool:
        """Whether its bytes are where the part put them."""
        kind, *values = json.loads(self.line)[1:]
        path = staged_path(out, self.place)
        return kind == "rejected" or (os.path.exists(path) and os.path.getsize(path) == values[0])

    def encoded(self, out: str) -> Encoded:
        """The sample, to be given its place."""
        _, _, nbytes, checksum, _, facts = json.loads(self.line)
        return Encoded(nbytes, checksum, staged_path(out, self.place), facts=facts)

    def outcome(self, out: str, in_parts: bool) -> tuple[Encoded, list[list[int]]]:
        """What ``Encoder.encode`` would give. ``in_parts``: as bytes in memory, mapped, not as a file.

        Raises RowRejected or OSError.
        """
        kind, *values = json.loads(self.line)[1:]
        if kind == "rejected":
            raise RowRejected(*values)
        encoded = self.encoded(out)
        if in_parts:
            with open(encoded.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            encoded = encoded._replace(path="", parts=(memoryview(mapped),))
        return encoded, values[2]


def read_results(out: str, prefix: str = "") -> dict[int, PartResult]:
    """The results of all runs of all parts, by place; of those whose names begin so. Raises OSError."""
    found: dict[int, PartResult] = {}
    folder = os.path.join(out, STATE, _PARTS)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return found
    for name in names:
        if not name.endswith(".jsonl") or not name.startswith(prefix):
            continue
        with open(os.path.join(folder, name), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # its process was killed while writing it
                    break
                place, kind, *_ = json.loads(line)
                if kind == "ok" or place not in found:  # rows that one run has read are better than none
                    found[place] = PartResult(place, line)
    return found


def outcomes(out: str, samples: Sequence[Sample], in_parts: bool) -> Callable[[int], Iterator[tuple[int, Outcome]]]:
    """The results of the parts in the order of the plan, from a place on. Raises DatasetError when some are missing."""
    results = read_results(out)
    missing = [place for place in range(len(samples)) if place not in results]
    if missing:
        raise DatasetError(
            f"{len(missing)} of {len(samples)} samples are not written yet (the first: {samples[missing[0]].id}); run "
            f"the parts that are missing, or were killed, and then --finish again"
        )

    def from_place(first: int) -> Iterator[tuple[int, Outcome]]:
        for place in range(first, len(samples)):
            result = results[place]
            yield place, lambda: result.outcome(out, in_parts)  # noqa: B023 - called before the next one
            with contextlib.suppress(FileNotFoundError):  # it has been copied, and filed
                os.unlink(staged_path(out, place))

    return from_place
