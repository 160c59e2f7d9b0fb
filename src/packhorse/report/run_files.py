"""run.json in and out: the estimate of a run, beside the plan that it was made for.

In: a `RunEstimate`, or the text of a file. Out: readable text, or the `RunEstimate`. Steps, sizes
of saves and evaluations follow from recipe, data and model, which a reader of the plan may lack.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError

from packhorse.errors import FileFormatError
from packhorse.notation import parse_notation
from packhorse.report.run import RunEstimate

KIND: Final = "packhorse/run"
VERSION: Final = 1
_FIX: Final = "write the file anew with `packhorse plan RECIPE`"


def format_run(run: RunEstimate) -> str:
    """Render an estimate as the text of a run.json, ending in a newline."""
    return json.dumps({"kind": KIND, "version": VERSION, **asdict(run)}, indent=2) + "\n"


def read_run(path: Path) -> RunEstimate:
    """Read a run.json (or the same in YAML).

    Raises:
        FileFormatError: it is no estimate, of a newer version, or damaged, by place.
    """
    try:
        loaded = parse_notation(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileFormatError(
            f"cannot read the estimate: {error.strerror}", where=str(path), fix=_FIX
        ) from error
    except ValueError as error:
        raise FileFormatError(
            f"the estimate is damaged: {error}", where=str(path), fix=_FIX
        ) from error
    if not isinstance(loaded, Mapping):
        raise FileFormatError("this is no estimate of a run", where=str(path), fix=_FIX)
    content = dict(cast("Mapping[str, object]", loaded))  # parsed text: checked below
    kind, version = content.pop("kind", None), content.pop("version", None)
    if kind != KIND:
        raise FileFormatError(f"this is of kind {kind!r}, not {KIND!r}", where=str(path), fix=_FIX)
    if not isinstance(version, int) or version > VERSION:
        raise FileFormatError(
            f"the estimate has version {version!r}; this Packhorse reads versions up to {VERSION}",
            where=str(path),
            fix="update Packhorse, or " + _FIX,
        )
    unknown = sorted(content.keys() - {field.name for field in fields(RunEstimate)})
    if unknown:
        raise FileFormatError(f"unknown key {unknown[0]!r}", where=str(path), fix=_FIX)
    try:
        return TypeAdapter(RunEstimate).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]  # a TypedDict of pydantic_core, untyped
        place = ".".join(str(part) for part in first["loc"])
        raise FileFormatError(
            f"key {place!r}: {first['msg']}", where=str(path), fix=_FIX
        ) from error
