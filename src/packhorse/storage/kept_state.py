"""State that a scratch folder keeps for its run: scratch files with a record of a finished step.

In: a scratch folder. Out: what is kept there, of which run and after which step, without touching
it; and its removal, once nobody needs it. A scratch file without a readable record holds no state:
nobody could tell which of its bytes belong together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.errors import FileFormatError, InputError
from packhorse.storage.record import Entry, Json, read_record
from packhorse.storage.scratch_folder import scratch_path

NAMES: Final = (("state", "record"), ("state-2", "record-2"))
"""Two pairs of files, so that a new one can be filled from an old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """The state after a finished step: its file, the record beside it and what that says.

    `damaged` names newer entries of the record that do not count.
    """

    names: tuple[str, str]
    file: Path
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
        return self.file.stat().st_size + self.record.stat().st_size


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
        size_bytes = file.stat().st_size if file.is_file() else None
        if size_bytes != read.header.get("file_bytes"):
            has = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            unreadable.append(
                Unreadable(path=record, reason=f"the file it speaks of, {file.name}, {has}")
            )
        elif read.entry is not None:
            found.append(
                KeptState(
                    names=names,
                    file=file,
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


def remove_kept(kept: KeptState) -> None:
    """Delete kept state; the record goes first, so that half of it is never believed."""
    kept.record.unlink(missing_ok=True)
    kept.file.unlink(missing_ok=True)


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
