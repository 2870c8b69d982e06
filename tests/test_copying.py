"""I/O threads copy alone, and nobody else's torch threads are touched."""

from __future__ import annotations

import threading

import pytest
import torch

from lmcache_hs_backend.tiers.serial import copy_alone, work_alone


def on_a_thread(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]


def test_a_thread_that_works_alone_forms_no_team_and_no_other_thread_notices():
    before = torch.get_num_threads()

    def alone() -> int:
        work_alone()
        return torch.get_num_threads()

    assert on_a_thread(alone) == 1
    assert torch.get_num_threads() == before
    assert on_a_thread(torch.get_num_threads) == before, "a thread that comes later starts as if nothing had been"


@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 4096), (256, 1000), (3, 40_000)])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "where no runtime is found"])
def test_rows_are_copied_whole_and_converted(shape, source_dtype, target_dtype, alone):
    source = torch.randn(shape).to(source_dtype)
    target = torch.full(shape, float("nan"), dtype=target_dtype)

    def copy() -> bool:
        if alone:
            work_alone()
        copy_alone(target, source)
        return True

    assert on_a_thread(copy)
    assert torch.equal(target, source.to(target_dtype))
