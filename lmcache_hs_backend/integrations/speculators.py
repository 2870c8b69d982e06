"""speculators' hidden states straight from the chunks: a backend named ``hs_tiered``, no files in between.

Importing this module registers the backend, which must happen before the speculators command line is
imported; ``lmcache-hs-train`` sees to that. The rows of the prepared dataset under ``--data-path`` are
looked for in the cold paths by their token ids, and assembled when the trainer asks for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
import xxhash
from hs_connectors import FileTransfer, HiddenStatesBackend, HiddenStatesTransfer

from lmcache_hs_backend.chunk import token_bytes
from lmcache_hs_backend.cli.arguments import shared_options
from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import DatasetError, NothingThere, RowRejected, Unreachable
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.dataset.news import FOLLOW_SEC, News
from lmcache_hs_backend.dataset.plan import DATASET, Choice, make_plan, plan_norm
from lmcache_hs_backend.dataset.prepared import open_prepared
from lmcache_hs_backend.dataset.rows import RowReader
from lmcache_hs_backend.format.reader import ReadHeaders
from lmcache_hs_backend.format.url_files import DEFAULT_CACHE_GB, url_options

logger = logging.getLogger(__name__)

NAME = "hs_tiered"


class TieredTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Samples of a prepared dataset by row number. Picklable, for DataLoader workers that are spawned.

    Rows that come while the trainer runs are found: a row that is not there is looked for again as soon as there is a
    request record of its tokens that is younger than the last look, or, in a shared tier, when a listing has shown
    another object since (see ``dataset.news``). So with ``--on-missing generate`` against a server with our connector,
    each row is generated once, whichever worker asks for it in the next epoch.
    """

    def __init__(
        self,
        choice: Choice,
        final_norm: str | None = None,
        *,
        may_be_empty: bool = False,
        follow_sec: float = FOLLOW_SEC,
    ) -> None:
        """Find the rows of the dataset in the chunks.

        Args:
            choice: Which rows of which cold paths; ``sequences`` names the dataset.
            final_norm: A model directory to check against: rows that are already normed are refused.
            may_be_empty: Whether the cold paths may have no row of the dataset, or not be there, as rows will come.
            follow_sec: Seconds between two listings of a shared tier for new rows, at least; 0: none is made.

        Raises:
            DatasetError: The dataset or the cold paths cannot be used.
        """
        self._choice = dataclasses.replace(choice, later=may_be_empty)
        self._final_norm = final_norm
        self._index: ChunkIndex | None = None
        self._reader: RowReader | None = None
        self._samples: dict[int, Sample] = {}
        self._news = News(choice.cold_paths, choice.urls, follow_sec)
        self._headers = ReadHeaders()
        self._rows = open_prepared(choice.sequences[len(DATASET) :])
        self.looks = 0  # how often the cold paths were looked through
        try:
            self._look()
        except NothingThere as error:
            if not may_be_empty:
                raise
            logger.info("%s; rows are looked for again when they come", error)

    def _look(self) -> None:
        """Look through the cold paths. Raises DatasetError, and what was known before is still known then."""
        self.looks += 1
        headers, whole = ReadHeaders(self._headers), False
        try:
            with self._news.look():
                plan = make_plan(self._choice, known=headers)
                try:
                    reader = plan_norm(plan, False, self._final_norm).reader
                except BaseException:
                    plan.close()
                    raise
            whole = True
        finally:
            headers.end(whole=whole)
            self._headers = headers
        self.close()  # what the last look has opened
        self._index, self._reader = plan.index, reader
        for warning in plan.warnings:
            logger.warning("%s", warning)
        lengths = {row: tokens for row, tokens, _ in plan.report.coverage}
        # A row that is covered in part only would not have the token ids of the dataset: it counts as missing.
        self._samples = {s.row: s for s in plan.samples if s.tokens == lengths[s.row]}
        covered, partly, missing = plan.report.covered()
        logger.info("hidden states of %d rows are there, of %d in part, of %d not", covered, partly, missing)

    def close(self) -> None:
        """Give up the threads and connections of URLs, without waiting. What is read after that starts new ones."""
        if self._index is not None:
            self._index.close()

    def _look_again(self, file_idx: int) -> Sample | None:
        """The sample of a row that was not there at the last look, if it may have come since and has."""
        if file_idx >= len(self._rows):
            return None
        try:
            ids = token_bytes(self._rows.row(file_idx)[0])
        except RowRejected:
            return None
        if not self._news.of(xxhash.xxh3_128_digest(ids)):
            return None
        try:
            self._look()
        except NothingThere:  # it was evicted again
            return None
        except DatasetError as error:  # a bucket that does not answer is no reason to end a training
            logger.warning("new rows could not be looked for: %s", error)
            return None
        return self._samples.get(file_idx)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """``hidden_states`` bf16 ``[S, n_aux + 1, H]`` and ``token_ids`` int64 ``[S]``; None where missing."""
        sample = self._samples.get(file_idx) or self._look_again(file_idx)
        if sample is None or self._reader is None:
            return None
        try:
            rows = self._reader.read(sample, stacked=True)
        except RowRejected as rejected:
            logger.warning("row %d: %s: %s", file_idx, rejected.reason, rejected)
            if isinstance(rejected, Unreachable):  # the next epoch may find the bucket again
                return None
            del self._samples[file_idx]  # generated again, it is found again
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
        parser.add_argument(
            "--hs-cold-path", type=str, default=None,
            help=f"cold paths, or URLs of shared tiers such as s3://bucket/hs, separated by {os.pathsep!r}",
        )  # fmt: skip
        parser.add_argument(
            "--hs-shared-options", type=str, default=None, help="options of URLs: a JSON table, or a file with one"
        )
        parser.add_argument(
            "--hs-follow-sec", type=float, default=FOLLOW_SEC,
            help="seconds between two listings of a URL, at least, by which rows are found that come while the trainer "
            f"runs (default: {FOLLOW_SEC:g}; 0: none)",
        )  # fmt: skip
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
        if not 0 <= args.hs_follow_sec < math.inf:
            raise SystemExit(f"--hs-follow-sec is {args.hs_follow_sec}, but must be a number of seconds, at least 0")
        try:
            options = shared_options(args.hs_shared_options) if args.hs_shared_options else None
        except argparse.ArgumentTypeError as error:
            raise SystemExit(f"--hs-shared-options {error}") from None
        choice = Choice(
            cold_paths=split_paths(args.hs_cold_path),
            urls=url_options(options, None, int(DEFAULT_CACHE_GB * 2**30)),
            model=args.hs_model,
            layers=layers,
            last_layer=args.hs_last_layer,
            sequences=f"{DATASET}{data_path}",
        )
        try:
            return TieredTransfer(
                choice, args.hs_final_norm, may_be_empty=_generates(args), follow_sec=args.hs_follow_sec
            )
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


def split_paths(text: str) -> tuple[str, ...]:
    """Paths and URLs that are separated as in ``PATH``; the colon of ``s3://`` separates nothing."""
    return tuple(re.split(rf"{os.pathsep}(?!//)", text))


def _generates(args: argparse.Namespace) -> bool:
    """Whether the trainer has a server make what is missing."""
    return getattr(args, "on_missing", None) == "generate"
