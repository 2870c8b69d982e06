"""Nothing that a row has is left out, guessed or written otherwise without a word."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from lmcache_hs_backend.capture.encode import BadRow, EncodedRow, RowEncoder
from lmcache_hs_backend.capture.spans import token_spans
from tests.capture import templates

TOOLS = [{"type": "function", "function": {"name": "tide_at", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = {"role": "system", "content": "You are a pilot."}
ASK = {"role": "user", "content": "Can the ferry leave now?"}
SAY = {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "tide_at", "content": "1.9 m"}


def call(arguments: Any = None, name: str = "tide_at") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments or {"harbour": "Hull"}}}


def calling(*calls: Any, content: str | None = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def encode(tokenizer: Any, row: dict[str, Any], template: str | None = templates.CHATML, **more: Any) -> EncodedRow:
    return RowEncoder(tokenizer, max_id=1 << 20, chat_template=template, **more).encode(row)


def text(tokenizer: Any, row: dict[str, Any], template: str = templates.CHATML, **more: Any) -> str:
    return str(tokenizer.decode(encode(tokenizer, row, template, **more).token_ids))


def trained(tokenizer: Any, row: dict[str, Any], template: str = templates.CHATML) -> list[str]:
    got = encode(tokenizer, row, template)
    return [tokenizer.decode(got.token_ids[begin:end]) for begin, end in got.loss_spans or ()]


# -- what the template leaves out ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        (templates.CHATML, [ASK, calling(call()), RESULT, SAY], "leaves out call 1 of turn 2, 'tide_at'"),
        (templates.CHATML, [ASK, calling(call(), content=None)], "leaves out call 1 of turn 2, 'tide_at'"),
        (
            templates.CHATML,
            [ASK, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
            "leaves out call 1 of turn 2, 'f'",
        ),
        (templates.FORGETFUL, [ASK, calling(call(), call({"harbour": "Rye"}))], "leaves out call 2 of turn 2"),
        (templates.FORGETFUL, [SYSTEM, ASK, SAY], "leaves out turn 1, the system's"),
        (templates.FORGETFUL, [ASK, calling(call()), RESULT, SAY], "leaves out turn 3, the tool's"),
    ],
)
def test_a_turn_or_a_call_that_the_template_leaves_out_is_a_bad_row(
    tokenizer: Any, template: str, turns: list[Any], reason: str
) -> None:
    with pytest.raises(BadRow, match=reason):
        encode(tokenizer, {"messages": turns}, template)


def test_a_system_that_the_template_has_elsewhere_is_not_left_out(tokenizer: Any) -> None:
    assert "You are a pilot." in text(tokenizer, {"messages": [SYSTEM, ASK]}, templates.FORGETFUL)


@pytest.mark.parametrize(
    ("template", "row", "remarks"),
    [
        (templates.CHATML, {"messages": [ASK, SAY]}, ()),
        (templates.CHATML, {"messages": [ASK, SAY], "tools": TOOLS}, ("tools",)),
        (templates.CHATML, {"messages": [ASK], "tools": TOOLS}, ("tools",)),
        (templates.CHATML, {"messages": [ASK, {**SAY, "reasoning_content": "It is high."}]}, ("reasoning",)),
        (templates.FORGETFUL, {"messages": [ASK, calling(call(), content="Let me look.")]}, ("content",)),
        (templates.QWEN3, {"messages": [ASK, calling(call('{"harbour": "Hull"}'))], "tools": TOOLS}, ("arguments",)),
        (templates.QWEN3, {"messages": [ASK, calling(call()), RESULT, SAY], "tools": TOOLS}, ()),
        (templates.QWEN3, {"messages": [ASK, {**SAY, "reasoning_content": "It is high."}]}, ()),
        (
            templates.QWEN3,
            {"messages": [ASK, {**SAY, "reasoning_content": "It is high."}, ASK, {**SAY, "content": "No."}]},
            ("reasoning",),
        ),
    ],
)
def test_what_else_the_template_leaves_out_is_remarked(
    tokenizer: Any, template: str, row: dict[str, Any], remarks: tuple[str, ...]
) -> None:
    assert encode(tokenizer, row, template).remarks == remarks


def test_the_answer_of_a_tool_is_never_trained_on(tokenizer: Any) -> None:
    """Where it stands within the assistant's turn, the row is bad: the spans would have to leave it out."""
    turns = [ASK, calling(call(), content="So yes."), RESULT, {**SAY, "content": "Go."}]
    with pytest.raises(BadRow, match="which text of turn 2 is the assistant's does not follow"):
        encode(tokenizer, {"messages": turns}, templates.ANSWER_WITHIN)


def test_null_content_is_never_the_word_none(tokenizer: Any) -> None:
    template = templates.CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")
    row = {"messages": [ASK, calling(call(), content=None)]}
    assert "None" not in text(tokenizer, row, template)
    assert trained(tokenizer, row, template)[0].startswith('[{"id"')


# -- calls and tools in their shapes ---------------------------------------------------------------------


