"""The shapes a row can have, and what each means. In: rows with named fields. Out: examples.

    text               text                                     loss on every token
    messages           messages: [{role, content}], tools       chat template, loss on the assistant
    prompt_completion  prompt, completion (texts or messages)   loss on the completion
    instruction        instruction, input, output, system       loss on the output
    conversations      conversations: [{from, value}], system   as messages
    tokens             input_ids, labels, attention_mask        as given

A row that has the fields of several formats is the most specific one, in the order of `FORMATS`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, assert_never

from packhorse.data.sources import Origin
from packhorse.data.values import IGNORED_LABEL, is_list, is_object
from packhorse.errors import DataError

RowFormat = Literal[
    "messages", "conversations", "prompt_completion", "instruction", "tokens", "text"
]
DataFormat = Literal[
    "auto", "text", "messages", "prompt_completion", "instruction", "conversations", "tokens"
]
FORMATS: Final[Mapping[RowFormat, tuple[str, ...]]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "tokens": ("input_ids",),
    "text": ("text",),
}
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    **{role: role for role in ROLES},
}

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A stretch of a document; every token is learnt."""

    text: str
    starts: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Turns for the chat template; no turn before `num_prompt_messages` carries loss."""

    messages: tuple[Message, ...]
    tools: tuple[object, ...] = ()
    num_prompt_messages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A text to continue, and how it goes on."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A task, perhaps with an input, and its answer."""

    instruction: str
    input: str
    output: str
    system: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A row tokenised elsewhere; `labelled` is None where it came without labels."""

    input_ids: tuple[int, ...]
    labelled: tuple[bool, ...] | None


Example = Text | Chat | Completion | Instruction | Tokens


def detect_format(fields: Mapping[str, object], origin: Origin) -> RowFormat:
    """Name the format that a row has the fields of.

    Raises:
        DataError: none fits; names the fields found and the nearest format.
    """
    for row_format, keys in FORMATS.items():
        if all(key in fields for key in keys):
            return row_format
    nearest = find_nearest_format(fields)
    raise DataError(
        f"the row fits no data format; its fields are {_list_names(fields)}",
        where=str(origin),
        fix=f"nearest is {nearest}, which needs {_list_names(FORMATS[nearest])}; rename the fields",
    )


def find_nearest_format(fields: Mapping[str, object]) -> RowFormat:
    """Find the format whose field names resemble the row's most."""

    def likeness(keys: Sequence[str]) -> float:
        best = [
            max(
                (difflib.SequenceMatcher(None, key, name.lower()).ratio() for name in fields),
                default=0.0,
            )
            for key in keys
        ]
        return sum(best) / len(best)

    return max(FORMATS, key=lambda row_format: likeness(FORMATS[row_format]))


def parse_row(fields: Mapping[str, object], row_format: RowFormat, origin: Origin) -> Example:
    """Read a row as `row_format`.

    Raises:
        DataError: a field is missing or has the wrong type, a chat is empty or has an unknown role.
    """
    missing = [key for key in FORMATS[row_format] if key not in fields]
    if missing:
        fitting = [name for name, keys in FORMATS.items() if all(key in fields for key in keys)]
        raise DataError(
            f"a row of format {row_format} needs {_list_names(missing)}; its fields are "
            f"{_list_names(fields)}",
            where=str(origin),
            fix=f"this row looks like {fitting[0]}; give each file one format"
            if fitting
            else f"the nearest format is {find_nearest_format(fields)}; rename the fields",
        )
    match row_format:
        case "text":
            return Text(text=_read_text(fields, "text", origin))
        case "messages":
            return Chat(
                messages=_read_messages(fields["messages"], "messages", origin),
                tools=_read_tools(fields.get("tools"), origin),
            )
        case "conversations":
            return _read_conversation(fields, origin)
        case "prompt_completion":
            return _read_completion(fields, origin)
        case "instruction":
            if fields.get("history"):
                raise DataError(
                    "an instruction row with earlier turns (history) is not read",
                    where=str(origin),
                    fix="write the turns as messages",
                )
            return Instruction(
                instruction=_read_text(fields, "instruction", origin),
                input=_read_optional_text(fields, "input", origin),
                output=_read_text(fields, "output", origin),
                system=_read_optional_text(fields, "system", origin),
            )
        case "tokens":
            return _read_tokens(fields, origin)
        case _:
            assert_never(row_format)


