"""An extraction: samples → checked rows → files, in order, by several threads, resumable.

Threads read and encode; one publishes, in the order of the plan, so that numbers are dense and the result
does not depend on timing. What is in memory is bounded by the number of threads, not of samples.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected, Unreachable
from lmcache_hs_backend.dataset.formats.base import TRAIN, VAL, Encoded, Entry, Format
from lmcache_hs_backend.dataset.journal import STATE, Journal, Rejected
from lmcache_hs_backend.dataset.masks import spans
from lmcache_hs_backend.dataset.plan import Plan
from lmcache_hs_backend.dataset.rows import RowReader

MANIFEST = "manifest.json"
REJECTED = "rejected.jsonl"
COVERAGE = "coverage.jsonl"
VERSION = 1


@dataclass
class Progress:
    """How far an extraction is. ``published`` and ``rejected`` count samples of earlier runs as well."""

    total: int
    published: int = 0
    rejected: int = 0
    tokens: int = 0
    nbytes: int = 0

    def add(self, encoded: Encoded | None, sample: Sample) -> None:
        """One more sample; None: it was rejected."""
        if encoded is None:
            self.rejected += 1
            return
        self.published += 1
        self.tokens += sample.tokens
        self.nbytes += encoded.nbytes


#: Gives an encoded sample and the runs of ones of its loss mask. Raises RowRejected or OSError.
Outcome = Callable[[], tuple[Encoded, list[list[int]]]]


class Encoder:
    """Makes the bytes of one sample. Thread-safe."""

    def __init__(self, reader: RowReader, plan: Plan, writer: Format) -> None:
        self._reader = reader
        self._plan = plan
        self._writer = writer

    def encode(self, sample: Sample, temporary: str) -> tuple[Encoded, list[list[int]]]:
        """The encoded sample, and the runs of ones of its loss mask. Raises RowRejected or OSError."""
        if sample.last < 0:
            raise RowRejected("gone", "the chunk in which the sample ends was deleted")
        rows = self._reader.read(sample, stacked=self._writer.stacked)
        mask = self._plan.mask(sample, rows.ids)
        return self._writer.encode(sample, rows, mask, temporary), spans(mask)


class Extraction:
    """One run into one output folder. Use as a context manager."""

    def __init__(self, out: str, *, resume: bool) -> None:
        """Take the folder, making it where it is missing. Raises DatasetError when it is not ours to fill."""
        self.out = os.path.abspath(os.path.expanduser(out))
        self._made = not os.path.isdir(self.out)
        try:
            os.makedirs(self.out, exist_ok=True)
            present = os.listdir(self.out)
            if set(present) - {REJECTED, COVERAGE} and not (resume and STATE in present):
                advice = "choose another folder" if resume or STATE not in present else "go on with --resume"
                raise DatasetError(f"{out} is not empty; {advice}")
            self.journal = Journal(self.out)
        except OSError as error:
            raise DatasetError(f"{out} cannot be written: {_trouble(error)}") from None

    def __enter__(self) -> Extraction:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folder. One in which nothing has been planned is left as it was before."""
        if self.journal.has_plan() or not os.path.isdir(self.journal.directory):
            self.journal.close()
            return
        self.journal.remove()
        if self._made:
            with contextlib.suppress(OSError):  # somebody else's file has appeared in it
                os.rmdir(self.out)

    def run(
        self,
        samples: Sequence[Sample],
        val_from: int,
        encoder: Encoder,
        writer: Format,
        workers: int,
        show: Callable[[Progress], None],
    ) -> Progress:
        """Publish every sample that is not yet; those from ``val_from`` on are for validation.

        Raises DatasetError when the output cannot be written; --resume then goes on.
        """
        pool = ThreadPoolExecutor(workers, thread_name_prefix="hs-extract")

        def outcomes(first: int) -> Iterator[tuple[int, Outcome]]:
            pending: deque[tuple[int, Future[tuple[Encoded, list[list[int]]]]]] = deque()
            for at in range(first, len(samples)):
                temporary = os.path.join(self.journal.temporary, str(at))
                pending.append((at, pool.submit(encoder.encode, samples[at], temporary)))
                if len(pending) > 2 * workers:
                    place, future = pending.popleft()
                    yield place, future.result
            for place, future in pending:
                yield place, future.result

        try:
            return self.publish(samples, val_from, writer, outcomes, show)
        finally:
            pool.shutdown(cancel_futures=True)

    def publish(
        self,
        samples: Sequence[Sample],
        val_from: int,
        writer: Format,
        outcomes: Callable[[int], Iterator[tuple[int, Outcome]]],
        show: Callable[[Progress], None],
    ) -> Progress:
        """Give every sample its place that has none yet.

        Args:
            samples: All of them, in the order of the set.
            val_from: Those from here on are for validation.
            writer: Their format.
            outcomes: The encoded samples from a number on, in order.
            show: Is called with the progress.

        Raises:
            DatasetError: The output cannot be written; what is whole stays, and a later run goes on from there.
        """
        progress, numbers = self._take_up(samples, writer)
        show(progress)
        try:
            for at, outcome in outcomes(progress.published + progress.rejected):
                self._publish(at, outcome, samples, val_from, writer, progress, numbers)
                show(progress)
            self._drop_unjournaled(writer, numbers)
        except OSError as error:
            raise DatasetError(
                f"{self.out} cannot be written: {_trouble(error)}; {progress.published} of {len(samples)} samples are "
                f"whole, --resume goes on from there"
            ) from None
        finally:
            writer.close()
        return progress

    def _drop_unjournaled(self, writer: Format, numbers: Counter[str]) -> None:
        """The one sample that a killed run may have put in its place without saying so, and that then was rejected."""
        for split in (TRAIN, VAL):
            path = writer.place_of(split, numbers[writer.folder(split)])
            if path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.out, path))

    def _take_up(self, samples: Sequence[Sample], writer: Format) -> tuple[Progress, Counter[str]]:
        """Where an earlier run ended: the results that are whole, and how many samples each folder has."""
        progress, numbers = Progress(len(samples)), Counter[str]()
        whole: dict[str, Entry] = {}  # the last one of each split
        for result in self.journal.results():
            if isinstance(result, Rejected):
                progress.rejected += 1
            elif writer.is_whole(result):
                progress.published += 1
                progress.tokens += result.tokens
                progress.nbytes += result.nbytes
                numbers[writer.folder(result.split)] += 1
                whole[result.split] = result
            else:
                break
        self.journal.keep(progress.published + progress.rejected)
        writer.rewind(list(whole.values()))
        return progress, numbers

    def _publish(
        self,
        at: int,
        outcome: Outcome,
        samples: Sequence[Sample],
        val_from: int,
        writer: Format,
        progress: Progress,
        numbers: Counter[str],
    ) -> None:
        sample = samples[at]
        split = VAL if at >= val_from else TRAIN
        try:
            encoded, runs = outcome()
        except Unreachable as trouble:  # others after it could not be read either
            raise DatasetError(
                f"{trouble}; {progress.published} of {len(samples)} samples are whole, --resume goes on from there"
            ) from None
        except RowRejected as rejected:
            self.journal.append(Rejected(sample.id, sample.tokens, rejected.reason, str(rejected)))
            progress.add(None, sample)
        else:
            folder = writer.folder(split)
            file = writer.publish(encoded, split, numbers[folder])
            numbers[folder] += 1
            facts = dict(encoded.facts)
            self.journal.append(Entry(file, encoded.nbytes, encoded.checksum, sample.tokens, runs, split, facts))
            progress.add(encoded, sample)

    def finish(self, writer: Format, head: dict[str, Any]) -> dict[str, Any]:
        """Write what describes the dataset as a whole, ``manifest.json`` last. Gives its head.

        Raises DatasetError when no sample passed its checks, or the output cannot be written.
        """
        rejected = Counter(result.reason for result in self.journal.rejected())
        with self.writing():
            self._write(REJECTED, (json.dumps(result._asdict()) + "\n" for result in self.journal.rejected()))
            splits: Counter[str] = Counter()
            trained = tokens = nbytes = 0
            for entry in self.journal.entries():
                splits[entry.split] += 1
                tokens += entry.tokens
                nbytes += entry.nbytes
                trained += sum(end - begin for begin, end in entry.loss)
            if not splits:
                self.journal.remove()  # nothing to go on with: other options may use the folder
                where = os.path.join(self.out, REJECTED)
                raise DatasetError(
                    f"no sample passed its checks ({counts_text(rejected)}); {where} says why{remedy(rejected)}"
                )
            self._make_durable()
            head = {
                "format": "lmcache-hs-dataset",
                "manifest_version": VERSION,
                **head,
                "samples_published": splits.total(),
                "samples_by_split": dict(splits),
                "tokens": tokens,
                "tokens_trained": trained,
                "bytes": nbytes,
                "rejected": dict(sorted(rejected.items())),
                **writer.finish(self.journal.entries()),
            }
            self._write(MANIFEST, self._manifest(head))
        self.journal.remove()
        return head

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """What the system refuses to write is a DatasetError."""
        try:
            yield
        except OSError as error:
            raise DatasetError(
                f"{self.out} cannot be written: {_trouble(error)}; --resume goes on from there"
            ) from None

    def _make_durable(self) -> None:
        """Have every published file on disk before there is a manifest that vouches for them.

        The disk has been at it all along, so there is little left to wait for.
        """
        for file in dict.fromkeys(entry.file for entry in self.journal.entries()):
            path = os.path.join(self.out, file)
            if os.path.exists(path):  # a shard that is still open is completed, and made durable, by its format
                _sync(path)

    def _manifest(self, head: dict[str, Any]) -> Iterator[str]:
        """JSON with one line per sample: as long as the dataset has samples, and never held in memory."""
        yield json.dumps(head, indent=1)[:-2] + ',\n "samples": [\n'
        comma = ""
        for entry in self.journal.entries():
            record = {
                "file": entry.file, "split": entry.split, "tokens": entry.tokens,
                "tokens_trained": sum(end - begin for begin, end in entry.loss),
                "bytes": entry.nbytes, "xxh3": entry.checksum,
            }  # fmt: skip
            if "offset" in entry.facts:
                record["offset"] = entry.facts["offset"]
            yield comma + "  " + json.dumps(record)
            comma = ",\n"
        yield "\n ]\n}\n"

    def _write(self, name: str, lines: Iterator[str]) -> None:
        temporary = os.path.join(self.journal.temporary, name)
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, os.path.join(self.out, name))


