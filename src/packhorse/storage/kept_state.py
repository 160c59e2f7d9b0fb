"""State that a scratch folder keeps for its run: scratch files with a record of a finished step.

In: a scratch folder. Out: what is kept there, of which run and after which step, without touching
it; and its removal, once nobody needs it. A scratch file without a readable record holds no state:
nobody could tell which of its bytes belong together.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from packhorse.errors import FileFormatError, InputError
from packhorse.storage.extents import ALIGNMENT_BYTES
from packhorse.storage.record import Entry, Json, read_record
from packhorse.storage.scratch_file import ScratchFile, open_scratch_file
from packhorse.storage.scratch_folder import scratch_path
from packhorse.storage.scratch_space import ScratchSpace, StateFile
from packhorse.storage.striped_file import StripedFile
from packhorse.storage.stripes import Stripes

NAMES: Final = (("state", "record"), ("state-2", "record-2"))
"""Two pairs of files, so that a new one can be filled from an old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """The state after a finished step: its file, the record beside it and what that says.

    `parts` are the parts of the file in other folders that it is striped over.
    `damaged` names newer entries of the record that do not count.
    """

    names: tuple[str, str]
    file: Path
    parts: tuple[Path, ...]
    record: Path
    header: Json
    entry: Entry
    damaged: tuple[str, ...]

    @property
    def owner(self) -> str:
        """The run folder that it belongs to."""
        return str(self.header.get("owner"))

    @property
    def size_bytes(self) -> int:
        """What its files take."""
        return sum(path.stat().st_size for path in (self.file, *self.parts, self.record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that cannot be used, and why."""

    path: Path
    reason: str


def find_kept(
    folder: str | os.PathLike[str],
) -> tuple[tuple[KeptState, ...], tuple[Unreadable, ...]]:
    """List what a scratch folder keeps, the newest step first, and records that say nothing."""
    found: list[KeptState] = []
    unreadable: list[Unreadable] = []
    for names in NAMES:
        file, record = (scratch_path(folder, name) for name in names)
        if not record.is_file():
            continue
        try:
            read = read_record(record)
        except FileFormatError as error:
            unreadable.append(Unreadable(path=record, reason=error.what))
            continue
        stripes, folders = _read_parts(read.header)
        part_name = f"{names[0]}-{read.header.get('tag')}"
        files = (file, *(scratch_path(other, part_name) for other in folders))
        wrong = _find_wrong(files, stripes.sizes(_file_bytes(read.header)))
        if wrong is not None:
            unreadable.append(Unreadable(path=record, reason=wrong))
        elif read.entry is not None:
            found.append(
                KeptState(
                    names=names,
                    file=file,
                    parts=files[1:],
                    record=record,
                    header=read.header,
                    entry=read.entry,
                    damaged=read.damaged,
                )
            )
        elif read.damaged:
            unreadable += [Unreadable(path=record, reason=reason) for reason in read.damaged]
    found.sort(key=lambda kept: kept.entry.step, reverse=True)
    return tuple(found), tuple(unreadable)


def name_owner(run_folder: Path) -> str:
    """Name a run in the records of its scratch files."""
    return str(run_folder.resolve())


def remove_kept(kept: KeptState) -> None:
    """Delete kept state; the record goes first, so that half of it is never believed."""
    kept.record.unlink(missing_ok=True)
    for file in (kept.file, *kept.parts):
        file.unlink(missing_ok=True)


def describe_parts(space: ScratchSpace) -> Json:
    """What the header says of a file that is striped over several folders; nothing of one."""
    if len(space.stripes.units) == 1:
        return {}
    return {
        "units": list(space.stripes.units),
        "folders": [str(folder.absolute()) for folder in space.folders[1:]],
        "tag": space.tag,
    }


def open_kept(kept: KeptState) -> StateFile:
    """Open the file of kept state, with all its parts, as it was made.

    Raises:
        StorageError: a part is gone or has another size.
    """
    stripes, _ = _read_parts(kept.header)
    size_bytes = _file_bytes(kept.header)
    with ExitStack() as undo:
        files: list[ScratchFile] = []
        sizes = stripes.sizes(size_bytes)
        for path, part_bytes in zip((kept.file, *kept.parts), sizes, strict=True):
            files.append(undo.enter_context(open_scratch_file(path, part_bytes)))
        undo.pop_all()
    if len(files) == 1:
        return files[0]
    threads = [1] * len(files)
    return StripedFile(files, stripes=stripes, num_threads=threads, size_bytes=size_bytes)


def _read_parts(header: Json) -> tuple[Stripes, tuple[str, ...]]:
    units, folders = header.get("units"), header.get("folders")
    if not isinstance(units, list) or not isinstance(folders, list):
        return Stripes(units=(1,)), ()
    shares = cast("list[int]", units)  # as `describe_parts` wrote them, under a checksum
    others = cast("list[str]", folders)  # the same
    return Stripes(units=tuple(shares)), tuple(others)


def _file_bytes(header: Json) -> int:
    size_bytes = header.get("file_bytes")
    return size_bytes if isinstance(size_bytes, int) else 0


def _find_wrong(files: tuple[Path, ...], sizes: tuple[int, ...]) -> str | None:
    """Say which part is not what the record speaks of, None when all are."""
    for file, size_bytes in zip(files, sizes, strict=True):
        found = file.stat().st_size if file.is_file() else None
        if found != max(size_bytes, ALIGNMENT_BYTES):
            has = "is missing" if found is None else f"has {found} bytes"
            return f"the file it speaks of, {file.name}, {has}"
    return None


def refuse_kept(kept: KeptState, folder: str | os.PathLike[str]) -> InputError:
    """Word the refusal to use a scratch folder that keeps the state of a run."""
    return InputError(
        f"the scratch folder holds the state of the run in {kept.owner} after step"
        f" {kept.entry.step}",
        where=str(folder),
        fix="to continue that run, start it with --resume;"
        f"\nto give its state up, run: packhorse clean {folder};"
        "\nto keep it for later, name another scratch folder in the disk budget",
    )
