"""Directories for data, gone when whoever asked for them is done."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def folder(parent: str | None) -> Iterator[str]:
    """A fresh directory below ``parent``, or below the system's own for temporary files."""
    path = tempfile.mkdtemp(prefix="hs-bench-", dir=parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # a file that is still being written is no reason to fail
