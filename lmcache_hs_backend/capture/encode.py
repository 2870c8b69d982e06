"""What one row of a data set becomes: token ids, and which of them are trained on. No I/O, no vLLM.

A row is a dict. The first of these columns that is not empty is used (``RowEncoder(column=…)`` names one instead):

1. turns: ``messages``, ``conversations``, ``conversation``, ``dialog``, ``dialogue``, ``turns``, or a list under
   ``prompt``;
2. token ids: ``input_ids``, ``prompt_token_ids``, with ``loss_mask``, ``assistant_masks`` or ``labels`` (-100: no loss)
   if they are there; without one, every token is trained on;
3. text: ``prompt``, given to the model as it is, without the chat template; with ``completion``, both together.

**Turns** reach ``apply_chat_template`` as they are, with the row's ``tools`` and ``chat_template_kwargs``. What is
changed: roles that exports spell differently (``human``, ``gpt``, ``chatgpt``, …), ``from``/``value`` for
``role``/``content``, turns that are JSON in a text, a ShareGPT ``function_call`` (it becomes ``tool_calls``), a
``system`` column (it becomes the first turn), content of text parts (it becomes their text, joined by newlines, as
vLLM's server does), and keys whose value is null (they are dropped, except ``content``). A role that is not known, or a
part that is not text, is a ``BadRow``: it never becomes a header.

A conversation that ends with the assistant is ``complete``: it is only read. Any other is answered by the model, and
gets the generation prompt.

**Spans.** Of a complete conversation the assistant's turns are trained on, from the first token that holds a character
of theirs to the token that ends the turn. A template with ``{% generation %}`` says itself which text that is
(transformers' ``return_assistant_tokens_mask``). With any other, each turn's text is found by rendering:

- it begins where the rendering of the turns before it, with the generation prompt, ends: that is what the model is
  given;
- it ends where the rendering up to and with this turn ends, less white space after a special token;
- where these are no beginnings of the whole text (templates that render a turn differently when more follows), the
  whole conversation is rendered with another answer in the turn's place, and what differs is the turn's;
- a special token that follows directly is the one that ends the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_hs_backend.capture.spans import runs, token_spans
from lmcache_hs_backend.format.request_log import Spans

TURN_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns")
ID_COLUMNS = ("input_ids", "prompt_token_ids")
MASK_COLUMNS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")
#: Columns that hold an answer to ``prompt`` in public sets. Answering the prompt anew beside one would be a guess.
ANSWER_COLUMNS = ("response", "responses", "answer", "answers", "output", "chosen", "solution")
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
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_LABEL = -100


class BadRow(Exception):
    """A row that cannot be captured. The text is the reason, in words."""


@dataclass(frozen=True)
class EncodedRow:
    """A row as tokens.

    ``complete``: it has its answer, and is only read. ``loss_spans``: what to train on; None for a row that is to be
    answered: its answer is. ``cut_from``: how many tokens it had before it was cut; None: it was not.
    """

    token_ids: list[int]
    complete: bool
    loss_spans: Spans | None
    cut_from: int | None
    column: str
    beside: tuple[str, ...]  # columns that could have been used instead


@dataclass(frozen=True)
class _Text:
    """Text, and the characters of it that are trained on; ``wanted`` None: it is a prompt to be answered."""

    text: str
    wanted: list[tuple[int, int]] | None
    special: bool  # the tokenizer adds its special tokens: the text has none of a template's


@dataclass(frozen=True)
class _Chat:
    """A conversation and what else its template gets."""

    turns: list[dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)


class RowEncoder:
    """Turns rows into tokens, for one model. Not thread-safe; keeps nothing of a row."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_id: int,
        max_tokens: int | None = None,
        cut: bool = False,
        column: str | None = None,
        prompts_as_turns: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Take what is the same for all rows.

        Args:
            tokenizer: A tokenizer of transformers.
            max_id: The largest token id that the model takes.
            max_tokens: The most that a row may have, or None. vLLM samples one token after a row, so this is one below
                its max_model_len.
            cut: Cut longer complete rows to that; else they are bad rows, as longer prompts always are.
            column: The only column to use, whatever else a row has.
            prompts_as_turns: Text under ``prompt`` is a user's turn.
            chat_template: A Jinja template in place of the tokenizer's own.
            chat_template_kwargs: Arguments of the template for every row; a row's own win.
        """
        self._tokenizer = tokenizer
        self._max_id = max_id
        self.max_tokens = max_tokens
        self._cut = cut
        self._column = column
        self._prompts_as_turns = prompts_as_turns
        self._template = chat_template
        self._arguments = dict(chat_template_kwargs or {})
        specials = sorted(
            (token.content for token in tokenizer.added_tokens_decoder.values() if token.special), key=len, reverse=True
        )
        any_special = "|".join(map(re.escape, specials)) or r"(?!)"
        self._special = re.compile(any_special)
        self._closed = re.compile(rf"({any_special})\s*\Z")
        self._closing = re.compile(rf"\s*(?:{any_special})")

    def encode(self, row: object) -> EncodedRow:
        """Raises BadRow."""
        if not isinstance(row, dict):
            raise BadRow(f"the row is {_kind(row)}, not an object with columns")
        column, beside = self._choose(row)
        spans: Spans | None
        value = row[column]
        if column in ID_COLUMNS or (column == self._column and _is_ids(value)):
            ids, spans = _given_ids(row, column)
            complete = True
        else:
            source = self._source(row, column, value)
            if isinstance(source, _Text):
                ids, spans = self._tokens(source)
                complete = spans is not None
            else:
                complete = source.turns[-1]["role"] == "assistant"
                ids, spans = self._conversation(source, complete)
        if not ids:
            raise BadRow(f"{column} is empty: there is no token")
        low, high = min(ids), max(ids)
        if low < 0 or high > self._max_id:
            wrong = low if low < 0 else high
            raise BadRow(f"token id {wrong} is not one of the model's, whose largest is {self._max_id}")
        count = len(ids)
        if self.max_tokens is None or count <= self.max_tokens:
            return EncodedRow(ids, complete, spans, None, column, beside)
        if not self._cut:
            raise BadRow(
                f"{count:,} tokens, max_model_len {self.max_tokens + 1}: too long (--too-long cut would cut it)"
            )
        if spans is None:
            raise BadRow(
                f"{count:,} tokens, max_model_len {self.max_tokens + 1}: a prompt to be answered cannot be cut"
            )
        kept = tuple((begin, min(end, self.max_tokens)) for begin, end in spans if begin < self.max_tokens)
        return EncodedRow(ids[: self.max_tokens], complete, kept, count, column, beside)

    # -- columns -----------------------------------------------------------------------------------------

    def _choose(self, row: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
        """The column to use, and the others that could have been."""
        if self._column is not None:
            if row.get(self._column) is None:
                raise BadRow(f"there is no column {self._column!r}; the row has {_names(row)}")
            return self._column, ()
        prompt = row.get("prompt")
        found = [name for name in TURN_COLUMNS if row.get(name) is not None]
        found += ["prompt"] if isinstance(prompt, list) else []
        found += [name for name in ID_COLUMNS if row.get(name) is not None]
        found += ["prompt"] if prompt is not None and not isinstance(prompt, list) else []
        if not found:
            raise BadRow(
                f"none of the columns messages, conversations, prompt and input_ids is there; the row has "
                f"{_names(row)} (--column names one)"
            )
        if found[0] == "prompt":
            answers = [name for name in ANSWER_COLUMNS if row.get(name)]
            if answers:
                raise BadRow(
                    f"there is {answers[0]!r} beside 'prompt', and how they belong together is not known; use "
                    f"'completion', or turns under 'messages' (--column prompt has the model answer the prompts anew)"
                )
        return found[0], tuple(found[1:])

    def _source(self, row: dict[str, Any], column: str, value: Any) -> _Text | _Chat:
        completion = row.get("completion") if column == "prompt" else None
        if isinstance(value, str) and column in TURN_COLUMNS and column != self._column:
            value = _turns_in_text(column, value)
        if isinstance(value, str):
            if not value:
                raise BadRow(f"{column} is empty")
            if completion is not None and not isinstance(completion, str):
                raise BadRow(f"prompt is text, but completion is {_kind(completion)}")
            if not self._prompts_as_turns:
                text = value + (completion or "")
                return _Text(text, None if not completion else [(len(value), len(text))], special=True)
            value = [{"role": "user", "content": value}]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if not isinstance(value, list | tuple):
            raise BadRow(f"{column} is {_kind(value)}, neither turns nor text")
        turns = [_turn(number, turn) for number, turn in enumerate([*value, *(completion or [])], 1)]
        if not turns:
            raise BadRow(f"{column} has no turns")
        return _Chat(_with_system(row, turns), self._arguments | _row_arguments(row))

    # -- rendering ---------------------------------------------------------------------------------------

    def _conversation(self, chat: _Chat, complete: bool) -> tuple[list[int], Spans | None]:
        if not complete:
            return self._tokens(_Text(self._render(chat.turns, chat, prompt=True), None, special=False))
        if self._has_generation_marks(chat):
            return self._marked(chat)
        text = self._render(chat.turns, chat)
        wanted = [
            self._turn_text(chat, number, text) for number, turn in enumerate(chat.turns) if turn["role"] == "assistant"
        ]
        return self._tokens(_Text(text, wanted, special=False))

    def _render(self, turns: Sequence[dict[str, Any]], chat: _Chat, *, prompt: bool = False) -> str:
        return str(self._apply(turns, chat, tokenize=False, add_generation_prompt=prompt))

    def _apply(self, turns: Sequence[dict[str, Any]], chat: _Chat, **how: Any) -> Any:
        """Raises BadRow with the template's own words, whatever goes wrong in it."""
        template = {} if self._template is None else {"chat_template": self._template}
        try:
            return self._tokenizer.apply_chat_template(list(turns), **chat.arguments, **template, **how)
        except Exception as error:  # noqa: BLE001 - a template is a program, and its faults are of every kind
            raise BadRow(f"the chat template refuses the row: {error}") from None

    def _try(self, turns: Sequence[dict[str, Any]], chat: _Chat, *, prompt: bool = False) -> str | None:
        """The text of a conversation that is none of the data set's; None when the template refuses it."""
        try:
            return self._render(turns, chat, prompt=prompt) if turns else None
        except BadRow:
            return None

    def _has_generation_marks(self, chat: _Chat) -> bool:
        try:
            template = self._template or self._tokenizer.get_chat_template(tools=chat.arguments.get("tools"))
        except ValueError as error:
            raise BadRow(
                f"the row has turns, but the tokenizer has no chat template (--chat-template FILE): {error}"[:300]
            ) from None
        return _GENERATION.search(template) is not None

    def _marked(self, chat: _Chat) -> tuple[list[int], Spans]:
        _checked(self._render(chat.turns, chat))
        found = self._apply(chat.turns, chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), runs(found["assistant_masks"])

    def _turn_text(self, chat: _Chat, number: int, text: str) -> tuple[int, int]:
        """The characters of an assistant's turn, as far as the token that ends it. See the module's text."""
        turns = chat.turns
        given = self._try(turns[:number], chat, prompt=True)
        until = text if number + 1 == len(turns) else self._try(turns[: number + 1], chat)
        begin = end = None
        if given is not None and text.startswith(given) and given != self._try(turns[:number], chat):
            begin = len(given)
        if until is not None and text.startswith(until):
            end = len(until)
            if begin is not None and (closed := self._closed.search(text, begin, end)):
                return begin, closed.end(1)
        if begin is None or end is None or end < begin:
            other = self._replaced(chat, number, text)
            if other is None:
                raise BadRow(
                    f"which text of turn {number + 1} is the assistant's does not follow from the chat template; "
                    f"one with {{% generation %}} tells (--chat-template FILE)"
                )
            begin = other[0] if begin is None else begin
            end, ended = other[1:]
            if ended:
                return begin, end
        closing = self._closing.match(text, end)
        return begin, closing.end() if closing else end

    def _replaced(self, chat: _Chat, number: int, text: str) -> tuple[int, int, bool] | None:
        """Where an assistant's turn is, by another one in its place, and whether its end token is in it."""
        probe = "otherwise"
        while probe in text:
            probe += "x"
        turn = chat.turns[number]
        for other in ({"role": "assistant", "content": probe}, {**turn, "content": probe}):
            rendered = self._try([*chat.turns[:number], other, *chat.turns[number + 1 :]], chat)
            if rendered is None or rendered.count(probe) != 1:
                continue
            head, tail = rendered.split(probe)
            begin = _common(text, head)
            end = len(text) - _common(text[::-1], tail[::-1])
            if not text.endswith(tail):  # another token ends this turn: it is in what differs, at least in part
                for special in self._special.finditer(text, begin):
                    if special.start() < end <= special.end():
                        return begin, special.end(), True
            if begin <= end:
                return begin, end, False
        return None

    # -- tokens ------------------------------------------------------------------------------------------

    def _tokens(self, source: _Text) -> tuple[list[int], Spans | None]:
        text = _checked(source.text)
        if source.wanted is None:
            return list(self._tokenizer(text, add_special_tokens=source.special)["input_ids"]), None
        try:
            return token_spans(self._tokenizer, text, source.wanted, special=source.special)
        except ValueError as error:
            raise BadRow(f"which tokens are trained on cannot be determined: {error}") from None


