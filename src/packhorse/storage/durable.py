"""Writes that are either wholly there after a crash or not there at all.

In: bytes, texts or finished temporary folders. Out: files and folders under their final names.
Order of every commit: content to disk, rename, folder entry to disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from packhorse.errors import StorageError
from packhorse.storage.space import explain_failure
from packhorse.units import format_bytes


def write_durably(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace a file so that a crash leaves the old content or the new, never a mixture.

    Texts are written as UTF-8. Blocks until the content is on the disk.

    Raises:
        StorageError: the folder is missing or unwritable, or the disk is full; the old content,
            if any, is untouched.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(target.parent)
    except OSError as error:
        raise explain_failure(error, target, f"write {format_bytes(len(data))}") from error


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Bring a folder's own entries (names, not contents) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: str | os.PathLike[str]) -> None:
    """Bring every file and folder at and below `folder` to the disk, contents first."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            file = Path(place, name)
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        fsync_folder(place)


def commit_folder(temporary: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Give a finished temporary folder its final name; after a crash it is whole or absent.

    Both names must lie on one file system. Blocks until all contents are on the disk.

    Raises:
        StorageError: the final name is taken, or the disk fails; the temporary folder stays.
    """
    target = Path(final)
    if target.exists():
        raise StorageError(
            "cannot commit a folder: its final name is taken",
            where=f"{temporary} -> {target}",
            fix="remove or rename the folder that is there",
        )
    try:
        fsync_tree(temporary)
        Path(temporary).rename(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise explain_failure(error, target, f"commit {os.fspath(temporary)}") from error
