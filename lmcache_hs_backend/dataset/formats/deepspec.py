"""DeepSpec's target cache, version 2: raw bytes in large shards, an index of fixed records, a manifest.

For each sample, in a shard: ``input_ids`` int32, ``attention_mask`` and ``loss_mask`` uint8 ``[S]``,
``target_hidden_states`` bf16 ``[S, n_aux * H]``, ``target_last_hidden_states`` bf16 ``[S, H]``, the last layer
after the final norm. ``samples.idx`` holds one record ``<QIIQQQQQ`` per sample: its number, shard, length
and the five offsets. A shard grows under a temporary name, and is renamed when it is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected
from lmcache_hs_backend.dataset.formats.base import Encoded, Entry, Format, Job, bytes_of
from lmcache_hs_backend.dataset.rows import Rows

VERSION = 2
RECORD = struct.Struct("<QIIQQQQQ")
INDEX = "samples.idx"
MANIFEST = "manifest.json"


class _Shard:
    """The shard of a split that is being filled."""

    def __init__(self, number: int = 0, nbytes: int = 0) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = -1


class DeepSpec(Format):
    """For every algorithm of DeepSpec."""

    wants_normed = True
    in_shards = True
    max_shard_bytes = 64 << 30

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._layer_ids = job.layers.output_ids() or list(job.layers.aux)
        if self._layer_ids != sorted(self._layer_ids):
            raise DatasetError(f"--format deepspec wants ascending --layers, not {self._layer_ids}")
        self._shards: dict[str, _Shard] = {}

    def nbytes(self, tokens: int) -> int:
        """About how many bytes a sample of so many tokens takes."""
        return tokens * (len(self.job.layers.slots) * self.job.hidden_size * 2 + 6) + RECORD.size

    def encode(self, sample: Sample, rows: Rows, mask: torch.Tensor, temporary: str) -> Encoded:
        """The arrays of a sample, in the order of a shard. Raises RowRejected for an id that does not fit int32."""
        if bool((rows.ids != rows.ids.to(torch.int32)).any()):
            raise RowRejected("ids", "a token id does not fit int32, in which this format has them")
        tensors = (
            rows.ids.to(torch.int32),
            torch.ones(sample.tokens, dtype=torch.uint8),
            mask.to(torch.uint8),
            rows.aux.contiguous(),
            rows.last.contiguous(),
        )
        parts = tuple(bytes_of(tensor) for tensor in tensors)
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        return Encoded(sum(map(len, parts)), digest.hexdigest(), parts=parts, facts={})

    def publish(self, encoded: Encoded, split: str, number: int) -> str:
        """Append a sample to the shard of its split, after a full one to the next. Raises OSError."""
        shard = self._shards.setdefault(split, _Shard())
        if shard.nbytes and shard.nbytes + encoded.nbytes > self.max_shard_bytes:
            self._complete(split, shard)
            shard.number, shard.nbytes = shard.number + 1, 0
        if shard.fd < 0:
            os.makedirs(self._path(split), exist_ok=True)
            path = self._unfinished(split, shard.number)
            complete = os.path.join(self._path(split), _shard_name(shard.number))
            if not os.path.exists(path) and os.path.exists(complete):  # the last samples in it have to be done again
                os.replace(complete, path)
            shard.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(shard.fd, shard.nbytes)
        offset = shard.nbytes
        for part in encoded.parts:
            done = 0
            while done < len(part):
                done += os.pwrite(shard.fd, part[done:], offset + done)
            offset += len(part)
        encoded.facts["offset"] = shard.nbytes
        shard.nbytes = offset
        return os.path.join(self.folder(split), _shard_name(shard.number))

    def is_whole(self, entry: Entry) -> bool:
        """Whether the shard, finished or not, reaches to the end of the sample."""
        end = entry.facts["offset"] + entry.nbytes
        number = int(os.path.basename(entry.file)[len("shard-") : -len(".bin")])
        paths = (self._unfinished(entry.split, number), os.path.join(self.job.out, entry.file))
        return any(os.path.exists(path) and os.path.getsize(path) >= end for path in paths)

    def rewind(self, entries: Sequence[Entry]) -> None:
        """Go on in each split's shard after these samples."""
        for entry in entries:
            number = int(os.path.basename(entry.file)[len("shard-") : -len(".bin")])
            self._shards[entry.split] = _Shard(number, entry.facts["offset"] + entry.nbytes)

    def finish(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """Write the index, and with splits a manifest for each; otherwise return its fields."""
        for split, shard in self._shards.items():
            self._complete(split, shard)
        counts: dict[str, int] = {}
        temporary = os.path.join(self.job.state, INDEX + ".{}")
        with contextlib.ExitStack() as files:
            indexes = {split: files.enter_context(open(temporary.format(split), "wb")) for split in self._shards}
            for entry in entries:
                indexes[entry.split].write(self._record(counts.setdefault(entry.split, 0), entry))
                counts[entry.split] += 1
        fields: dict[str, Any] = {}
        for split, count in counts.items():
            os.replace(temporary.format(split), os.path.join(self._path(split), INDEX))
            fields = self._manifest(split, count)
            if self.job.split:
                path = os.path.join(self.job.state, MANIFEST)
                with open(path, "w", encoding="utf-8") as text:
                    json.dump(fields, text, indent=2)
                os.replace(path, os.path.join(self._path(split), MANIFEST))
        return {} if self.job.split else fields

    def close(self) -> None:
        """Close the shards that are open."""
        for shard in self._shards.values():
            if shard.fd >= 0:
                os.close(shard.fd)
                shard.fd = -1

    def _manifest(self, split: str, count: int) -> dict[str, Any]:
        last = self._shards[split].number
        return {
            "version": VERSION,
            "num_samples": count,
            "num_shards": last + 1,
            "target_layer_ids": self._layer_ids,
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": RECORD.size,
            "hidden_size": self.job.hidden_size,
            "shards": [{"shard_id": number, "file_name": _shard_name(number)} for number in range(last + 1)],
            "target_model_name_or_path": self.job.model,
        }

    def _record(self, number: int, entry: Entry) -> bytes:
        width = len(self.job.layers.aux) * self.job.hidden_size * 2
        sizes = (4 * entry.tokens, entry.tokens, entry.tokens, width * entry.tokens)
        offsets = [entry.facts["offset"]]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        shard = int(os.path.basename(entry.file)[len("shard-") : -len(".bin")])
        return RECORD.pack(number, shard, entry.tokens, *offsets)

    def _complete(self, split: str, shard: _Shard) -> None:
        """A shard gets its final name; it may have it already, from a run that was killed after that."""
        if shard.fd >= 0:
            os.close(shard.fd)
            shard.fd = -1
        unfinished = self._unfinished(split, shard.number)
        if os.path.exists(unfinished):
            fd = os.open(unfinished, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(fd, shard.nbytes)
            os.fsync(fd)
            os.close(fd)
            os.replace(unfinished, os.path.join(self._path(split), _shard_name(shard.number)))

    def _path(self, split: str) -> str:
        return os.path.join(self.job.out, self.folder(split))

    def _unfinished(self, split: str, number: int) -> str:
        return os.path.join(self.job.state, f"{split}-{_shard_name(number)}")


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"
