"""``lmcache-hs-train`` where there is no accelerator, for trials and checks: ``python on_cpu.py OPTIONS…``.

speculators 0.9.0 takes an accelerator for granted in three places (``train/trainer.py``, ``utils/util.py``): the model
and the batches go to device number ``local_rank``, every phase of a logged step is timed with
``torch.accelerator.synchronize``, and a checkpoint is loaded to ``cuda:0``. Those are replaced, nothing else.
"""

from __future__ import annotations

import sys
import time

import torch
from speculators.train import checkpointer, cli, trainer

import lmcache_hs_backend.integrations.speculators  # noqa: F401 - registers the backend before their command line
from lmcache_hs_backend.cli.train import main


class CpuTrainer(trainer.Trainer):
    def setup_trainer(self) -> None:
        self.local_rank, self.device_type = torch.device("cpu"), "cpu"
        super().setup_trainer()


class CpuStepTimer(trainer._StepTimer):
    def mark(self, name: str) -> None:
        self.mark_value(name, time.perf_counter())

    def now(self) -> float | None:
        return time.perf_counter() if self.enabled else None


if __name__ == "__main__":
    if not torch.accelerator.is_available():
        print("on_cpu.py: there is no accelerator; training on the CPU, which is for trials only", file=sys.stderr)
        cli.Trainer = CpuTrainer
        trainer._StepTimer = CpuStepTimer
        checkpointer.get_current_device = lambda: "cpu"
    sys.exit(main())
