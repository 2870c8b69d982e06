"""A capture from its first row to its summary: count everything, check the room, run what is not done, count again.

Rows are read and encoded twice, once to count and once to run, so that memory holds no row but those under way.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import xxhash

from lmcache_hs_backend.capture.budget import DiskBudget
from lmcache_hs_backend.capture.capture_settings import CaptureError, Settings
from lmcache_hs_backend.capture.encode import BadRow, EncodedRow, RowEncoder
from lmcache_hs_backend.capture.estimate import ChunkSizes, Estimate
from lmcache_hs_backend.capture.finished import Recorded, RecordTail, is_ours, look_at_disk
from lmcache_hs_backend.capture.sources import SourceError, read_rows
from lmcache_hs_backend.capture.vllm_backends import Backend, Outcome, Request
from lmcache_hs_backend.format.namespace import read_record

REJECTED = "rejected.jsonl"

_PROOF_SEC = 30.0  # a server's first record appears in this time, or its rows go elsewhere
_RECORD_SEC = 15.0  # so long records may take after the last answer
_POLL_SEC = 0.1


class Bad(NamedTuple):
    """A row that is not captured: its file, its line there, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


class CaptureProgress(NamedTuple):
    """How far a run is. ``seconds_left`` is None until it can be estimated."""

    rows: int
    of_rows: int
    tokens: int
    failed: int
    tokens_per_sec: float
    seconds_left: float | None
    on_disk: int


class View(Protocol):
    """What shows the user how it goes."""

    def say(self, text: str) -> None:
        """One line, for good."""

    def warn(self, text: str) -> None:
        """One line that must not be overlooked."""

    def reading(self, rows: int) -> None:
        """So many rows have been counted so far."""

    def running(self, progress: CaptureProgress) -> None:
        """So far the run has come."""


@dataclass
class CaptureJob:
    """One data set and one model. ``limit``: only so many different rows; ``served``: a server has the model."""

    settings: Settings
    encoder: RowEncoder
    paths: Sequence[str]
    view: View
    limit: int | None = None
    rejected_path: str | None = None
    served: bool = False
    bad: dict[tuple[str, int], Bad] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class Summary(NamedTuple):
    """How a run ended. ``stopped``: why it ended before its last row, empty if it did not."""

    rows: int
    captured: int
    bad: int
    stopped: str

    @property
    def status(self) -> int:
        """The exit status."""
        return 0 if self.captured == self.rows and not self.bad and not self.stopped else 1


class Interrupted(Exception):
    """Ctrl-C. The text is the summary."""


# -- counting --------------------------------------------------------------------------------------------


def survey(job: CaptureJob) -> Estimate:
    """Go through all rows without a model: the figures, and in ``job`` the bad rows and what is done already.

    Raises CaptureError and SourceError.
    """
    job.done, prefixes = look_at_disk(job.settings, served=job.served)
    estimate = Estimate(ChunkSizes(job.settings), job.settings.answer_tokens, job.encoder.max_tokens, prefixes)
    count = 0
    for count, (_, row, row_id) in enumerate(_encoded(job, job.view.warn), 1):
        estimate.add(row, again=row_id in job.wanted, done=row_id in job.done)
        job.wanted.add(row_id)
        if count % 100 == 0:
            job.view.reading(count)
    job.view.reading(count)
    if not count and not job.bad:
        raise CaptureError(f"there is no row in {', '.join(job.paths)}")
    return estimate


def _encoded(job: CaptureJob, note: Callable[[str], None] = lambda text: None) -> Iterator[tuple[str, EncodedRow, int]]:
    """The good rows, with their place and id. Bad ones are noted in the job; ``note`` is told what is passed over."""
    different: set[int] = set()
    for source in read_rows(job.paths, note):
        try:
            if source.problem:
                raise BadRow(source.problem)
            row = job.encoder.encode(source.value)
        except BadRow as error:
            job.bad.setdefault((source.file, source.number), Bad(source.file, source.number, str(error)))
            continue
        row_id = row_number(row, job.settings)
        if job.limit is not None and row_id not in different:
            if len(different) == job.limit:
                return
            different.add(row_id)
        yield f"{source.file}, line {source.number}", row, row_id


