"""What a chat template leaves out of a conversation. A turn or a call makes a bad row; the rest is remarked. No I/O."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lmcache_hs_backend.capture.turns import REASONING, BadRow, Chat

#: What is said of the rows that have such a remark.
REMARKS = {
    "tools": "the chat template does not show the row's tools to the model",
    "reasoning": "the chat template leaves out reasoning",
    "content": "the chat template leaves out what is said beside a tool call",
    "arguments": "arguments of tool calls are JSON text, which the chat template quotes once more (--tool-arguments "
    "parsed takes them for what they say, as vLLM's server does)",
}
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def left_out(chat: Chat, text: str, attempt: Callable[[Chat], str | None]) -> tuple[str, ...]:
    """Names of ``REMARKS`` that hold for a conversation.

    Args:
        chat: The conversation.
        text: What the template makes of it.
        attempt: Renders another one in the same way; None when the template refuses it.

    Raises:
        BadRow: The template leaves out a turn, or a call.
    """

    def without(number: int, turn: dict[str, Any]) -> bool:
        """Whether the text is the same with another turn in a turn's place."""
        return attempt(replace(chat, turns=[*chat.turns[:number], turn, *chat.turns[number + 1 :]])) == text

    found = []
    for number in _suspects(chat, text):
        turn = chat.turns[number]
        if without(number, {**turn, "content": turn["content"] + " otherwise"}):
            if not turn.get("tool_calls"):
                raise BadRow(f"the chat template leaves out turn {number + 1}, the {turn['role']}'s")
            found.append("content")
    for number, turn in enumerate(chat.turns):
        for at, fewer in _fewer_calls(turn):
            if without(number, fewer):
                which = f"call {at + 1} of turn {number + 1}, {_name(turn, at)}"
                raise BadRow(f"the chat template leaves out {which}; another template has it (--chat-template FILE)")
        if any(json.dumps(each, ensure_ascii=False)[1:-1] in text for each in _quoted(turn)):
            found.append("arguments")
        if any(thought not in text for thought in _thoughts(turn)):
            found.append("reasoning")
    if chat.arguments.get("tools"):
        fewer_arguments = {name: value for name, value in chat.arguments.items() if name != "tools"}
        if attempt(replace(chat, arguments=fewer_arguments)) == text:
            found.append("tools")
    return tuple(name for name in REMARKS if name in found)


def _suspects(chat: Chat, text: str) -> Iterator[int]:
    """Turns whose content does not stand in the text as often as it should: left out, or written in another way."""
    contents = [(turn["content"] or "").strip() for turn in chat.turns]
    times = Counter(contents)
    missing = {content for content, count in times.items() if content and text.count(content) < count}
    return (number for number, content in enumerate(contents) if content in missing)


def _fewer_calls(turn: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The turn without each of its calls."""
    calls = turn.get("tool_calls") or []
    for at in range(len(calls)):
        rest = [*calls[:at], *calls[at + 1 :]]
        plain = {**turn, "content": turn["content"] or ""}
        yield at, {**plain, "tool_calls": rest} if rest else {k: v for k, v in plain.items() if k != "tool_calls"}
    if "function_call" in turn:
        yield len(calls), {k: v for k, v in turn.items() if k != "function_call"} | {"content": turn["content"] or ""}


def _name(turn: dict[str, Any], at: int) -> str:
    calls = [*(turn.get("tool_calls") or []), *([turn["function_call"]] if "function_call" in turn else [])]
    call = calls[at]
    inner = call.get("function", call) if isinstance(call, dict) else {}
    return repr(inner.get("name") if isinstance(inner, dict) else None)


def _quoted(turn: dict[str, Any]) -> Iterator[str]:
    """Arguments of a turn's calls that are text, and change when they are quoted."""
    for call in turn.get("tool_calls") or []:
        inner = call.get("function")
        arguments = inner.get("arguments") if isinstance(inner, dict) else None
        if isinstance(arguments, str) and '"' in arguments:
            yield arguments


def _thoughts(turn: dict[str, Any]) -> Iterator[str]:
    """What a turn of the assistant's has thought, in a key of its own or within its content."""
    if turn["role"] != "assistant":
        return
    thoughts = [turn[key] for key in REASONING if isinstance(turn.get(key), str)]
    thoughts += _THOUGHT.findall(turn["content"] or "")
    yield from (thought.strip() for thought in thoughts if thought.strip())
