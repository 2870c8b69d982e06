"""What the other ranks of a node have in the place of a store when only the first one keeps rows (``ranks: first``).

They hold no pool, write nothing and take no lock. Of what the first rank has written they read the chunk files, and
nothing of what is still in its RAM alone: that is a miss. Each file is checked as every file is, and rows are given out
only where this rank's own KV is present. Files are never changed in place, so no agreement with the first rank is
needed: a file that it deletes meanwhile is read to its end, or is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from lmcache_hs_backend.chunk import AskPresence, ChunkRef, LayerSpec, Presence, chunk_name
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.chunk_file import FileLayer, read, read_header
from lmcache_hs_backend.format.header import BadChunk, Header
from lmcache_hs_backend.format.layout import SUBDIRECTORY, chunk_path, subdirectories
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.metrics import GAUGES, Metrics
from lmcache_hs_backend.tiers.flows.bell import Latch
from lmcache_hs_backend.tiers.flows.core import ask_presence
from lmcache_hs_backend.tiers.flows.store_chunks import Stored
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

logger = logging.getLogger(__name__)

_PUBLISH_SEC = 1.0

#: Layers of one chunk, as they were read.
_Rows = dict[LayerSpec, bytearray]


class _Job:
    """Something to be done on the reading thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.result: Any = None
        self.over = Latch()
        self.given_up = False  # the call does not wait for it any more