def _list_names(names: Mapping[str, object] | Sequence[str]) -> str:
    shown = [json.dumps(name) for name in list(names)[:8]]
    return ", ".join(shown) + (", ..." if len(names) > 8 else "") if shown else "none"


def _wrong_type(field: str, value: object, wanted: str, origin: Origin) -> DataError:
    found = "null" if value is None else type(value).__name__
    return DataError(f"{field} must be {wanted}, not {found}", where=str(origin))


def _check_text(value: object, field: str, origin: Origin) -> str:
    if not isinstance(value, str):
        raise _wrong_type(field, value, "a string", origin)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{field} holds half of a surrogate pair, which is no character",
                where=f"{origin}, character {error.start}",
                fix="write the text again with its full characters",
            ) from error
    return value


def _read_text(fields: Mapping[str, object], key: str, origin: Origin) -> str:
    return _check_text(fields[key], f'"{key}"', origin)


def _read_optional_text(fields: Mapping[str, object], key: str, origin: Origin) -> str:
    value = fields.get(key)
    return "" if value is None else _check_text(value, f'"{key}"', origin)


def _read_list(value: object, field: str, origin: Origin) -> list[object]:
    if not is_list(value):
        raise _wrong_type(field, value, "a list", origin)
    return value


def _read_object(value: object, field: str, origin: Origin) -> dict[str, object]:
    if not is_object(value):
        raise _wrong_type(field, value, "an object", origin)
    return value


def _read_messages(value: object, field: str, origin: Origin) -> tuple[Message, ...]:
    turns = _read_list(value, f'"{field}"', origin)
    if not turns:
        raise DataError(f'"{field}" is empty: a chat without turns', where=str(origin))
    return tuple(
        _read_message(_read_object(turn, f"{field}[{index}]", origin), f"{field}[{index}]", origin)
        for index, turn in enumerate(turns)
    )


def _read_message(turn: dict[str, object], field: str, origin: Origin) -> Message:
    for key in ("role", "content"):
        if key not in turn and not (key == "content" and turn.get("tool_calls")):
            raise DataError(
                f'{field} has no "{key}"; its fields are {_list_names(turn)}',
                where=str(origin),
                fix='"from" and "value" belong to the format conversations'
                if {"from", "value"} & turn.keys()
                else "write every turn with role and content",
            )
    role = turn["role"]
    if role not in ROLES:
        raise DataError(
            f"{field} has the unknown role {_show(role)}",
            where=str(origin),
            fix="use one of " + ", ".join(ROLES),
        )
    if "weight" in turn:
        raise DataError(
            f"{field} has a weight, which is not read",
            where=str(origin),
            fix="remove it, or split the chat where the loss should begin: prompt, completion",
        )
    content = turn.get("content")
    if content is None and turn.get("tool_calls"):
        return {**turn, "content": ""}
    if is_list(content):
        return {**turn, "content": _join_parts(content, field, origin)}
    return {**turn, "content": _check_text(content, f"{field}.content", origin)}


def _join_parts(parts: list[object], field: str, origin: Origin) -> str:
    texts: list[str] = []
    for part in parts:
        piece = _read_object(part, f"{field}.content", origin)
        if piece.get("type") != "text":
            raise DataError(
                f"{field} has content of type {_show(piece.get('type'))}; only text is read",
                where=str(origin),
            )
        texts.append(_check_text(piece.get("text"), f"{field}.content", origin))
    return "".join(texts)


def _show(value: object) -> str:
    return json.dumps(value)[:40]


def _read_tools(value: object, origin: Origin) -> tuple[object, ...]:
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f'"tools" is broken JSON: {error.msg}', where=str(origin)) from error
    return tuple(_read_list(value, '"tools"', origin))


