"""Every counter, gauge and histogram: the names of ``stats()`` and of Prometheus, in one place.

Counting is an append to a list, which is added up when figures are read, under a lock of its own that is held for
nothing else; so it can be done from anywhere, under any lock. Prometheus sees the figures when ``publish`` copies them
over, once a second from the background thread; its objects are made once per process, because LMCache builds its
backends again at will and the registry refuses a second one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=MetricWrapperBase)

#: Why a retrieve ended before the end of the prompt. One is counted for each such call.
MISSES = {
    "absent": "the chunk is in neither tier",
    "layer": "the chunk is there, but not with every layer that was asked for",
    "kv_gone": "LMCache has lost the KV of the chunk",
    "kv_unknown": "it is not known whether LMCache still has the KV",
    "kv_absent": "the chunk is kept, but its KV has not been back in this process",
    "collision": "another prompt has the same chunk hash",
    "offline": "the chunk is on a disk that does not answer",
    "timeout": "the disk did not answer in read_timeout_sec",
    "bad_file": "the chunk's file was damaged, replaced or deleted",
    "memory": "the system gave no memory for the result",
    "shape": "the hidden size (or, for native rows, the dtype) changes within the prompt",
}
#: Why rows that were given to us are no longer here, other than that their KV is gone.
DROPS = {
    "no_room": "a store kept less than it was given: nothing could leave RAM in store_wait_ms",
    "offline": "dropped from RAM while the disk took no writes",
    "too_large": "dropped from RAM: the chunk alone is larger than max_cold_size",
    "cold_limit": "deleted from disk, least recently used, to stay within max_cold_size or min_free_disk",
    "unshared": "deleted from disk like drops_cold_limit, before it was in the bucket of the shared tier",
    "collision": "not stored: another prompt has the same chunk hash",
    "reshaped": "stored again with another hidden size: the rows were another model's, under the same name",
    "bad_file": "the file was damaged, replaced or deleted by something else",
    "unwritable": "dropped from RAM: writing it failed in a way that is a bug in this package",
    "archive": "its KV was gone, and the file could not be moved to the archive",
    "close": "not yet on disk when close_timeout_sec was over",
    "interrupted": "an exception from outside has cut a change of the index short, and left the chunk in doubt",
}
#: What went wrong inside.
ERRORS = {
    "read": "the system refused to read a chunk file",
    "write": "the system refused to write a chunk file",
    "disk_full": "the filesystem had no room for a chunk file",
    "unlink": "a chunk file could not be deleted; it is tried again",
    "shared_read": "the bucket of the shared tier did not answer a read, or refused it",
    "shared_write": "the bucket of the shared tier did not answer a write, or refused it",
    "shared_bad": "an object of the shared tier was damaged, or another chunk",
    "shared_file": "a chunk file was not good enough to be uploaded",
    "presence": "asking LMCache for the KV of chunks raised",
    "clear": "what was cleared could not be moved away on disk at once; it is tried again",
    "interrupted": "an exception from outside has cut a change of the index short; it was put in order",
    "internal": "a bug in this package; the log has it",
}
COUNTERS = {
    "stored_chunks": "chunks that newly got a layer",
    "hits_hot": "chunks served from RAM",
    "hits_cold": "chunks served from disk",
    "demoted": "chunks that left RAM for disk",
    "promoted": "chunks that came back to RAM",
    "kv_gone_deleted": "chunks deleted (or archived) because their KV was gone",
    "written_chunks": "chunk files written",
    "written_bytes": "bytes of chunk files written",
    "read_bytes": "bytes of rows read from chunk files",
    "shared_puts": "chunks put into the bucket of the shared tier",
    "shared_put_bytes": "bytes put there",
    "shared_record_bytes": "bytes of request records put there",
    "shared_exists": "chunks that the bucket had already",
    "shared_hits": "chunks that came from the bucket",
    "shared_read_bytes": "bytes read from there",
    "shared_absent": "chunks that were asked for and are not there",
    "shared_timeouts": "retrieves that did not wait longer than shared_read_sec; what they asked for may come later",
    "shared_offline": "retrieves that did not ask the bucket, because it does not answer",
    "evicted_shared": "chunks that left the disk and stay in the bucket",
    **{f"misses_{reason}": f"retrieves that ended early: {why}" for reason, why in MISSES.items()},
    **{f"drops_{reason}": f"chunks lost: {why}" for reason, why in DROPS.items()},
    **{f"errors_{reason}": f"errors: {why}" for reason, why in ERRORS.items()},
}
GAUGES = {
    "hot_bytes": "bytes of the hot tier in use",
    "hot_chunks": "chunks with rows in RAM",
    "dirty_chunks": "chunks in RAM that are not yet on disk",
    "cold_bytes": "bytes on disk, quarantine, archive and dead namespaces included",
    "cold_chunks": "chunks with a file",
    "archived_chunks": "chunk files kept for extraction only",
    "quarantined_chunks": "damaged files in quarantine",
    "unconfirmed_chunks": "chunks whose KV has not been seen in this process",
    "capacity_bytes": "size of the hot tier",
    "cold_limit_bytes": "limit of the cold tier",
    "cold_online": "1 when the disk takes reads and writes, else 0",
    "pinned": "1 when the hot tier is pinned memory",
    "slots_stuck": "file operations that have not returned in read_timeout_sec",
    "queue_reads": "reads that wait for a thread",
    "queue_writes": "chunks that wait to be written",
    "queue_uploads": "chunks on disk that wait to be uploaded to the shared tier",
    "shared_chunks": "chunks on disk that the bucket of the shared tier holds too",
    "shared_read_online": "1 when the bucket of the shared tier answers reads, else 0; 0 without one",
    "shared_write_online": "1 when it takes writes, else 0; 0 without one",
}
HISTOGRAMS = {
    "store_seconds": "time of one store call",
    "retrieve_seconds": "time of one retrieve call",
    "disk_read_seconds": "time of reading one chunk file",
    "disk_write_seconds": "time of writing one chunk file",
    "shared_get_seconds": "time of one read from the bucket of the shared tier",
    "shared_put_seconds": "time of bringing one chunk to the bucket of the shared tier",
}

PREFIX = "lmcache:hs_"
LABELS = ("model_name", "worker_id", "role", "served_model_name")
_BUCKETS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LOG_INTERVAL_SEC = 10.0
#: So many calls are added up at the latest, should nobody ask for figures.
_MANY_NOTES = 10_000

_registered: dict[str, MetricWrapperBase] = {}
_registering = threading.Lock()  # guards _registered; held only while a metric object is made


def _metric(kind: type[M], name: str, doc: str, **options: Any) -> M:
    with _registering:
        if name not in _registered:
            _registered[name] = kind(PREFIX + name, doc, LABELS, **options)
        return cast("M", _registered[name])


class Metrics:
    """The figures of one store."""

    def __init__(self, labels: Mapping[str, object] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts: Counts[str] = Counts()
        self._sums: dict[str, float] = dict.fromkeys(HISTOGRAMS, 0.0)
        self._published: Counts[str] = Counts()
        self._durations: list[tuple[str, float]] = []  # not published yet
        self._notes: deque[tuple[str, float, Mapping[str, int]]] = deque()  # not added up yet; needs no lock
        self._reported: dict[str, float] = {}  # reason → when its losses were last in the log
        self._unreported: Counts[str] = Counts()
        values = [str((labels or {}).get(label, "")) for label in LABELS]
        self._counters = {
            name: _metric(prometheus_client.Counter, name, doc).labels(*values) for name, doc in COUNTERS.items()
        }
        self._gauges = {
            name: _metric(prometheus_client.Gauge, name, doc, multiprocess_mode="livemostrecent").labels(*values)
            for name, doc in GAUGES.items()
        }
        self._histograms = {
            name: _metric(prometheus_client.Histogram, name, doc, buckets=_BUCKETS).labels(*values)
            for name, doc in HISTOGRAMS.items()
        }

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have had it."""
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Count something; ``name`` is one of COUNTERS."""
        self._note("", 0.0, {name: count})

    def add_all(self, counts: Mapping[str, int]) -> None:
        """Count several things; the names are some of COUNTERS. They are counted a little later: change nothing."""
        self._note("", 0.0, counts)

    def observe(self, name: str, seconds: float, **counts: int) -> None:
        """A duration for one of HISTOGRAMS, and ``counts`` for some of COUNTERS that go with it.

        Prometheus has them with the next ``publish``.
        """
        self._note(name, seconds, counts)

    def _note(self, name: str, seconds: float, counts: Mapping[str, int]) -> None:
        # Every call comes by here, and figures are read once a second: so nothing is added up yet.
        self._notes.append((name, seconds, counts))
        if len(self._notes) >= _MANY_NOTES:
            with self._lock:
                self._add_up()

    def _add_up(self) -> None:
        """Lock held. Count what was noted so far."""
        while self._notes:
            name, seconds, counts = self._notes.popleft()
            for counter, count in counts.items():
                self._counts[counter] += count
            if name:
                self._sums[name] += seconds
                self._counts[f"{name}_count"] += 1
                self._durations.append((name, seconds))

    def loss(self, reason: str, chunks: int = 1) -> None:
        """Count rows that are lost; ``reason`` is one of DROPS. The log has it with the next report."""
        with self._lock:
            self._counts[f"drops_{reason}"] += chunks
            self._unreported[reason] += chunks

    def report_losses(self) -> None:
        """Say in the log what was lost: at most one line per reason in ten seconds."""
        now = time.monotonic()
        with self._lock:
            due = [
                reason
                for reason in self._unreported
                if now - self._reported.get(reason, -_LOG_INTERVAL_SEC) >= _LOG_INTERVAL_SEC
            ]
            self._reported.update(dict.fromkeys(due, now))
            losses = {reason: self._unreported.pop(reason) for reason in due}
        for reason, lost in losses.items():
            # Evicting the oldest file is what a full cache does; everything else needs attention.
            level = logging.INFO if reason == "cold_limit" else logging.WARNING
            logger.log(level, "hidden states of %d chunk(s) lost: %s (drops_%s)", lost, DROPS[reason], reason)

    def snapshot(self) -> dict[str, float]:
        """All counters, and the sums and counts of the histograms."""
        with self._lock:
            self._add_up()
            figures: dict[str, float] = {name: self._counts[name] for name in COUNTERS}
            for name in HISTOGRAMS:
                figures[f"{name}_sum"] = self._sums[name]
                figures[f"{name}_count"] = self._counts[f"{name}_count"]
        return figures

    def publish(self, gauges: Mapping[str, float]) -> None:
        """Bring Prometheus up to date; ``gauges`` has a value for each of GAUGES."""
        with self._lock:
            self._add_up()
            deltas = {name: self._counts[name] - self._published[name] for name in COUNTERS}
            self._published.update(deltas)
            durations, self._durations = self._durations, []
        for name, seconds in durations:
            self._histograms[name].observe(seconds)
        for name, delta in deltas.items():
            if delta:
                self._counters[name].inc(delta)
        for name, gauge in self._gauges.items():
            gauge.set(gauges[name])
