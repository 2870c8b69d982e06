"""Others that put rows on disk: LMCache's LocalDiskBackend and safetensors' own files.

Each moves the rows of one prompt, chunk by chunk, in the way its users do. They take ``rows`` as they are, without
keys of a prefix, checks or limits of their own, so what they do is less than what the tiers do.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from safetensors.torch import load_file, save_file

from benchmarks import disk
from benchmarks.workload import ChunkedTokenDatabase, expect, make_config, make_metadata, new_prompt

GIB = 1 << 30


class DiskBackend:
    """LMCache's LocalDiskBackend over a CPU backend of its own; with ``direct``, LMCache's ``use_odirect``."""

    def __init__(self, directory: str, rows: torch.Tensor, chunk: int, *, direct: bool) -> None:
        self._rows = list(rows.split(chunk))
        nbytes = rows.numel() * rows.element_size()
        config = make_config(
            directory,
            chunk_size=chunk,
            local_disk=directory + "/",
            max_local_disk_size=64.0,
            max_local_cpu_size=2.5 * nbytes / GIB + 0.01,
            extra={"use_odirect": direct},
            storage_plugins=[],
        )
        metadata = make_metadata(chunk=chunk)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._cpu = LocalCPUBackend(config, metadata, "cpu")
        self._backend = LocalDiskBackend(config, self._loop, self._cpu, "cpu", None, metadata)
        database = ChunkedTokenDatabase(config, metadata)
        ids = new_prompt(len(rows))
        self._keys = [key for _, _, key in database.process_tokens(tokens=ids)]
        self._objects = []
        for part in self._rows:
            obj = self._cpu.allocate(part.shape, part.dtype, MemoryFormat.HS_TD)
            assert obj is not None
            obj.tensor.copy_(part)
            self._objects.append(obj)

    def put(self) -> None:
        """Write all chunks, and wait for them."""
        done = threading.Semaphore(0)
        self._backend.batched_submit_put_task(self._keys, self._objects, on_complete_callback=lambda _: done.release())
        for _ in self._keys:
            assert done.acquire(timeout=300)

    def get(self) -> None:
        """Read all chunks into memory of its pool, and give it back."""
        for obj in self._backend.batched_get_blocking(self._keys):
            assert obj is not None
            obj.ref_count_down()

    def check(self) -> None:
        for obj, part in zip(self._backend.batched_get_blocking(self._keys), self._rows, strict=True):
            assert obj is not None
            expect(obj.tensor, part, "LocalDiskBackend")
            obj.ref_count_down()

    def delete(self) -> None:
        for key in self._keys:
            self._backend.remove(key)

    @property
    def paths(self) -> list[str]:
        return [path for key in self._keys if os.path.exists(path := self._backend._key_to_path(key))]

    def close(self) -> None:
        for obj in self._objects:
            obj.ref_count_down()
        self._backend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class SafetensorsFiles:
    """One file per chunk by ``save_file``, read by ``load_file`` and copied into one warm tensor."""

    def __init__(self, directory: str, rows: torch.Tensor, chunk: int) -> None:
        self._rows = list(rows.split(chunk))
        self._chunk = chunk
        self._out = torch.zeros_like(rows)
        self.paths: Sequence[str] = [
            os.path.join(directory, f"{number}.safetensors") for number in range(len(self._rows))
        ]

    def save(self) -> None:
        for path, part in zip(self.paths, self._rows, strict=True):
            save_file({"layer.0": part}, path)

    def load(self) -> None:
        for number, path in enumerate(self.paths):
            self._out[number * self._chunk : (number + 1) * self._chunk].copy_(load_file(path)["layer.0"])

    def check(self) -> None:
        self.load()
        expect(self._out, torch.cat(self._rows), "load_file")

    def delete(self) -> None:
        disk.remove(self.paths)


def peers_of(directory: str, rows: torch.Tensor, chunk: int) -> tuple[dict[str, DiskBackend], SafetensorsFiles]:
    """LocalDiskBackend without and with ``use_odirect``, and safetensors, each in a directory of its own."""
    backends: dict[str, Any] = {}
    for name, direct in (("LocalDiskBackend", False), ("LocalDiskBackend, use_odirect", True)):
        path = os.path.join(directory, f"disk-backend-{direct}")
        os.mkdir(path)
        backends[name] = DiskBackend(path, rows, chunk, direct=direct)
    path = os.path.join(directory, "safetensors")
    os.mkdir(path)
    return backends, SafetensorsFiles(path, rows, chunk)
