"""model.json in and out: a traced model without its code, so that plans are read without torch.

In: a `Model`, or the text of a file (JSON or YAML alike). Out: readable text, one block, body,
value or parameter a line; or the `Model`. `parse_model(format_model(model)) == model` always holds,
the order of every mapping included. Whatever the file names exists in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from packhorse.errors import FileFormatError
from packhorse.model.spec import (
    ITEM_BYTES,
    Block,
    Body,
    Half,
    Halves,
    Model,
    Parameter,
    Value,
    ValueId,
)
from packhorse.notation import NotationError, parse_notation

KIND: Final = "packhorse/model"
VERSION: Final = 1
_LEFT_OUT: Final = ("halves", "first_backward_workspace_bytes")
_FIX: Final = "write the file anew with `packhorse plan RECIPE`"
_PARTS: Final[Mapping[str, type]] = {
    "blocks": Block,
    "bodies": Body,
    "values": Value,
    "parameters": Parameter,
}
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    # The file's keys. Mappings are lists in it, because each item has its own name.
    __pydantic_config__ = ConfigDict(strict=True)

    name: str
    fingerprint: str
    rows: int
    length: int
    loss: ValueId
    blocks: tuple[Block, ...]
    bodies: tuple[Body, ...]
    values: tuple[Value, ...]
    parameters: tuple[Parameter, ...]


def format_model(model: Model) -> str:
    """Render a model as the text of a model.json, ending in a newline."""
    head: dict[str, object] = {
        "kind": KIND,
        "version": VERSION,
        "name": model.name,
        "fingerprint": model.fingerprint,
        "rows": model.rows,
        "length": model.length,
        "loss": model.loss,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    parts: dict[str, Iterable[Block | Body | Value | Parameter]] = {
        "blocks": model.blocks,
        "bodies": model.bodies.values(),
        "values": model.values.values(),
        "parameters": model.parameters.values(),
    }
    for key, items in parts.items():
        rows = ",\n    ".join(json.dumps(_describe(item)) for item in items)
        lines.append(f"  {json.dumps(key)}: " + (f"[\n    {rows}\n  ]" if rows else "[]"))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _describe(item: Block | Body | Value | Parameter) -> dict[str, object]:
    # What nobody asked for or told is left out.
    found: dict[str, object] = asdict(item)
    for name in _LEFT_OUT:
        if found.get(name, item) is None:
            del found[name]
    return found


def read_model(path: str | os.PathLike[str]) -> Model:
    """Read a model.json (or the same in YAML).

    Raises:
        FileFormatError: no such file, no model, a newer version, or a damaged part, by place.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise FileFormatError(
            f"cannot read the model file: {reason}",
            where=os.fspath(path),
            fix="`packhorse plan RECIPE` writes one beside its plan.json",
        ) from error
    return parse_model(text, where=os.fspath(path))


def parse_model(text: str, *, where: str = "model") -> Model:
    """Read the text of a model.json.

    Args:
        text: JSON or YAML.
        where: what errors name as the place, such as the path.

    Raises:
        FileFormatError: as for `read_model`.
    """
    content = _load(text, where)
    _check_kind(content, where)
    body = {str(key): value for key, value in content.items() if key not in ("kind", "version")}
    _check_keys(body, where)
    try:
        # JSON's rules: lists become tuples, but a text never becomes a number.
        found = TypeAdapter(_Content).validate_json(json.dumps(body))
    except ValidationError as error:
        raise _explain(error, where) from error
    model = Model(
        name=found.name,
        fingerprint=found.fingerprint,
        rows=found.rows,
        length=found.length,
        loss=found.loss,
        blocks=found.blocks,
        bodies=_key(found.bodies, [body.id for body in found.bodies], f"{where}: bodies"),
        values=_key(found.values, [value.id for value in found.values], f"{where}: values"),
        parameters=_key(
            found.parameters, [each.name for each in found.parameters], f"{where}: parameters"
        ),
    )
    check_model(model, where)
    return model


def check_model(model: Model, where: str) -> None:
    """Refuse a model that names something which is not in it.

    Raises:
        FileFormatError: names the first such place.
    """
    blocks = range(len(model.blocks))
    for index, block in enumerate(model.blocks):
        place = f"{where}: blocks[{index}]"
        if block.id != index:
            raise _refuse(f"block {block.name} has the id {block.id}, not {index}", place)
        _check_known((block.body,), model.bodies, "body", place)
        _check_known(block.inputs + block.outputs, model.values, "value", place)
        _check_known(block.parameters, model.parameters, "parameter", place)
    _check_known((model.loss,), model.values, "value", f"{where}: loss")
    for value in model.values.values():
        place = f"{where}: value {value.id}"
        users = value.consumers if value.producer is None else (value.producer, *value.consumers)
        _check_known(users, blocks, "block", place)
        _check_dtype(value.dtype, place)
    for parameter in model.parameters.values():
        place = f"{where}: parameter {parameter.name}"
        _check_known(parameter.blocks, blocks, "block", place)
        _check_dtype(parameter.dtype, place)


