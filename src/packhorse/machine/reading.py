"""What machine files and cluster files share: how a file of a kind is read and written.

In: text or a path, and the kind that it must be of. Out: its keys; or a `FileFormatError` that
names the key, what was expected there, and the nearest key that exists.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, cast

import yaml
from pydantic import ValidationError

from packhorse.errors import FileFormatError
from packhorse.notation import NotationError, parse_notation

FIX: Final = "write the file anew with `packhorse probe`, or correct it by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSort:
    """One kind of file: what people call it, its first keys, and the newest version."""

    noun: str
    kind: str
    version: int


def write_notation(text: str, path: str | os.PathLike[str], sort: FileSort) -> None:
    """Write JSON text to a file; as YAML when the name ends in .yaml or .yml.

    Raises:
        FileFormatError: the file cannot be written.
    """
    target = Path(path)
    if target.suffix in (".yaml", ".yml"):
        text = yaml.safe_dump(json.loads(text), sort_keys=False)
    try:
        target.write_text(text)
    except OSError as error:
        raise FileFormatError(
            f"cannot write the {sort.noun} file: {error.strerror}", where=str(target)
        ) from error


def read_file(path: str | os.PathLike[str], sort: FileSort) -> str:
    """Read the text of a file.

    Raises:
        FileFormatError: the file is missing, unreadable or no text.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(
            f"cannot read the {sort.noun} file: {getattr(error, 'strerror', None) or error}",
            where=os.fspath(path),
            fix="check the path; `packhorse probe` writes such a file",
        ) from error


def parse_body(text: str, sort: FileSort, where: str) -> dict[str, object]:
    """Read the keys of a text but for its kind and version, which are checked.

    Raises:
        FileFormatError: the text is damaged, of another kind or of a newer version.
    """
    try:
        content = parse_notation(text)
    except NotationError as error:
        raise FileFormatError(f"the file is damaged: {error}", where=where, fix=FIX) from error
    if not isinstance(content, dict):
        raise FileFormatError(
            f"this is no {sort.noun} file: it holds no keys", where=where, fix=FIX
        )
    found = cast("dict[object, object]", content)  # parsed JSON or YAML: checked by the caller
    check_kind(found, sort, where)
    return strip_kind(found)


def strip_kind(found: Mapping[object, object]) -> dict[str, object]:
    """Leave kind and version out."""
    return {str(key): value for key, value in found.items() if key not in ("kind", "version")}


def check_kind(found: Mapping[object, object], sort: FileSort, where: str) -> None:
    """Refuse another kind, a newer version, or none.

    Raises:
        FileFormatError: names both.
    """
    kind, version = found.get("kind"), found.get("version")
    if kind != sort.kind:
        raise FileFormatError(
            f"this is no {sort.noun} file: its kind is {kind!r}, not {sort.kind!r}",
            where=where,
            fix=FIX,
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileFormatError(
            f"the {sort.noun} file has version {version!r}, not a number", where=where, fix=FIX
        )
    if version > sort.version:
        raise FileFormatError(
            f"the {sort.noun} file has version {version}; this program reads versions up to"
            f" {sort.version}",
            where=where,
            fix="install a newer packhorse, or write the file anew with `packhorse probe`",
        )


def check_names(body: Mapping[str, object], part: type, where: str) -> None:
    """Refuse keys that are no fields of a dataclass, naming the nearest.

    Raises:
        FileFormatError: names the first.
    """
    known = [field.name for field in fields(part)]
    for name in body:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]!r}?" if near else f"the keys are: {', '.join(known)}"
            raise FileFormatError(f"unknown key {name!r}", where=where, fix=fix)


def explain_invalid(error: ValidationError, where: str) -> FileFormatError:
    """Say in words what the first key is that has no value of its type."""
    first: Any = error.errors(include_url=False)[0]  # a TypedDict of pydantic_core, untyped here
    place = ""
    for part in first["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}"
    place = place.removeprefix(".")
    if first["type"] in ("missing", "missing_keyword_only_argument", "missing_argument"):
        return FileFormatError(f"key {place!r} is missing", where=where, fix=FIX)
    message = str(first["msg"])
    given = repr(first["input"])
    return FileFormatError(
        f"key {place!r}: {message[0].lower()}{message[1:]}, not {given[:80]}",
        where=where,
        fix=FIX,
    )