class FirstRankFiles:
    """The chunk files of another process, with those methods of ``TieredStore`` that LMCache's integration uses.

    Thread-safe. Files are read on one thread of its own, so that a disk that hangs costs a call ``read_timeout_sec``,
    and the next ones nothing until that read has returned.
    """

    def __init__(
        self,
        config: TieredConfig,
        ident: NamespaceId,
        *,
        ask: AskPresence,
        labels: Mapping[str, object] | None = None,
        files: FileLayer | None = None,
    ) -> None:
        """Touches no file.

        Args:
            config: The settings.
            ident: The namespace of the first rank.
            ask: As for ``TieredStore``.
            labels: Likewise.
            files: The system calls on chunk files; tests replace it.
        """
        self.config = config
        self.ident = ident
        self.metrics = Metrics(labels)
        self.directory = os.path.join(config.cold_path, ident.directory)
        self.closed = False
        self._ask = ask
        self._files = files or FileLayer()
        self._work: SimpleQueue[_Job | None] = SimpleQueue()
        self._reader: threading.Thread | None = None
        self._started_at = 0.0  # of the read that is under way; 0: none is
        self._published_at = 0.0

    # -- rows ------------------------------------------------------------------------------------------------

    def store_checked(
        self, refs: Sequence[ChunkRef], ids: bytes, rows: Mapping[int, torch.Tensor], row_offset: int = 0
    ) -> Stored:
        """Keep nothing: the first rank has the same rows.

        0 chunks newly hold a layer, and all of the call's range count as held: a caller has nothing to store again.
        """
        return Stored(0, 0 if self.closed else sum(ref.start >= row_offset for ref in refs))

    def retrieve(
        self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int], dtype: torch.dtype | None = torch.float32
    ) -> dict[int, torch.Tensor]:
        """As ``TieredStore.retrieve``, from files alone. Every reason to end early is counted."""
        if self.closed or not layer_idxs:
            return {}
        began = time.monotonic()
        present, miss = self._present(refs)
        chunks: list[_Rows] = []
        if present:
            answer = self._in_time(lambda: self._read(refs[:present], layer_idxs))
            if answer is None:
                miss = "timeout"
            else:
                chunks, file_miss = answer
                miss = file_miss or miss
        self.metrics.add_all({"hits_cold": len(chunks), **({f"misses_{miss}": 1} if miss else {})})
        self.metrics.observe("retrieve_seconds", time.monotonic() - began)
        self._publish()
        return _joined(chunks, dtype)

    def covered(self, names: Iterable[bytes], layer_idxs: Sequence[int]) -> int:
        """How many chunks, from the first on, have a file with every layer. Reads their headers."""
        listed = list(names)

        def count() -> int:
            for number, name in enumerate(listed):
                header = self._header(name)
                if header is None or not all(header.layout.spec(idx) for idx in layer_idxs):
                    return number
            return len(listed)

        return 0 if self.closed else self._in_time(count) or 0

    def _present(self, refs: Sequence[ChunkRef]) -> tuple[int, str | None]:
        """How many chunks may be given out, as to this rank's KV, and why the next one may not."""
        answers = ask_presence(self._ask, self.metrics, [ref.kv_key for ref in refs], False)
        for number, answer in enumerate(answers):
            if answer is not Presence.PRESENT:
                return number, "kv_absent" if answer is Presence.GONE else "kv_unknown"
        return len(refs), None

    def _publish(self) -> None:
        now = time.monotonic()
        if now - self._published_at > _PUBLISH_SEC:
            self._published_at = now
            self.metrics.publish(self._gauges())

    # -- files, on the reading thread --------------------------------------------------------------------------

    def _in_time(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns on the reading thread; None when it is not done in time, or one before it hangs."""
        if not self._is_moving():
            return None
        job = _Job(work)
        try:
            self._queue().put(job)
        except RuntimeError as error:
            logger.debug("no thread to read with: %s", error)
            return None
        job.over.wait(self.config.read_timeout_sec)
        job.given_up = True
        return job.result

    def _is_moving(self) -> bool:
        """Whether the read that is under way, if any, may still end in time."""
        began = self._started_at
        return not began or time.monotonic() - began < self.config.read_timeout_sec

    def _queue(self) -> SimpleQueue[_Job | None]:
        """Where the reading thread takes its work from; a forked child begins with a new one. Raises RuntimeError."""
        reader = self._reader
        if reader is None or not reader.is_alive():
            self._started_at = 0.0
            work: SimpleQueue[_Job | None] = SimpleQueue()
            reader = threading.Thread(target=self._read_loop, args=(work,), name="hs-first-rank", daemon=True)
            reader.start()
            self._reader, self._work = reader, work
            return work  # should two calls do this at once, one's thread serves that call alone
        return self._work

    def _read_loop(self, work: SimpleQueue[_Job | None]) -> None:
        while not self.closed and (job := work.get()) is not None:
            if job.given_up:
                continue
            self._started_at = time.monotonic()
            try:
                job.result = job.work()
            except Exception:
                self.metrics.add("errors_internal")
                logger.exception("reading what the first rank keeps failed")
            finally:
                self._started_at = 0.0
                job.over.set()

    def _read(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int]) -> tuple[list[_Rows], str | None]:
        """The chunks from the first on, and why the next one is not there."""
        chunks: list[_Rows] = []
        for ref in refs:
            try:
                header = self._header(ref.name)
                if header is None:
                    return chunks, "absent"
                if header.meta.prefix != ref.prefix or header.meta.num_tokens != ref.num_tokens:
                    return chunks, "collision"
                specs = [header.layout.spec(layer_idx) for layer_idx in layer_idxs]
                wanted = [spec for spec in specs if spec is not None]
                if len(wanted) < len(specs):
                    return chunks, "layer"
                if chunks and list(chunks[0]) != wanted:
                    return chunks, "shape"
                rows = {spec: bytearray(spec.nbytes(ref.num_tokens)) for spec in wanted}
                read(
                    self._files, self._path(ref.name), ref.name, ref.prefix, header.layout,
                    {spec.layer_idx: memoryview(view) for spec, view in rows.items()},
                    direct=False, verify=self.config.verify_reads,
                )  # fmt: skip
            except FileNotFoundError:
                return chunks, "absent"
            except BadChunk as bad:
                logger.warning("chunk file %s is not used (%s): %s", self._path(ref.name), bad.reason, bad)
                return chunks, "bad_file"
            except OSError as error:
                self.metrics.add("errors_read")
                logger.debug("chunk %s cannot be read: %s", ref.name.hex(), error)
                return chunks, "offline"
            chunks.append(rows)
        return chunks, None

    def _header(self, name: bytes) -> Header | None:
        with contextlib.suppress(FileNotFoundError):
            header = read_header(self._files, self._path(name))
            return header if chunk_name(header.meta.key) == name else None
        return None

    def _path(self, name: bytes) -> str:
        """Of a chunk's file. The first rank's directory is a subdirectory where another process holds the namespace."""
        path = chunk_path(self.directory, name)
        if not os.path.lexists(path):
            for below in subdirectories(self.directory):
                if SUBDIRECTORY.fullmatch(os.path.basename(below)) and os.path.lexists(chunk_path(below, name)):
                    return chunk_path(below, name)
        return path

    # -- what there is nothing to do for -----------------------------------------------------------------------

    readable = True

    def pin(self) -> bool:
        """There is no pool."""
        return False

    def prefetch(self, refs: Sequence[ChunkRef], layer_idxs: Sequence[int] | None = None) -> None:
        """There is no pool to promote to."""

    def has(self, name: bytes, layer_idx: int) -> tuple[bool, bool]:
        """Neither tier of this rank holds anything."""
        return False, False

    def add_layer(self, name: bytes, layer_idx: int, rows: torch.Tensor, kv_key: object) -> bool:
        """The chunk is not here."""
        return False

    def read_layer(self, name: bytes, layer_idx: int, kv_key: object, *, tiers: tuple[bool, bool]) -> None:
        """The chunk is not here."""

    def drop(self, names: Iterable[bytes], *, durable: bool = True) -> int:
        """Nothing was here; the first rank drops its own."""
        return 0

    def kv_gone(self, names: Iterable[bytes]) -> int:
        """Likewise."""
        return 0

    def clear(self) -> int:
        """Likewise."""
        return 0

    def flush(self, timeout: float) -> int:
        """Nothing is dirty."""
        return 0

    def check(self) -> list[str]:
        """There is no state that could be wrong."""
        return []

    def wait_recovered(self, timeout: float) -> bool:
        """There is nothing to recover."""
        return True

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def _gauges(self) -> dict[str, float]:
        return {**dict.fromkeys(GAUGES, 0.0), "cold_online": int(self._is_moving())}

    def stats(self) -> dict[str, float | str | bool]:
        """All figures by name, as ``TieredStore.stats`` has them. All that this rank holds is 0."""
        state = "online" if self._is_moving() else "offline"
        now: dict[str, float | str | bool] = {**self._gauges(), "cold_state": state, "pinned": False}
        return {**now, "write_bytes_per_sec": 0, **self.metrics.snapshot()}

    def close(self) -> None:
        """End the reading thread, after the read that it is in. Does not wait for it."""
        if not self.closed:
            self.closed = True
            self.metrics.publish(dict.fromkeys(GAUGES, 0))
            self._work.put(None)


def _joined(chunks: Sequence[_Rows], dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    """``layer_idx`` to the rows of all chunks."""
    layers: dict[int, list[torch.Tensor]] = {}
    for chunk in chunks:
        for spec, data in chunk.items():
            rows = torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).view(-1, spec.hidden_dim)
            layers.setdefault(spec.layer_idx, []).append(rows)
    return {layer_idx: torch.cat(rows).to(dtype or rows[0].dtype) for layer_idx, rows in layers.items()}