def row_number(row: EncodedRow, settings: Settings) -> int:
    """The id of a row: a hash of its tokens, and of what is trained on or how it is answered."""
    if row.complete:
        what = json.dumps(["read", row.loss_spans])
    else:
        what = json.dumps(["answer", settings.answer_tokens, sorted(settings.sampling.items())], default=repr)
    return xxhash.xxh3_128_intdigest(array("q", row.token_ids).tobytes() + what.encode())


def figures(job: CaptureJob, estimate: Estimate) -> dict[str, Any]:
    """All that a dry run says, as plain values. Sizes in bytes."""
    settings = job.settings
    budget = _budget(settings)
    free = budget.free()
    fits = budget.on_disk + estimate.needed_bytes <= budget.limit and free - estimate.needed_bytes >= budget.min_free
    return {
        "model": settings.model,
        "cold_path": settings.cold_path,
        "rows": estimate.rows + len(job.bad),
        "bad": len(job.bad),
        "different": estimate.different,
        "repeated": estimate.rows - estimate.different,
        "done": estimate.done,
        "complete": estimate.complete,
        "answered": estimate.answered,
        "cut": estimate.cut,
        "without_loss": estimate.without_loss,
        "tokens": estimate.tokens,
        "trained_tokens": estimate.trained_tokens,
        "most_answer_tokens": estimate.most_answer_tokens,
        "stored_tokens": estimate.stored_tokens,
        "longest": estimate.longest,
        "max_model_len": settings.max_model_len,
        "layers": [{"id": layer, "purpose": purpose} for layer, purpose in settings.layer_purposes()],
        "bytes_per_token": len(settings.layers) * settings.facts.row_bytes,
        "bytes": estimate.nbytes,
        "needed_bytes": estimate.needed_bytes,
        "used_bytes": budget.on_disk,
        "limit_bytes": budget.limit,
        "free_bytes": free,
        "min_free_bytes": budget.min_free,
        "fits": fits,
        "columns": estimate.columns,
        "beside": estimate.beside,
        "left_out": estimate.remarks,
        "warnings": settings.warnings(),
        "rejected": [bad._asdict() for bad in list(job.bad.values())[:20]],
    }


def _budget(settings: Settings) -> DiskBudget:
    return DiskBudget(settings.cold_path, settings.tiers.max_cold_bytes, settings.tiers.min_free_bytes)


# -- running ---------------------------------------------------------------------------------------------


def run(job: CaptureJob, estimate: Estimate, start: Callable[[], Backend]) -> Summary:
    """Run every row that is not done. ``start`` makes the backend; a server's first row proves that it captures.

    Raises CaptureError, SourceError, and Interrupted.
    """
    write_rejected(job)
    backend: Backend | None = None
    runner = _Runner(job, estimate)
    try:
        if job.wanted - job.done:
            runner.check_room()
            backend = start()
            if job.encoder.max_tokens != backend.max_model_len - 1:
                runner = _Runner(job, _count_again(job, backend.max_model_len))
            runner.go(backend)
            backend.close()
            runner.await_records()
        write_rejected(job)
        return runner.summary()
    except KeyboardInterrupt:
        text = runner.interrupted()
        with contextlib.suppress(KeyboardInterrupt):
            if backend is not None:
                backend.abandon()
        raise Interrupted(text) from None
    except (CaptureError, SourceError, OSError):
        if backend is not None:
            backend.abandon()
        raise


def _count_again(job: CaptureJob, max_model_len: int) -> Estimate:
    """The model takes another length than its config says: other rows are too long, or are cut to another length."""
    job.view.warn(f"the model runs with max_model_len {max_model_len:,}; the rows are counted again")
    job.encoder.max_tokens = max_model_len - 1
    job.wanted.clear()
    job.bad.clear()
    estimate = survey(job)
    write_rejected(job)
    return estimate


