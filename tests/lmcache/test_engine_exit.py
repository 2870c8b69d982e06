"""A whole process: it ends by itself, in time, and the next one finds what it has written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import CHUNK, chunk_files

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from tests.support.engines import CHUNK, Engine, GatedFiles, make_config, our_threads, rows_of, tokens_of

cold_path, what = sys.argv[1:]
tokens = tokens_of(4)
engine = Engine(make_config(cold_path, settings={"close_timeout_sec": 1}))
if what == "read":
    engine.settled()
    engine.store_kv(tokens)
    print("served", engine.served(tokens))
else:
    engine.store_both(tokens, rows_of(len(tokens)))
    if what == "hang":
        engine.use_files(GatedFiles("pwritev"))
engine.close()
print("threads", our_threads())
"""


def process(cold_path: Path, what: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cold_path), what],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_a_process_ends_by_itself_and_the_next_one_is_served(cold_path):
    first = process(cold_path, "write")
    assert (first.returncode, first.stdout) == (0, "threads []\n"), first.stderr
    assert "Traceback" not in first.stderr
    assert len(chunk_files(cold_path)) == 4
    second = process(cold_path, "read")
    assert (second.returncode, second.stdout) == (0, f"served {4 * CHUNK}\nthreads []\n"), second.stderr
    assert "Traceback" not in second.stderr


def test_a_process_whose_disk_hangs_for_ever_ends_by_itself(cold_path):
    ended = process(cold_path, "hang")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "4 chunk(s) lost: not yet on disk" in ended.stderr
    assert not chunk_files(cold_path)
