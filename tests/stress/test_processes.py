"""Several processes on one cold path, some of them on one namespace, with a reader beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lmcache_hs_backend.format.reader import ColdTierReader, NotAColdPath
from tests.support.amounts import amount
from tests.support.figures import tell
from tests.support.inspecting import inspect_json

pytestmark = pytest.mark.slow

SECONDS = amount("HS_STRESS_SEC", 8, 30) / 2

WORKER = r"""
import json, random, sys, time
from collections import Counter
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from tests.support.prompts import *
number, model = {number}, {model!r}
ident = IDENT.__class__(**{{**IDENT.__dict__, "model": model}})
choose = random.Random(number)
limit = 40 * (LAYER_BYTES + 8192) / 1024**3
operations, drops = 0, Counter()
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    with opened({cold_path!r}, chunks=6, max_cold_size=limit, write_back_sec=0, ident=ident) as store:
        pause = time.monotonic() + 1.5
        while time.monotonic() < min(until, pause):
            p = Prompt([choose.randrange(3) * 1000 + n for _ in range(choose.randint(1, 5)) for n in range(CHUNK)])
            if choose.random() < 0.5:
                store.store(p.refs, p.bytes, {{0: honest_rows(p.ids, number)}})
            for rows in store.retrieve(p.refs, [0]).values():
                assert torch.equal(rows, honest_rows(p.ids, number)[: len(rows)].float()), "a wrong row"
            operations += 1
        figures = store.stats()
        assert figures["quarantined_chunks"] == 0
        assert figures["errors_internal"] == 0
        drops.update({{name[6:]: int(n) for name, n in figures.items() if name.startswith("drops_") and n}})
print(json.dumps([operations, drops]))
"""


def test_processes_share_a_cold_path_with_a_reader_beside_them(tmp_path: Path) -> None:
    # Two processes of one model write equal rows, and swap directories when they restart.
    jobs = [(0, "org/a"), (0, "org/a"), (1, "org/b")]
    processes = []
    for number, model in jobs:
        code = WORKER.format(path=sys.path, number=number, model=model, seconds=SECONDS, cold_path=str(tmp_path))
        processes.append(
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    looked = seen = programs = 0
    while any(process.poll() is None for process in processes):
        try:
            chunks = list(ColdTierReader(str(tmp_path)).chunks())
        except NotAColdPath:
            continue
        looked += 1
        seen += len(chunks)
        damaged = [info.problem for info in chunks if info.header is None and info.problem != "vanished"]
        assert not damaged, "a reader never sees half a file"
        if looked % 20 == 1:
            programs += 1
            found = inspect_json("verify", tmp_path, "--fix", "--ignore", "orphan")
            assert found["counts"] == {}, "nor does the program, and it sets nothing aside"
    operations, drops = 0, Counter[str]()
    for process in processes:
        out, error = process.communicate()
        assert process.returncode == 0, error
        done, lost = json.loads(out)
        operations += done
        drops.update(lost)
    assert seen
    assert programs
    tell(
        f"operations under stress in {len(jobs)} processes: {operations}, wrong rows: 0, drops: {dict(drops)}; "
        f"reader: {seen} chunks in {looked} passes, and lmcache-hs-inspect verify --fix {programs} times"
    )
