"""Files that a command writes where a person asked for them.

In: a path and a text. Out: the whole file, or an error that names the folder. Existing files are
replaced at once, never half.
"""

from __future__ import annotations

import os
from pathlib import Path

from packhorse.errors import InputError


def check_output(path: Path) -> None:
    """Refuse a path that cannot be written, before anything that takes long. Changes nothing.

    Raises:
        InputError: the path is a folder, or its folder may not be written or made.
    """
    from packhorse.storage.space import nearest_folder

    if path.is_dir():
        raise InputError(
            "the output is a folder, not a file",
            where=str(path),
            fix=f"name a file in it: {path / 'NAME'}",
        )
    folder = nearest_folder(path.parent)
    if not os.access(folder, os.W_OK):
        raise InputError(
            "the folder for the output cannot be written",
            where=str(folder),
            fix="name a folder that this user may write",
        )


def write_output(path: Path, text: str) -> Path:
    """Write a file, making its folder when it is missing.

    Raises:
        InputError: the path is a folder, or may not be written.
        StorageError: the disk is full or fails.
    """
    from packhorse.storage.durable import write_durably

    check_output(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the folder for the output cannot be made: {error.strerror}",
            where=str(path.parent),
            fix="name a folder that this user may write",
        ) from error
    write_durably(path, text)
    return path