def _read_conversation(fields: Mapping[str, object], origin: Origin) -> Chat:
    turns = _read_list(fields["conversations"], '"conversations"', origin)
    converted: list[object] = []
    for index, turn in enumerate(turns):
        field = f"conversations[{index}]"
        entry = _read_object(turn, field, origin)
        if "role" in entry and "from" not in entry:
            converted.append(entry)
            continue
        for key in ("from", "value"):
            if key not in entry:
                raise DataError(
                    f'{field} has no "{key}"; its fields are {_list_names(entry)}',
                    where=str(origin),
                    fix="write every turn with from and value (or role and content)",
                )
        role = _SHAREGPT_ROLES.get(str(entry["from"]))
        if role is None:
            raise DataError(
                f"{field} is from the unknown role {_show(entry['from'])}",
                where=str(origin),
                fix="use one of " + ", ".join(_SHAREGPT_ROLES),
            )
        converted.append({"role": role, "content": entry["value"]})
    system = _read_optional_text(fields, "system", origin)
    if system and converted:
        converted.insert(0, {"role": "system", "content": system})
    return Chat(
        messages=_read_messages(converted, "conversations", origin),
        tools=_read_tools(fields.get("tools"), origin),
    )


def _read_completion(fields: Mapping[str, object], origin: Origin) -> Chat | Completion:
    prompt, completion = fields["prompt"], fields["completion"]
    if not is_list(prompt) and not is_list(completion):
        return Completion(
            prompt=_read_text(fields, "prompt", origin),
            completion=_read_text(fields, "completion", origin),
        )
    before = _read_messages(prompt, "prompt", origin)
    after = _read_messages(completion, "completion", origin)
    return Chat(
        messages=before + after,
        tools=_read_tools(fields.get("tools"), origin),
        num_prompt_messages=len(before),
    )


def _read_tokens(fields: Mapping[str, object], origin: Origin) -> Tokens:
    input_ids = _read_ints(fields["input_ids"], "input_ids", origin)
    labelled: tuple[bool, ...] | None = None
    if fields.get("labels") is not None:
        labels = _read_ints(fields["labels"], "labels", origin)
        _check_length(labels, "labels", input_ids, origin)
        for index, (token, label) in enumerate(zip(input_ids, labels, strict=True)):
            if label not in (token, IGNORED_LABEL):
                raise DataError(
                    f"labels[{index}] is {label}, but input_ids[{index}] is {token}",
                    where=str(origin),
                    fix=f"a label is its token or {IGNORED_LABEL}; the model shifts them by one",
                )
        labelled = tuple(label != IGNORED_LABEL for label in labels)
    if fields.get("attention_mask") is not None:
        mask = _read_ints(fields["attention_mask"], "attention_mask", origin)
        _check_length(mask, "attention_mask", input_ids, origin)
        start, end = _find_unpadded(mask, origin)
        input_ids = input_ids[start:end]
        labelled = None if labelled is None else labelled[start:end]
    return Tokens(input_ids=input_ids, labelled=labelled)


def _find_unpadded(mask: tuple[int, ...], origin: Origin) -> tuple[int, int]:
    start = next((index for index, seen in enumerate(mask) if seen), len(mask))
    end = next((index + 1 for index in reversed(range(len(mask))) if mask[index]), start)
    if not all(mask[start:end]):
        raise DataError(
            "attention_mask hides tokens in the middle of the row",
            where=str(origin),
            fix="only padding at either end may be hidden",
        )
    return start, end


def _check_length(
    values: tuple[int, ...], field: str, input_ids: tuple[int, ...], origin: Origin
) -> None:
    if len(values) != len(input_ids):
        raise DataError(
            f"{field} has {len(values)} entries, input_ids has {len(input_ids)}",
            where=str(origin),
            fix="write them with the same length",
        )


def _read_ints(value: object, field: str, origin: Origin) -> tuple[int, ...]:
    numbers: list[int] = []
    for index, item in enumerate(_read_list(value, f'"{field}"', origin)):
        if not isinstance(item, int) or isinstance(item, bool):
            raise _wrong_type(f"{field}[{index}]", item, "an integer", origin)
        numbers.append(item)
    return tuple(numbers)
