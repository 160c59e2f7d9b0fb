"""`packhorse clean`: what unfinished state is here, and may it go?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.options import AsJson, Yes
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    from packhorse.machine.spec import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """Something unfinished, what it is, and how large."""

    path: Path
    what: str
    size_bytes: int


def clean_folder(
    path: Annotated[
        Path, typer.Argument(metavar="RUN | SCRATCH", help="A run folder or a scratch folder.")
    ],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove what dead runs left behind; checkpoints stay."""
    from packhorse.checkpoint.folders import clean_leftovers
    from packhorse.cli.screen import Screen
    from packhorse.storage.kept_state import find_kept, remove_kept
    from packhorse.storage.scratch_folder import clean_scratch
    from packhorse.trainer.run_folder import claim_run
    from packhorse.units import format_bytes

    screen = Screen(as_json=as_json)
    if not path.is_dir():
        raise InputError(
            "there is no such folder", where=str(path), fix="name a run folder or a scratch folder"
        )
    groups = _find_groups(path)
    remains = find_remains(path, groups)
    for each in remains:
        screen.show_text(f"{each.path}: {each.what}, {format_bytes(each.size_bytes)}\n")
    total_bytes = sum(each.size_bytes for each in remains)
    removed = False
    if not remains:
        screen.show_text(f"nothing unfinished in {path}\n")
    elif screen.ask(f"remove these, {format_bytes(total_bytes)} in all?", yes=yes):
        with claim_run(path):
            for group in groups:
                kept, unreadable = find_kept(group[0])
                for folder in group:
                    clean_scratch(folder, but=_find_others(folder, group))
                for state in (*kept, *unreadable):
                    remove_kept(state)
            clean_leftovers(path)
        removed = True
        screen.show_text(f"removed, {format_bytes(total_bytes)} freed\n")
    else:
        screen.show_text("nothing was removed\n")
    screen.answer(
        {
            "folder": str(path),
            "found": [
                {"path": str(each.path), "what": each.what, "size_bytes": each.size_bytes}
                for each in remains
            ],
            "removed": removed,
        }
    )


def find_remains(path: Path, groups: list[list[Path]]) -> list[Remains]:
    """List the unfinished saves of a run folder, and what dead runs left in scratch folders.

    Args:
        groups: for each rank, the folder that was named and those of its scratch files; or folders
            of scratch files alone.
    """
    from packhorse.checkpoint.folders import find_leftovers

    found = [
        Remains(
            path=leftover,
            what="a checkpoint that made room for one which never came; it gets its name back"
            if ".old-" in leftover.name and not _original(leftover).exists()
            else "an unfinished save",
            size_bytes=_size_of(leftover),
        )
        for leftover in find_leftovers(path)
    ]
    for at, group in enumerate(groups):
        # The run folder stands at the head of every rank's group: it is looked at once.
        looked_at = {folder for earlier in groups[:at] for folder in earlier}
        found += _find_scratch_files(group, looked_at)
    return found


def _find_scratch_files(group: list[Path], looked_at: set[Path]) -> list[Remains]:
    from packhorse.storage.kept_state import find_kept
    from packhorse.storage.scratch_folder import find_leftovers

    path, found = group[0], list[Remains]()
    scratch = [folder for folder in group if folder not in looked_at]
    words: dict[Path, str] = {}
    for folder in scratch:
        # Parts of a file that is striped over several folders lie in those.
        kept, unreadable = find_kept(folder)
        for each in kept:
            state = f"the state of the run in {each.owner} after step {each.entry.step}"
            words |= {file.absolute(): state for file in (each.file, *each.parts)}
            words[each.record.absolute()] = f"the record of {each.file.name}"
            if folder == path:
                # Named alone, the first folder speaks for the others.
                found += [
                    Remains(path=part, what=state, size_bytes=part.stat().st_size)
                    for part in each.parts
                ]
        for each in unreadable:
            state = f"state that cannot be read: {each.reason}"
            words |= {file.absolute(): state for file in each.files}
            if folder == path:
                found += [
                    Remains(path=part, what=state, size_bytes=part.stat().st_size)
                    for part in each.files
                    if part.parent.absolute() != folder.absolute() and part.is_file()
                ]
    for folder in scratch:
        others = _find_others(folder, group)
        found += [
            Remains(
                path=file.path,
                what=words.get(file.path.absolute(), "a scratch file that holds no state"),
                size_bytes=file.size_bytes,
            )
            for file in find_leftovers(folder)
            if file.path not in others
        ]
    return found


def _find_others(folder: Path, scratch: list[Path]) -> tuple[Path, ...]:
    """Files in a run's scratch folder that keep the state of another run: they are not its own.

    Args:
        scratch: the run folder, its scratch folder, and those that this one is striped over.
    """
    from packhorse.storage.kept_state import find_kept, name_owner
    from packhorse.storage.scratch_folder import find_leftovers
    from packhorse.storage.scratch_space import part_tag

    path, *places = scratch
    if folder == path:
        return ()
    kept, unreadable = find_kept(places[0])
    theirs = {
        file.absolute()
        for each in (*kept, *unreadable)
        if each.owner != name_owner(path)
        for file in each.files
    }
    return tuple(
        left.path
        for left in find_leftovers(folder)
        if left.path.absolute() in theirs
        # In the other folders lie parts of other files, too.
        or (folder != places[0] and not left.path.stem.endswith(f"-{part_tag(places[0])}"))
    )


def _find_groups(path: Path) -> list[list[Path]]:
    """Find the scratch folders that belong to a folder: one list for each rank.

    Of a run its machine file names them; of a scratch folder named alone they are those of ranks in
    it, each for itself.
    """
    ranks = _find_scratch(path)
    if any(ranks):
        return [[path, *folders] for folders in ranks]
    in_it = sorted(each for each in path.glob("rank-*") if each.is_dir())
    return [[path], *([folder] for folder in in_it)]


def _find_scratch(path: Path) -> list[list[Path]]:
    """Find the scratch folders of a run, rank by rank: its machine file names them."""
    from packhorse.cli.kinds import detect_kind
    from packhorse.machine.cluster_files import read_cluster
    from packhorse.machine.files import read_machine

    file = path / "machine.json"
    if not file.is_file():
        return []
    try:
        is_cluster = detect_kind(file) == "cluster"
        machines = read_cluster(file).ranks if is_cluster else (read_machine(file),)
    except PackhorseError:
        # A damaged machine file must not keep a run folder from being cleaned.
        return []
    return [
        [Path(each) for each in _name_drives(machine.tier("disk")) if Path(each).is_dir()]
        for machine in machines
    ]


def _name_drives(disk: Tier | None) -> list[str]:
    if disk is None or disk.path is None:
        return []
    return [drive.path for drive in disk.drives] or [disk.path]


def _original(leftover: Path) -> Path:
    return leftover.with_name(leftover.name.partition(".old-")[0])


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