def test_arguments_that_are_json_text_are_taken_as_given_or_for_what_they_say(tokenizer: Any) -> None:
    row = {"messages": [ASK, calling(call('{"harbour": "Hull"}'))], "tools": TOOLS}
    given = tokenizer.apply_chat_template(row["messages"], tools=TOOLS, chat_template=templates.QWEN3, tokenize=False)
    assert text(tokenizer, row, templates.QWEN3) == given
    assert r"{\"harbour\": \"Hull\"}" in given
    parsed = encode(tokenizer, row, templates.QWEN3, parse_arguments=True)
    assert '"arguments": {"harbour": "Hull"}' in tokenizer.decode(parsed.token_ids)
    assert parsed.remarks == ()
    row["messages"] = [ASK, calling(call("not json"))]
    with pytest.raises(BadRow, match="turn 2 has a tool call whose arguments are text, but not a JSON object"):
        encode(tokenizer, row, templates.QWEN3, parse_arguments=True)


def test_calls_and_tools_may_be_json_in_a_text(tokenizer: Any) -> None:
    import json

    want = text(tokenizer, {"messages": [ASK, calling(call())], "tools": TOOLS}, templates.QWEN3)
    turn = {**calling(), "tool_calls": json.dumps([call()])}
    for tools in (json.dumps(TOOLS), [json.dumps(TOOLS[0])]):
        assert text(tokenizer, {"messages": [ASK, turn], "tools": tools}, templates.QWEN3) == want


def test_empty_tool_calls_are_none_for_templates_that_ask_for_the_key(tokenizer: Any) -> None:
    template = templates.CHATML.replace("{{ m.content }}", "{{ 'CALLS' if 'tool_calls' in m else m.content }}")
    assert "CALLS" not in text(tokenizer, {"messages": [ASK, {**SAY, "tool_calls": []}]}, template)


@pytest.mark.parametrize("calls", ["no json", "5", {"name": "f"}, [1], ["f"]])
def test_calls_that_are_none_are_a_bad_row(tokenizer: Any, calls: Any) -> None:
    with pytest.raises(BadRow, match=r"turn 2 has tool_calls that are .*, not a list of calls"):
        encode(tokenizer, {"messages": [ASK, {**SAY, "tool_calls": calls}]}, templates.QWEN3)


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "tide_at", "arguments": {"harbour": "Hull"}}',
        '{"name": "tide_at", "parameters": {"harbour": "Hull"}}',
        '[{"type": "function", "function": {"name": "tide_at", "arguments": {"harbour": "Hull"}}}]',
        {"name": "tide_at", "arguments": {"harbour": "Hull"}},
    ],
)
def test_a_sharegpt_call_keeps_its_arguments_in_every_shape(tokenizer: Any, said: Any) -> None:
    turns = [{"from": "human", "value": "Tide?"}, {"from": "function_call", "value": said}]
    assert '{"name": "tide_at", "arguments": {"harbour": "Hull"}}' in text(
        tokenizer, {"conversations": turns}, templates.QWEN3
    )


@pytest.mark.parametrize("said", ['{"name": "f", "input": {}}', '{"name": "f", "arguments": 1, "parameters": 2}', "[]"])
def test_a_sharegpt_call_with_a_part_that_is_not_known_is_a_bad_row(tokenizer: Any, said: str) -> None:
    with pytest.raises(BadRow, match="turn 1 is a function call, but not JSON with a name and arguments"):
        encode(tokenizer, {"conversations": [{"from": "function_call", "value": said}]}, templates.QWEN3)


# -- contents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [templates.PARTS, templates.TEXT_OR_PARTS])
def test_parts_reach_a_template_that_reads_parts(tokenizer: Any, template: str) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "When"}, {"type": "text", "text": " is it?"}]}
    row = {"messages": [parts, {"role": "assistant", "content": [{"type": "text", "text": "Six."}]}]}
    want = tokenizer.apply_chat_template(row["messages"], chat_template=template, tokenize=False)
    assert "When is it?" in want
    assert text(tokenizer, row, template) == want
    assert trained(tokenizer, row, template) == ["Six.<|im_end|>"]


def test_text_reaches_a_template_that_reads_parts_only(tokenizer: Any) -> None:
    row = {"messages": [SYSTEM, ASK, SAY, ASK, SAY]}
    assert text(tokenizer, row, templates.PARTS) == text(tokenizer, row, templates.CHATML)
    assert trained(tokenizer, row, templates.PARTS) == ["Yes.<|im_end|>"] * 2


def test_parts_are_lines_for_a_template_that_reads_text(tokenizer: Any) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]}
    assert "user\na\nb<|im_end|>" in text(tokenizer, row)


def test_nothing_is_trained_on_where_an_answer_has_no_character(tokenizer: Any) -> None:
    """Not the token either that the place lies in: three newlines are one."""
    assert token_spans(tokenizer, "tide\n\n\nout", [(5, 5)], special=False)[1] == ()
    assert token_spans(tokenizer, "tide\n\n\nout", [(5, 6)], special=False)[1] != ()


def test_turns_may_be_one_list_for_each_key(tokenizer: Any) -> None:
    """``datasets`` keeps a Sequence of objects like that."""
    row = {"conversations": {"from": ["human", "gpt"], "value": ["When?", "Six."]}}
    turns = [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "Six."}]
    assert encode(tokenizer, row) == encode(tokenizer, {"conversations": turns})


