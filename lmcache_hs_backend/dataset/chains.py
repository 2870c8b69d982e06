"""Chunks → sequences: which rows, of which chunks, make one training sample.

Three sources: every maximal chain of chunks (``leaves``), request records that a writer left beside them
(``requests``), and a prepared dataset whose rows are looked for in the chunks (``dataset``). Token ids and
rows of hidden states are not kept here; a sequence is the chunk it ends in and a number of tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from lmcache_hs_backend.chunk import TOKEN_BYTES, token_bytes
from lmcache_hs_backend.dataset.errors import DatasetError, NothingThere, RowRejected
from lmcache_hs_backend.dataset.forest import UsableForest
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.chunk_forest import FIRST
from lmcache_hs_backend.format.request_log import RequestRecord, Spans, read_records

T = TypeVar("T")

#: Why sequences are left out that the user has chosen to do without.
ASKED_FOR = ("shorter than min_tokens", "the same as another one, cut to max_tokens")


class Sample(NamedTuple):
    """One training sample: the first ``tokens`` tokens of the chain that ends in chunk ``last``.

    ``prompt_tokens`` is -1 where it is not known, ``row`` the row of the prepared dataset or -1. ``loss_spans`` are the
    tokens that its request record says are trained on, half open; None where it says nothing.
    """

    id: str
    last: int
    tokens: int
    prompt_tokens: int = -1
    row: int = -1
    loss_spans: Spans | None = None


@dataclass
class Report:
    """What became of everything that could have been a sequence."""

    source: str
    sequences: int = 0
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    #: Row of a prepared dataset, its tokens, covered tokens; -1 of those for a row that is none.
    coverage: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    bad_rows: list[tuple[int, RowRejected]] = dataclasses.field(default_factory=list)  # of the prepared dataset

    def covered(self) -> tuple[int, int, int]:
        """Rows of a prepared dataset that are covered, partly covered and missing. Those that are none are in none."""
        full = sum(covered == tokens for _, tokens, covered in self.coverage)  # an empty row is
        missing = sum(covered == 0 < tokens for _, tokens, covered in self.coverage)
        return full, len(self.coverage) - full - missing - self.unreadable(), missing

    def unreadable(self) -> int:
        """Rows of a prepared dataset that cannot be read."""
        return sum(covered < 0 for _, _, covered in self.coverage)


def leaves(forest: UsableForest, report: Report) -> list[Sample]:
    """Every maximal chain, those that share chunks beside each other."""
    chunks = forest.index.chunks
    found = [Sample(chunks[last].prefix.hex(), last, chunks[last].end) for last in forest.leaves()]
    report.sequences = len(found)
    return found


# -- requests --------------------------------------------------------------------------------------------


def requests(forest: UsableForest, report: Report) -> list[Sample]:
    """One sequence per request record, in the order of the records. The same request twice counts once."""
    paths = forest.index.record_files()
    if not paths:
        raise DatasetError(
            "there are no request records (sequences/*.jsonl) beside the chunks; use --sequences leaves or dataset:PATH"
        )
    chunks = forest.index.chunks
    by_prefix: dict[bytes, int] = {}
    for position in _usable(forest):
        by_prefix.setdefault(chunks[position].prefix, position)
    found: dict[RequestRecord, int | None] = {}
    wanted: dict[int, dict[int, set[bytes]]] = {}
    for record in _records(forest.index.files, paths, report):
        if record in found:
            continue
        found[record] = last = by_prefix.get(record.prefix)
        parent = by_prefix.get(record.parent_prefix) if record.parent_prefix else FIRST
        if last is None and parent is not None:
            length = record.num_tokens - (chunks[parent].end if parent >= 0 else 0)
            if length > 0:
                wanted.setdefault(parent, {}).setdefault(length, set()).add(record.prefix)
    inside = {prefix: child for (_, prefix), child in forest.find_inside(wanted).items()}
    result = []
    for record, last in found.items():
        last = inside.get(record.prefix) if last is None else last
        if last is None or chunks[last].end < record.num_tokens:
            report.left_out["a chunk of the request is no longer there"] += 1
            continue
        sample = Sample(record.request_id, last, record.num_tokens, record.prompt_tokens)
        result.append(sample._replace(loss_spans=record.loss_spans))
    report.sequences = len(found)
    return result


def _records(files: FileLayer, paths: Iterable[str], report: Report) -> Iterator[RequestRecord]:
    for path in paths:
        for record in read_records(path, files):
            if isinstance(record, RequestRecord):
                yield record
            else:  # a line cut short by a crash, of another version, or not ours
                report.left_out["unreadable request record"] += 1


def _usable(forest: UsableForest) -> Iterator[int]:
    stack = list(forest.children(FIRST))
    while stack:
        position = stack.pop()
        yield position
        stack += forest.children(position)


# -- a prepared dataset ----------------------------------------------------------------------------------


def matched(forest: UsableForest, rows: Iterable[Sequence[int] | RowRejected], report: Report) -> list[Sample]:
    """One sequence per row of a prepared dataset that chunks cover at least in part, in the dataset's order.

    A row that is no row, a RowRejected in its place, is kept in the report, and no sequence.

    A row is covered up to the end of the last whole chunk whose tokens are its own, or to its end where that
    lies inside a chunk. Raises DatasetError when no row is covered at all.
    """
    chunks = forest.index.chunks
    walked: list[tuple[int, int, int, bytes]] = []  # last chunk, covered tokens, tokens, digest of the whole row
    wanted: dict[int, dict[int, set[bytes]]] = {}
    for number, row in enumerate(rows):
        if isinstance(row, RowRejected):
            report.bad_rows.append((number, row))
            row = ()
        ids = token_bytes(row)
        walk = forest.walk(ids)
        tokens = len(ids) // TOKEN_BYTES
        digest = b""
        # The rest may lie inside a chunk after the last one, or after the one before when that is a short tail.
        for parent in _ends(forest, walk.last):
            start = chunks[parent].end if parent >= 0 else 0
            if walk.tokens < tokens and tokens - start < forest.longest_after(parent):
                if not digest:
                    state = walk.state.copy()
                    state.update(ids[walk.tokens * TOKEN_BYTES :])
                    digest = state.digest()
                wanted.setdefault(parent, {}).setdefault(tokens - start, set()).add(digest)
        walked.append((walk.last, walk.tokens, tokens, digest))
    inside = forest.find_inside(wanted)
    found = []
    bad = {number for number, _ in report.bad_rows}
    for number, (last, covered, tokens, digest) in enumerate(walked):
        if digest:
            for parent in _ends(forest, last):
                beyond = inside.get((parent, digest))
                if beyond is not None:
                    last, covered = beyond, tokens
                    break
        report.coverage.append((number, tokens, -1 if number in bad else covered))
        if covered:
            found.append(Sample(f"row-{number}", last, covered, row=number))
        elif number not in bad:
            report.left_out["no chunk of the row is there" if tokens else "the row is empty"] += 1
    report.sequences = len(walked)
    if walked and len(bad) == len(walked):
        raise DatasetError(f"none of the dataset's {len(walked)} rows can be read; the first: {report.bad_rows[0][1]}")
    if walked and not found:
        raise NothingThere(
            f"none of the dataset's {len(walked)} rows begins with a chunk of {forest.index.model}; was the dataset "
            f"tokenised with this model's tokenizer and chat template, and are these the prompts that were captured?"
        )
    return found


def _ends(forest: UsableForest, last: int) -> list[int]:
    """The chunk where a walk ended, and the one before it."""
    return [last] if last < 0 else [last, forest.index.chunks[last].parent]


# -- limits ----------------------------------------------------------------------------------------------


def bounded(
    index: ChunkIndex, found: Sequence[Sample], min_tokens: int, max_tokens: int | None, report: Report
) -> list[Sample]:
    """Sequences cut to ``max_tokens``, and without those below ``min_tokens`` or that a cut made equal."""
    result = []
    cut: set[tuple[tuple[int, bytes], int, int]] = set()
    for sequence in found:
        if max_tokens is not None and sequence.tokens >= max_tokens:
            last = sequence.last
            while index.chunks[last].start >= max_tokens:
                last = index.chunks[last].parent
            sequence = sequence._replace(last=last, tokens=max_tokens)
            identity = (_content(index, last, max_tokens), sequence.row, sequence.prompt_tokens)
            if identity in cut:
                report.left_out[ASKED_FOR[1]] += 1
                continue
            cut.add(identity)
        if sequence.tokens < min_tokens:
            report.left_out[ASKED_FOR[0]] += 1
            continue
        result.append(sequence)
    return result


def _content(index: ChunkIndex, last: int, tokens: int) -> tuple[int, bytes]:
    """What two sequences have in common whose first ``tokens`` tokens, which end in chunk ``last``, are equal."""
    chunk = index.chunks[last]
    if chunk.end == tokens:
        return FIRST, chunk.prefix
    ids = index.ids(last)  # other chunks may begin like this one, and differ after the cut
    return (chunk.parent, ids[: (tokens - chunk.start) * TOKEN_BYTES]) if ids is not None else (last, b"")


def share(found: Sequence[T], number: int, of: int) -> list[T]:
    """The ``number``-th (from 1) of ``of`` contiguous shares, which differ by at most one sequence."""
    return list(found[len(found) * (number - 1) // of : len(found) * number // of])


def read_once(index: ChunkIndex, samples: Sequence[Sample]) -> set[int]:
    """The chunks that just one of the samples lies in."""
    uses = [0] * len(index)
    for sample in samples:
        if sample.last >= 0:
            uses[sample.last] += 1
    for position in range(len(index) - 1, -1, -1):  # children come after their parents
        parent = index.chunks[position].parent
        if parent >= 0:
            uses[parent] += uses[position]
    return {position for position, count in enumerate(uses) if count == 1}


def neighbours(index: ChunkIndex, samples: Sequence[Sample]) -> list[int]:
    """The numbers of all samples, those that share the most chunks beside each other."""
    children: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    seen: set[int] = set()
    roots: list[int] = []
    for number, sample in enumerate(samples):
        ends.setdefault(sample.last, []).append(number)
        position = sample.last
        while position not in seen:
            seen.add(position)
            parent = index.chunks[position].parent
            if parent < 0:
                roots.append(position)
                break
            children.setdefault(parent, []).append(position)
            position = parent
    order: list[int] = []
    stack = roots
    while stack:
        position = stack.pop()
        order += ends.get(position, [])
        stack += children.get(position, [])
    return order
