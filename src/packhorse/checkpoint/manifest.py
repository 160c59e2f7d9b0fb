"""What a checkpoint says about itself: `packhorse.json`.

In: the state of a run besides its tensors, and every file with size and checksum. Out: JSON that
carries a checksum of its own, so that no flipped bit of it is believed.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.checkpoint.json_values import JsonObject, JsonValue, is_object, parse_json
from packhorse.errors import FileFormatError

MANIFEST_NAME: Final = "packhorse.json"
KIND: Final = "packhorse/checkpoint"
VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run at one optimizer step, besides its tensors.

    `model` is the model's fingerprint, `step` the number of finished optimizer steps, `workers`
    the logical workers of the summation order. The objects belong to whoever resumes from them:
    `data_position` to data, `random` (seed and key) to the runtime, `numerics` to the plan,
    `optimizer` and `trainer` to the trainer.
    """

    model: str
    step: int
    workers: int
    data_position: JsonObject
    random: JsonObject
    numerics: JsonObject
    optimizer: JsonObject
    trainer: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint, by its name in the folder."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The run's state and the files that belong to it; `model_only` ones cannot be resumed."""

    run: RunState
    model_only: bool
    files: tuple[FileEntry, ...]


def format_manifest(manifest: Manifest) -> str:
    """Render a manifest as JSON."""
    content = _content(manifest)
    return json.dumps({**content, "crc32": _checksum(content)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises:
        FileFormatError: it is missing, damaged, of another kind, or of a newer version.
    """
    path = folder / MANIFEST_NAME
    try:
        parsed = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise FileFormatError(
            f"{folder.name} has no {MANIFEST_NAME}, so it is no checkpoint of Packhorse",
            where=str(folder),
            fix="to begin from its weights, name the folder as model_name_or_path",
        ) from error
    except OSError as error:
        raise FileFormatError(
            f"cannot read {MANIFEST_NAME}: {error.strerror}", where=str(path)
        ) from error
    except ValueError as error:
        raise _damaged(path, "it is not JSON") from error
    if not is_object(parsed) or parsed.get("kind") != KIND:
        found = parsed.get("kind") if is_object(parsed) else type(parsed).__name__
        raise FileFormatError(
            f"{MANIFEST_NAME} is of kind {found!r}, expected {KIND!r}", where=str(path)
        )
    version = parsed.get("version")
    if isinstance(version, int) and version > VERSION:
        raise FileFormatError(
            f"{MANIFEST_NAME} has version {version}, this Packhorse reads up to {VERSION}",
            where=str(path),
            fix="install the version of Packhorse that wrote it, or a newer one",
        )
    content = {key: value for key, value in parsed.items() if key != "crc32"}
    if version != VERSION or parsed.get("crc32") != _checksum(content):
        raise _damaged(path, "its checksum does not match its content")
    return _parse(path, content)


def run_to_json(run: RunState) -> JsonObject:
    """Give a run's state as a JSON object; `run_from_json` reads it back."""
    return {
        "model": run.model,
        "step": run.step,
        "workers": run.workers,
        "data_position": run.data_position,
        "random": run.random,
        "numerics": run.numerics,
        "optimizer": run.optimizer,
        "trainer": run.trainer,
    }


def run_from_json(content: JsonObject, *, where: Path) -> RunState:
    """Read a run's state.

    Raises:
        FileFormatError: a key is missing or has another type.
    """
    match content:
        case {"model": str(model), "step": int(step), "workers": int(workers)}:
            return RunState(
                model=model,
                step=step,
                workers=workers,
                data_position=_object(where, content, "data_position"),
                random=_object(where, content, "random"),
                numerics=_object(where, content, "numerics"),
                optimizer=_object(where, content, "optimizer"),
                trainer=_object(where, content, "trainer"),
            )
        case _:
            raise _damaged(where, "a key is missing or has another type")


def _content(manifest: Manifest) -> dict[str, JsonValue]:
    run = manifest.run
    return {
        "kind": KIND,
        "version": VERSION,
        "model": run.model,
        "step": run.step,
        "workers": run.workers,
        "model_only": manifest.model_only,
        "data_position": run.data_position,
        "random": run.random,
        "numerics": run.numerics,
        "optimizer": run.optimizer,
        "trainer": run.trainer,
        "files": [
            {"name": entry.name, "size_bytes": entry.size_bytes, "crc32": entry.crc32}
            for entry in manifest.files
        ],
    }


def _checksum(content: JsonObject) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _parse(path: Path, content: JsonObject) -> Manifest:
    match content:
        case {"model_only": bool(model_only), "files": list(entries)}:
            files = tuple(_parse_file(path, entry) for entry in entries)
            run = run_from_json(content, where=path)
            return Manifest(run=run, model_only=model_only, files=files)
        case _:
            raise _damaged(path, "a key is missing or has another type")


def _parse_file(path: Path, entry: JsonValue) -> FileEntry:
    match entry:
        case {"name": str(name), "size_bytes": int(size_bytes), "crc32": int(crc32)}:
            return FileEntry(name=name, size_bytes=size_bytes, crc32=crc32)
        case _:
            raise _damaged(path, "an entry of files is malformed")


def _object(path: Path, content: JsonObject, key: str) -> JsonObject:
    value = content.get(key)
    if not is_object(value):
        raise _damaged(path, f"{key!r} is missing or no object")
    return value


def _damaged(path: Path, how: str) -> FileFormatError:
    return FileFormatError(
        f"{path.name} is damaged: {how}", where=str(path), fix="take an earlier checkpoint"
    )
