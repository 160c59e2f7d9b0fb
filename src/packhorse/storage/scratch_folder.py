"""The folder of a run's scratch files: owned by one live process, cleaned after a dead one.

In: a folder name. Out: a locked `ScratchFolder`, or an `InputError` that names the process which
holds it. Only files made by `ScratchFolder.create_file` are ever removed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from packhorse.storage.folder_lock import FolderLock, lock_folder
from packhorse.storage.scratch_file import ScratchFile, create_scratch_file, open_scratch_file
from packhorse.storage.space import explain_failure

LOCK_NAME: Final = ".packhorse-lock"
_PREFIX: Final = "packhorse-"
_SUFFIX: Final = ".scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A scratch file that lies in a folder."""

    path: Path
    size_bytes: int


class ScratchFolder:
    """A folder that this process holds until `close`; made by `claim_scratch`."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self._path = path
        self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def file_path(self, name: str) -> Path:
        """Where the scratch file called `name` lies or would lie."""
        return scratch_path(self._path, name)

    def create_file(self, name: str, size_bytes: int) -> ScratchFile:
        """Make the preallocated scratch file `name`; replaces a leftover of that name.

        Raises:
            StorageError: not enough space, or the folder is unwritable.
        """
        return create_scratch_file(self.file_path(name), size_bytes)

    def open_file(self, name: str, size_bytes: int) -> ScratchFile:
        """Open the scratch file `name` of an earlier process, with what it wrote.

        Raises:
            StorageError: it is not there or has another size.
        """
        return open_scratch_file(self.file_path(name), size_bytes)

    def remove_files(self, *, but: Collection[Path] = ()) -> tuple[Leftover, ...]:
        """Delete the scratch files here, `but` some, and tell which.

        Raises:
            StorageError: one may not be deleted.
        """
        leftovers = tuple(left for left in find_leftovers(self._path) if left.path not in but)
        for leftover in leftovers:
            try:
                leftover.path.unlink(missing_ok=True)
            except OSError as error:
                raise explain_failure(error, leftover.path, "remove a scratch file") from error
        return leftovers

    def close(self) -> None:
        """Give the folder free; scratch files stay. Closing twice is harmless."""
        self._lock.close()


def scratch_path(folder: str | os.PathLike[str], name: str) -> Path:
    """Where the scratch file called `name` lies or would lie in a folder."""
    return Path(folder) / f"{_PREFIX}{name}{_SUFFIX}"


def claim_scratch(folder: str | os.PathLike[str]) -> ScratchFolder:
    """Take a folder for this process, making it when it is missing. Leftover files stay.

    Raises:
        InputError: another live process holds it.
        StorageError: it cannot be made or written.
    """
    path = Path(folder)
    lock = lock_folder(
        path,
        LOCK_NAME,
        what="the scratch folder",
        fix="give each run its own scratch folder, or wait for that process to end",
    )
    return ScratchFolder(path, lock)


def find_leftovers(folder: str | os.PathLike[str]) -> tuple[Leftover, ...]:
    """List the scratch files in a folder, by name; looks only, whoever holds the folder."""
    return tuple(
        Leftover(path=path, size_bytes=path.stat().st_size)
        for path in sorted(Path(folder).glob(f"{_PREFIX}*{_SUFFIX}"))
        if path.is_file() and not path.is_symlink()
    )


def clean_scratch(
    folder: str | os.PathLike[str], *, but: Collection[Path] = ()
) -> tuple[Leftover, ...]:
    """Delete what a dead run left in a folder, `but` some, and tell what it was.

    Raises:
        InputError: the run is alive; nothing was deleted.
        StorageError: the folder cannot be written.
    """
    if not Path(folder).is_dir():
        return ()
    with claim_scratch(folder) as claimed:
        return claimed.remove_files(but=but)
