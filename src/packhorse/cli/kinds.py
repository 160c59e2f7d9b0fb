"""What is this file? The kind that its first key or line gives.

In: a path. Out: a `FileKind`, or an error that lists the kinds. A folder is a checkpoint (it has a
manifest), a token cache (it has another), or a run folder (a recipe.yaml or a plan.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, cast

from packhorse.errors import FileFormatError
from packhorse.notation import NotationError, parse_notation

FileKind = Literal[
    "plan",
    "rank plans",
    "program",
    "machine",
    "cluster",
    "timeline",
    "recipe",
    "model",
    "profile",
    "run",
    "checkpoint",
    "token cache",
    "run folder",
]
_KINDS: Final[Mapping[object, FileKind]] = {
    "packhorse/plan": "plan",
    "packhorse/rank-plans": "rank plans",
    "packhorse/program": "program",
    "packhorse/machine": "machine",
    "packhorse/cluster": "cluster",
    "packhorse/timeline": "timeline",
    "packhorse/recipe": "recipe",
    "packhorse/model": "model",
    "packhorse/profile": "profile",
    "packhorse/run": "run",
    "packhorse/checkpoint": "checkpoint",
    "token-cache": "token cache",
}
_FIX: Final = (
    "give a plan, program, machine, cluster, timeline, recipe, model, checkpoint or run folder"
)
_RECIPE_KEYS: Final = frozenset({"model_name_or_path", "train_data", "output_dir"})


def detect_kind(path: Path) -> FileKind:
    """Tell what a file or folder of ours is.

    Raises:
        FileFormatError: it is missing, unreadable, or nothing of ours.
    """
    if path.is_dir():
        return _detect_folder(path)
    text = read_text(path)
    if text.startswith("packhorse/program "):
        return "program"
    kind = _find_kind(text, path)
    if kind is None:
        raise FileFormatError(
            "this is no file of ours: it names no kind", where=str(path), fix=_FIX
        )
    return kind


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        FileFormatError: it is missing, unreadable or no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(
            f"cannot read the file: {error.strerror}", where=str(path), fix="check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"the file is no text: {error.reason} at byte {error.start}", where=str(path), fix=_FIX
        ) from error


def _detect_folder(path: Path) -> FileKind:
    if (path / "packhorse.json").is_file():
        return "checkpoint"
    if (path / "manifest.json").is_file() and (path / "tokens.bin").is_file():
        return "token cache"
    if (path / "plan.json").is_file() or (path / "recipe.yaml").is_file():
        return "run folder"
    raise FileFormatError(
        "the folder is no checkpoint (packhorse.json), token cache (manifest.json) or run folder"
        " (recipe.yaml)",
        where=str(path),
        fix=_FIX,
    )


def _find_kind(text: str, path: Path) -> FileKind | None:
    try:
        loaded = parse_notation(text)
    except NotationError as error:
        raise FileFormatError(
            f"the file is neither JSON nor YAML: {error}",
            where=str(path),
            fix="undo the last edit, or write the file anew",
        ) from error
    if not isinstance(loaded, Mapping):
        return None
    content = cast("Mapping[object, object]", loaded)  # parsed text: only its keys are looked at
    if "kind" not in content:
        # A recipe may leave its kind out: people write it.
        return "recipe" if _RECIPE_KEYS & set(content) else None
    kind = content["kind"]
    if kind not in _KINDS:
        raise FileFormatError(
            f"the file is of the unknown kind {kind!r}", where=str(path), fix=_FIX
        )
    return _KINDS[kind]
