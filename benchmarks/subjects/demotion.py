"""Sustained demotion, RAM to disk, beside raw O_DIRECT writes and beside others that write the same rows.

All chunks are dirty and everything has to go to disk, as files that carry a checked header and are renamed when
complete. No ``fsync``: files are checked when they are read. The peers that write through the page cache are charged
for the ``fdatasync`` that brings their bytes to the disk.
"""

from __future__ import annotations

import os

from xxhash import xxh3_64_hexdigest

from benchmarks import disk
from benchmarks.context import NO_VLLM, Context
from benchmarks.disk import RawDisk
from benchmarks.figures import Result, times_table
from benchmarks.measuring import Step, fastest, interleaved, quotients
from benchmarks.peers import peers_of
from benchmarks.workload import Stores, expect, new_prompt, random_rows

TITLE = "Sustained demotion"


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    chunks = size.demoted_chunks
    tokens = chunks * size.chunk
    rows = random_rows(tokens, size.hidden)
    nbytes = rows.numel() * rows.element_size()
    pool = chunks * size.chunk_bytes * 9 // 8 + (1 << 20)
    with (
        context.folder() as path,
        Stores(os.path.join(path, "cold"), size.chunk, pool) as stores,
        Stores(
            os.path.join(path, "small"), size.chunk, max(1, chunks // 8) * size.chunk_bytes, store_wait_ms=60_000
        ) as small,
        context.vllm_files(size.chunk_bytes, chunks) as vllm,
    ):
        direct = disk.takes_direct(path)
        # As large as our files are: their first 4096-byte page is the header.
        raw = RawDisk(size.depths, size.chunk_bytes + 4096, chunks, direct=direct)
        raw_paths = [os.path.join(path, f"raw-{number}") for number in range(chunks)]
        backends, plain = peers_of(path, rows, size.chunk)
        ids = new_prompt(tokens)

        def dirty() -> None:
            stores.delete_all()
            stored = stores.ours.store_hidden_states(ids, rows)
            assert stored == chunks

        def stream() -> None:
            """A prompt eight times as large as RAM: seven eighths are written while the call waits."""
            stored = small.ours.store_hidden_states(ids, rows)
            assert stored == chunks, f"{stored} of {chunks} chunks were kept: {small.ours.stats()}"
            small.write_all()

        depths = {f"raw O_DIRECT write, {depth} at a time": depth for depth in size.depths}
        steps = {
            name: Step(lambda d=depth: raw.write(raw_paths, d), lambda: disk.remove(raw_paths))
            for name, depth in depths.items()
        }
        checked = {f"raw write, xxh3, rename, {depth} at a time": depth for depth in size.depths[-2:]}
        for name, depth in checked.items():
            steps[name] = Step(
                lambda d=depth: raw.write_and(raw_paths, d, lambda n: xxh3_64_hexdigest(raw.rows_read(n))),
                lambda: disk.remove(raw_paths),
            )
        steps["demotion"] = Step(stores.write_all, dirty)
        steps["store through a pool of an eighth"] = Step(stream, small.delete_all)
        for name, backend in backends.items():

            def put(backend=backend, sync="odirect" not in name) -> None:
                backend.put()
                if sync:
                    disk.sync(backend.paths)

            steps[name if "odirect" in name else f"{name} + fdatasync"] = Step(put, backend.delete)

        def save() -> None:
            plain.save()
            disk.sync(plain.paths)

        steps["save_file + fdatasync"] = Step(save, plain.delete)
        theirs = {f"vLLM's file tier, {n} threads": n for n in (4, 16)} if vllm is not None else {}
        if vllm is not None:
            steps |= {name: Step(lambda n=n: vllm.store(n), own_clock=True) for name, n in theirs.items()}
        else:
            result.notes.append(NO_VLLM)

        times = interleaved(steps, size.demote_rounds, warmups=1)
        for one in (stores, small):
            one.leave_ram()
            expect(one.ours.retrieve_hidden_states(ids), rows, "what was demoted")
        for backend in backends.values():
            backend.close()
        raw.close()

    result.tables.append(
        times_table(f"{chunks} chunks of {size.chunk_bytes / 2**20:g} MiB, no sync of ours", times, nbytes)
    )
    best = times[fastest(times, list(depths))]
    ours = times["demotion"]
    result.figure("demotion.vs_raw", "demotion, share of the raw write", quotients(best, ours), at_least=0.9)
    bound = times[fastest(times, list(checked))]
    result.figure(
        "demotion.limit", "… the limit: raw write, xxh3 and rename, share of the raw write", quotients(best, bound)
    )
    result.figure("demotion.vs_limit", "… demotion, share of that limit", quotients(bound, ours))
    if theirs:
        vllms = times[fastest(times, list(theirs))]
        result.figure("demotion.vs_vllm", "demotion, share of vLLM's file tier", quotients(vllms, ours), at_least=0.95)
        result.figure(
            "demotion.vllm_limit", "… the limit: raw write, xxh3 and rename, share of vLLM's file tier",
            quotients(vllms, bound),
        )  # fmt: skip
    for key, name in (
        ("disk_backend", "LocalDiskBackend + fdatasync"),
        ("disk_backend_direct", "LocalDiskBackend, use_odirect"),
        ("save_file", "save_file + fdatasync"),
    ):
        result.figure(f"demotion.vs_{key}", f"demotion, times {name}", quotients(times[name], ours))
    result.figure(
        "demotion.stream_vs_raw", "store through a pool of an eighth, share of the raw write",
        quotients(best, times["store through a pool of an eighth"]),
    )  # fmt: skip
    return result
