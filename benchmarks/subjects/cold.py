"""Cold retrieve, nothing in any cache, beside the raw disk and beside others' files of the same rows.

One call reads all chunks of the prompt in parallel, checks them, converts them as they arrive and leaves them in RAM.
The raw read only moves the bytes, in as many files, into huge pages like ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from benchmarks import disk
from benchmarks.context import NO_VLLM, Context
from benchmarks.disk import RawDisk
from benchmarks.figures import Result, times_table
from benchmarks.measuring import Step, fastest, interleaved, median, quotients
from benchmarks.peers import peers_of
from benchmarks.workload import Stores, expect, huge_rows, new_prompt, random_rows
from lmcache_hs_backend.tiers.memory.copies import alone, copy_alone

TITLE = "Cold retrieve"

_VLLM_THREADS = (4, 16)
_BARE_HALF = "copy_ of that half, raw read, xxh3, copy_ of the other"


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    tokens = size.chunks * size.chunk
    ids, rows = new_prompt(tokens), random_rows(tokens, size.hidden)
    half = ids[: tokens // 2 // size.chunk * size.chunk]
    wide = torch.zeros(len(half), size.hidden)
    pool = size.chunks * size.chunk_bytes * 5 // 4 + (1 << 20)
    with (
        context.folder() as path,
        Stores(os.path.join(path, "cold"), size.chunk, pool) as stores,
        Stores(
            os.path.join(path, "small"), size.chunk, max(1, size.chunks // 4) * size.chunk_bytes, store_wait_ms=60_000
        ) as small,
        context.vllm_files(size.chunk_bytes, size.chunks) as vllm,
    ):
        for one in (stores, small):
            one.ours.store_hidden_states(ids, rows)
            one.write_all()
        files = stores.files()
        if not disk.takes_direct(path):
            result.notes.append("This filesystem takes no O_DIRECT; everything goes through the page cache.")
        raw = RawDisk(size.depths, os.path.getsize(files[0]), len(files), direct=disk.takes_direct(path))
        backends, plain = peers_of(path, rows, size.chunk)
        plain.save()
        for backend in backends.values():
            backend.put()

        def cold(one: Stores) -> Callable[[], None]:
            def prepare() -> None:
                one.leave_ram()
                disk.leave_page_cache(one.files())

            return prepare

        def half_hot() -> None:
            cold(stores)()
            stores.ours.retrieve_hidden_states(half)

        depths = {f"raw O_DIRECT read, {depth} at a time": depth for depth in size.depths}
        steps = {
            name: Step(lambda d=depth: raw.read(files, d), lambda: disk.leave_page_cache(files))
            for name, depth in depths.items()
        }

        def bare(targets: torch.Tensor) -> Callable[[int], None]:
            def use(number: int) -> None:
                raw.check_and_copy(number, [targets[number * size.chunk : (number + 1) * size.chunk]], rows.dtype)

            return use

        whole = {"float32": huge_rows(tokens, size.hidden, torch.float32), "native": huge_rows(*rows.shape, rows.dtype)}  # type: ignore[call-arg]
        limits = {
            f"raw read, xxh3, copy_ to {kind}, {depth} at a time": (kind, depth)
            for kind in whole
            for depth in size.depths[-2:]
        }
        for name, (kind, depth) in limits.items():

            def checked(kind=kind, depth=depth) -> None:
                with alone():
                    raw.read_and(files, depth, bare(whole[kind]))

            steps[name] = Step(checked, lambda: disk.leave_page_cache(files))
        steps["retrieve, float32"] = Step(lambda: stores.ours.retrieve_hidden_states(ids), cold(stores))
        steps["retrieve, native"] = Step(lambda: stores.ours.retrieve_layers(ids, [0], None), cold(stores))
        steps["retrieve through a pool of a quarter"] = Step(
            lambda: small.ours.retrieve_hidden_states(ids), cold(small)
        )
        steps["retrieve, half of it hot"] = Step(lambda: stores.ours.retrieve_hidden_states(ids), half_hot)
        steps["copy_ of that half to float32"] = Step(lambda: wide.copy_(rows[: len(half)]))

        def bare_half() -> None:
            """The limit of that: a copy of one half, while the files of the other are read."""
            first = len(half) // size.chunk
            use = bare(whole["float32"][len(half) :])
            with alone():
                raw.read_and(files[first:], size.depths[-2], use, lambda: copy_alone(wide, rows[: len(half)]))

        steps[_BARE_HALF] = Step(bare_half, lambda: disk.leave_page_cache(files))
        for name, backend in backends.items():
            steps[name] = Step(backend.get, lambda b=backend: disk.leave_page_cache(b.paths))
        steps["load_file + copy"] = Step(plain.load, lambda: disk.leave_page_cache(plain.paths))
        theirs = {f"vLLM's file tier, {n} threads": n for n in _VLLM_THREADS} if vllm is not None else {}
        if vllm is not None:
            vllm.store(4)
            steps |= {name: Step(lambda n=n: vllm.load(n), own_clock=True) for name, n in theirs.items()}
        else:
            result.notes.append(NO_VLLM)

        times = interleaved(steps, size.rounds)
        for one in (stores, small):
            cold(one)()
            expect(one.ours.retrieve_hidden_states(ids), rows, "cold")
        half_hot()
        expect(stores.ours.retrieve_layers(ids, [0], None)[0], rows, "cold, native")
        for peer in (*backends.values(), plain):
            peer.check()  # type: ignore[attr-defined]
        for backend in backends.values():
            backend.close()
        raw.close()

    nbytes = rows.numel() * rows.element_size()
    sizes = dict.fromkeys(times, nbytes)
    sizes["copy_ of that half to float32"] = wide.numel() * 4
    result.tables.append(times_table(f"{size.chunks} chunks of {size.chunk_bytes / 2**20:g} MiB", times, sizes))
    best = times[fastest(times, list(depths))]
    got, native = times["retrieve, float32"], times["retrieve, native"]
    result.figure("cold.retrieve_vs_raw", "retrieve cold, share of the raw read", quotients(best, got), at_least=0.9)
    bounds = {kind: times[fastest(times, [name for name, (k, _) in limits.items() if k == kind])] for kind in whole}
    for kind, ours in (("float32", got), ("native", native)):
        result.figure(
            f"cold.limit_{kind}", f"… the limit: raw read, xxh3 and copy_ to {kind}, share of the raw read",
            quotients(best, bounds[kind]),
        )  # fmt: skip
        result.figure(
            f"cold.{kind}_vs_limit", f"… retrieve cold, {kind}, share of that limit", quotients(bounds[kind], ours)
        )
    for key, name in (
        ("disk_backend", "LocalDiskBackend"),
        ("load_file", "load_file + copy"),
        ("disk_backend_direct", "LocalDiskBackend, use_odirect"),
    ):
        ratios = quotients(times[name], got)
        result.figure(f"cold.retrieve_vs_{key}", f"retrieve cold, times {name}", ratios)
        result.figure(f"cold.worst_vs_{key}", f"… in the worst round, times {name}", [min(ratios)], at_least=1.0)
    result.figure(
        "cold.worst_limit", "… the limit: raw read, xxh3 and copy_ in the worst round, times the same",
        [min(quotients(times["LocalDiskBackend, use_odirect"], bounds["float32"]))],
    )  # fmt: skip
    result.figure("cold.native_vs_raw", "retrieve cold, native, share of the raw read", quotients(best, native))
    if theirs:
        result.figure(
            "cold.native_vs_vllm", "retrieve cold, native, share of vLLM's file tier",
            quotients(times[fastest(times, list(theirs))], native), at_least=0.95,
        )  # fmt: skip
        result.figure(
            "cold.vllm_limit", "… the limit: raw read, xxh3 and copy_ to native, share of vLLM's file tier",
            quotients(times[fastest(times, list(theirs))], bounds["native"]),
        )  # fmt: skip
    result.figure(
        "cold.streaming_vs_raw", "retrieve cold through a pool of a quarter, share of the raw read",
        quotients(best, times["retrieve through a pool of a quarter"]),
    )  # fmt: skip
    limit = max(median(times["copy_ of that half to float32"]), median(best) / 2)
    for key, text, name, most in (
        ("mixed", "half hot, half cold", "retrieve, half of it hot", 1.3),
        ("mixed_limit", "… the limit: the same by a bare loop", _BARE_HALF, None),
    ):
        result.figure(
            f"cold.{key}", f"{text}: time over max(hot half at RAM speed, cold half at disk speed)",
            [seconds / limit for seconds in times[name]], at_most=most,
        )  # fmt: skip
    return result
