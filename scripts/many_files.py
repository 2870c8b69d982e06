"""A start over millions of real chunk files: when the first is served, when all are known, RAM, and the longest pause.

Usage: python scripts/many_files.py [COUNT] --dir DIR

Makes COUNT valid files (default 10,000,000) below DIR, 4 KiB of disk and an inode each, or takes those that a run
before has left there; empties the kernel's caches (as root), opens a store, asks for one chunk until it is served, and
waits until every header is known. A thread that only sleeps 1 ms at a time tells how long the interpreter was held. The
files stay.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import threading
import time

from benchmarks import disk
from benchmarks.subjects.opening import IDENT, bare_scan, make_files, serve_once
from lmcache_hs_backend.config import GIB, TieredConfig
from lmcache_hs_backend.tiered import TieredStore

_SERVED = 7919  # which of the files is asked for
_DONE = "complete"


def resident_bytes() -> int:
    """The anonymous memory of this process, without what is mapped from files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


class Pauses:
    """The longest time that a thread which wants the interpreter every millisecond did not get it."""

    def __init__(self) -> None:
        self.longest_sec = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(0.001):
            now = time.perf_counter()
            self.longest_sec = max(self.longest_sec, now - last - 0.001)
            last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10_000_000)
    parser.add_argument("--dir", required=True, help="where the files are, or will be")
    options = parser.parse_args()
    os.makedirs(options.dir, exist_ok=True)
    whole_disk = shutil.disk_usage(options.dir).total / GIB
    config = TieredConfig(cold_path=options.dir, max_cold_size=whole_disk, min_free_disk=0)
    store = TieredStore(config, 1 << 20, IDENT)
    directory = store.directory
    store.close()
    marker = os.path.join(options.dir, f"{_DONE}-{options.count}")
    if not os.path.exists(marker):
        started = time.perf_counter()
        for number, _ in enumerate(make_files(directory, options.count)):
            if number % 500_000 == 0:
                print(f"{number:,} files made, {time.perf_counter() - started:.0f} s", flush=True)
        open(marker, "w").close()
    [ref] = itertools.islice(make_files(directory, _SERVED + 1), _SERVED, None)
    emptied = disk.drop_caches()
    print(f"bare scan with stat: {bare_scan(directory):.1f} s, caches {'emptied' if emptied else 'warm'}", flush=True)
    disk.drop_caches()

    before = resident_bytes()
    pauses = Pauses()
    started = time.perf_counter()
    store = TieredStore(config, 1 << 20, IDENT)
    print(f"constructor: {1e3 * (time.perf_counter() - started):.1f} ms", flush=True)
    serve_once(store, ref)
    print(f"a chunk served after {time.perf_counter() - started:.2f} s", flush=True)
    while not store.wait_recovered(1):
        pass
    read = time.perf_counter() - started
    pauses.end()
    known = len(store)
    print(f"{known:,} headers known after {read:.1f} s; {(resident_bytes() - before) / known:.0f} bytes of RAM each")
    print(f"longest pause of another thread meanwhile: {1e3 * pauses.longest_sec:.1f} ms")
    store.close()


if __name__ == "__main__":
    main()
