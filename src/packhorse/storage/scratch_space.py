"""Where a run's scratch files lie and how their bytes move: one folder, or several as one.

In: a `Scratch`, as the machine's measured drives or a person say. Out: a held `ScratchSpace` that
makes files by name: a plain one where one thread of one drive does it, striped ones elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from packhorse.errors import InputError
from packhorse.storage.scratch_file import (
    DEFAULT_BLOCK_BYTES,
    ScratchFile,
    create_scratch_file,
    open_scratch_file,
)
from packhorse.storage.scratch_folder import (
    Leftover,
    ScratchFolder,
    claim_scratch,
    find_leftovers,
)
from packhorse.storage.striped_file import StripedFile
from packhorse.storage.stripes import Stripes

StateFile = ScratchFile | StripedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchPart:
    """One scratch folder: its share of every round of stripes, and how its bytes move.

    `direct` False never bypasses the page cache; None does where the file system takes it.
    """

    folder: Path
    units: int = 1
    direct: bool | None = None
    block_bytes: int = DEFAULT_BLOCK_BYTES
    num_threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Scratch folders that are used as one; `huge_pages`: of the memory that they move."""

    parts: tuple[ScratchPart, ...]
    huge_pages: bool = True

    @property
    def stripes(self) -> Stripes:
        """How bytes are dealt out to the folders."""
        if len(self.parts) == 1:
            return Stripes(units=(1,))
        return Stripes(units=tuple(part.units for part in self.parts))


def make_scratch(folder: Path | Scratch) -> Scratch:
    """Take a folder alone, with what is usual, as a `Scratch`."""
    if isinstance(folder, Scratch):
        return folder
    return Scratch(parts=(ScratchPart(folder=folder),))


class ScratchSpace:
    """Scratch folders that this process holds until `close`; made by `claim_space`."""

    def __init__(self, scratch: Scratch, folders: tuple[ScratchFolder, ...]) -> None:
        self._scratch = scratch
        self._folders = folders

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
        """The first folder, where what belongs to all of them lies."""
        return self._folders[0].path

    @property
    def tag(self) -> str:
        """What the names of parts in other folders end with: they belong to this first folder.

        Another run may have its own parts there, beside those of another first folder.
        """
        return part_tag(self.path)

    def file_path(self, name: str) -> Path:
        """Where the file called `name` lies, or its part in the first folder."""
        return self._folders[0].file_path(name)

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders."""
        return tuple(folder.path for folder in self._folders)

    @property
    def stripes(self) -> Stripes:
        """How files are dealt out to the folders."""
        return self._scratch.stripes

    def create_file(self, name: str, size_bytes: int) -> StateFile:
        """Make the preallocated file `name`; replaces a leftover of that name.

        Raises:
            StorageError: not enough space, or a folder is unwritable. No file is left behind.
        """
        return self._open(name, size_bytes, create_scratch_file, remove=True)

    def open_file(self, name: str, size_bytes: int) -> StateFile:
        """Open the file `name` of an earlier process, with what it wrote.

        Raises:
            StorageError: a part is not there or has another size.
        """
        return self._open(name, size_bytes, open_scratch_file, remove=False)

    def remove_files(self, *, but: Collection[Path] = ()) -> tuple[Leftover, ...]:
        """Delete the scratch files here, `but` some of the first folder and their parts.

        Of the other folders only what belongs to this first folder goes.
        """
        first, *others = self._folders
        removed = [*first.remove_files(but=but)]
        for index, folder in enumerate(others, 1):
            keep = {
                folder.path / f"{part_name(path.stem, index, self.tag)}{path.suffix}"
                for path in but
            }
            keep |= {
                left.path
                for left in find_leftovers(folder.path)
                if not left.path.stem.endswith(f"-{self.tag}")
            }
            removed += folder.remove_files(but=keep)
        return tuple(removed)

    def close(self) -> None:
        """Give the folders free; files stay. Closing twice is harmless."""
        for folder in self._folders:
            folder.close()

    def _open(
        self, name: str, size_bytes: int, open_one: Callable[..., ScratchFile], *, remove: bool
    ) -> StateFile:
        parts, stripes = self._scratch.parts, self._scratch.stripes
        with ExitStack() as undo:
            files: list[ScratchFile] = []
            sizes = stripes.sizes(size_bytes)
            places = enumerate(zip(self._folders, parts, sizes, strict=True))
            for index, (folder, part, part_bytes) in places:
                file = open_one(
                    folder.file_path(part_name(name, index, self.tag)),
                    part_bytes,
                    # Measured elsewhere it may be refused here: then it goes without.
                    direct=None if part.direct else part.direct,
                    block_bytes=part.block_bytes,
                )
                undo.callback(file.remove if remove else file.close)
                files.append(file)
            undo.pop_all()
        if len(files) == 1 and parts[0].num_threads == 1:
            return files[0]
        return StripedFile(
            files,
            stripes=stripes,
            num_threads=[part.num_threads for part in parts],
            size_bytes=size_bytes,
        )


def part_name(name: str, index: int, tag: str) -> str:
    """Name the part of a file in the folder at `index`.

    The number is in it, so that drives which change places are not taken for each other.
    """
    return f"{name}.{index}-{tag}" if index else name


def part_tag(first: Path) -> str:
    """What the names of parts end with whose first part lies in the folder `first`."""
    return hashlib.sha256(str(first.absolute()).encode()).hexdigest()[:8]


def claim_space(scratch: Scratch) -> ScratchSpace:
    """Take all folders for this process, making what is missing. Leftover files stay.

    Raises:
        InputError: another live process holds one of them, or two are the same.
        StorageError: one cannot be made or written.
    """
    places = [part.folder.resolve() for part in scratch.parts]
    for part, place in zip(scratch.parts, places, strict=True):
        if places.count(place) > 1:
            raise InputError(
                "two of the scratch folders are the same",
                where=str(part.folder),
                fix="name each folder once in the disk budget",
            )
    with ExitStack() as undo:
        folders: list[ScratchFolder] = []
        for part in scratch.parts:
            folder = claim_scratch(part.folder)
            undo.callback(folder.close)
            folders.append(folder)
        undo.pop_all()
    return ScratchSpace(scratch, tuple(folders))
