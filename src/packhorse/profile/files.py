"""profile.json in and out: the times that a plan was predicted with.

In: a `Profile`, or the text of a file (JSON or YAML alike). Out: readable text, one body a line; or
the `Profile`. `parse_profile(format_profile(profile)) == profile` always holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from packhorse.errors import FileFormatError
from packhorse.model.spec import BodyId
from packhorse.notation import NotationError, parse_notation
from packhorse.profile.spec import BodyTime, Profile

KIND: Final = "packhorse/profile"
VERSION: Final = 1
_FIX: Final = "write the file anew with `packhorse plan RECIPE`"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    kind: Literal["packhorse/profile"]
    version: Literal[1]
    model: str
    rows: int
    length: int
    source: Literal["analytic", "measured"]
    base_bytes: int
    bodies: Mapping[str, tuple[int, int, int]]
    busy_share: float = 0.0


def format_profile(profile: Profile) -> str:
    """Render a profile as the text of a profile.json, ending in a newline.

    A body's times are [forward_ns, discard_ns, backward_ns].
    """
    head: dict[str, object] = {
        "kind": KIND,
        "version": VERSION,
        "model": profile.model,
        "rows": profile.rows,
        "length": profile.length,
        "source": profile.source,
        "base_bytes": profile.base_bytes,
        "busy_share": profile.busy_share,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    bodies = ",\n    ".join(
        f"{json.dumps(body)}: [{time.forward_ns}, {time.discard_ns}, {time.backward_ns}]"
        for body, time in profile.bodies.items()
    )
    lines.append('  "bodies": ' + (f"{{\n    {bodies}\n  }}" if bodies else "{}"))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile.json (or the same in YAML).

    Raises:
        FileFormatError: no such file, no profile, a newer version, or a damaged part, by place.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise FileFormatError(
            f"cannot read the profile: {reason}",
            where=os.fspath(path),
            fix="`packhorse plan RECIPE` writes one beside its plan.json",
        ) from error
    return parse_profile(text, where=os.fspath(path))


def parse_profile(text: str, *, where: str = "profile") -> Profile:
    """Read the text of a profile.json.

    Args:
        text: JSON or YAML.
        where: what errors name as the place, such as the path.

    Raises:
        FileFormatError: as for `read_profile`.
    """
    try:
        loaded = parse_notation(text)
    except NotationError as error:
        shown = " ".join(str(error).split())
        raise FileFormatError(f"the profile is damaged: {shown}", where=where, fix=_FIX) from error
    if not isinstance(loaded, Mapping):
        raise FileFormatError("this is no profile: it holds no keys", where=where, fix=_FIX)
    version = cast("Mapping[object, object]", loaded).get("version")  # parsed text
    if isinstance(version, int) and version > VERSION:
        raise FileFormatError(
            f"the profile has version {version}; this Packhorse reads versions up to {VERSION}",
            where=where,
            fix="update Packhorse, or " + _FIX,
        )
    try:
        # JSON's rules: lists become tuples, but a text never becomes a number.
        found = TypeAdapter(_Content).validate_json(json.dumps(loaded))
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]  # a TypedDict of pydantic_core, untyped
        place = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"])
        raise FileFormatError(
            f"key {place!r}: {message[0].lower()}{message[1:]}", where=where, fix=_FIX
        ) from error
    return Profile(
        model=found.model,
        rows=found.rows,
        length=found.length,
        source=found.source,
        bodies={
            BodyId(body): BodyTime(
                forward_ns=forward_ns, discard_ns=discard_ns, backward_ns=backward_ns
            )
            for body, (forward_ns, discard_ns, backward_ns) in found.bodies.items()
        },
        base_bytes=found.base_bytes,
        busy_share=found.busy_share,
    )
