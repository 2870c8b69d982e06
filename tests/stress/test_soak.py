"""Full churn for a while: memory, file descriptors and threads stay where they are.

``scripts/soak.sh`` runs it for ten minutes, the ordinary test run for some seconds.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.amounts import amount
from tests.support.figures import tell
from tests.support.prompts import CHUNK, LAYER_BYTES, Prompt, check_balance, honest_rows, opened
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SECONDS = amount("HS_SOAK_SEC", 10, 60)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_descriptors_and_threads_stay_flat(tmp_path: Path) -> None:
    choose = random.Random(5)
    limit = 200 * (LAYER_BYTES + 8192) / 1024**3
    with opened(tmp_path, chunks=16, max_cold_size=limit, write_back_sec=0.2) as store:
        started = time.monotonic()
        samples: list[tuple[int, int, int]] = []
        operations = 0
        while (elapsed := time.monotonic() - started) < SECONDS:
            base = choose.randrange(400) * 1000
            p = Prompt([base + n for n in range(CHUNK * choose.randint(1, 6))])
            if choose.random() < 0.6:
                store.store(p.refs, p.bytes, {0: honest_rows(p.ids)})
            for rows in store.retrieve(p.refs, [0]).values():
                assert torch.equal(rows, honest_rows(p.ids)[: len(rows)].float())
            if choose.random() < 0.05:
                store.drop(p.names[-1:])
            operations += 1
            if elapsed >= SECONDS * (0.2 + 0.08 * len(samples)):
                gc.collect()
                samples.append((resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()))
        store.flush(20)
        wait_until(lambda: not store.debug.busy())
        check_balance(store)
        figures = store.stats()
    memory = [sample[0] for sample in samples]
    descriptors = [sample[1] for sample in samples]
    threads = [sample[2] for sample in samples]
    assert max(memory[len(memory) // 2 :]) < memory[0] + (24 << 20), "memory grows"
    assert max(descriptors) <= min(descriptors) + 8, "file descriptors leak (an operation in flight holds one)"
    assert max(threads) == min(threads), "threads leak"
    assert figures["cold_bytes"] <= limit * 1024**3
    assert figures["errors_internal"] == 0
    tell(
        f"soak: {operations} operations in {SECONDS:.0f} s, wrong rows 0, memory {memory[0] >> 20} to "
        f"{memory[-1] >> 20} MiB, descriptors {min(descriptors)} to {max(descriptors)}, threads {threads[-1]}, "
        f"written {figures['written_chunks']:.0f}, hits cold {figures['hits_cold']:.0f}, "
        f"drops: { {name[6:]: int(n) for name, n in figures.items() if name.startswith('drops_') and n} }"
    )
