"""Which characters of a rendered conversation an assistant's turn is, for chat templates without marks. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmcache_hs_backend.capture.render import Renderer
from lmcache_hs_backend.capture.turns import BadRow, Chat


class TurnFinder:
    """Finds turns by rendering the conversation with and without them. See ``capture.encode`` for the rules."""

    def __init__(self, tokenizer: Any, renderer: Renderer) -> None:
        self._renderer = renderer
        specials = sorted(
            (token.content for token in tokenizer.added_tokens_decoder.values() if token.special), key=len, reverse=True
        )
        any_special = "|".join(map(re.escape, specials)) or r"(?!)"
        self._special = re.compile(any_special)
        self._closed = re.compile(rf"({any_special})\s*\Z")
        self._closing = re.compile(rf"\s*(?:{any_special})")

    def find(self, chat: Chat, number: int, text: str) -> tuple[int, int]:
        """The characters of an assistant's turn, as far as the token that ends it. Raises BadRow.

        Args:
            chat: The conversation.
            number: The turn's, from 0.
            text: The conversation, rendered.
        """
        turns = chat.turns
        given = self._renderer.attempt_turns(turns[:number], chat, prompt=True)
        until = text if number + 1 == len(turns) else self._renderer.attempt_turns(turns[: number + 1], chat)
        begin = end = None
        if given is not None and text.startswith(given) and given != self._renderer.attempt_turns(turns[:number], chat):
            begin = len(given)
        if until is not None and text.startswith(until):
            end = len(until)
            if begin is not None and (closed := self._closed.search(text, begin, end)):
                return begin, closed.end(1)
        if begin is None or end is None or end < begin:
            other = self._replaced(chat, number, text)
            if other is None:
                raise _unknown(number)
            begin = other[0] if begin is None else begin
            end, ended = other[1:]
            if any(begin < last and first < end for first, last in self._beside(chat, number, text)):
                raise _unknown(number)
            if ended:
                return begin, end
        closing = self._closing.match(text, end)
        return begin, closing.end() if closing else end

    def _replaced(self, chat: Chat, number: int, text: str) -> tuple[int, int, bool] | None:
        """Where an assistant's turn is, by another one in its place, and whether its end token is in it."""
        probe = _new_to(text)
        turn = chat.turns[number]
        others = [{"role": "assistant", "content": probe}]
        # Other content beside the turn's own calls would show where the content is, not where the turn is.
        if not turn.get("tool_calls"):
            others.append({**turn, "content": probe})
        for other in others:
            rendered = self._with(chat, number, other)
            if rendered is None or rendered.count(probe) != 1:
                continue
            head, tail = rendered.split(probe)
            begin = common(text, head)
            end = len(text) - common(text[::-1], tail[::-1])
            if not text.endswith(tail):  # another token ends this turn: it is in what differs, at least in part
                for special in self._special.finditer(text, begin):
                    if special.start() < end <= special.end():
                        return begin, special.end(), True
            if begin <= end:
                return begin, end, False
        return None

    def _beside(self, chat: Chat, number: int, text: str) -> Iterator[tuple[int, int]]:
        """What changes with the contents of the turns before and after a turn: none of it is the turn's."""
        for at in (number - 1, number + 1):
            if 0 <= at < len(chat.turns):
                rendered = self._with(chat, at, {**chat.turns[at], "content": _new_to(text)})
                if rendered is not None and rendered != text:
                    first = common(text, rendered)
                    yield first, max(first, len(text) - common(text[::-1], rendered[::-1]))

    def _with(self, chat: Chat, number: int, turn: dict[str, Any]) -> str | None:
        return self._renderer.attempt_turns([*chat.turns[:number], turn, *chat.turns[number + 1 :]], chat)


def _unknown(number: int) -> BadRow:
    return BadRow(
        f"which text of turn {number + 1} is the assistant's does not follow from the chat template; "
        f"one with {{% generation %}} tells (--chat-template FILE)"
    )


def _new_to(text: str) -> str:
    """A word that a text does not have."""
    probe = "otherwise"
    while probe in text:
        probe += "x"
    return probe


def common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