class _Runner:
    """The state of one run."""

    def __init__(self, job: CaptureJob, estimate: Estimate) -> None:
        self._job = job
        self._settings = job.settings
        self._sizes, self._on_disk = estimate.sizes, estimate.on_disk
        self._budget = _budget(job.settings)
        self._tail = RecordTail(job.settings.cold_path)
        self._tokens_to_do = estimate.tokens * (1 - estimate.done / max(1, estimate.different))
        self._rows_to_do = len(job.wanted - job.done)
        self._recorded: set[int] = set()  # rows that this run has brought to disk, by their records
        self._tokens = self._rows = self._failed = 0
        self._started = time.monotonic()
        self.stopped = ""

    def check_room(self) -> None:
        """Raises CaptureError when opening the tiers alone would evict what is there."""
        budget = self._budget
        if budget.on_disk > budget.limit:
            raise CaptureError(
                f"{self._settings.cold_path} holds {budget.on_disk:,} bytes, more than max_cold_size "
                f"({self._settings.tiers.max_cold_size:g} GB, {budget.limit:,} bytes): starting would evict "
                f"rows; raise it"
            )

    def go(self, backend: Backend) -> None:
        """Give the backend rows while there is room for them, until all have ended."""
        self._started = time.monotonic()
        requests = self._requests(backend.max_model_len)
        request = next(requests, None)
        if self._job.served and request is not None and self._budget.admits(request.nbytes):
            self._prove(backend, request)
            request = next(requests, None)
        idle_since: float | None = None
        while request is not None or backend.running:
            while request is not None and backend.room > 0 and self._budget.admits(request.nbytes):
                self._submit(backend, request)
                request = next(requests, None)
            if backend.running:
                for outcome in backend.wait():
                    self._ended(outcome)
                idle_since = None
            elif request is not None:  # full, unless rows that are not settled turn out smaller than their bound
                idle_since = idle_since or time.monotonic()
                if not self._budget.under_way or time.monotonic() > idle_since + _RECORD_SEC:
                    self._budget.settle_all()
                    self._budget.measure()
                    if not self._budget.admits(request.nbytes):
                        self._full(request)
                        return
                time.sleep(_POLL_SEC)
            self._settle()
            self._show()

    def await_records(self) -> None:
        """Records come a moment after answers."""
        deadline = time.monotonic() + _RECORD_SEC
        self._settle()
        while self._budget.under_way and time.monotonic() < deadline:
            time.sleep(_POLL_SEC)
            self._settle()

    def summary(self) -> Summary:
        """What is on disk now, looked up chunk by chunk."""
        captured = len(self._job.wanted & look_at_disk(self._settings, served=self._job.served).rows)
        if self.stopped:
            self.stopped = f"full: {captured} of {len(self._job.wanted)} rows are done. {self.stopped}"
        return Summary(len(self._job.wanted), captured, len(self._job.bad), self.stopped)

    def interrupted(self) -> str:
        """The summary of a run that was stopped: by records alone, which takes no time."""
        with contextlib.suppress(OSError):
            self._settle()
        done = len(self._job.done & self._job.wanted) + len(self._recorded - self._job.done)
        under_way = f", {self._budget.under_way} under way are given up" if self._budget.under_way else ""
        return (
            f"stopped: {done} of {len(self._job.wanted)} rows are in {self._settings.cold_path}{under_way}; "
            f"the same command goes on"
        )

    # -- inside ------------------------------------------------------------------------------------------

    def _requests(self, max_model_len: int) -> Iterator[Request]:
        """The rows that are not done, each once."""
        settings, given = self._settings, set(self._job.done)
        for place, row, row_id in _encoded(self._job):
            if row_id in given or row_id not in self._job.wanted:
                continue
            given.add(row_id)
            count = len(row.token_ids)
            most = 1 if row.complete else min(settings.answer_tokens, max_model_len - count)
            record: dict[str, Any] = {}
            if row.loss_spans is not None:
                record["loss_spans"] = [list(span) for span in row.loss_spans]
            if row.cut_from is not None:
                record["cut_from"] = row.cut_from
            nbytes = self._sizes.missing(row.token_ids, count + most - 1, self._on_disk)
            yield Request(f"hs{row_id:032x}", row.token_ids, most, record, place, nbytes)

    def _submit(self, backend: Backend, request: Request) -> None:
        self._budget.start(request.row_id, request.nbytes)
        backend.submit(request)

    def _ended(self, outcome: Outcome) -> None:
        self._rows += 1
        self._tokens += len(outcome.request.token_ids)
        if outcome.problem is not None:
            self._failed += 1
            self._budget.settle(outcome.request.row_id)
            self._job.view.warn(f"{outcome.request.place}: {outcome.problem}")

    def _settle(self) -> list[Recorded]:
        found = self._tail.new()
        for recorded in found:
            self._budget.settle(recorded.row_id)
            number = int(recorded.row_id[2:], 16)
            if recorded.whole and number in self._job.wanted:
                self._recorded.add(number)
        return found

    def _show(self) -> None:
        seconds = max(1e-3, time.monotonic() - self._started)
        rate = self._tokens / seconds
        left = max(0.0, self._tokens_to_do - self._tokens) / rate if rate else None
        self._job.view.running(
            CaptureProgress(self._rows, self._rows_to_do, self._tokens, self._failed, rate, left, self._budget.on_disk)
        )

    def _full(self, request: Request) -> None:
        budget, settings = self._budget, self._settings
        over_limit = budget.on_disk + request.nbytes > budget.limit
        what = (
            f"max_cold_size is {settings.tiers.max_cold_size:g} GB ({budget.limit:,} bytes)"
            if over_limit
            else f"{budget.free():,} bytes are free on the disk, of which min_free_disk keeps {budget.min_free:,}"
        )
        remedy = "raise max_cold_size (--max-cold-size GB)" if over_limit else "free some of the disk"
        self.stopped = (
            f"{what}, {budget.on_disk:,} are used, and the next row may need {request.nbytes:,}. Nothing was evicted. "
            f"To go on, {remedy}, or extract what is there and clear it; then run the same command again."
        )

    def _prove(self, backend: Backend, request: Request) -> None:
        """Send one row and look for its record, before the whole data set goes to a server that captures nothing."""
        self._submit(backend, request)
        ended: list[Outcome] = []
        while not ended:
            ended = backend.wait()
        self._ended(ended[0])
        settings, name = self._settings, self._settings.cold_path
        if ended[0].problem is not None:
            raise CaptureError(f"the first row, {request.place}, failed: {ended[0].problem}")
        if not (ended[0].transfer or {}).get("hidden_states_last_chunk"):
            raise CaptureError(
                "the server answered, but keeps no hidden states: it runs without HSTieredConnector; start it as "
                "--serve-command prints"
            )
        deadline = time.monotonic() + _PROOF_SEC
        mine: list[Recorded] = []
        while not mine:
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"the server answered, but wrote no record under {name} within {_PROOF_SEC:.0f} s: is that its "
                    f"cold path, and is it the same directory here?"
                )
            time.sleep(_POLL_SEC)
            mine = [recorded for recorded in self._settle() if recorded.row_id == request.row_id]
        capture = mine[0].record.get("capture") or {}
        stored = capture.get("layers") or []
        missing = sorted(set(settings.layers) - set(stored))
        if missing:
            raise CaptureError(
                f"the server captures layers {', '.join(map(str, stored))}, but the layers here are "
                f"{', '.join(map(str, settings.layers))}: start it as --serve-command "
                f"prints, or name its layers with --layers"
            )
        namespace = read_record(mine[0].directory)
        if not is_ours(namespace, settings, served=True):
            raise CaptureError(
                f"the server's rows are those of {namespace.get('model')} (revision "
                f"{namespace.get('model_revision')!r}, {namespace.get('kv_dtype')}), not of {settings.model} "
                f"({settings.facts.dtype})"
            )
        if not mine[0].whole:
            raise CaptureError(f"the server lost rows of its first request, {request.place}; its log says why")


# -- the bad rows ----------------------------------------------------------------------------------------


def write_rejected(job: CaptureJob) -> str | None:
    """Write the bad rows where the user wants them, and say where; None: there are none, and no file is asked for.

    Without ``--rejected`` the file is in the cold path, and one of an earlier run goes when there is no bad row.
    """
    asked = job.rejected_path is not None
    path = job.rejected_path or os.path.join(job.settings.cold_path, REJECTED)
    if not job.bad and not asked:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
        return None
    _write_lines(path, (json.dumps(bad._asdict(), ensure_ascii=False) for bad in job.bad.values()), job.settings)
    return path


def _write_lines(path: str, lines: Iterable[str], settings: Settings) -> None:
    try:
        os.makedirs(os.path.dirname(path) or ".", settings.tiers.cold_dir_mode, exist_ok=True)
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.replace(temporary, path)
    except OSError as error:
        raise CaptureError(f"{path} cannot be written: {error.strerror}; --rejected FILE names another one") from None