# -- turns -----------------------------------------------------------------------------------------------


def _turns_in_text(column: str, text: str) -> list[Any]:
    """Some sets keep turns as JSON in a column of text. Raises BadRow for any other text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise BadRow(f"{column} is text, not a list of turns (--column {column} takes it for a prompt)")
    return value


def _turn(number: int, turn: object) -> dict[str, Any]:
    """A turn with ``role`` and ``content``, and all else that it has. Raises BadRow."""
    if not isinstance(turn, dict):
        raise BadRow(f"turn {number} is {_kind(turn)}, not an object with a role and content")
    spelling = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    if not isinstance(spelling, str):
        raise BadRow(f"turn {number} has no role: neither 'role' nor 'from' is text in it")
    content = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), None)
    more = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    name = spelling.strip().lower()
    if name in _CALLS:
        return {**more, "role": "assistant", "content": "", "tool_calls": _calls(number, content)}
    role = _ROLE.get(name) or ("assistant" if _GPT.fullmatch(name) else None)
    if role is None:
        raise BadRow(
            f"turn {number} has the role {spelling!r}, which is none of {', '.join(ROLES)}, and no known spelling"
        )
    return {"role": role, "content": _content(number, role, content, more), **more}


def _content(number: int, role: str, content: object, more: Mapping[str, Any]) -> str | None:
    if content is None:
        if role == "assistant" and more.keys() & {
            "tool_calls",
            "function_call",
            "reasoning_content",
            "reasoning",
            "thinking",
        }:
            return None
        raise BadRow(f"turn {number}, the {role}'s, has no content")
    if isinstance(content, list | tuple):
        return "\n".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"turn {number}, the {role}'s, has content that is {_kind(content)}, not text")
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
    kind = repr(part.get("type")) if isinstance(part, dict) else _kind(part)
    raise BadRow(f"turn {number} has a content part of type {kind}, and only text can be captured")


def _calls(number: int, content: object) -> list[dict[str, Any]]:
    try:
        calls: Any = json.loads(content) if isinstance(content, str) else content
        found = [
            {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
            for call in (calls if isinstance(calls, list) else [calls])
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        found = []
    if not found:
        raise BadRow(f"turn {number} is a function call, but not JSON with a name and arguments")
    return found


def _with_system(row: dict[str, Any], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, with what a column of the row says as the system before them."""
    for name in SYSTEM_COLUMNS:
        said = row.get(name)
        if not said:
            continue
        if not isinstance(said, str):
            raise BadRow(f"{name} is {_kind(said)}, not text")
        if turns[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": said}, *turns]
        if turns[0]["content"] != said:
            raise BadRow(f"there is a column {name!r} and a first turn of the {turns[0]['role']}, and they differ")
    return turns


def _row_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """What a row has for the template beside its turns."""
    arguments: dict[str, Any] = {}
    if row.get("functions") and not row.get("tools"):
        raise BadRow("there is a column 'functions'; the chat template takes tools, under 'tools'")
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except ValueError as error:
                raise BadRow(f"{name} is text, but no JSON: {error}") from None
        if not value:
            continue
        if not isinstance(value, kind):
            raise BadRow(f"{name} is {_kind(value)}, not a {'list' if kind is list else 'mapping'}")
        arguments |= {"tools": value} if kind is list else value
    return arguments


# -- token ids that are given ----------------------------------------------------------------------------


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(item) is int for item in value)


