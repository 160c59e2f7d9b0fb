from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.data.formats import (
    Chat,
    Completion,
    Instruction,
    Text,
    Tokens,
    detect_format,
    parse_row,
)
from packhorse.data.sources import Origin
from packhorse.errors import DataError

HERE = Origin(path=Path("train.jsonl"), line=7)
TURN = {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "a"}, "text"),
        ({"messages": []}, "messages"),
        ({"conversations": []}, "conversations"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b", "text": "all"}, "instruction"),
        ({"input_ids": [1]}, "tokens"),
        ({"text": "a", "messages": []}, "messages"),
    ],
)
def test_formats_are_told_by_their_fields(fields: dict[str, object], expected: str) -> None:
    assert detect_format(fields, HERE) == expected


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"Text": "a"}, "text"),
        ({"message": []}, "messages"),
        ({"instruction": "a", "response": "b"}, "instruction"),
        ({"conversation": []}, "conversations"),
        ({"prompt": "a", "completions": "b"}, "prompt_completion"),
        ({"input_id": [1]}, "tokens"),
    ],
)
def test_an_unknown_shape_names_the_nearest(fields: dict[str, object], nearest: str) -> None:
    with pytest.raises(DataError) as caught:
        detect_format(fields, HERE)
    assert caught.value.where == "train.jsonl:7"
    assert f"nearest is {nearest}" in str(caught.value)
    assert f'"{next(iter(fields))}"' in str(caught.value)


def test_rows_become_examples() -> None:
    assert parse_row({"text": "a"}, "text", HERE) == Text(text="a")
    assert parse_row({"prompt": "a", "completion": "b"}, "prompt_completion", HERE) == Completion(
        prompt="a", completion="b"
    )
    assert parse_row(
        {"instruction": "a", "input": None, "output": "c"}, "instruction", HERE
    ) == Instruction(instruction="a", input="", output="c", system="")
    assert parse_row({"input_ids": [3, 4]}, "tokens", HERE) == Tokens(
        input_ids=(3, 4), labelled=None
    )


def test_conversations_become_messages() -> None:
    chat = parse_row(
        {
            "system": "be kind",
            "conversations": [
                {"from": "human", "value": "hello"},
                {"from": "gpt", "value": "hi"},
                {"role": "user", "content": "bye"},
            ],
        },
        "conversations",
        HERE,
    )
    assert isinstance(chat, Chat)
    assert [(turn["role"], turn["content"]) for turn in chat.messages] == [
        ("system", "be kind"),
        ("user", "hello"),
        ("assistant", "hi"),
        ("user", "bye"),
    ]


def test_text_parts_are_joined_and_tool_calls_need_no_content() -> None:
    chat = parse_row(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}] * 2},
                {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            ],
            "tools": '[{"name": "f"}]',
        },
        "messages",
        HERE,
    )
    assert isinstance(chat, Chat)
    assert [turn["content"] for turn in chat.messages] == ["aa", ""]
    assert chat.tools == ({"name": "f"},)


def test_prompts_of_messages_are_counted() -> None:
    chat = parse_row(
        {"prompt": [{"role": "user", "content": "a"}, TURN], "completion": [TURN]},
        "prompt_completion",
        HERE,
    )
    assert isinstance(chat, Chat)
    assert (len(chat.messages), chat.num_prompt_messages) == (3, 2)


def test_labels_and_padding_of_given_tokens() -> None:
    row = {
        "input_ids": [0, 5, 6, 7, 0, 0],
        "labels": [-100, -100, 6, 7, -100, -100],
        "attention_mask": [0, 1, 1, 1, 0, 0],
    }
    assert parse_row(row, "tokens", HERE) == Tokens(
        input_ids=(5, 6, 7), labelled=(False, True, True)
    )


@pytest.mark.parametrize(
    ("row_format", "fields", "words"),
    [
        ("text", {"text": 3}, '"text" must be a string, not int'),
        ("text", {"text": None}, "not null"),
        ("text", {"text": "bad \ud800"}, "surrogate"),
        ("text", {"messages": [TURN]}, "looks like messages"),
        ("text", {"texts": "a"}, "nearest format is text"),
        ("messages", {"messages": []}, "empty"),
        ("messages", {"messages": "hello"}, "a list, not str"),
        ("messages", {"messages": ["hello"]}, "messages[0] must be an object"),
        ("messages", {"messages": [{"content": "a"}]}, 'no "role"'),
        ("messages", {"messages": [TURN, {"role": "user"}]}, 'messages[1] has no "content"'),
        ("messages", {"messages": [{"role": "robot", "content": ""}]}, 'unknown role "robot"'),
        ("messages", {"messages": [{"role": 3, "content": ""}]}, "unknown role 3"),
        ("messages", {"messages": [{"role": [], "content": ""}]}, "unknown role []"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "not null"),
        ("messages", {"messages": [{"from": "human", "value": "a"}]}, "format conversations"),
        ("messages", {"messages": [{**TURN, "weight": 0}]}, "weight"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "only text is read",
        ),
        ("messages", {"messages": [TURN], "tools": "[{"}, '"tools" is broken JSON'),
        ("conversations", {"conversations": []}, "empty"),
        ("conversations", {"conversations": [], "system": "x"}, "empty"),
        ("conversations", {"conversations": [{"from": "bot", "value": "a"}]}, 'unknown role "bot"'),
        ("conversations", {"conversations": [{"from": "human"}]}, 'no "value"'),
        ("prompt_completion", {"prompt": "a"}, 'needs "completion"'),
        ("prompt_completion", {"prompt": "a", "completion": [TURN]}, '"prompt" must be a list'),
        ("prompt_completion", {"prompt": [], "completion": [TURN]}, "empty"),
        ("instruction", {"instruction": "a", "output": 1}, '"output" must be a string'),
        (
            "instruction",
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "history",
        ),
        ("tokens", {"input_ids": [1, "a"]}, "input_ids[1] must be an integer"),
        ("tokens", {"input_ids": [True]}, "must be an integer, not bool"),
        ("tokens", {"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries"),
        ("tokens", {"input_ids": [1, 2], "labels": [2, -100]}, "labels[0] is 2"),
        ("tokens", {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "in the middle"),
    ],
)
def test_wrong_rows_are_refused_with_their_place(
    row_format: str, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse_row(fields, row_format, HERE)  # type: ignore[arg-type] parametrised
    assert words in str(caught.value)
    assert "train.jsonl:7" in str(caught.value)
