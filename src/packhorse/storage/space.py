"""Free space on a disk, and the refusal that comes before a write instead of in the middle of it.

In: paths that need not exist yet. Out: bytes, or a `StorageError` with need and have.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from packhorse.errors import StorageError
from packhorse.units import format_bytes

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def nearest_folder(path: str | os.PathLike[str]) -> Path:
    """Find the folder that exists at, or nearest above, `path`."""
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Tell how many bytes this user can still write to the file system that holds `path`."""
    status = os.statvfs(nearest_folder(path))
    return status.f_bavail * status.f_frsize


def ensure_space(path: str | os.PathLike[str], need_bytes: int, what: str) -> None:
    """Refuse when the file system of `path` has less than `need_bytes` free.

    Args:
        what: what the space is for, as the subject of the message, such as `a checkpoint`.

    Raises:
        StorageError: with need and have.
    """
    have_bytes = free_bytes(path)
    if have_bytes < need_bytes:
        raise no_space(path, need_bytes, have_bytes, what)


def no_space(
    path: str | os.PathLike[str], need_bytes: int, have_bytes: int, what: str
) -> StorageError:
    """Word the refusal of a write that does not fit on the disk."""
    return StorageError(
        f"{what} does not fit on the disk: need {format_bytes(need_bytes)} ({need_bytes} bytes),"
        f" have {format_bytes(have_bytes)} ({have_bytes} bytes)",
        where=os.fspath(path),
        fix="free some space there, name a folder on a larger disk, or lower the disk budget",
    )


def explain_failure(error: OSError, path: str | os.PathLike[str], doing: str) -> StorageError:
    """Word a failure of the operating system as what happened, where, and what to do.

    Args:
        doing: what was tried, such as `write 4.00 MiB at byte 8192`.
    """
    what = f"cannot {doing}: {error.strerror or error}"
    if error.errno in _FULL:
        what = f"the disk is full: cannot {doing}; {format_bytes(free_bytes(path))} are free"
        fix = "free some space there or name a folder on a larger disk; the run can be resumed"
    elif error.errno in _UNWRITABLE:
        fix = "choose a folder that this user may write, or change its owner or mode"
    elif error.errno == errno.EIO:
        fix = "the drive or its connection fails; look at the kernel log and use another disk"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        fix = "check that the folder exists and is still mounted"
    else:
        fix = "check the disk and the folder, then start again"
    return StorageError(what, where=os.fspath(path), fix=fix)
