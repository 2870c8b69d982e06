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

#: How an assistant's turn begins and ends. The end mark is trained on, as the model must learn to stop.
TEMPLATES = {
    "chatml": ("<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
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
        self._end = -1
        if kind in TEMPLATES:
            if tokenizer is None:
                raise DatasetError(f"--loss-mask {kind} finds the answers by their tokens; name --tokenizer DIR")
            self._begin, self._end = _marks(kind, tokenizer)

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
            begin = at + width
            try:
                at = ids.index(self._end, begin) + 1
            except ValueError:  # cut within the answer
                at = len(ids)
            mask[begin:at] = 1
        return mask


def _given(given: Sequence[int] | None, count: int) -> torch.Tensor:
    if given is None or len(given) < count:
        raise RowRejected("mask", f"{count} tokens, but a loss mask of {'none' if given is None else len(given)}")
    mask = torch.tensor(list(given)[:count], dtype=torch.int64)
    if count and not bool(((mask == 0) | (mask == 1)).all()):
        raise RowRejected("mask", "the loss mask has a value other than 0 and 1")
    return mask


def _marks(kind: str, tokenizer: str) -> tuple[list[int], int]:
    """The token ids that begin an assistant's turn, and the one that ends it."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise needs_extra("tokenizers", "--tokenizer") from None
    path = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else tokenizer
    if not os.path.isfile(path):
        raise DatasetError(f"--tokenizer {tokenizer}: there is no tokenizer.json")
    loaded: Any = Tokenizer.from_file(path)
    begin, end = TEMPLATES[kind]
    for mark in re.findall(r"<\|\w+\|>", begin + end):
        if loaded.token_to_id(mark) is None:
            raise DatasetError(
                f"--loss-mask {kind}: {mark} is no token of {tokenizer}, so its chat template is another one"
            )
    return list(loaded.encode(begin, add_special_tokens=False).ids), int(loaded.token_to_id(end))


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
