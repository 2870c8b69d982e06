"""One small input for each kind of fault in data sets, and what it has to become. The counts are SmolLM2's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_hs_backend.capture.encode import BadRow, EncodedRow, RowEncoder
from tests.capture.conftest import CASES, LARGEST_ID, encode_file

GOOD = 44


def encoder(tokenizer: Any, **choices: Any) -> RowEncoder:
    return RowEncoder(tokenizer, max_id=LARGEST_ID, **choices)


def case(tokenizer: Any, name: str, template: str = "", **choices: Any) -> list[EncodedRow | str]:
    if template:
        choices["chat_template"] = (CASES / template).read_text()
    return encode_file(encoder(tokenizer, **choices), CASES / name)


def good(found: list[EncodedRow | str]) -> list[EncodedRow]:
    assert all(isinstance(row, EncodedRow) for row in found), found
    return [row for row in found if isinstance(row, EncodedRow)]


def spans(rows: list[EncodedRow]) -> list[Any]:
    return [row.loss_spans for row in rows]


def test_turns_win_over_a_prompt_beside_them(tokenizer: Any) -> None:
    rows = good(case(tokenizer, "rows_ultrachat_like.jsonl"))
    assert [(len(row.token_ids), row.complete, row.column, row.beside) for row in rows] == [
        (71, True, "messages", ("prompt",)),
        (47, True, "messages", ("prompt",)),
    ]
    for row in rows:
        assert tokenizer.decode(row.token_ids).startswith("<|im_start|>")
    assert "Why that one?" in tokenizer.decode(rows[0].token_ids)


def test_tools_calls_and_reasoning_reach_the_template(tokenizer: Any) -> None:
    [row] = good(case(tokenizer, "rows_tools_reasoning.jsonl", "template_tools_reasoning.jinja"))
    assert len(row.token_ids) == 166
    assert row.complete
    text = tokenizer.decode(row.token_ids)
    for part in (
        "Tools:",
        '<tool_call>{"name": "tide_at", "arguments": {"harbour": "Lerwick"}}</tool_call>',
        "tool tide_at",
        "<think>The draught is 1.2 m, so 1.9 m is enough.</think>",
    ):
        assert part in text
    trained = [tokenizer.decode(row.token_ids[begin:end]) for begin, end in row.loss_spans or ()]
    assert len(trained) == 2
    assert trained[0].lstrip().startswith("<tool_call>")
    assert trained[1].lstrip().startswith("<think>")
    assert all(part.endswith("<|im_end|>") for part in trained)


def test_roles_of_sharegpt_and_a_system_beside_the_turns(tokenizer: Any) -> None:
    one, other, sailor = good(case(tokenizer, "rows_sharegpt_roles.jsonl"))
    assert one == other
    assert (len(one.token_ids), one.complete) == (44, True)
    assert len(sailor.token_ids) == 34
    assert tokenizer.decode(sailor.token_ids).startswith("<|im_start|>system\nAnswer as a sailor would.<|im_end|>")


def test_an_answer_may_begin_with_newlines(tokenizer: Any) -> None:
    rows = good(case(tokenizer, "rows_answer_begins_with_newlines.jsonl"))
    assert [len(row.token_ids) for row in rows] == [67, 45, 39]
    assert spans(rows) == [((35, 41), (54, 66)), ((34, 44),), ((33, 38),)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bad_empty_conversation.jsonl", "conversations has no turns"),
        ("bad_empty_prompt.jsonl", "prompt is empty"),
        ("bad_empty_ids.jsonl", "input_ids is empty"),
        ("bad_latin1.jsonl", "not UTF-8"),
        ("bad_lone_surrogate.jsonl", "lone surrogate, U+D83D"),
        ("bad_id_outside_vocabulary.jsonl", "token id 7000000 is not one of the model's, whose largest is 49151"),
    ],
)
def test_a_bad_row_is_named_and_the_others_are_read(tokenizer: Any, name: str, reason: str) -> None:
    first, bad, last = case(tokenizer, name)
    assert isinstance(bad, str)
    assert reason in bad
    assert [len(row.token_ids) for row in good([first, last])] == [GOOD, GOOD]


def test_the_templates_own_words_are_the_reason(tokenizer: Any) -> None:
    first, bad, last = case(tokenizer, "bad_roles_do_not_alternate.jsonl", "template_alternating.jinja")
    assert isinstance(bad, str)
    assert "turn 2 must be the assistant's" in bad
    assert [len(row.token_ids) for row in good([first, last])] == [23, 23]


@pytest.mark.parametrize("name", ["bad_bom.jsonl", "bad_json_array.json"])
def test_what_other_programs_write_is_read(tokenizer: Any, name: str) -> None:
    assert [len(row.token_ids) for row in good(case(tokenizer, name))] == [GOOD, GOOD]


def test_a_text_part_is_its_text_and_any_other_part_a_bad_row(tokenizer: Any) -> None:
    assert [len(row.token_ids) for row in good(case(tokenizer, "bad_content_parts.jsonl"))] == [GOOD, 39, GOOD]
    row = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    with pytest.raises(BadRow, match="turn 1 has a content part of type 'image_url'"):
        encoder(tokenizer).encode(row)


def test_a_row_longer_than_the_context_is_left_out_or_cut(tokenizer: Any) -> None:
    name = "rows_longer_than_context.jsonl"
    _, bad, _ = case(tokenizer, name, max_tokens=63)
    assert isinstance(bad, str)
    assert "210 tokens, max_model_len 64" in bad
    _, cut, _ = good(case(tokenizer, name, max_tokens=63, cut=True))
    assert (len(cut.token_ids), cut.cut_from, cut.loss_spans) == (63, 210, ())


def test_arguments_of_the_template_come_from_everywhere_and_a_rows_own_win(tokenizer: Any) -> None:
    template = "{% if enable_thinking is defined %}{{ enable_thinking }} {% endif %}{{ messages[0].content }}"
    made = encoder(tokenizer, chat_template=template, chat_template_kwargs={"enable_thinking": False})
    row: dict[str, Any] = {"messages": [{"role": "user", "content": "tide"}]}
    assert tokenizer.decode(made.encode(row).token_ids) == "False tide"
    row["chat_template_kwargs"] = {"enable_thinking": True}
    assert tokenizer.decode(made.encode(row).token_ids) == "True tide"
    row["chat_template_kwargs"] = '{"enable_thinking": 7}'
    assert tokenizer.decode(made.encode(row).token_ids) == "7 tide"


ASK = {"role": "user", "content": "When?"}
SAY = {"role": "assistant", "content": "At six."}


@pytest.mark.parametrize("role", ["human", "Human", "USER", "prompter", "user"])
@pytest.mark.parametrize("answer", ["gpt", "GPT", "chatgpt", "bard", "bing", "claude", "gpt-4", "gpt4", "model", "bot"])
def test_every_common_spelling_of_a_role(tokenizer: Any, role: str, answer: str) -> None:
    want = encoder(tokenizer).encode({"messages": [ASK, SAY]})
    turns = [{"from": role, "value": "When?"}, {"from": answer, "value": "At six."}]
    for name in ("conversations", "conversation", "messages", "dialog"):
        got = encoder(tokenizer).encode({name: turns})
        assert (got.token_ids, got.loss_spans) == (want.token_ids, want.loss_spans)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "turn 1 has the role 'narrator'"),
        ({"messages": [ASK, "At six."]}, "turn 2 is text, not an object"),
        ({"messages": [{"content": "x"}]}, "turn 1 has no role"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "turn 2, the assistant's, has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content that is a number"),
        ({"messages": "When?", "column": 1}, "messages is text, not a list of turns"),
        ({"text": "x"}, "none of the columns .* the row has 'text'"),
        ({}, "no column at all"),
        ([ASK], "the row is a list"),
        ({"prompt": "When?", "response": "At six."}, "'response' beside 'prompt'"),
        ({"prompt": [ASK], "chosen": [SAY]}, "'chosen' beside 'prompt'"),
        ({"messages": [ASK, SAY], "functions": [{"name": "f"}]}, "takes tools, under 'tools'"),
        ({"messages": [ASK, SAY], "tools": "no json"}, "tools is text, but no JSON"),
        ({"messages": [{"role": "system", "content": "a"}, ASK], "system": "b"}, "they differ"),
        ({"conversations": [{"from": "function_call", "value": "call me"}]}, "turn 1 is a function call"),
        ({"input_ids": [1, 2.5]}, "2.5, which is no token id"),
        ({"input_ids": [1, -1]}, "token id -1"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 token ids, but loss_mask has 1"),
    ],
)
def test_what_cannot_be_expressed_is_a_bad_row(tokenizer: Any, row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        encoder(tokenizer).encode(row)


def test_a_list_under_prompt_is_turns_and_a_completion_is_its_answer(tokenizer: Any) -> None:
    asked = encoder(tokenizer).encode({"prompt": [ASK]})
    assert (asked.complete, asked.loss_spans) == (False, None)
    assert tokenizer.decode(asked.token_ids).endswith("<|im_start|>assistant\n")
    want = encoder(tokenizer).encode({"messages": [ASK, SAY]})
    for completion in ("At six.", [SAY]):
        got = encoder(tokenizer).encode({"prompt": [ASK], "completion": completion})
        assert (got.token_ids, got.loss_spans) == (want.token_ids, want.loss_spans)


def test_text_under_prompt_is_raw_or_a_turn(tokenizer: Any) -> None:
    raw = encoder(tokenizer).encode({"prompt": "When?"})
    assert raw.token_ids == tokenizer("When?")["input_ids"]
    assert not raw.complete
    turn = encoder(tokenizer, prompts_as_turns=True).encode({"prompt": "When?"})
    assert turn.token_ids == encoder(tokenizer).encode({"messages": [ASK]}).token_ids
    both = encoder(tokenizer).encode({"prompt": "The tide", "completion": " comes in."})
    assert tokenizer.decode(both.token_ids) == "The tide comes in."
    assert both.loss_spans == ((len(tokenizer("The tide")["input_ids"]), len(both.token_ids)),)


def test_turns_that_are_json_in_a_text_are_turns(tokenizer: Any) -> None:
    want = encoder(tokenizer).encode({"messages": [ASK, SAY]})
    got = encoder(tokenizer).encode({"messages": json.dumps([ASK, SAY])})
    assert (got.token_ids, got.loss_spans) == (want.token_ids, want.loss_spans)


def test_a_named_column_is_used_whatever_else_there_is(tokenizer: Any) -> None:
    row = {"messages": [ASK, SAY], "prompt": "When?", "chosen": [ASK, SAY, ASK]}
    assert encoder(tokenizer, column="prompt").encode(row).token_ids == tokenizer("When?")["input_ids"]
    assert not encoder(tokenizer, column="chosen").encode(row).complete
    with pytest.raises(BadRow, match="no column 'other'"):
        encoder(tokenizer, column="other").encode(row)


def test_token_ids_bring_their_mask(tokenizer: Any) -> None:
    made = encoder(tokenizer)
    assert made.encode({"input_ids": [5, 6, 7]}).loss_spans == ((0, 3),)
    assert made.encode({"input_ids": [[5, 6, 7]], "loss_mask": [[0, 1, 1]]}).loss_spans == ((1, 3),)
    assert made.encode({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}).loss_spans == ((1, 2),)
    assert made.encode({"input_ids": [5, 6], "assistant_masks": [0, 0]}).loss_spans == ()


def test_a_sharegpt_call_becomes_a_tool_call(tokenizer: Any) -> None:
    turns = [
        {"from": "human", "value": "Tide?"},
        {"from": "function_call", "value": '{"name": "tide_at", "arguments": {"harbour": "Lerwick"}}'},
        {"from": "observation", "value": "1.9 m"},
        {"from": "gpt", "value": "1.9 m."},
    ]
    row = {"conversations": turns, "tools": "[]"}
    template = (CASES / "template_tools_reasoning.jinja").read_text()
    text = tokenizer.decode(encoder(tokenizer, chat_template=template).encode(row).token_ids)
    assert '<tool_call>{"name": "tide_at", "arguments": {"harbour": "Lerwick"}}</tool_call>' in text
    assert "<|im_start|>tool\n" in text


def test_the_cases_are_all_there() -> None:
    assert len(list(Path(CASES).glob("bad_*"))) == 10
