"""From characters that are trained on to tokens that are. No I/O.

A token is trained on when it holds at least one wanted character, which is transformers' own rule for its masks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_hs_backend.format.request_log import Spans


def token_spans(
    tokenizer: Any, text: str, wanted: Sequence[tuple[int, int]], *, special: bool
) -> tuple[list[int], Spans]:
    """The token ids of a text, and the runs of them that hold a character of ``wanted``, half-open pairs of positions.

    ``special``: the tokenizer adds its special tokens. Raises ValueError when the tokenizer neither says which
    characters a token holds (fast ones do) nor gives the text back from its tokens.
    """
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        return list(found["input_ids"]), _by_offsets(found["offset_mapping"], wanted)
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])

    def decoded(count: int) -> str:
        return str(tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False))

    if decoded(len(ids)) != text:
        raise ValueError("the tokenizer is no fast one, and does not give the text back from its tokens")
    return ids, _by_decoding(decoded, len(ids), text, wanted)


def runs(mask: Sequence[int]) -> Spans:
    """The runs of ones of a mask."""
    edges = [n for n, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if bool(a) != bool(b)]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def minus(spans: Spans, others: Spans) -> Spans:
    """The positions of ``spans`` that are not in ``others``."""
    mask = [0] * max((end for _, end in spans), default=0)
    for value, each in ((1, spans), (0, others)):
        for begin, end in each:
            mask[begin:end] = [value] * (min(end, len(mask)) - begin)
    return runs(mask)


def _by_offsets(offsets: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]) -> Spans:
    mask, at = [0] * len(offsets), 0
    spans = sorted((begin, end) for begin, end in wanted if begin < end)
    for token, (first, last) in enumerate(offsets):
        while at < len(spans) and first >= spans[at][1]:
            at += 1
        if at == len(spans):
            break
        mask[token] = int(last > spans[at][0])
    return runs(mask)


def _by_decoding(decoded: Callable[[int], str], count: int, text: str, wanted: Sequence[tuple[int, int]]) -> Spans:
    """The same without offsets: how long the text of the first tokens is says where a token begins and ends."""
    mask = [0] * count
    for begin, end in wanted:
        if begin == end:
            continue
        # The tokens up to here give all text before; part of a character shows as a character, or as nothing.
        first = bisect_left(range(count + 1), True, key=lambda n: len(decoded(n)) >= begin)
        while len(decoded(first)) <= begin and decoded(first) != text[:begin]:
            first += 1
        first -= len(decoded(first)) > begin  # this token holds characters of both sides
        last = bisect_left(range(count), True, key=lambda n: len(decoded(n + 1)) >= end)
        while not decoded(last + 1).startswith(text[:end]):
            last += 1
        mask[first : last + 1] = [1] * (last + 1 - first)
    return runs(mask)
