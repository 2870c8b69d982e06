"""A store that is closed from a signal handler, in any call, twice, or at the interpreter's end returns in its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import with_tiers

#: Forks a process for each delay.
SERVERS = """
import os, signal, sys, threading, time
from pathlib import Path
from lmcache_hs_backend.tiered import TieredStore
from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES, Prompt, rows, settings, tokens

path, how, again = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "twice"

def serve(delay):
    store = TieredStore(settings(path / str(delay), close_timeout_sec=1), 32 * LAYER_BYTES, IDENT)
    prompts = [Prompt(tokens(8, seed)) for seed in range(20)]
    x = rows(8 * CHUNK)
    signals = 0
    busy = threading.Event()

    def handler(*_):
        nonlocal signals
        signals += 1
        started = time.monotonic()
        store.close()
        took = time.monotonic() - started
        while again and signals < 2:  # a close that was quicker than the second signal
            time.sleep(0.001)
        # Not print: the second signal may come within it, and then Python refuses the second one.
        os.write(1, f"closed in {took:.2f}\\n".encode())
        if how == "exit":
            os._exit(0)
        raise SystemExit(0)

    def kill():
        busy.wait()
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGTERM)
        if again:
            while not signals:
                time.sleep(0.001)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handler)
    threading.Thread(target=kill, daemon=True).start()
    while True:
        for p in prompts:
            store.store(p.refs, p.bytes, {0: x})
            store.retrieve(p.refs, [0])
            busy.set()

for delay in sys.argv[4:]:
    child = os.fork()
    if not child:
        serve(float(delay))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"ended with {status}\\n".encode())
"""

DELAYS = ("0.2", "0.23", "0.27", "0.31", "0.36", "0.41")


@pytest.mark.timing
@pytest.mark.parametrize("again", ["once", "twice"])
@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_signal_handler_that_closes_a_busy_store_ends_in_its_time(tmp_path: Path, how: str, again: str) -> None:
    done = with_tiers().run(SERVERS, tmp_path, how, again, *DELAYS, timeout=30 * len(DELAYS))
    assert done.returncode == 0, done.stderr
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ends == ["ended with 0"] * len(DELAYS), done.stdout + done.stderr
    *servers, rest = done.stdout.split("ended with 0\n")
    assert not rest
    for server in servers:
        times = [float(line.rpartition(" ")[2]) for line in server.splitlines()]
        assert times, done.stdout
        assert max(times) < 4, "close_timeout_sec is 1"
