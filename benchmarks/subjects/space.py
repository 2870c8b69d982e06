"""Bytes that a row takes in RAM and on disk, beside upstream's and beside the rows alone."""

from __future__ import annotations

import os

from benchmarks.context import Context
from benchmarks.figures import Result, Table
from benchmarks.peers import peers_of
from benchmarks.workload import Stores, new_prompt, random_rows

TITLE = "Bytes per row"


def run(context: Context) -> Result:
    size = context.size
    result = Result(TITLE)
    tokens = size.chunks * size.chunk
    ids, rows = new_prompt(tokens), random_rows(tokens, size.hidden)
    pool = size.chunks * size.chunk_bytes * 5 // 4 + (1 << 20)
    with context.folder() as path, Stores(os.path.join(path, "cold"), size.chunk, pool, 2 * pool + (8 << 20)) as stores:
        stores.ours.store_hidden_states(ids, rows)
        stores.upstream.store_hidden_states(ids, rows)
        stores.write_all()
        hot = float(stores.ours.stats()["hot_bytes"])
        theirs = sum(obj.get_physical_size() for layers in stores.upstream._chunks.values() for obj in layers.values())
        on_disk = sum(os.path.getsize(file) for file in stores.files())
        wide = rows.float()
        backends, _ = peers_of(path, wide, size.chunk)
        backend = backends["LocalDiskBackend"]
        backend.put()
        theirs_on_disk = sum(os.path.getsize(file) for file in backend.paths)
        for peer in backends.values():
            peer.close()
    bare = size.chunks * size.chunk_bytes
    table = Table(
        f"bytes per row of {size.hidden} bfloat16 ({2 * size.hidden} bytes)", ["", "RAM", "disk"],
        [
            ["ours", f"{hot / tokens:.1f}", f"{on_disk / tokens:.1f}"],
            ["upstream; float32 in LocalDiskBackend", f"{theirs / tokens:.1f}", f"{theirs_on_disk / tokens:.1f}"],
        ],
    )  # fmt: skip
    result.tables.append(table)
    result.figure("space.ram", "RAM per row, over upstream's", [hot / theirs], at_most=0.5)
    result.figure("space.disk", "disk per row, over float32 rows", [on_disk / theirs_on_disk], at_most=0.505)
    share = (on_disk - bare) / on_disk
    two_mib = share * size.chunk_bytes / (2 << 20)
    result.figure("space.metadata", "metadata on disk at 2 MiB chunks", [100 * two_mib], unit="%", at_most=1.0)
    return result