# -- what is trained on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [templates.CHATML, templates.CHATML_MARKED])
@pytest.mark.parametrize("untrained", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}])
def test_turns_that_say_so_are_not_trained_on(tokenizer: Any, template: str, untrained: dict[str, Any]) -> None:
    first = {**SAY, "content": "Perhaps.", **untrained}
    row = {"messages": [ASK, first, ASK, {**SAY, "weight": 1}]}
    assert trained(tokenizer, row, template) == ["Yes.<|im_end|>"]
    assert trained(tokenizer, {**row, "system": "You are a pilot."}, template) == ["Yes.<|im_end|>"]


def test_a_weight_that_is_no_mask_is_a_bad_row(tokenizer: Any) -> None:
    with pytest.raises(BadRow, match=r"turn 2 has a weight of 0\.5"):
        encode(tokenizer, {"messages": [ASK, {**SAY, "weight": 0.5}]})


@pytest.mark.parametrize("name", ["response", "chosen", "answer", "completion"])
def test_an_answer_beside_turns_that_have_none_is_not_passed_over(tokenizer: Any, name: str) -> None:
    row: dict[str, Any] = {"messages": [ASK], name: "Yes."}
    with pytest.raises(BadRow, match=f"there is '{name}' beside 'messages'.*--column messages has the model answer"):
        encode(tokenizer, row)
    assert not encode(tokenizer, row, column="messages").complete
    assert encode(tokenizer, {**row, "messages": [ASK, SAY]}).complete


@pytest.mark.parametrize("prompt", ["When?", [ASK]])
@pytest.mark.parametrize("completion", ["", []])
def test_an_empty_completion_is_not_taken_for_none(tokenizer: Any, prompt: Any, completion: Any) -> None:
    with pytest.raises(BadRow, match="completion is empty"):
        encode(tokenizer, {"prompt": prompt, "completion": completion})


# -- token ids that are given ----------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 1, 0]])
def test_padding_is_no_part_of_a_row(tokenizer: Any, mask: list[int], nested: bool) -> None:
    ids, labels = iter([5, 6, 7]), iter([-100, 6, 7])
    row = {
        "input_ids": [next(ids) if one else 2 for one in mask],
        "labels": [next(labels) if one else -100 for one in mask],
        "attention_mask": mask,
    }
    got = encode(tokenizer, {name: [value] for name, value in row.items()} if nested else row)
    assert (got.token_ids, got.loss_spans) == ([5, 6, 7], ((1, 3),))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"attention_mask": [1, 0, 1]}, "zeros between its ones"),
        ({"attention_mask": [1, 1]}, "3 token ids, but an attention_mask of 2"),
        ({"attention_mask": [1, 1, 5]}, "attention_mask has a value other than 0 and 1"),
        ({"attention_mask": [0, 0, 0]}, "input_ids is empty"),
        ({"labels": [6, 7, -100]}, "label 6 at token 0 is neither -100 nor the token's id 5: moved by one"),
        ({"loss_mask": [1, 1, 1], "labels": [1]}, "3 token ids, but labels has 1"),
        ({"loss_mask": "111"}, "but loss_mask is '111'"),
    ],
)
def test_ids_whose_columns_contradict_them_are_a_bad_row(tokenizer: Any, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        encode(tokenizer, {"input_ids": [5, 6, 7], **row})


def test_a_token_is_trained_on_where_all_masks_say_so(tokenizer: Any) -> None:
    """TRL has completion_mask and assistant_masks; plain language modelling has labels that are the ids."""
    row = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0], "labels": [5, 6, 7]}
    assert encode(tokenizer, row).loss_spans == ((1, 2),)


# -- dates -----------------------------------------------------------------------------------------------


def test_a_template_that_writes_the_date_gives_the_same_row_on_another_day(tokenizer: Any) -> None:
    row = {"messages": [ASK, SAY]}
    made = RowEncoder(tokenizer, max_id=1 << 20, chat_template=templates.DATED, today=datetime(2026, 1, 31))
    assert not made.writes_date
    assert tokenizer.decode(made.encode(row).token_ids).startswith("Today: 31 Jan 2026<")
    assert made.writes_date
    today = tokenizer.apply_chat_template(row["messages"], chat_template=templates.DATED, tokenize=False)
    assert text(tokenizer, row, templates.DATED) == today
    plain = RowEncoder(tokenizer, max_id=1 << 20, chat_template=templates.CHATML)
    plain.encode(row)
    assert not plain.writes_date


# -- words -----------------------------------------------------------------------------------------------


def test_a_reason_is_one_line_that_can_be_printed(tokenizer: Any) -> None:
    template = "{{ raise_exception('turn\n' + messages[0].content) }}"
    with pytest.raises(BadRow) as caught:
        encode(tokenizer, {"messages": [{"role": "user", "content": "a \ud83d b\n\nc"}]}, template)
    reason = str(caught.value)
    assert "\n" not in reason
    assert reason.encode() == b"the chat template refuses the row: turn a \\ud83d b c"
