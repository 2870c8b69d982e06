"""CPU time of all threads, and memory at the peak, per GB moved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from benchmarks import disk
from benchmarks.context import Context
from benchmarks.disk import RawDisk
from benchmarks.figures import Result, Table
from benchmarks.measuring import median
from benchmarks.peers import peers_of
from benchmarks.workload import Stores, expect, new_prompt, random_rows

TITLE = "CPU time and peak memory per GB"


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    tokens = size.chunks * size.chunk
    ids, rows = new_prompt(tokens), random_rows(tokens, size.hidden)
    nbytes = rows.numel() * 2
    same, wide = torch.zeros_like(rows), torch.zeros(tokens, size.hidden)
    pool = size.chunks * size.chunk_bytes * 5 // 4 + (1 << 20)
    with context.folder() as path, Stores(os.path.join(path, "cold"), size.chunk, pool, 2 * pool + (8 << 20)) as stores:
        ours, upstream = stores.ours, stores.upstream
        backends, plain = peers_of(path, rows, size.chunk)
        backend = backends["LocalDiskBackend, use_odirect"]
        raw = RawDisk((4,), size.chunk_bytes + 4096, size.chunks, direct=disk.takes_direct(path))
        raw_paths = [os.path.join(path, f"raw-{number}") for number in range(size.chunks)]

        def forget() -> None:
            for store in (stores.ours, stores.upstream):
                stores.forget(store, ids)

        def store_again() -> None:
            stores.delete_all()
            ours.store_hidden_states(ids, rows)

        def cold() -> None:
            stores.write_all()
            stores.leave_ram()

        steps: list[tuple[str, Callable[[], object], Callable[[], object] | None]] = [
            ("copy_", lambda: same.copy_(rows), None),
            ("store, upstream", lambda: upstream.store_hidden_states(ids, rows), forget),
            ("store", lambda: ours.store_hidden_states(ids, rows), stores.delete_all),
            ("copy_ to float32", lambda: wide.copy_(rows), None),
            ("retrieve, upstream", lambda: upstream.retrieve_hidden_states(ids), None),
            ("retrieve", lambda: ours.retrieve_hidden_states(ids), None),
            ("raw write, 4 at a time", lambda: raw.write(raw_paths, 4), lambda: disk.remove(raw_paths)),
            ("demotion", stores.write_all, store_again),
            ("LocalDiskBackend put, use_odirect", backend.put, backend.delete),
            ("save_file", plain.save, plain.delete),
            ("raw read, 4 at a time", lambda: raw.read(raw_paths, 4), None),
            ("retrieve cold", lambda: ours.retrieve_hidden_states(ids), cold),
            ("LocalDiskBackend get, use_odirect", backend.get, None),
            ("load_file + copy", plain.load, lambda: disk.leave_page_cache(plain.paths)),
        ]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in steps}
        for number in range(-1, max(2, size.rounds // 2)):
            for name, call, prepare in steps:
                if prepare is not None:
                    prepare()
                cost = _cost(call)
                if number >= 0:
                    found[name].append(cost)
        stores.leave_ram()
        expect(ours.retrieve_hidden_states(ids), rows, "cost")
        for peer in backends.values():
            peer.close()
        raw.close()
    table = Table(
        f"per GB of bfloat16 rows, {nbytes / 1e9:.3g} GB at a time (medians)",
        ["step", "CPU s per GB", "new resident MB at the peak, per GB"],
        [],
    )
    cpu = {}
    for name, costs in found.items():
        cpu[name] = [seconds * 1e9 / nbytes for seconds, _ in costs]
        peak = median([memory for _, memory in costs]) / nbytes * 1e3
        table.rows.append([name, f"{median(cpu[name]):.3f}", f"{peak:.0f}"])
    result.tables.append(table)
    for key, mine, other in (
        ("store", "store", "store, upstream"),
        ("retrieve", "retrieve", "retrieve, upstream"),
        ("demotion", "demotion", "LocalDiskBackend put, use_odirect"),
        ("cold", "retrieve cold", "LocalDiskBackend get, use_odirect"),
    ):
        ratio = median(cpu[mine]) / max(1e-9, median(cpu[other]))
        result.figure(f"cost.{key}", f"CPU time of {mine}, over {other}", [ratio])
    return result


def _cost(call: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of the whole process, and by how many bytes its resident memory rose at most."""
    _reset_peak()
    before, started = _status("VmRSS"), time.process_time()
    result = call()
    seconds = time.process_time() - started
    peak = _status("VmHWM") - before
    del result
    return seconds, float(max(0, peak))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
