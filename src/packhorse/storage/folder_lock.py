"""A lock on a folder: one live process holds it, and the kernel frees it when that process ends.

In: a folder and the name of the lock's file in it. Out: a held `FolderLock`, or an `InputError`
that names the process which holds it. The lock is the kernel's (flock), so that it ends with its
process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from packhorse.errors import InputError
from packhorse.storage.space import explain_failure


class FolderLock:
    """A lock that this process holds until `close`; made by `lock_folder`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the folder. Closing twice is harmless."""
        if self._descriptor is not None:
            # Removed while the lock is still held: whoever opened it meanwhile sees that its file
            # is no longer the one at this path, and tries again. Where it cannot be removed, as on
            # a drive that takes no more writes, it locks nothing once it is closed.
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def lock_folder(folder: Path, name: str, *, what: str, fix: str) -> FolderLock:
    """Take a folder for this process, making it when it is missing.

    Args:
        name: of the lock's file.
        what: what the folder is, as in `the scratch folder`.
        fix: what to do when another process holds it.

    Raises:
        InputError: another live process holds it.
        StorageError: it cannot be made or written.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise InputError(
                    f"{what} is in use by process {holder or '(unknown)'}",
                    where=str(folder),
                    fix=fix,
                ) from error
            except OSError:
                os.close(descriptor)
                raise
            if _is_at(descriptor, path):
                break
            os.close(descriptor)
    except OSError as error:
        raise explain_failure(error, folder, f"use {what}") from error
    lock = FolderLock(path, descriptor)
    # The lock is the kernel's. On a full disk it holds as well, without a name for others to read:
    # what is in the folder has its space already, and a run must be able to go on with it.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return lock


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
