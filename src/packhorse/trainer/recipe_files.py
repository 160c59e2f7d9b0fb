"""Recipe files: YAML in, a `Recipe` and warnings out; and back.

In: a path, and `key=value` settings that override it. Out: a `LoadedRecipe`, or one `RecipeError`
that lists every bad key with its value and what to do. What `format_recipe` writes reads back
equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from packhorse.errors import FileFormatError, RecipeError
from packhorse.notation import NotationError, parse_notation
from packhorse.trainer.recipe import Recipe
from packhorse.trainer.recipe_keys import BadKey, nearest_key, translate_keys

KIND: Final = "packhorse/recipe"
VERSION: Final = 1
_HEAD: Final = ("kind", "version")
# Keys inside of keys, to name the nearest of them.
_PARTS: Final = (
    "device", "host", "disk", "path", "size", "patterns", "learning_rate", "weight_decay",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A recipe, and what a person should know about how it was read."""

    recipe: Recipe
    warnings: tuple[str, ...]


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe file and apply `key=value` settings.

    Args:
        path: YAML or JSON.
        settings: such as `learning_rate=1e-4` or `plan.recompute=all`; later ones win.

    Raises:
        RecipeError: the file is missing or no YAML, or keys are bad; lists every one.
        FileFormatError: the file is of another kind or of a newer version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise RecipeError(
            f"cannot read the recipe: {reason}",
            where=str(path),
            fix="name a recipe file; `packhorse init` writes one",
        ) from error
    return parse_recipe(text, settings, where=str(path))


def parse_recipe(text: str, settings: Sequence[str] = (), *, where: str = "recipe") -> LoadedRecipe:
    """Read the text of a recipe; see `load_recipe`."""
    try:
        loaded = parse_notation(text)
    except NotationError as error:
        place = where if error.line is None else f"{where}, line {error.line}"
        place += "" if error.column is None else f", column {error.column}"
        raise RecipeError(
            f"the recipe cannot be read: {error.problem}",
            where=place,
            fix="check indentation, quotes and repeated keys",
        ) from error
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, Mapping):
        raise RecipeError(
            f"a recipe is a mapping of keys to values, this is a {type(loaded).__name__}",
            where=where,
        )
    keyed = cast("Mapping[object, object]", loaded)  # parsed text
    content = {str(key): value for key, value in keyed.items()}
    _check_head(content, where)
    for setting in settings:
        _apply_setting(content, setting)
    return make_recipe(content, where=where)


def make_recipe(content: Mapping[str, object], *, where: str = "recipe") -> LoadedRecipe:
    """Make a recipe from a mapping.

    Raises:
        RecipeError: lists every bad key.
    """
    given = {key: value for key, value in content.items() if key not in _HEAD}
    translation = translate_keys(given, Recipe.model_fields)
    bad = list(translation.bad)
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(dict(translation.values))
    except ValidationError as error:
        bad += [_explain(detail) for detail in error.errors()]
    if bad or recipe is None:
        raise _list_bad(bad, where)
    return LoadedRecipe(recipe=recipe, warnings=translation.warnings)


def format_recipe(recipe: Recipe) -> str:
    """Write the resolved recipe as YAML: every key, defaults included."""
    content = {"kind": KIND, "version": VERSION, **recipe.model_dump(mode="json")}
    return yaml.safe_dump(content, sort_keys=False, width=100)


def recipe_schema() -> dict[str, object]:
    """Give the JSON schema of recipes, for editors."""
    schema: dict[str, object] = dict(Recipe.model_json_schema())
    properties = cast("dict[str, object]", schema["properties"])  # pydantic's own schema
    properties["kind"] = {"const": KIND}
    properties["version"] = {"type": "integer", "maximum": VERSION}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def format_schema() -> str:
    """Write the JSON schema as text that ends in a newline."""
    return json.dumps(recipe_schema(), indent=2) + "\n"


def _check_head(content: Mapping[str, object], where: str) -> None:
    kind, version = content.get("kind", KIND), content.get("version", VERSION)
    if kind != KIND:
        raise FileFormatError(f"this is a {kind!r}, not a {KIND!r}", where=where)
    if not isinstance(version, int) or version > VERSION:
        raise FileFormatError(
            f"the recipe has version {version!r}; this packhorse reads up to {VERSION}",
            where=where,
            fix="update packhorse",
        )


def _apply_setting(content: dict[str, object], setting: str) -> None:
    key, equals, text = setting.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(
            f"cannot read the setting {setting!r}",
            where="--set",
            fix="write key=value, for example --set learning_rate=1e-4",
        )
    try:
        value = parse_notation(text)
    except NotationError as error:
        raise RecipeError(
            f"the value of {key} cannot be read: {error.problem}",
            where=f"--set {setting}",
            fix="put quotes around a text with special characters",
        ) from error
    target = content
    for depth, part in enumerate(path[:-1], start=1):
        inner = target.get(part)
        if inner is not None and not isinstance(inner, Mapping):
            outer = ".".join(path[:depth])
            raise RecipeError(
                f"{key.strip()} cannot be set: the recipe's {outer} is {inner!r}, which has no"
                " keys",
                where="--set",
                fix=f"give all of it: --set '{outer}={{...}}', or write {outer} as keys in the"
                " recipe",
            )
        # A copy: the mapping that the caller gave stays as it was.
        copied: dict[str, object] = {}
        if isinstance(inner, Mapping):
            copied = dict(cast("Mapping[str, object]", inner))  # parsed text
        target[part] = copied
        target = copied
    target[path[-1]] = value


def _explain(detail: ErrorDetails) -> BadKey:
    key = ".".join(str(part) for part in detail["loc"] if not _is_branch(str(part)))
    value: object = detail["input"]
    message = detail["msg"].removeprefix("Value error, ")
    match detail["type"]:
        case "missing":
            return BadKey(key=key, what="it is missing", fix="give it; it has no default")
        case "extra_forbidden":
            name = str(detail["loc"][-1])
            near = nearest_key(name, _PARTS)
            fix = f"did you mean {near}?" if near else "remove it"
            return BadKey(key=key, what="there is no such key", fix=fix)
        case "value_error":
            return BadKey(key=key or "(together)", what=message, fix="")
        case _:
            return BadKey(key=key, what=f"{value!r}: {_lower_first(message)}", fix="")


def _is_branch(part: str) -> bool:
    # pydantic adds the tried alternative of a union to a place, such as `literal['auto']`.
    return "[" in part or part in ("str", "int", "bool", "BudgetSection", "DiskSection", "tuple")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _list_bad(bad: Sequence[BadKey], where: str) -> RecipeError:
    # Alternatives of a union fail one by one: a key is listed once, and not beside its own parts.
    unique = {entry.key: entry for entry in reversed(bad)}
    entries = [
        entry
        for entry in bad
        if unique.get(entry.key) is entry
        and not any(key.startswith(f"{entry.key}.") for key in unique)
    ]
    lines = [f"{e.key}: {e.what}" + (f" -> {e.fix}" if e.fix else "") for e in entries]
    count = len(entries)
    what = "a key of the recipe is wrong" if count == 1 else f"{count} keys of the recipe are wrong"
    return RecipeError(
        f"{what}: {', '.join(entry.key for entry in entries)}",
        where="\n".join((where, *lines)),
        fix="correct the keys above; `packhorse schema` has all keys with their meaning",
    )