def _trouble(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def counts_text(counter: Mapping[str, int]) -> str:
    """``10 no_loss, 1 ids``: the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(counter).most_common())


#: What to do when nearly all samples are rejected for one reason.
_REMEDIES = {
    "no_loss": "conversations that end with the assistant's answer were only read, so nothing follows their prompts: "
    "name the answers with --loss-mask chatml or llama3 and --tokenizer DIR, or take a capture whose request records "
    "have loss_spans, as lmcache-hs-capture writes them",
    "norm": "the rows are on the other side of the final norm than captured, or --final-norm is another model's",
    "mask": "the dataset's masks do not fit its ids: choose another --loss-mask, or prepare it again",
    "ids": "the token ids are not those that were captured: were both made with the same tokenizer?",
    "bad_file": "chunk files are damaged: lmcache-hs-inspect verify names them all",
    "gone": "an engine has deleted the chunks meanwhile: raise its max_cold_size, or extract before they are evicted",
}


def remedy(rejected: Mapping[str, int]) -> str:
    """What to do about samples that were rejected, as the end of a sentence; empty where there is no advice."""
    reason = max(rejected, key=lambda reason: rejected[reason], default="")
    return f"; {_REMEDIES[reason]}" if reason in _REMEDIES else ""


def trial(encoder: Encoder, samples: Sequence[Sample], near: str, seconds: float = 2.0) -> float:
    """Bytes per second that reading, encoding and writing the first samples here takes, on one thread.

    Writes into a temporary folder beside ``near``, and removes it. 0 where nothing could be tried.
    """
    folder = os.path.abspath(near)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    scratch = os.path.join(folder, f"{STATE}-trial.{os.getpid()}")
    try:
        os.mkdir(scratch)
    except OSError:  # a folder that cannot be written to: the estimate goes without a time
        return 0.0
    started, nbytes = time.monotonic(), 0
    try:
        for number, sample in enumerate(samples):
            with contextlib.suppress(RowRejected):
                encoded, _ = encoder.encode(sample, os.path.join(scratch, str(number)))
                nbytes += encoded.nbytes
                if encoded.path:
                    os.unlink(encoded.path)
            if time.monotonic() - started > seconds:
                break
    finally:
        shutil.rmtree(scratch)
    return nbytes / max(1e-9, time.monotonic() - started)


def one_thread_per_row() -> None:
    """Samples are the unit of parallel work here; torch's own threads would only stand in the way."""
    torch.set_num_threads(1)
