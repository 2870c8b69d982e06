"""What every subject gets: how much to measure, where to put data, and which peers there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.folders import folder
from benchmarks.sizes import Size
from benchmarks.vllm_files import VllmFiles


@dataclass(frozen=True)
class Context:
    size: Size
    directory: str | None  # where data goes; None: the system's directory for temporary files
    vllm_python: str | None  # an interpreter with vLLM
    real_time: bool = False  # what is timed on an idle machine is scheduled before everything else

    @contextlib.contextmanager
    def folder(self) -> Iterator[str]:
        with folder(self.directory) as path:
            yield path

    @contextlib.contextmanager
    def vllm_files(self, block_bytes: int, blocks: int) -> Iterator[VllmFiles | None]:
        """vLLM's file tier, or None where vLLM is not installed."""
        if self.vllm_python is None:
            yield None
            return
        with self.folder() as path, VllmFiles(self.vllm_python, path, block_bytes, blocks) as files:
            yield files


NO_VLLM = "vLLM's file tier is left out: no interpreter with vLLM was named (--vllm-python)."
