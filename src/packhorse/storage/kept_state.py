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
from typing import Final

from packhorse.errors import FileFormatError, InputError, OtherVersionError
from packhorse.storage.durable import fsync_folder
from packhorse.storage.extents import ALIGNMENT_BYTES
from packhorse.storage.kept_layout import KeptLayout, read_layout
from packhorse.storage.record import Entry, Found, Json, read_record
from packhorse.storage.scratch_file import ScratchFile, open_scratch_file
from packhorse.storage.scratch_folder import scratch_path
from packhorse.storage.scratch_space import StateFile, part_name
from packhorse.storage.space import explain_failure
from packhorse.storage.striped_file import StripedFile

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
    layout: KeptLayout
    entry: Entry
    damaged: tuple[str, ...]

    @property
    def owner(self) -> str:
        """The run folder that it belongs to."""
        return str(self.header.get("owner"))

    @property
    def files(self) -> tuple[Path, ...]:
        """All its files, the record first."""
        return (self.record, self.file, *self.parts)

    @property
    def size_bytes(self) -> int:
        """What its files take."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that cannot be used, and why.

    `may_return` is True where nothing is known to be damaged: a drive is not there, or another
    version of Packhorse can read it. `owner`, `step` and the parts among `files`, of which the
    record is the first, are what the record says; None where it says nothing.
    """

    path: Path
    reason: str
    files: tuple[Path, ...]
    owner: str | None
    step: int | None
    may_return: bool


def find_kept(
    folder: str | os.PathLike[str],
) -> tuple[tuple[KeptState, ...], tuple[Unreadable, ...]]:
    """List what a scratch folder keeps, the newest step first, and records that say nothing."""
    found: list[KeptState] = []
    unreadable: list[Unreadable] = []
    for names in NAMES:
        match _look(Path(folder), names):
            case KeptState() as kept:
                found.append(kept)
            case Unreadable() as other:
                unreadable.append(other)
            case None:
                pass
    found.sort(key=lambda kept: kept.entry.step, reverse=True)
    return tuple(found), tuple(unreadable)


def name_owner(run_folder: Path) -> str:
    """Name a run in the records of its scratch files."""
    return str(run_folder.resolve())


def remove_kept(kept: KeptState | Unreadable) -> None:
    """Delete kept state; the record goes first, so that half of it is never believed.

    Raises:
        StorageError: it may not be deleted.
    """
    record, *files = kept.files
    try:
        record.unlink(missing_ok=True)
        fsync_folder(record.parent)
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise explain_failure(error, record, "remove kept state") from error


def open_kept(kept: KeptState) -> StateFile:
    """Open the file of kept state, with all its parts, to read it.

    Raises:
        StorageError: a part is gone or has another size.
    """
    layout = kept.layout
    with ExitStack() as undo:
        files: list[ScratchFile] = []
        sizes = layout.stripes.sizes(layout.file_bytes)
        for path, part_bytes in zip((kept.file, *kept.parts), sizes, strict=True):
            file = open_scratch_file(path, part_bytes, writable=False)
            files.append(undo.enter_context(file))
        undo.pop_all()
    if len(files) == 1:
        return files[0]
    return StripedFile(
        files,
        stripes=layout.stripes,
        num_threads=[1] * len(files),
        size_bytes=layout.file_bytes,
    )


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


def refuse_unreadable(state: Unreadable, folder: str | os.PathLike[str]) -> InputError:
    """Word the refusal to use a scratch folder whose state cannot be read, but may be one day."""
    owner = "a run" if state.owner is None else f"the run in {state.owner}"
    step = "" if state.step is None else f" after step {state.step}"
    return InputError(
        f"the scratch folder holds the state of {owner}{step}, which cannot be read:"
        f" {state.reason}",
        where=str(state.path),
        fix="if a drive is not mounted, or a file was moved, bring it back, then --resume;"
        f"\nto give this state up, run: packhorse clean {folder};"
        "\nthen --resume goes on from the newest checkpoint",
    )


def _look(folder: Path, names: tuple[str, str]) -> KeptState | Unreadable | None:
    """Read one pair of files; None where there is no finished step, nor ever was."""
    file, record = (scratch_path(folder, name) for name in names)
    if not record.is_file():
        return None
    unknown = Unreadable(
        path=record, reason="", files=(record, file), owner=None, step=None, may_return=False
    )
    if not os.access(record, os.R_OK):
        return _because(unknown, f"this user may not read {record}", may_return=True)
    try:
        read = read_record(record)
    except OtherVersionError as error:
        return _because(unknown, error.what, may_return=True)
    except FileFormatError as error:
        return _because(unknown, error.what)
    entry = read.entry
    if entry is None:
        return _because(unknown, "; ".join(read.damaged)) if read.damaged else None
    try:
        layout = read_layout(read.header)
        _check_entry(layout, entry)
    except ValueError as error:
        return _because(unknown, f"the record of the scratch file is damaged: {error}")
    parts = tuple(
        scratch_path(other, part_name(names[0], index, layout.tag))
        for index, other in enumerate(layout.folders, 1)
    )
    said = Unreadable(
        path=record,
        reason="",
        files=(record, file, *parts),
        owner=_read_owner(read),
        step=entry.step,
        may_return=False,
    )
    sizes = layout.stripes.sizes(layout.file_bytes)
    for path, size_bytes in zip((file, *parts), sizes, strict=True):
        if path.is_symlink() or not path.is_file():
            how = "is a link" if path.is_symlink() else "is missing"
            return _because(said, f"the file it speaks of, {path}, {how}", may_return=True)
        if not os.access(path, os.R_OK):
            return _because(said, f"this user may not read {path}", may_return=True)
        found_bytes, made_bytes = path.stat().st_size, max(size_bytes, ALIGNMENT_BYTES)
        if found_bytes != made_bytes:
            reason = f"the file it speaks of, {path}, has {found_bytes} bytes, not {made_bytes}"
            return _because(said, reason)
    return KeptState(
        names=names,
        file=file,
        parts=parts,
        record=record,
        header=read.header,
        layout=layout,
        entry=entry,
        damaged=read.damaged,
    )


def _check_entry(layout: KeptLayout, entry: Entry) -> None:
    if len(entry.slots) != len(layout.in_slots):
        raise ValueError(f"it has {len(entry.slots)} slots for {len(layout.in_slots)} buffers")
    if len(entry.marks) != len(layout.marked):
        raise ValueError(f"it has {len(entry.marks)} marks for {len(layout.marked)} buffers")


def _read_owner(read: Found) -> str | None:
    owner = read.header.get("owner")
    return owner if isinstance(owner, str) else None


def _because(state: Unreadable, reason: str, *, may_return: bool = False) -> Unreadable:
    return Unreadable(
        path=state.path,
        reason=reason,
        files=state.files,
        owner=state.owner,
        step=state.step,
        may_return=may_return,
    )
