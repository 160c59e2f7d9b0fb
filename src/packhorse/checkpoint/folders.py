"""Checkpoint folders of a run: finding, checking, clearing away.

In: an output folder. Out: its checkpoints, the newest that is complete, and why others are not.

A folder `checkpoint-N` is there as a whole or not at all; work in progress has a name of its own:
`checkpoint-N.tmp-*` is being written or deleted, `checkpoint-N.old-*` makes room for a new one of
the same step.
"""

from __future__ import annotations

import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.checkpoint.checksums import checksum_file
from packhorse.checkpoint.manifest import FileEntry, Manifest, read_manifest
from packhorse.errors import FileFormatError
from packhorse.storage.durable import fsync_folder
from packhorse.storage.space import explain_failure

_FINISHED: Final = re.compile(r"checkpoint-(\d+)")
_TEMPORARY: Final = re.compile(r"(?:checkpoint-\d+|model)\.tmp-[0-9a-f]{8}")
_REPLACED: Final = re.compile(r"(checkpoint-\d+)\.old-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest usable checkpoint, None when there is none, and newer ones that are not usable."""

    path: Path | None
    skipped: tuple[Skipped, ...]


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Name the checkpoint folder of a step."""
    return output_dir / f"checkpoint-{step}"


def checkpoint_step(path: Path) -> int:
    """The step in the name of a checkpoint folder; 0 for a folder with another name."""
    return _step_of(path) or 0


def temporary_path(path: Path) -> Path:
    """Name a fresh sibling for work in progress."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def find_checkpoints(output_dir: Path) -> tuple[Path, ...]:
    """List the folders `checkpoint-N`, complete or not, by rising step."""
    if not output_dir.is_dir():
        return ()
    found = [path for path in output_dir.iterdir() if _step_of(path) is not None and path.is_dir()]
    return tuple(sorted(found, key=lambda path: _step_of(path) or 0))


def verify_checkpoint(path: Path, *, checksums: bool = True, resumable: bool = True) -> Manifest:
    """Check that every file of a checkpoint is there and whole.

    Args:
        checksums: also read every file and compare its content.
        resumable: also refuse a checkpoint that holds only the model.

    Raises:
        FileFormatError: names the file and what is wrong with it.
    """
    manifest = read_manifest(path)
    for entry in manifest.files:
        _check_size(path, entry)
    if resumable and manifest.model_only:
        raise FileFormatError(
            f"{path.name} holds only the model (save_only_model), so no run can resume from it",
            where=str(path),
            fix="to begin anew from its weights, name it as model_name_or_path",
        )
    if checksums:
        for entry in manifest.files:
            if checksum_file(path / entry.name) != entry.crc32:
                raise FileFormatError(
                    f"{entry.name} is damaged: its checksum differs from what was written",
                    where=str(path),
                    fix="take an earlier checkpoint, or another copy of this file",
                )
    return manifest


def newest_complete(output_dir: Path, *, checksums: bool = True) -> Newest:
    """Find the newest checkpoint to resume from; damaged and partial ones are skipped and named."""
    skipped: list[Skipped] = []
    for path in reversed(find_checkpoints(output_dir)):
        try:
            verify_checkpoint(path, checksums=checksums)
        except FileFormatError as error:
            skipped.append(Skipped(path=path, reason=error.what))
        else:
            return Newest(path=path, skipped=tuple(skipped))
    return Newest(path=None, skipped=tuple(skipped))


def find_leftovers(output_dir: Path) -> tuple[Path, ...]:
    """List what an interrupted save or delete left behind; nothing else is ever listed."""
    if not output_dir.is_dir():
        return ()
    return tuple(
        sorted(
            path
            for path in output_dir.iterdir()
            if (_TEMPORARY.fullmatch(path.name) or _REPLACED.fullmatch(path.name)) and path.is_dir()
        )
    )


def clean_leftovers(output_dir: Path) -> tuple[Path, ...]:
    """Remove what an interrupted save or delete left behind; no other save may be in progress.

    A checkpoint that had made room for a new one which never came gets its name back.

    Returns:
        The paths that were there.

    Raises:
        StorageError: the folder cannot be written.
    """
    leftovers = find_leftovers(output_dir)
    for path in leftovers:
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not path.with_name(replaced.group(1)).exists():
            _rename(path, path.with_name(replaced.group(1)))
        else:
            remove_folder(path)
    return leftovers


def make_room(path: Path) -> Path | None:
    """Move a checkpoint out of the way of a new one of the same step.

    Returns:
        Where it is now, None when there was none.
    """
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}.old-{secrets.token_hex(4)}")
    path.rename(aside)
    return aside


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint such that it is never seen half deleted.

    Raises:
        StorageError: the folder cannot be written.
    """
    temporary = temporary_path(path)
    _rename(path, temporary)
    remove_folder(temporary)


def remove_folder(path: Path) -> None:
    """Delete a folder with all that is in it.

    Raises:
        StorageError: part of it cannot be deleted.
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise explain_failure(error, path, f"remove {path.name}") from error


def limit_checkpoints(output_dir: Path, *, limit: int, newest: Path) -> tuple[Path, ...]:
    """Keep the `limit` newest complete checkpoints up to `newest`, and delete older ones.

    Folders without a manifest of ours, damaged ones and those of later steps are left alone.

    Returns:
        The paths that were deleted.

    Raises:
        StorageError: the folder cannot be written.
    """
    if limit < 1:
        raise ValueError(f"at least one checkpoint has to be kept, not {limit}")
    newest_step = _step_of(newest) or 0
    complete = [
        path
        for path in find_checkpoints(output_dir)
        if (_step_of(path) or 0) <= newest_step and _is_complete(path)
    ]
    surplus = tuple(complete[:-limit])
    for path in surplus:
        remove_checkpoint(path)
    return surplus


def _is_complete(path: Path) -> bool:
    try:
        verify_checkpoint(path, checksums=False, resumable=False)
    except FileFormatError:
        return False
    return True


def _rename(path: Path, target: Path) -> None:
    """Rename a folder and bring its new name to the disk."""
    try:
        path.rename(target)
        fsync_folder(path.parent)
    except OSError as error:
        raise explain_failure(error, path, f"rename {path.name} to {target.name}") from error


def _step_of(path: Path) -> int | None:
    match = _FINISHED.fullmatch(path.name)
    return int(match.group(1)) if match else None


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        size_bytes = (path / entry.name).stat().st_size
    except OSError as error:
        raise FileFormatError(
            f"{entry.name} is missing from {path.name}",
            where=str(path),
            fix="take an earlier checkpoint, or another copy of this file",
        ) from error
    if size_bytes != entry.size_bytes:
        raise FileFormatError(
            f"{entry.name} is damaged: it has {size_bytes} bytes, {entry.size_bytes} were written",
            where=str(path),
            fix="take an earlier checkpoint, or another copy of this file",
        )
