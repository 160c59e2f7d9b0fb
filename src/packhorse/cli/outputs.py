"""Files that a command writes where a person asked for them.

In: a path and a text. Out: the whole file, or an error that names the folder. Existing files are
replaced at once, never half.
"""

from __future__ import annotations

import os
from pathlib import Path

from packhorse.errors import InputError


def write_output(path: Path, text: str) -> Path:
    """Write a file, making its folder when it is missing.

    Raises:
        InputError: the path is a folder, or may not be written.
        StorageError: the disk is full or fails.
    """
    from packhorse.storage.durable import write_durably

    folder = path.parent
    if path.is_dir():
        raise InputError(
            "the output is a folder, not a file",
            where=str(path),
            fix=f"name a file in it: {path}/...",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the folder for the output cannot be made: {error.strerror}",
            where=str(folder),
            fix="name a folder that this user may write",
        ) from error
    if not os.access(folder, os.W_OK):
        raise InputError(
            "the folder for the output cannot be written",
            where=str(folder),
            fix="name a folder that this user may write",
        )
    write_durably(path, text)
    return path
