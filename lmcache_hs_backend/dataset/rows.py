"""The rows of one sample, read from its chunks and checked: nothing unchecked leaves this module.

What is checked is what no trainer checks: every chunk's checksums, rows = tokens, one hidden size and one
dtype per layer, finite values, token ids that have the prefix digest the rows were stored under, and the
side of the final norm that the last layer is on. A sample that fails is a ``RowRejected``.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
import xxhash

from lmcache_hs_backend.chunk import TOKEN_BYTES, LayerSpec
from lmcache_hs_backend.dataset.capture_info import Layers
from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import RowRejected, Unreachable
from lmcache_hs_backend.dataset.final_norm import FinalNorm
from lmcache_hs_backend.dataset.index import ChunkFile, ChunkIndex, IndexedChunk
from lmcache_hs_backend.format.chunk_file import announce, read
from lmcache_hs_backend.format.header import BadChunk, FileLayout, Header
from lmcache_hs_backend.format.url_files import is_url
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

_IDLE_BYTES = 512 << 20
#: Chunks of a sample that are asked for before they are read.
_AHEAD = 8

#: How many rows of a sample tell which side of the norm they are on: one may look normed by chance, most do not.
_NORM_ROWS = 4096
_NORM_LEAST = 8


class Rows(NamedTuple):
    """What a trainer gets of one sample: S tokens, n auxiliary layers, hidden size H.

    ``ids`` int64 ``[S]``; ``aux`` ``[S, n, H]`` and ``last`` ``[S, H]`` of the dtype asked for; ``last`` is ``[S, 0]``
    where it was not asked for. With ``stacked`` ``[S, n + 1, H]``, the two are views of it.
    """

    ids: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    stacked: torch.Tensor | None


class RowReader:
    """Reads samples of an index. Thread-safe, picklable.

    ``apply`` is what becomes of the last layer: None: it stays as it is; a FinalNorm: it is applied.
    ``check`` is the norm to check against, and ``stored_normed`` the side on which the stored rows should be.
    """

    def __init__(
        self,
        index: ChunkIndex,
        layers: Layers,
        *,
        dtype: torch.dtype = torch.bfloat16,
        apply: FinalNorm | None = None,
        check: FinalNorm | None = None,
        stored_normed: bool = False,
    ) -> None:
        self._index = index
        self._layers = layers
        self._dtype = dtype
        self._apply = apply
        self._check = check
        self._stored_normed = stored_normed
        self._read_once: Collection[int] = ()
        self._pool = BufferPool(_IDLE_BYTES)

    def reads_once(self, chunks: Collection[int]) -> None:
        """Read these chunks past the page cache, where the disk can do that: they are not read again soon."""
        self._read_once = chunks

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_pool"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._pool = BufferPool(_IDLE_BYTES)

    def hidden_size(self) -> int:
        """That of the first chunk; every row must have it. Picked up before anything is read."""
        for chunk in self._index.chunks:
            for file in chunk.files:
                spec = file.layout.spec(self._layers.slots[-1])
                if spec is not None:
                    return spec.hidden_dim
        raise RowRejected("layer", f"layer {self._layers.slots[-1]} is in no chunk")

    def read(self, sample: Sample, *, stacked: bool) -> Rows:
        """The rows of a sample. Raises RowRejected."""
        hidden = self.hidden_size()
        count, width = sample.tokens, len(self._layers.aux)
        both = self._empty(count, len(self._layers.slots), hidden) if stacked else None
        aux = self._empty(count, width, hidden) if both is None else both[:, :width]
        if self._layers.last is None:
            last = torch.empty(count, 0, dtype=self._dtype)
        else:
            last = self._empty(count, 1, hidden)[:, 0] if both is None else both[:, width]
        ids = torch.empty(count, dtype=torch.int64)
        digest = xxhash.xxh3_128()
        dtypes: dict[int, str] = {}
        normed = judged = 0
        chain = self._index.chain(sample.last)
        for position in chain[:_AHEAD]:
            self._announce(position)
        for at, position in enumerate(chain):
            for later in chain[at + _AHEAD : at + _AHEAD + 1]:
                self._announce(later)
            chunk = self._index.chunks[position]
            take = min(chunk.num_tokens, count - chunk.start)
            span = slice(chunk.start, chunk.start + take)
            token_ids = None
            for slot, spec, rows, header in self._layers_of(chunk, position in self._read_once):
                where = f"layer {slot}, tokens {chunk.start} to {chunk.end}"
                if token_ids is None:
                    token_ids = header.token_ids
                    digest.update(token_ids)
                    if digest.digest() != chunk.prefix or len(token_ids) != chunk.num_tokens * TOKEN_BYTES:
                        raise RowRejected("ids", f"{where}: the token ids so far are not those the rows belong to")
                    ids[span] = torch.frombuffer(bytearray(token_ids[: take * TOKEN_BYTES]), dtype=torch.int64)
                if spec.hidden_dim != hidden:
                    raise RowRejected("shape", f"{where}: hidden size {spec.hidden_dim} instead of {hidden}")
                if dtypes.setdefault(slot, spec.dtype) != spec.dtype:
                    raise RowRejected("dtype", f"{where}: {spec.dtype} after {dtypes[slot]}")
                rows = rows[:take]
                if slot == self._layers.last:
                    if self._check is not None and judged < _NORM_ROWS:
                        normed += self._check.count_normed(rows)
                        judged += take
                    last[span] = self._converted(rows if self._apply is None else self._apply(rows), chunk.start, where)
                else:
                    aux[span, self._layers.aux.index(slot)] = self._converted(rows, chunk.start, where)
            if token_ids is None or (position == sample.last) != (chunk.end >= count):
                raise RowRejected(
                    "shape", f"{count} tokens do not end in the chunk of tokens {chunk.start} to {chunk.end}"
                )
        if judged >= _NORM_LEAST and (2 * normed > judged) != self._stored_normed:
            raise RowRejected(
                "norm",
                f"layer {self._layers.last}: {normed} of {judged} rows are after the final norm of the model, but the "
                f"layer was captured {'after' if self._stored_normed else 'before'} it",
            )
        return Rows(ids, aux, last, both)

    def _announce(self, position: int) -> None:
        """Where a read is a request, begin it: several chunks of a sample come side by side."""
        for file in self._index.chunks[position].files[:1]:
            with contextlib.suppress(OSError):  # the read itself says why
                again = position not in self._read_once
                announce(self._index.files, file.path, file.layout, self._layers.slots, again=again)

    def _empty(self, count: int, layers: int, hidden: int) -> torch.Tensor:
        """Recycled memory for results: fresh pages cost more than what is done with them."""
        if not layers:
            return torch.empty(count, 0, hidden, dtype=self._dtype)
        buffer = self._pool.get(count * layers * hidden * self._dtype.itemsize)
        return buffer.rows(count, layers * hidden, self._dtype).view(count, layers, hidden)

    def _converted(self, rows: torch.Tensor, start: int, where: str) -> torch.Tensor:
        """Rows of one layer in the dtype of the dataset, and finite in it. ``start``: the first row's token."""
        rows = rows.to(self._dtype)
        low, high = torch.aminmax(rows)  # the fastest that sees NaN and both infinities
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad = int((~torch.isfinite(rows)).any(-1).nonzero()[0])
            raise RowRejected("non_finite", f"{where}: NaN or infinity at token {start + bad}")
        return rows

    def _layers_of(self, chunk: IndexedChunk, once: bool) -> Iterator[tuple[int, LayerSpec, torch.Tensor, Header]]:
        """Each layer asked for, with its rows, from whichever file of the chunk has it and can be read."""
        todo = list(self._layers.slots)
        trouble: RowRejected | None = None
        for file in chunk.files:
            layout = file.layout
            for attempt in range(2):
                specs = [spec for spec in layout.layers if spec.layer_idx in todo]
                if not specs:
                    break
                buffers = {spec.layer_idx: self._pool.get(spec.nbytes(layout.num_tokens)) for spec in specs}
                into = {layer_idx: buffer.bytes() for layer_idx, buffer in buffers.items()}
                try:
                    header = self._read(file, chunk.prefix, layout, into, once)
                except FileNotFoundError:
                    trouble = RowRejected("gone", f"{file.path} was deleted")
                    break
                except BadChunk as bad:
                    trouble = RowRejected("bad_file", f"{file.path}: {bad.reason}: {bad}")
                    now = self._index.header(file) if attempt == 0 else None
                    if now is None or now.layout == layout:
                        break
                    layout = now.layout  # a running engine has added a layer to it meanwhile
                except OSError as error:
                    detail = f"{file.path}: {error.strerror}"
                    trouble = Unreachable(detail) if is_url(file.path) else RowRejected("unreadable", detail)
                    break
                else:
                    for spec in specs:
                        todo.remove(spec.layer_idx)
                        rows = buffers[spec.layer_idx].rows(
                            layout.num_tokens, spec.hidden_dim, TORCH_DTYPES[spec.dtype]
                        )
                        yield spec.layer_idx, spec, rows, header
                    break
        if todo:
            raise trouble or RowRejected(
                "layer", f"layer {todo[0]} is not in the chunk of tokens {chunk.start} to {chunk.end}"
            )

    def _read(
        self, file: ChunkFile, prefix: bytes, layout: FileLayout, into: Mapping[int, memoryview], once: bool
    ) -> Header:
        """Raises BadChunk or OSError; FileNotFoundError when it is neither where it was nor in the archive."""
        try:
            return self._read_at(file.path, file.name, prefix, layout, into, once)
        except FileNotFoundError:
            return self._read_at(file.archived_path, file.name, prefix, layout, into, once)

    def _read_at(
        self, path: str, name: bytes, prefix: bytes, layout: FileLayout, into: Mapping[int, memoryview], once: bool
    ) -> Header:
        if once:
            try:
                return read(self._index.files, path, name, prefix, layout, into, direct=True, verify=True)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the disk has larger blocks, or no O_DIRECT at all
                    raise
        return read(self._index.files, path, name, prefix, layout, into, direct=False, verify=True)
