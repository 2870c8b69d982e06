"""What one row of a data set becomes: token ids, and which of them are trained on. No I/O, no vLLM.

A row is a dict. The first of these columns that is not empty is used (``RowEncoder(column=…)`` names one instead):

1. turns: ``messages``, ``conversations``, ``conversation``, ``dialog``, ``dialogue``, ``turns``, or a list under
   ``prompt``;
2. token ids: ``input_ids``, ``prompt_token_ids``, without the padding that ``attention_mask`` names; a token is
   trained on where ``loss_mask``, ``assistant_masks``, ``completion_mask`` and ``labels`` (-100: no loss), as far as
   the row has them, all say so; without one, every token is;
3. text: ``prompt``, given to the model as it is, without the chat template; with ``completion``, both together.

**Turns** reach ``apply_chat_template`` as they are, with the row's ``tools`` and ``chat_template_kwargs``. What is
changed: roles that exports spell differently (``human``, ``gpt``, ``chatgpt``, …), ``from``/``value`` for
``role``/``content``, turns, tools and calls that are JSON in a text, one list for each key of the turns, a ShareGPT
``function_call`` (it becomes ``tool_calls``), a ``system`` column (it becomes the first turn), content of text parts
where the template reads no parts (it becomes their text, joined by newlines, as vLLM's server does; where a template
reads parts only, text becomes one), and keys whose value is null and empty ``tool_calls`` (they are dropped;
``content`` that is null stays, but where the template would write the word None). A role that is not known, or a part
that is not text, is a ``BadRow``: it never becomes a header. So is a turn or a call that the template leaves out; what
else it leaves out is in ``EncodedRow.remarks`` (``left_out``).

Templates that write the date get that of the run's start (``today``), so that a row is the same row on the next day.

A conversation that ends with the assistant is ``complete``: it is only read. Any other is answered by the model, and
gets the generation prompt.

**Spans.** Of a complete conversation the assistant's turns are trained on, from the first token that holds a character
of theirs to the token that ends the turn; not those that say they are not (``weight`` 0, ``train`` or ``loss`` false).
A template with ``{% generation %}`` says itself which text that is (transformers' ``return_assistant_tokens_mask``).
With any other, each turn's text is found by rendering:

- it begins where the rendering of the turns before it, with the generation prompt, ends: that is what the model is
  given;
- it ends where the rendering up to and with this turn ends, less white space after a special token;
- where these are no beginnings of the whole text (templates that render a turn differently when more follows), the
  whole conversation is rendered with another answer in the turn's place, and what differs is the turn's, unless it
  changes with the turns beside it as well;
- a special token that follows directly is the one that ends the turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lmcache_hs_backend.capture.left_out import left_out
from lmcache_hs_backend.capture.render import Renderer
from lmcache_hs_backend.capture.spans import minus, runs, token_spans
from lmcache_hs_backend.capture.turn_spans import TurnFinder
from lmcache_hs_backend.capture.turns import (
    SYSTEM_COLUMNS,
    BadRow,
    Chat,
    chat_of,
    kind,
    turns_in_columns,
    turns_in_text,
)  # fmt: skip
from lmcache_hs_backend.dataset.given_ids import MASK_COLUMNS, PADDING, flat, given_mask, ids_of, unpadded
from lmcache_hs_backend.format.request_log import Spans

__all__ = ["MASK_COLUMNS", "SYSTEM_COLUMNS", "BadRow", "EncodedRow", "RowEncoder"]

TURN_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns")
ID_COLUMNS = ("input_ids", "prompt_token_ids")
#: Columns that hold an answer to ``prompt`` in public sets. Answering the prompt anew beside one would be a guess.
ANSWER_COLUMNS = ("response", "responses", "answer", "answers", "output", "chosen", "solution")


@dataclass(frozen=True)
class EncodedRow:
    """A row as tokens.

    ``complete``: it has its answer, and is only read. ``loss_spans``: what to train on; None for a row that is to be
    answered: its answer is. ``cut_from``: how many tokens it had before it was cut; None: it was not. ``remarks``: what
    the chat template makes of it that should be known, by the names of ``left_out.REMARKS``.
    """

    token_ids: list[int]
    complete: bool
    loss_spans: Spans | None
    cut_from: int | None
    column: str
    beside: tuple[str, ...]  # columns that could have been used instead
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Text:
    """Text, and the characters of it that are trained on; ``wanted`` None: it is a prompt to be answered."""

    text: str
    wanted: list[tuple[int, int]] | None
    special: bool  # the tokenizer adds its special tokens: the text has none of a template's


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
        parse_arguments: bool = False,
        today: datetime | None = None,
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
            parse_arguments: Arguments of tool calls that are JSON text become what the text says, as vLLM's server
                has them.
            today: What templates write that write the date; now by default.
        """
        self._tokenizer = tokenizer
        self._max_id = max_id
        self.max_tokens = max_tokens
        self._cut = cut
        self._column = column
        self._prompts_as_turns = prompts_as_turns
        self._arguments = dict(chat_template_kwargs or {})
        self._parse_arguments = parse_arguments
        self._renderer = Renderer(tokenizer, chat_template, today or datetime.now())
        self._finder = TurnFinder(tokenizer, self._renderer)

    @property
    def writes_date(self) -> bool:
        """Whether the chat template has written the date into a row that could have named one (``date_string``)."""
        return self._renderer.writes_date and "date_string" not in self._arguments

    def encode(self, row: object) -> EncodedRow:
        """Raises BadRow."""
        if not isinstance(row, dict):
            raise BadRow(f"the row is {kind(row)}, not an object with columns")
        column, beside = self._choose(row)
        spans: Spans | None
        value = row[column]
        remarks: tuple[str, ...] = ()
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
                if not complete:
                    self._check_answers(row, column)
                ids, spans, remarks = self._conversation(source, complete)
        if not ids:
            raise BadRow(f"{column} is empty: there is no token")
        low, high = min(ids), max(ids)
        if low < 0 or high > self._max_id:
            wrong = low if low < 0 else high
            raise BadRow(f"token id {wrong} is not one of the model's, whose largest is {self._max_id}")
        count = len(ids)
        if self.max_tokens is None or count <= self.max_tokens:
            return EncodedRow(ids, complete, spans, None, column, beside, remarks)
        if not self._cut:
            raise BadRow(
                f"{count:,} tokens, max_model_len {self.max_tokens + 1}: too long (--too-long cut would cut it)"
            )
        if spans is None:
            raise BadRow(
                f"{count:,} tokens, max_model_len {self.max_tokens + 1}: a prompt to be answered cannot be cut"
            )
        kept = tuple((begin, min(end, self.max_tokens)) for begin, end in spans if begin < self.max_tokens)
        return EncodedRow(ids[: self.max_tokens], complete, kept, count, column, beside, remarks)

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
            self._check_answers(row, "prompt")
        return found[0], tuple(found[1:])

    def _check_answers(self, row: dict[str, Any], column: str) -> None:
        """Raises BadRow when a row that is to be answered may have its answer in another column."""
        names = ANSWER_COLUMNS if column == "prompt" else (*ANSWER_COLUMNS, "completion")
        answers = [name for name in names if row.get(name)]
        if answers and self._column is None:
            raise BadRow(
                f"there is {answers[0]!r} beside {column!r}, and how they belong together is not known; use "
                f"'completion' beside 'prompt', or turns that end with the answer under 'messages' (--column {column} "
                f"has the model answer anew)"
            )

    def _source(self, row: dict[str, Any], column: str, value: Any) -> _Text | Chat:
        completion = row.get("completion") if column == "prompt" else None
        if completion is not None and not completion:
            raise BadRow("completion is empty (without one, the model answers the prompt)")
        if isinstance(value, str) and column in TURN_COLUMNS and column != self._column:
            value = turns_in_text(column, value)
        value = turns_in_columns(value)
        if isinstance(value, str):
            if not value:
                raise BadRow(f"{column} is empty")
            if completion is not None and not isinstance(completion, str):
                raise BadRow(f"prompt is text, but completion is {kind(completion)}")
            if not self._prompts_as_turns:
                text = value + (completion or "")
                return _Text(text, None if not completion else [(len(value), len(text))], special=True)
            value = [{"role": "user", "content": value}]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if completion is not None and not isinstance(completion, list | tuple):
            raise BadRow(f"prompt is turns, but completion is {kind(completion)}")
        if not isinstance(value, list | tuple):
            raise BadRow(f"{column} is {kind(value)}, neither turns nor text")
        if not value:
            raise BadRow(f"{column} has no turns")
        return chat_of(row, [*value, *(completion or [])], self._arguments, parse_arguments=self._parse_arguments)

    # -- tokens ------------------------------------------------------------------------------------------

    def _conversation(self, chat: Chat, complete: bool) -> tuple[list[int], Spans | None, tuple[str, ...]]:
        chat, text = self._renderer.text_of(chat, prompt=not complete)
        marked = complete and self._renderer.has_marks(chat)
        wanted = None
        if complete:  # with marks, what they say but for the turns that are not trained on
            wanted = [
                self._finder.find(chat, number, text)
                for number, turn in enumerate(chat.turns)
                if turn["role"] == "assistant" and (number in chat.untrained) == marked
            ]
        _checked(text)
        remarks = left_out(chat, text, lambda other: self._renderer.attempt(other, prompt=not complete))
        if not marked or wanted:
            ids, spans = self._tokens(_Text(text, wanted, special=False))
            if not marked:
                return ids, spans, remarks
        ids, trained = self._renderer.marked(chat)
        return ids, minus(trained, spans or ()) if wanted else trained, remarks

    def _tokens(self, source: _Text) -> tuple[list[int], Spans | None]:
        text = _checked(source.text)
        if source.wanted is None:
            return list(self._tokenizer(text, add_special_tokens=source.special)["input_ids"]), None
        try:
            return token_spans(self._tokenizer, text, source.wanted, special=source.special)
        except ValueError as error:
            raise BadRow(f"which tokens are trained on cannot be determined: {error}") from None


# -- token ids that are given ----------------------------------------------------------------------------


def _is_ids(value: object) -> bool:
    ids = flat(value)
    return bool(ids) and all(type(item) is int for item in ids or ())


def _given_ids(row: dict[str, Any], column: str) -> tuple[list[int], Spans]:
    try:
        ids = ids_of(row[column], column)
        kept = unpadded(len(ids), row.get(PADDING))
        mask = given_mask(row, ids)
    except ValueError as error:
        raise BadRow(str(error)) from None
    return ids[kept], runs([1] * len(ids[kept]) if mask is None else mask[kept])


# -- small things ----------------------------------------------------------------------------------------


def _checked(text: str) -> str:
    """Raises BadRow for text that is no Unicode: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}: half of a character that was cut in two"
        ) from None
    return text


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:12])) or "no column at all"