def _load(text: str, where: str) -> Mapping[object, object]:
    try:
        loaded = parse_notation(text)
    except NotationError as error:
        shown = " ".join(str(error).split())
        raise FileFormatError(
            f"the model file is damaged: {shown}", where=where, fix=_FIX
        ) from error
    if not isinstance(loaded, Mapping):
        raise FileFormatError("this is no model file: it holds no keys", where=where, fix=_FIX)
    return cast("Mapping[object, object]", loaded)  # parsed text: checked key by key


def _check_kind(content: Mapping[object, object], where: str) -> None:
    kind, version = content.get("kind"), content.get("version")
    if kind != KIND:
        raise FileFormatError(
            f"this is no model file: its kind is {kind!r}, not {KIND!r}", where=where, fix=_FIX
        )
    if type(version) is not int or version < 1:
        raise FileFormatError(f"version {version!r} is no version number", where=where, fix=_FIX)
    if version > VERSION:
        raise FileFormatError(
            f"the model file has version {version}; this packhorse reads up to {VERSION}",
            where=where,
            fix="update packhorse, or write the file again with this one",
        )


def _check_keys(body: Mapping[str, object], where: str) -> None:
    _check_names(body, _Content, where)
    for key, part in _PARTS.items():
        value = body.get(key)
        entries = cast("list[object]", value) if isinstance(value, list) else []  # parsed text
        for index, entry in enumerate(entries):
            if isinstance(entry, Mapping):
                names = cast("Mapping[object, object]", entry)  # parsed text: only keys are read
                _check_names(names, part, f"{where}: {key}[{index}]")
                _check_halves(names.get("halves"), f"{where}: {key}[{index}].halves")


def _check_halves(halves: object, where: str) -> None:
    if not isinstance(halves, Mapping):
        return
    names = cast("Mapping[object, object]", halves)  # parsed text: only keys are read
    _check_names(names, Halves, where)
    for key in ("input", "weight"):
        half = names.get(key)
        if isinstance(half, Mapping):
            keys = cast("Mapping[object, object]", half)  # parsed text: only keys are read
            _check_names(keys, Half, f"{where}.{key}")


def _check_names(content: Iterable[object], part: type, where: str) -> None:
    known = [field.name for field in fields(part)]
    for name in content:
        if name not in known:
            near = get_close_matches(str(name), known, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]!r}?" if near else f"the keys are: {', '.join(known)}"
            raise FileFormatError(f"unknown key {name!r}", where=where, fix=fix)


def _key(items: Sequence[Item], keys: Sequence[Key], where: str) -> dict[Key, Item]:
    keyed: dict[Key, Item] = {}
    for key, item in zip(keys, items, strict=True):
        if key in keyed:
            raise _refuse(f"{key} is there twice", where)
        keyed[key] = item
    return keyed


def _check_known(names: Iterable[object], known: object, noun: str, place: str) -> None:
    # `known` is a mapping or a range: both answer `in`.
    container = cast("Mapping[object, object]", known)  # only `in` is used
    for name in names:
        if name not in container:
            raise _refuse(f"there is no {noun} {name}", place)


def _check_dtype(dtype: str, place: str) -> None:
    if dtype not in ITEM_BYTES:
        near = get_close_matches(dtype, ITEM_BYTES, n=1, cutoff=0.0)
        raise FileFormatError(
            f"unknown dtype {dtype!r}", where=place, fix=f"the nearest known one is {near[0]!r}"
        )


def _refuse(what: str, place: str) -> FileFormatError:
    return FileFormatError(what, where=place, fix=_FIX)


def _explain(error: ValidationError, where: str) -> FileFormatError:
    first: Any = error.errors(include_url=False)[0]  # a TypedDict of pydantic_core, untyped here
    place = ""
    for part in first["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}"
    place = place.removeprefix(".")
    if str(first["type"]).startswith("missing"):
        return FileFormatError(f"key {place!r} is missing", where=where, fix=_FIX)
    message = str(first["msg"])
    given = repr(first["input"])
    return FileFormatError(
        f"key {place!r}: {message[0].lower()}{message[1:]}, not {given[:80]}",
        where=where,
        fix=_FIX,
    )