def _flat(name: str, value: Any) -> list[Any]:
    """A list, or the one list in it: sets made of ``[1, N]`` tensors have those."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    if not isinstance(value, list | tuple):
        raise BadRow(f"{name} is {_kind(value)}, not a list of integers")
    return list(value)


def _given_ids(row: dict[str, Any], column: str) -> tuple[list[int], Spans]:
    ids = _flat(column, row[column])
    for item in ids:
        if type(item) is not int:
            raise BadRow(f"{column} has {item!r:.40}, which is no token id")
    spans: Spans = ((0, len(ids)),) if ids else ()
    for name in (*MASK_COLUMNS, "labels"):
        if row.get(name) is None:
            continue
        mask = _flat(name, row[name])
        if len(mask) != len(ids):
            raise BadRow(f"{len(ids)} token ids, but {name} has {len(mask)}")
        if name == "labels":
            mask = [int(label != _NO_LABEL) for label in mask]
        elif not all(value in (0, 1) for value in mask):
            raise BadRow(f"{name} has values other than 0 and 1")
        spans = runs(mask)
        break
    return ids, spans


# -- small things ----------------------------------------------------------------------------------------


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _checked(text: str) -> str:
    """Raises BadRow for text that is no Unicode: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}: half of a character that was cut in two"
        ) from None
    return text


def _kind(value: object) -> str:
    """What a value is, in words of JSON."""
    kinds: list[tuple[type, str]] = [(bool, "true or false"), (str, "text"), (dict, "an object"), (list, "a list")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "null" if value is None else "a number")


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:12])) or "no column at all"
