"""Ten million chunks on disk fit a server's RAM."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.figures import tell
from tests.support.inspecting import ROOT

pytest.importorskip("lmcache")


@pytest.mark.parametrize("kind", ["recovered", "stored"])
def test_a_chunk_that_is_on_disk_takes_less_than_600_bytes_of_ram(kind: str) -> None:
    command = [sys.executable, "-m", "benchmarks.index_memory", "50000", kind]
    env = os.environ | {"HS_STRICT": "0"}  # whose checks make tables of all chunks, beside what is measured
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(kind)]
    nbytes = float(line.split()[1])
    tell(f"RAM of a chunk on disk, {kind}: {nbytes:.0f} bytes")
    assert 100 < nbytes < 600
