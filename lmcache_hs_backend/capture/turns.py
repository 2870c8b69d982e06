"""Turns in the shapes that exports have, as a chat template takes them; and the words for what is none. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SYSTEM_COLUMNS = ("system", "system_prompt")

#: How exports spell a role, in lower case. GPT's versions are matched by ``_GPT``.
ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bard", "bing", "claude", "model", "bot", "ai"),
    "system": ("system",),
    "developer": ("developer",),
    "tool": ("tool", "observation", "function_response", "tool_response", "function-response"),
    "function": ("function",),
    "ipython": ("ipython",),
}
_ROLE = {spelling: role for role, spellings in ROLES.items() for spelling in spellings}
_GPT = re.compile(r"(chat)?gpt[-_ ]?[0-9][\w.-]*")
_CALLS = ("function_call", "function-call", "tool_call")  # ShareGPT roles of a turn that is a call, as JSON

#: What a turn may have instead of content.
REASONING = ("reasoning_content", "reasoning", "thinking")
_IN_PLACE_OF_CONTENT = {"tool_calls", "function_call", *REASONING}


class BadRow(Exception):
    """A row that cannot be captured. The text is the reason, in words."""


class Joined(str):
    """Content that was a list of text parts: their text, joined by newlines, and the ``parts`` themselves."""

    parts: list[str]

    def __new__(cls, parts: list[str]) -> Joined:
        """The text of these parts."""
        made = super().__new__(cls, "\n".join(parts))
        made.parts = parts
        return made


@dataclass(frozen=True)
class Chat:
    """A conversation and what else its template gets. ``untrained``: assistant's turns that are not trained on."""

    turns: list[dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()


def chat_of(row: Mapping[str, Any], values: list[Any], arguments: Mapping[str, Any], *, parse_arguments: bool) -> Chat:
    """The conversation of a row.

    Args:
        row: The row, for its columns ``system``, ``tools`` and ``chat_template_kwargs``.
        values: Its turns, as they stand there.
        arguments: What every row's template gets; a row's own win.
        parse_arguments: Arguments of tool calls that are JSON text become what the text says.

    Raises:
        BadRow: A turn is none, or cannot be expressed.
    """
    turns = [_turn(number, value, parse_arguments) for number, value in enumerate(values, 1)]
    untrained = [number for number, turn in enumerate(turns) if _is_untrained(number + 1, turn)]
    whole = _with_system(row, turns)
    moved = len(whole) - len(turns)
    return Chat(whole, {**arguments, **_row_arguments(row)}, frozenset(number + moved for number in untrained))


def turns_in_text(column: str, text: str) -> list[Any]:
    """Some sets keep turns as JSON in a column of text. Raises BadRow for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise BadRow(f"{column} is text, not a list of turns (--column {column} takes it for a prompt)")
    return value


def turns_in_columns(value: Any) -> Any:
    """Turns that ``datasets`` keeps as one list for each of their keys; any other value as it is."""
    if not isinstance(value, dict) or not value.keys() & {"role", "from"}:
        return value
    lists = list(value.values())
    if not all(isinstance(each, list | tuple) and len(each) == len(lists[0]) for each in lists):
        return value
    return [dict(zip(value, each, strict=True)) for each in zip(*lists, strict=True)]


def _turn(number: int, turn: object, parse_arguments: bool) -> dict[str, Any]:
    """A turn with ``role`` and ``content``, and all else that it has. Raises BadRow."""
    if not isinstance(turn, dict):
        raise BadRow(f"turn {number} is {kind(turn)}, not an object with a role and content")
    spelling = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    if not isinstance(spelling, str):
        raise BadRow(f"turn {number} has no role: neither 'role' nor 'from' is text in it")
    content = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), None)
    more = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    name = spelling.strip().lower()
    if name in _CALLS:
        return {**more, "role": "assistant", "content": "", "tool_calls": _calls_in_content(number, content)}
    role = _ROLE.get(name) or ("assistant" if _GPT.fullmatch(name) else None)
    if role is None:
        raise BadRow(
            f"turn {number} has the role {spelling!r}, which is none of {', '.join(ROLES)}, and no known spelling"
        )
    if "tool_calls" in more:
        more["tool_calls"] = _tool_calls(number, more["tool_calls"], parse_arguments)
        if not more["tool_calls"]:  # templates ask whether the key is there
            del more["tool_calls"]
    return {"role": role, "content": _content(number, role, content, more), **more}


def _content(number: int, role: str, content: object, more: Mapping[str, Any]) -> str | None:
    if content is None:
        if role == "assistant" and more.keys() & _IN_PLACE_OF_CONTENT:
            return None
        raise BadRow(f"turn {number}, the {role}'s, has no content")
    if isinstance(content, list | tuple):
        return Joined([_part(number, part) for part in content])
    if not isinstance(content, str):
        raise BadRow(f"turn {number}, the {role}'s, has content that is {kind(content)}, not text")
    return content


def _part(number: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, dict)
        and isinstance(part.get("text"), str)
        and part.get("type", "text") in ("text", "input_text", "output_text")
    ):
        return str(part["text"])
    what = repr(part.get("type")) if isinstance(part, dict) else kind(part)
    raise BadRow(f"turn {number} has a content part of type {what}, and only text can be captured")


# -- calls -----------------------------------------------------------------------------------------------


def _tool_calls(number: int, calls: Any, parse_arguments: bool) -> list[dict[str, Any]]:
    """``tool_calls`` as templates take them: a list of objects. Some sets keep it as JSON in a text."""
    if isinstance(calls, str):
        calls = _json(calls)
    if not isinstance(calls, list | tuple) or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f"turn {number} has tool_calls that are {kind(calls)}, not a list of calls")
    return [_parsed(number, call) if parse_arguments else call for call in calls]


def _parsed(number: int, call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    if not isinstance(inner, dict) or not isinstance(inner.get("arguments"), str):
        return call
    value = _json(inner["arguments"] or "{}")
    if not isinstance(value, dict):
        raise BadRow(f"turn {number} has a tool call whose arguments are text, but not a JSON object")
    return {**call, "function": {**inner, "arguments": value}}


def _calls_in_content(number: int, content: object) -> list[dict[str, Any]]:
    """The calls of a ShareGPT turn that is one call or several, as JSON."""
    calls: Any = _json(content) if isinstance(content, str) else content
    try:
        found = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    except (ValueError, KeyError, TypeError, AttributeError):
        found = []
    if not found:
        raise BadRow(f"turn {number} is a function call, but not JSON with a name and arguments, and nothing else")
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Raises one of several errors for what is no call, or has a part that would be left out."""
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    given = [inner[name] for name in ("arguments", "parameters") if name in inner]
    known = {"name", "arguments", "parameters", "id", "type", "function"}
    if not isinstance(inner["name"], str) or len(given) > 1 or not known.issuperset({*call, *inner}):
        raise ValueError
    made = {"type": "function", "function": {"name": inner["name"], "arguments": given[0] if given else {}}}
    return {**made, "id": call["id"]} if "id" in call else made


# -- what stands beside the turns ------------------------------------------------------------------------


def _is_untrained(number: int, turn: dict[str, Any]) -> bool:
    """Whether an assistant's turn says that it is not trained on: ``weight`` 0 as OpenAI has it, or a false key."""
    if turn["role"] != "assistant":
        return False
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"turn {number} has a weight of {weight!r:.40}, but a token is trained on or not: 0 or 1")
    return weight == 0 or turn.get("train") is False or turn.get("loss") is False


