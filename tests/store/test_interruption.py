"""A store that is closed from a signal handler, in any call, twice, or at the interpreter's end returns in its time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, signal, sys, threading, time
from pathlib import Path
from lmcache_hs_backend.tiered import TieredStore
from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES, Prompt, rows, settings, tokens

store = TieredStore(settings(Path(sys.argv[1]), close_timeout_sec=1), 32 * LAYER_BYTES, IDENT)
prompts = [Prompt(tokens(8, seed)) for seed in range(20)]
x = rows(8 * CHUNK)

def handler(*_):
    started = time.monotonic()
    store.close()
    print(f"closed in {time.monotonic() - started:.2f}", flush=True)
    if HOW == "exit":
        os._exit(0)
    raise SystemExit(0)

HOW = sys.argv[2]
signal.signal(signal.SIGTERM, handler)
delay, again = float(sys.argv[3]), sys.argv[4] == "twice"

def kill():
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGTERM)
    if again:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=kill, daemon=True).start()
print("ready", flush=True)
while True:
    for p in prompts:
        store.store(p.refs, p.bytes, {0: x})
        store.retrieve(p.refs, [0])
"""


@pytest.mark.timing
@pytest.mark.parametrize("again", ["once", "twice"])
@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_signal_handler_that_closes_a_busy_store_ends_in_its_time(tmp_path: Path, how: str, again: str) -> None:
    for number, delay in enumerate((0.2, 0.23, 0.27, 0.31, 0.36, 0.41)):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path / str(number)), how, str(delay), again],
            cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        times = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("closed")]
        assert times, done.stdout
        assert max(times) < 4, "close_timeout_sec is 1"
