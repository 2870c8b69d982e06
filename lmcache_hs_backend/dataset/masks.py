"""Loss masks: which tokens of a sample are trained on. One int64 0 or 1 for each token, beside its id.

A mask comes from a request record (``recorded``: the spans that its writer took from the chat template, or else what
follows the prompt; ``generated``: always what follows the prompt), from the prepared dataset (``dataset``), from the
chat template's own marks in the token ids (``chatml``, ``llama3``), or from nowhere (``all``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

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
KINDS = ("all", "recorded", "generated", "dataset", *TEMPLATES)


class LossMask:
    """Makes the mask of one sample after another. Picklable and thread-safe."""

    def __init__(self, kind: str, tokenizer: str | None = None) -> None:
        """``tokenizer``: a directory with tokenizer.json, or that file; needed for the templates.

        Raises DatasetError.
        """
        self.kind = kind
        if kind not in KINDS:
            raise DatasetError(f"--loss-mask is {kind!r}, but must be one of {', '.join(KINDS)}")
        self._marks: _Marks | None = None
        if kind in TEMPLATES:
            if tokenizer is None:
                raise DatasetError(f"--loss-mask {kind} finds the answers by their tokens; name --tokenizer DIR")
            self._marks = _marks(kind, tokenizer)

    @property
    def needs_ids(self) -> bool:
        """Whether the mask depends on what the tokens are."""
        return self._marks is not None

    def make(self, sample: Sample, ids: torch.Tensor, given: Sequence[int] | None = None) -> torch.Tensor:
        """The mask of a sample.

        Args:
            sample: What is known of it.
            ids: Its token ids, ``[S]``.
            given: The mask of the whole row of a prepared dataset, where there is one.

        Returns:
            int64 ``[S]``.

        Raises:
            RowRejected: A prepared dataset has no mask for the row.
        """
        count = len(ids)
        if self.kind == "all":
            return torch.ones(count, dtype=torch.int64)
        if self.kind == "dataset":
            if given is None or len(given) < count:
                raise RowRejected(
                    "mask", f"{count} tokens, but a loss mask of {'none' if given is None else len(given)}"
                )
            return torch.tensor(given[:count], dtype=torch.int64)
        if self._marks is not None:
            return from_spans(self._marks.answers(ids.tolist()), count)
        if self.kind == "recorded" and sample.loss_spans is not None:
            return from_spans(sample.loss_spans, count)
        return from_spans([(max(0, sample.prompt_tokens), count)], count)


class _Marks(NamedTuple):
    """What an assistant's turn begins and ends with.

    ``begin`` are the tokens that are the same before every answer, ``text`` is what follows them, ``alone`` its tokens
    where nothing else follows: the beginning of an answer may share a token with it, as newlines after a newline do.
    """

    tokenizer: Any
    begin: list[int]
    text: str
    alone: list[int]
    ends: frozenset[int]

    def answers(self, ids: list[int]) -> list[tuple[int, int]]:
        """The spans of all answers, each with the token that ends it."""
        found = []
        at, width = 0, len(self.begin)
        while at <= len(ids) - width:
            begin = self._after_text(ids, at + width) if ids[at : at + width] == self.begin else None
            if begin is None:
                at += 1
                continue
            at = begin
            while at < len(ids) and ids[at] not in self.ends and ids[at] != self.begin[0]:
                at += 1
            if at < len(ids) and ids[at] in self.ends:
                at += 1
            found.append((begin, at))
        return found

    def _after_text(self, ids: list[int], at: int) -> int | None:
        """Where the answer begins: the token in which ``text`` ends if it holds more than that, else the next one."""
        if ids[at : at + len(self.alone)] == self.alone:
            return at + len(self.alone)
        for end in range(at, len(ids) + 1):
            said: str = self.tokenizer.decode(ids[at:end], skip_special_tokens=False)
            if len(said) >= len(self.text):
                if not said.startswith(self.text):
                    return None
                return end if said == self.text else end - 1
        return None


def _marks(kind: str, tokenizer: str) -> _Marks:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise needs_extra("tokenizers", "--tokenizer") from None
    path = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else tokenizer
    if not os.path.isfile(path):
        raise DatasetError(f"--tokenizer {tokenizer}: there is no tokenizer.json")
    try:
        loaded: Any = Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the library raises no narrower one for a file that is none
        raise DatasetError(f"--tokenizer {tokenizer}: {path} cannot be read: {error}") from None
    begin, ends = TEMPLATES[kind]
    for mark in re.findall(r"<\|\w+\|>", begin + ends[0]):
        if loaded.token_to_id(mark) is None:
            raise DatasetError(
                f"--loss-mask {kind}: {mark} is no token of {tokenizer}, so its chat template is another one"
            )
    fixed, text = begin[: begin.rindex(">") + 1], begin[begin.rindex(">") + 1 :]
    ids, alone = (list(loaded.encode(part, add_special_tokens=False).ids) for part in (fixed, begin))
    known = frozenset(i for i in map(loaded.token_to_id, ends) if i is not None)
    return _Marks(loaded, ids, text, alone[len(ids) :], known)


def spans(mask: torch.Tensor) -> list[list[int]]:
    """The runs of ones of a mask, as ``[begin, end)`` pairs."""
    edges = torch.diff(mask, prepend=mask.new_zeros(1), append=mask.new_zeros(1)).nonzero().flatten().tolist()
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def from_spans(pairs: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """The mask of ``count`` tokens that has these runs of ones; what lies beyond does not count."""
    mask = torch.zeros(count, dtype=torch.int64)
    for begin, end in pairs:
        mask[begin:end] = 1
    return mask
