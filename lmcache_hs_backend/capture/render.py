"""A conversation by the model's chat template: its text, or its tokens where the template marks what is trained on.

The template is transformers' ``apply_chat_template``. What differs: dates are those of one moment, so that a row is
the same row whenever it is rendered, and what goes wrong in a template is a ``BadRow`` with the template's own words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from lmcache_hs_backend.capture.spans import runs
from lmcache_hs_backend.capture.turns import BadRow, Chat, Joined
from lmcache_hs_backend.format.request_log import Spans

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = re.compile(r"""strftime_now\(\s*("[^"\\]*"|'[^'\\]*')\s*\)""")
_LONGEST_REASON = 500


class Renderer:
    """One tokenizer's template. ``writes_date``: one that was used so far writes the date."""

    def __init__(self, tokenizer: Any, chat_template: str | None, today: datetime) -> None:
        """``chat_template``: in place of the tokenizer's own; ``today``: what it has for the date."""
        self._tokenizer = tokenizer
        self._given = chat_template
        self._today = today
        self._templates: dict[bool, str] = {}  # with tools and without
        self._readers: dict[str, frozenset[type]] = {}  # for each template, what content it reads: str, list
        self.writes_date = False

    def text_of(self, chat: Chat, *, prompt: bool) -> tuple[Chat, str]:
        """The text of a conversation, and the conversation as it was rendered. Raises BadRow.

        Content that is null is left to the template, as some ask for it, but where it would write the word None.
        """
        text = str(self._apply(chat, tokenize=False, add_generation_prompt=prompt))
        if "None" not in text or all(turn["content"] is not None for turn in chat.turns):
            return chat, text
        plain = replace(chat, turns=[{**turn, "content": turn["content"] or ""} for turn in chat.turns])
        other = str(self._apply(plain, tokenize=False, add_generation_prompt=prompt))
        return (plain, other) if other.count("None") < text.count("None") else (chat, text)

    def attempt(self, chat: Chat, *, prompt: bool = False) -> str | None:
        """The text of a conversation that is none of the data set's; None when the template refuses it."""
        try:
            return str(self._apply(chat, tokenize=False, add_generation_prompt=prompt)) if chat.turns else None
        except BadRow:
            return None

    def attempt_turns(self, turns: Sequence[dict[str, Any]], chat: Chat, *, prompt: bool = False) -> str | None:
        """The same of other turns, with the arguments of a conversation."""
        return self.attempt(replace(chat, turns=list(turns)), prompt=prompt)

    def has_marks(self, chat: Chat) -> bool:
        """Whether the template itself marks what is trained on."""
        return _GENERATION.search(self._template(chat)) is not None

    def marked(self, chat: Chat) -> tuple[list[int], Spans]:
        """The tokens of a conversation, and what the template's marks say is trained on. Raises BadRow."""
        found = self._apply(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), runs(found["assistant_masks"])

    def _apply(self, chat: Chat, **how: Any) -> Any:
        template = self._template(chat)
        turns = [_in_form(turn, self._reads(template)) for turn in chat.turns]
        try:
            return self._tokenizer.apply_chat_template(turns, **chat.arguments, chat_template=template, **how)
        except Exception as error:  # noqa: BLE001 - a template is a program, and its faults are of every kind
            reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
            # Text of the row's may be in it, which need not be text that can be printed.
            reason = reason.encode("utf-8", "backslashreplace").decode()
            raise BadRow(f"the chat template refuses the row: {reason}") from None

    def _reads(self, template: str) -> frozenset[type]:
        """What content a template reads, found out by trying: text, a list of text parts, or both."""
        if template not in self._readers:
            found = set()
            for content in ("otherwise unlikely", [_part("otherwise"), _part("unlikely")]):
                try:
                    turns = [{"role": "user", "content": content}]
                    text = self._tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
                except Exception:  # noqa: BLE001 - see _apply
                    continue
                if "otherwise" in text and "unlikely" in text and repr(_part("otherwise")) not in text:
                    found.add(type(content))
            self._readers[template] = frozenset(found or {str})
        return self._readers[template]

    def _template(self, chat: Chat) -> str:
        tools = chat.arguments.get("tools")
        known = self._templates.get(bool(tools))
        if known is not None:
            return known
        try:
            text = self._given if self._given is not None else self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise BadRow(
                f"the row has turns, but the tokenizer has no chat template (--chat-template FILE): {error}"[:300]
            ) from None
        fixed = _DATE.sub(lambda call: repr(self._today.strftime(call[1][1:-1])), text)
        self.writes_date = self.writes_date or fixed != text
        self._templates[bool(tools)] = fixed
        return fixed


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _in_form(turn: dict[str, Any], reads: frozenset[type]) -> dict[str, Any]:
    """A turn with its content as the template reads it: parts as parts where it can, text as text where it can."""
    content = turn["content"]
    if content is None or list not in reads or (str in reads and not isinstance(content, Joined)):
        return {**turn, "content": str(content)} if isinstance(content, Joined) else turn
    return {**turn, "content": [_part(text) for text in (content.parts if isinstance(content, Joined) else [content])]}
