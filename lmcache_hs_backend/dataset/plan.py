"""From a few choices to the list of samples: what the extractor, the torch dataset and the live backend share.

Reads headers, token ids where needed, and a prepared dataset; no rows, except the few that tell which side
of the final norm they are on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lmcache_hs_backend.chunk import TOKEN_BYTES
from lmcache_hs_backend.dataset import chains
from lmcache_hs_backend.dataset.capture_info import POST_NORM, PRE_NORM, Capture, Layers, choose_layers
from lmcache_hs_backend.dataset.chains import Report, Sample
from lmcache_hs_backend.dataset.errors import DatasetError, NothingThere, RowRejected
from lmcache_hs_backend.dataset.final_norm import FinalNorm, layers_of
from lmcache_hs_backend.dataset.forest import UsableForest
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.dataset.masks import LossMask
from lmcache_hs_backend.dataset.prepared import MASK_COLUMNS, Prepared, ids_of, open_prepared
from lmcache_hs_backend.dataset.rows import RowReader
from lmcache_hs_backend.format.reader import ReadHeaders
from lmcache_hs_backend.format.url_files import UrlOptions

DATASET = "dataset:"


@dataclass(frozen=True)
class Choice:
    """What the user chose. ``sequences`` is ``leaves``, ``requests`` or ``dataset:PATH``."""

    cold_paths: tuple[str, ...]
    model: str | None = None
    chunk_size: int | None = None
    uses_last: bool = True  # whether the last layer is wanted
    layers: tuple[int, ...] | None = None
    last_layer: int | None = None
    sequences: str = "leaves"
    loss_mask: str | None = None  # None: what the source of the sequences says
    tokenizer: str | None = None
    min_tokens: int = 1
    max_tokens: int | None = None
    shard: tuple[int, int] = (1, 1)
    limit: int | None = None
    urls: UrlOptions | None = None  # how cold paths are read that are URLs
    later: bool = False  # a cold path may have nothing in it yet, or not be there, as long as another has chunks

    @property
    def mask_kind(self) -> str:
        """The kind of loss mask: what was chosen, else what the source of the sequences says."""
        if self.loss_mask is not None:
            return self.loss_mask
        return {"requests": "recorded", "leaves": "all"}.get(self.sequences, "dataset")


@dataclass
class Plan:
    """The samples of a dataset, and everything needed to read them. A context manager, or to be closed."""

    choice: Choice
    index: ChunkIndex
    layers: Layers
    samples: list[Sample]
    report: Report
    masks: LossMask
    prepared: Prepared | None
    unusable: dict[str, int]
    warnings: list[str]

    def close(self) -> None:
        """See ``ChunkIndex.close``."""
        self.index.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(sample.tokens for sample in self.samples)

    def mask(self, sample: Sample, ids: torch.Tensor) -> torch.Tensor:
        """The loss mask, int64 ``[S]``, of a sample with token ids ``ids`` ``[S]``.

        Raises RowRejected when the ids are not those of the dataset's row, its mask does not fit, or nothing is trained
        on.
        """
        given = None
        if self.prepared is not None and sample.row >= 0:
            row = self.prepared.row(sample.row)
            given = row.mask()
            if ids.tolist() != row.ids[: sample.tokens]:
                raise RowRejected("ids", f"the token ids are not those of row {sample.row} of {self.prepared.path}")
        return self._trained(sample, ids, given)

    def promise(self, sample: Sample) -> torch.Tensor:
        """What ``mask`` will give, without reading any rows. Raises RowRejected where that will."""
        if sample.last < 0:
            raise RowRejected("gone", "the chunk in which the sample ends was deleted")
        given = None
        ids = torch.zeros(sample.tokens, dtype=torch.int64)
        if self.prepared is not None and sample.row >= 0:
            row = self.prepared.row(sample.row)
            given = row.mask()
            ids = torch.tensor(row.ids[: sample.tokens], dtype=torch.int64)
        elif self.masks.needs_ids:
            ids = self.token_ids(sample)
        return self._trained(sample, ids, given)

    def token_ids(self, sample: Sample) -> torch.Tensor:
        """The token ids of a sample, int64 ``[S]``, from the headers of its chunks. Raises RowRejected."""
        parts = [self.index.ids(position) for position in self.index.chain(sample.last)]
        if None in parts:
            raise RowRejected("gone", "a chunk file of the sample was deleted, or is damaged")
        raw = bytearray(b"".join(part for part in parts if part is not None)[: sample.tokens * TOKEN_BYTES])
        return torch.frombuffer(raw, dtype=torch.int64)

    def _trained(self, sample: Sample, ids: torch.Tensor, given: Sequence[int] | None) -> torch.Tensor:
        mask = self.masks.make(sample, ids, given)
        if not bool(mask.any()):
            raise RowRejected("no_loss", "no token of the sample is trained on")
        return mask

    def stored_tokens(self) -> int:
        """Tokens of the chunks that the samples lie in, each chunk counted once."""
        seen: set[int] = set()
        for sample in self.samples:
            position = sample.last
            while position >= 0 and position not in seen:
                seen.add(position)
                position = self.index.chunks[position].parent
        return sum(self.index.chunks[position].num_tokens for position in seen)


def make_plan(
    choice: Choice, looked_at: Callable[[int], None] = lambda count: None, known: ReadHeaders | None = None
) -> Plan:
    """Find the samples. Raises DatasetError for anything that makes the choice impossible.

    Args:
        choice: What the user chose.
        looked_at: Called with 1 for every chunk, for a progress bar.
        known: Headers of objects from an earlier plan; see ``ChunkIndex``.
    """
    masks, prepared = _masks(choice)
    index = ChunkIndex(
        choice.cold_paths, choice.model, looked_at,
        chunk_size=choice.chunk_size, urls=choice.urls, known=known, later=choice.later,
    )  # fmt: skip
    try:
        return _find_samples(choice, masks, prepared, index)
    except BaseException:
        index.close()
        raise


def _find_samples(choice: Choice, masks: LossMask, prepared: Prepared | None, index: ChunkIndex) -> Plan:
    layers, warnings = _layers(choice, index)
    forest = UsableForest(index, layers.slots)
    report = Report(choice.sequences)
    if prepared is not None:
        samples = chains.matched(forest, ids_of(prepared), report)
    elif choice.sequences == "requests":
        samples = chains.requests(forest, report)
    else:
        samples = chains.leaves(forest, report)
    samples = chains.bounded(index, samples, choice.min_tokens, choice.max_tokens, report)
    samples = chains.share(samples, *choice.shard)[: choice.limit]
    report.bad_rows = chains.share(report.bad_rows, *choice.shard)
    if not samples:
        why = {**forest.unusable, **report.left_out}
        raise NothingThere(
            "no sequence is left to extract: "
            + ("; ".join(f"{count} × {text}" for text, count in why.items()) or f"{choice.sequences} gives none")
        )
    return Plan(choice, index, layers, samples, report, masks, prepared, dict(forest.unusable), warnings)


def planned(choice: Choice, index: ChunkIndex, samples: list[Sample]) -> Plan:
    """The plan that another process has made, from what it has filed. Raises DatasetError."""
    masks, prepared = _masks(choice)
    layers, warnings = _layers(choice, index)
    return Plan(choice, index, layers, samples, Report(choice.sequences), masks, prepared, {}, warnings)


def _layers(choice: Choice, index: ChunkIndex) -> tuple[Layers, list[str]]:
    stored = sorted({spec.layer_idx for c in index.chunks for file in c.files for spec in file.layout.layers})
    return choose_layers(
        Capture.of(index.captures), stored, choice.layers, choice.last_layer, uses_last=choice.uses_last
    )


def _masks(choice: Choice) -> tuple[LossMask, Prepared | None]:
    masks = LossMask(choice.mask_kind, choice.tokenizer)  # before the index, which takes long
    prepared = open_prepared(choice.sequences[len(DATASET) :]) if choice.sequences.startswith(DATASET) else None
    if prepared is None and choice.sequences not in ("leaves", "requests"):
        raise DatasetError(f"--sequences is {choice.sequences!r}, but must be leaves, requests or dataset:PATH")
    if choice.mask_kind in ("generated", "recorded") and choice.sequences != "requests":
        raise DatasetError(
            f"--loss-mask {choice.mask_kind} needs prompt lengths, which only the records of --sequences requests have"
        )
    if choice.mask_kind == "dataset" and prepared is None:
        raise DatasetError("--loss-mask dataset needs --sequences dataset:PATH")
    if choice.mask_kind == "dataset" and prepared is not None and not prepared.mask_columns:
        raise DatasetError(
            f"{prepared.path} has no column {' or '.join(MASK_COLUMNS)}; name the tokens to train on with --loss-mask"
        )
    return masks, prepared


@dataclass(frozen=True)
class NormPlan:
    """What is done about the final norm.

    ``stored_normed``: the side of it that the stored rows are on; ``normed``: that the last layer ends up on.
    """

    reader: RowReader
    normed: bool
    stored_normed: bool


def plan_norm(
    plan: Plan,
    wants_normed: bool | None,
    model_dir: str | None,
    norm_kind: str | None = None,
    *,
    stored_normed: bool | None = None,
) -> NormPlan:
    """How to give the last layer on the side of the final norm that is wanted (None: either, it is flagged).

    ``stored_normed``: the side that the stored rows are on, where it has been found out already.
    Adds to the plan's warnings what had to be taken on trust. Raises DatasetError when it cannot be done.
    """
    plain = RowReader(plan.index, plan.layers)
    if plan.layers.last is None:
        if model_dir is not None:
            raise DatasetError(f"--final-norm {model_dir}: this format stores no last layer to norm or check")
        return NormPlan(plain, False, False)
    norm = None if model_dir is None else FinalNorm.load(model_dir, norm_kind)
    hidden = plain.hidden_size()
    if norm is not None and norm.hidden_size != hidden:
        raise DatasetError(
            f"--final-norm {model_dir} is of a model with hidden size {norm.hidden_size}; the rows have {hidden}"
        )
    captured, own = plan.layers.capture.num_layers, None if model_dir is None else layers_of(model_dir)
    if captured is not None and own is not None and captured != own:
        raise DatasetError(
            f"--final-norm {model_dir} is of a model with {own} layers; the rows were captured from one with {captured}"
        )
    said = plan.layers.capture.last_layer
    if stored_normed is not None:
        pass
    elif said:
        stored_normed = said == POST_NORM
    elif norm is not None:
        stored_normed = _judge(plain, plan.samples, norm)
        side = "after" if stored_normed else "before"
        plan.warnings.append(
            f"whether the last layer is {PRE_NORM} was not captured; its rows show it {side} the final norm"
        )
    else:
        stored_normed = wants_normed is not False
        side = "after" if stored_normed else "before"
        plan.warnings.append(
            f"whether the last layer is {PRE_NORM} was not captured; it is taken to be {side} the final norm "
            f"(--final-norm MODEL_DIR would tell)"
        )
    if stored_normed and wants_normed is False:
        raise DatasetError("this format stores the last layer before the final norm, but it was captured after it")
    if wants_normed and not stored_normed and norm is None:
        raise DatasetError(
            "this format stores the last layer after the final norm, but it was captured before it; "
            "name the model with --final-norm MODEL_DIR"
        )
    apply = norm if norm is not None and not stored_normed and wants_normed is not False else None
    reader = RowReader(plan.index, plan.layers, apply=apply, check=norm, stored_normed=stored_normed)
    return NormPlan(reader, stored_normed or apply is not None, stored_normed)


def _judge(reader: RowReader, samples: Sequence[Sample], norm: FinalNorm) -> bool:
    for sample in samples[:100]:
        try:
            return norm.looks_normed(reader.read(sample, stacked=False).last)
        except RowRejected:  # counted when the sample's turn comes
            continue
    return False
