"""speculators' hidden states straight from the chunks: a backend named ``hs_tiered``, no files in between.

Importing this module registers the backend, which must happen before the speculators command line is
imported; ``lmcache-hs-train`` sees to that. The rows of the prepared dataset under ``--data-path`` are
looked for in the cold paths by their token ids, and assembled when the trainer asks for them.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from hs_connectors import FileTransfer, HiddenStatesBackend, HiddenStatesTransfer

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected
from lmcache_hs_backend.dataset.plan import DATASET, Choice, make_plan, plan_norm

logger = logging.getLogger(__name__)

NAME = "hs_tiered"


class TieredTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Samples of a prepared dataset by row number. Picklable, for DataLoader workers that are spawned."""

    def __init__(self, choice: Choice, final_norm: str | None = None) -> None:
        """Find the rows of the dataset in the chunks. Raises DatasetError.

        ``final_norm``, a model directory, is checked against: rows that are already normed are refused.
        """
        plan = make_plan(choice)
        self._reader = plan_norm(plan, False, final_norm).reader
        for warning in plan.warnings:
            logger.warning("%s", warning)
        lengths = {row: tokens for row, tokens, _ in plan.report.coverage}
        # A row that is covered in part only would not have the token ids of the dataset: it counts as missing.
        self._samples: dict[int, Sample] = {s.row: s for s in plan.samples if s.tokens == lengths[s.row]}
        covered, partly, missing = plan.report.covered()
        logger.info("hidden states of %d rows are there, of %d in part, of %d not", covered, partly, missing)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """``hidden_states`` bf16 ``[S, n_aux + 1, H]`` and ``token_ids`` int64 ``[S]``; None where missing."""
        sample = self._samples.get(file_idx)
        if sample is None:
            return None
        try:
            rows = self._reader.read(sample, stacked=True)
        except RowRejected as rejected:
            logger.warning("row %d: %s: %s", file_idx, rejected.reason, rejected)
            return None
        assert rows.stacked is not None
        return {"hidden_states": rows.stacked, "token_ids": rows.ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """What a serving vLLM has just written to a file for one request (``emit: both``)."""
        result: dict[str, torch.Tensor] | None = FileTransfer(Path()).get_generated(hs_transfer_params)
        return result

    def delete(self, handle: str) -> None:
        """Remove such a file."""
        Path(handle).unlink()


@HiddenStatesBackend.register(NAME)
class TieredBackend(HiddenStatesBackend):  # type: ignore[misc]
    """The backend's options, as speculators shows them. It passes on neither lists nor repeated options."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add the options of a training run."""
        parser.add_argument("--hs-cold-path", type=str, default=None, help=f"cold paths, separated by {os.pathsep!r}")
        parser.add_argument("--hs-model", type=str, default=None, help="which rows, where there are several models")
        parser.add_argument(
            "--hs-layers", type=str, default=None, help="storage slots of the auxiliary layers: 2,15,27"
        )
        parser.add_argument("--hs-last-layer", type=int, default=None, help="storage slot of the last layer")
        parser.add_argument("--hs-final-norm", type=str, default=None, help="model directory to check the rows against")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add the options of a server that captures."""
        parser.add_argument("--hs-cold-path", type=str, default=None, help="directory of the cold tier")
        parser.add_argument("--hs-files", type=str, default="/tmp/hidden_states", help="folder of per-request files")

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> TieredTransfer:
        """Raises SystemExit, with one line, when the cold paths cannot serve the dataset."""
        if not args.hs_cold_path:
            raise SystemExit("--hidden-states-backend hs_tiered needs --hs-cold-path DIR")
        try:
            layers = None if args.hs_layers is None else tuple(int(slot) for slot in args.hs_layers.split(",") if slot)
        except ValueError:
            raise SystemExit(f"--hs-layers is {args.hs_layers!r}, but must be slots such as 2,15,27") from None
        choice = Choice(
            cold_paths=tuple(args.hs_cold_path.split(os.pathsep)),
            model=args.hs_model,
            layers=layers,
            last_layer=args.hs_last_layer,
            sequences=f"{DATASET}{data_path}",
        )
        try:
            return TieredTransfer(choice, args.hs_final_norm)
        except DatasetError as error:
            raise SystemExit(str(error)) from None

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """vLLM's ``--kv-transfer-config``: rows into the tiers, and a file for the trainer that asked."""
        extra = {"emit": "both", "shared_storage_path": args.hs_files}
        if args.hs_cold_path:
            extra["cold_path"] = args.hs_cold_path
        return {
            "kv_connector": "HSTieredConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "lmcache_hs_backend.integrations.vllm.connector",
            "kv_connector_extra_config": extra,
        }


# -- without an accelerator ------------------------------------------------------------------------------


def use_cpu() -> bool:
    """Let speculators' trainer run where there is no accelerator, for trials and tests; whether that was needed.

    Its trainer (0.9.0, ``train/trainer.py``) has three places that take an accelerator for granted: the model and
    the batches go to device number ``local_rank``, every phase of a logged step is timed with
    ``torch.accelerator.synchronize``, and a checkpoint is loaded to ``cuda:0``. Those are replaced, nothing else.
    """
    if torch.accelerator.is_available():
        return False
    from speculators.train import checkpointer, cli, trainer

    class CpuTrainer(trainer.Trainer):  # type: ignore[misc]
        def setup_trainer(self) -> None:
            self.local_rank, self.device_type = torch.device("cpu"), "cpu"
            super().setup_trainer()

    class CpuStepTimer(trainer._StepTimer):  # type: ignore[misc]
        def mark(self, name: str) -> None:
            self.mark_value(name, time.perf_counter())

        def now(self) -> float | None:
            return time.perf_counter() if self.enabled else None

    cli.Trainer = CpuTrainer
    trainer._StepTimer = CpuStepTimer
    checkpointer.get_current_device = lambda: "cpu"
    return True
