"""A writer killed at a random moment, again and again: whatever is found afterwards is whole.

One process imports everything once and forks a writer for each round, so that a hundred kills take a minute. The
writers use the tiers alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.amounts import amount
from tests.support.figures import tell
from tests.support.forked import with_tiers

KILLS = int(amount("HS_CRASHES", 20, 100))

ZYGOTE = r"""
import os, random, signal, sys, time
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from tests.support.prompts import *
from lmcache_hs_backend.format.chunk_file import read, FileLayer
from lmcache_hs_backend.format.reader import ColdTierReader
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from lmcache_hs_backend.format.layout import scan_chunks, is_temporary

cold_path, kills, fsync = {cold_path!r}, {kills}, {fsync}
LIMIT = 60 * (LAYER_BYTES + 8192)
random.seed(7)

def numbered(n):
    return Prompt([n * 100_000 + token for token in range(3 * CHUNK)])

def open_store():
    config = settings(cold_path, max_cold_size=LIMIT / 1024**3, write_back_sec=0, fsync=fsync, clean_fraction=0.5)
    return TieredStore(config, 12 * LAYER_BYTES, IDENT)

def write(first, flushed):
    store = open_store()
    assert store.wait_recovered(20)
    os.write(flushed, b"start\n")
    n = first
    while True:
        p = numbered(n)
        store.store(p.refs, p.bytes, {{idx: honest_rows(p.ids, idx) for idx in (0, 5)}})
        if n % 3 == 0 and store.flush(10) == 0:
            os.write(flushed, f"{{n}}\n".encode())
        n += 1

def check(flushed):
    # By a reader without any store: every file is whole, whatever the moment of the kill.
    pool = BufferPool(1 << 24)
    for info in ColdTierReader(cold_path).chunks():
        assert info.header is not None, info.problem
        layout = info.header.layout
        buffers = {{spec.layer_idx: pool.get(spec.nbytes(layout.num_tokens)) for spec in layout.layers}}
        read(FileLayer(), info.file.path, info.file.name, info.header.meta.prefix, layout,
             {{idx: buffer.bytes() for idx, buffer in buffers.items()}}, direct=False, verify=True)
    store = open_store()
    assert store.wait_recovered(20)
    figures = store.stats()
    assert figures["quarantined_chunks"] == 0 and figures["errors_internal"] == 0, figures
    assert figures["cold_bytes"] <= LIMIT
    served = 0
    for n in flushed:
        p = numbered(n)
        out = store.retrieve(p.refs, [0, 5])
        for idx, rows in out.items():
            assert torch.equal(rows, honest_rows(p.ids, idx)[: len(rows)].float()), "a wrong row"
        served += bool(out) and len(out[0]) == len(p)
    # The last flushed prompts are there (the limit holds twenty); earlier ones may have made room.
    for n in flushed[-3:]:
        p = numbered(n)
        assert store.covered(p.names, [0, 5]) == 3, f"prompt {{n}} was flushed and is not there"
    store.close()
    left = [f for f in os.scandir(store.directory) if is_temporary(f.name)]
    assert not left and not [f for f in scan_chunks(store.directory) if not f.name], "temporaries are left"
    return served

survived = served = first = 0
for kill in range(kills):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            write(first, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        assert pipe.read(6) == b"start\n"
        time.sleep(random.random() * 0.25)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        flushed = [int(line) for line in pipe.read().split()]
    checker = os.fork()
    if checker == 0:
        code = 1
        try:
            served = check(flushed)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(checker, 0)
    assert status == 0, f"after kill {{kill}}"
    survived += 1
    first += 1000
print(f"crashes survived: {{survived}}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("fsync", [False, True])
def test_a_directory_is_whole_after_every_kill(tmp_path: Path, fsync: bool) -> None:
    kills = KILLS if not fsync else KILLS // 4
    code = ZYGOTE.format(path=sys.path, cold_path=str(tmp_path), kills=kills, fsync=fsync)
    done = with_tiers().run(code, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"crashes survived: {kills}" in done.stdout
    tell(f"{done.stdout.strip()}{', with fsync' if fsync else ''}")