def _with_system(row: Mapping[str, Any], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, with what a column of the row says as the system before them."""
    for name in SYSTEM_COLUMNS:
        said = row.get(name)
        if not said or not turns:
            continue
        if not isinstance(said, str):
            raise BadRow(f"{name} is {kind(said)}, not text")
        if turns[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": said}, *turns]
        if turns[0]["content"] != said:
            raise BadRow(f"there is a column {name!r} and a first turn of the {turns[0]['role']}, and they differ")
    return turns


def _row_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row has for the template beside its turns."""
    arguments: dict[str, Any] = {}
    if row.get("functions") and not row.get("tools"):
        raise BadRow("there is a column 'functions'; the chat template takes tools, under 'tools'")
    for name, wanted in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise BadRow(f"{name} is text, but no JSON: {error}") from None
        if not value:
            continue
        if not isinstance(value, wanted):
            raise BadRow(f"{name} is {kind(value)}, not a {'list' if wanted is list else 'mapping'}")
        arguments |= {"tools": [_tool(tool) for tool in value]} if wanted is list else value
    return arguments


def _tool(tool: Any) -> Any:
    """A tool is an object; some sets keep each as JSON in a text."""
    value = _json(tool) if isinstance(tool, str) else tool
    if not isinstance(value, dict):
        raise BadRow(f"tools has an element that is {kind(tool)}, not an object")
    return value


# -- small things ----------------------------------------------------------------------------------------


def _json(text: str) -> Any:
    """What a text says as JSON; None where it says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def kind(value: object) -> str:
    """What a value is, in words of JSON."""
    kinds: list[tuple[type, str]] = [(bool, "true or false"), (str, "text"), (dict, "an object"), (list, "a list")]
    return next((name for each, name in kinds if isinstance(value, each)), "null" if value is None else "a number")
