"""Ten million chunks on disk fit a server's RAM."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.figures import tell
from tests.support.inspecting import ROOT

pytest.importorskip("lmcache")


@pytest.mark.parametrize("kind", ["recovered", "stored"])
def test_a_chunk_that_is_on_disk_takes_less_than_600_bytes_of_ram(kind: str) -> None:
    command = [sys.executable, "-m", "benchmarks.index_memory", "50000", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(kind)]
    nbytes = float(line.split()[1])
    tell(f"RAM of a chunk on disk, {kind}: {nbytes:.0f} bytes")
    assert 100 < nbytes < 600
