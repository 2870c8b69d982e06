"""Loss masks: which tokens of a sample are trained on. One int64 0 or 1 for each token, beside its id.

A mask comes from nowhere (``all``), from a request record (``generated``), from the chat template's own
marks in the token ids (``chatml``, ``llama3``), or from the prepared dataset (``dataset``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from lmcache_hs_backend.dataset.chains import Sample
from lmcache_hs_backend.dataset.errors import DatasetError, RowRejected
from lmcache_hs_backend.dataset.prepared import needs_extra

#: How an assistant's turn begins, and how it ends: the first mark every tokenizer of the kind has, the others some. The
#: end mark is trained on, as the model must learn to stop; without one, the turn ends where the next one begins.
TEMPLATES = {
    "chatml": ("<|im_start|>assistant\n", ("<|im_end|>",)),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", ("<|eot_id|>", "<|eom_id|>")),
}
KINDS = ("all", "generated", "dataset", *TEMPLATES)


class LossMask:
    """Makes the mask of one sample after another. Picklable."""

    def __init__(self, kind: str, tokenizer: str | None = None) -> None:
        """``tokenizer``: a directory with tokenizer.json, or that file; needed for the templates.

        Raises DatasetError.
        """
        self.kind = kind
        if kind not in KINDS:
            raise DatasetError(f"--loss-mask is {kind!r}, but must be one of {', '.join(KINDS)}")
        self._begin: list[int] = []
        self._ends: frozenset[int] = frozenset()
        if kind in TEMPLATES:
            if tokenizer is None:
                raise DatasetError(f"--loss-mask {kind} finds the answers by their tokens; name --tokenizer DIR")
            self._begin, self._ends = _marks(kind, tokenizer)

    def make(self, sample: Sample, ids: torch.Tensor, given: Sequence[int] | None = None) -> torch.Tensor:
        """The mask of a sample with token ids ``ids`` ``[S]``; ``given`` is the prepared dataset's own.

        Raises RowRejected when that does not fit.
        """
        count = len(ids)
        if self.kind == "all":
            return torch.ones(count, dtype=torch.int64)
        if self.kind == "generated":
            mask = torch.zeros(count, dtype=torch.int64)
            mask[max(0, sample.prompt_tokens) :] = 1
            return mask
        if self.kind == "dataset":
            return _given(given, count)
        return self._answers(ids.tolist())

    def _answers(self, ids: list[int]) -> torch.Tensor:
        mask = torch.zeros(len(ids), dtype=torch.int64)
        at, width = 0, len(self._begin)
        while at <= len(ids) - width:
            if ids[at : at + width] != self._begin:
                at += 1
                continue
            begin = at = at + width
            while at < len(ids) and ids[at] not in self._ends and ids[at] != self._begin[0]:
                at += 1
            if at < len(ids) and ids[at] in self._ends:
                at += 1
            mask[begin:at] = 1
        return mask


def check_given(given: object, ids: Sequence[int]) -> None:
    """Raises RowRejected when what a prepared dataset has as a loss mask is none of these token ids."""
    if given is not None and not (isinstance(given, list | tuple) and len(given) == len(ids)):
        what = (
            f"a loss mask of {len(given)}" if isinstance(given, list | tuple) else f"a loss mask that is {given!r:.40}"
        )
        raise RowRejected("mask", f"{len(ids)} token ids, but {what}")


def _given(given: Sequence[int] | None, count: int) -> torch.Tensor:
    if given is None or len(given) < count:
        raise RowRejected("mask", f"{count} tokens, but a loss mask of {'none' if given is None else len(given)}")
    values = list(given)[:count]
    if not all(value in (0, 1) for value in values):
        raise RowRejected("mask", "the loss mask has a value other than 0 and 1")
    return torch.tensor([int(value) for value in values], dtype=torch.int64)


def _marks(kind: str, tokenizer: str) -> tuple[list[int], frozenset[int]]:
    """The token ids that begin an assistant's turn, and those that end it."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise needs_extra("tokenizers", "--tokenizer") from None
    path = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else tokenizer
    if not os.path.isfile(path):
        raise DatasetError(f"--tokenizer {tokenizer}: there is no tokenizer.json")
    loaded: Any = Tokenizer.from_file(path)
    begin, ends = TEMPLATES[kind]
    for mark in re.findall(r"<\|\w+\|>", begin + ends[0]):
        if loaded.token_to_id(mark) is None:
            raise DatasetError(
                f"--loss-mask {kind}: {mark} is no token of {tokenizer}, so its chat template is another one"
            )
    found = [loaded.token_to_id(end) for end in ends]
    return list(loaded.encode(begin, add_special_tokens=False).ids), frozenset(i for i in found if i is not None)


def spans(mask: torch.Tensor) -> list[list[int]]:
    """The runs of ones of a mask, as ``[begin, end)`` pairs."""
    edges = torch.diff(mask, prepend=mask.new_zeros(1), append=mask.new_zeros(1)).nonzero().flatten().tolist()
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def from_spans(pairs: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """The mask of ``count`` tokens that has these runs of ones."""
    mask = torch.zeros(count, dtype=torch.int64)
    for begin, end in pairs:
        mask[begin:end] = 1
    return mask
