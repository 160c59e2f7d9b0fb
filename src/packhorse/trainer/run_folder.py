"""The run folder: what lies in it, and whether a run may begin there.

    recipe.yaml  machine.json  plan.json                resolved, at every start
    timeline-predicted.json  timeline-measured.json     of ranks beside the first: ...-rank-N.json
    metrics.jsonl  logs/rank-0.log                      grow with the run
    checkpoint-N/                                       as `checkpoint` writes them
    config.json, model.safetensors, tokenizer ...       the model, at the end

In: an output folder and how to begin. Out: where to resume from, or a refusal that names both ways
out. metrics.jsonl never has a step twice: what lies beyond the resumed step is cut off.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TextIO, assert_never, cast

from packhorse.checkpoint.folders import (
    Skipped,
    checkpoint_step,
    clean_leftovers,
    find_checkpoints,
    find_leftovers,
    newest_complete,
    verify_checkpoint,
)
from packhorse.checkpoint.kept_run import verify_kept
from packhorse.checkpoint.tensor_files import INDEX_NAME, MODEL_NAME
from packhorse.errors import FileFormatError, InputError, StorageError
from packhorse.storage.durable import write_durably
from packhorse.storage.folder_lock import FolderLock, lock_folder
from packhorse.storage.kept_state import (
    KeptState,
    Unreadable,
    find_kept,
    name_owner,
    refuse_kept,
    refuse_unreadable,
)
from packhorse.storage.scratch_folder import claim_scratch
from packhorse.storage.space import explain_failure

RECIPE_NAME: Final = "recipe.yaml"
MACHINE_NAME: Final = "machine.json"
METRICS_NAME: Final = "metrics.jsonl"
LOG_NAME: Final = "logs/rank-0.log"
_LOCK_NAME: Final = ".packhorse-run-lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFresh:
    """Begin at step 1, only in a folder without state of an earlier run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeNewest:
    """Resume from the newest complete checkpoint; without one, begin at step 1 or refuse."""

    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFrom:
    """Resume from one checkpoint folder."""

    path: Path


Resume = StartFresh | ResumeNewest | ResumeFrom


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where a run begins: kept state, a verified checkpoint, or neither.

    `skipped` is what is newer and cannot be used, `obsolete` the run's kept state that something
    newer stands for. `again` counts the steps that were finished once and have to be done again.
    """

    checkpoint: Path | None
    skipped: tuple[Skipped, ...]
    kept: KeptState | None = None
    obsolete: tuple[KeptState | Unreadable, ...] = ()
    again: int = 0


def read_resume(given: bool | str | Path | None, fallback: bool | str | None = None) -> Resume:
    """Read `--resume [PATH]`, or else the recipe's `resume_from_checkpoint`.

    Args:
        given: the command line's: True without a path, None when it is absent.
        fallback: the recipe's, whose `true` asks for a checkpoint that exists.
    """
    if given is True:
        return ResumeNewest()
    if given:
        return ResumeFrom(path=Path(given))
    if fallback is True:
        return ResumeNewest(required=True)
    return ResumeFrom(path=Path(fallback)) if fallback else StartFresh()


def claim_run(folder: Path) -> FolderLock:
    """Take a run folder for this process until the lock is closed; makes it when it is missing.

    Raises:
        InputError: another live process trains in it.
        StorageError: it cannot be made or written.
    """
    return lock_folder(
        folder,
        _LOCK_NAME,
        what="the run folder",
        fix="wait for that process to end, stop it with SIGTERM, or choose another output_dir",
    )


def find_beginning(folder: Path, resume: Resume, scratch: Path | None = None) -> Beginning:
    """Decide where a run in `folder` begins. Changes nothing.

    Args:
        scratch: the scratch folder, where the state of the last finished step may be kept.

    Raises:
        InputError: the folder cannot be made or written, a fresh start where there is state or
            where another process runs, no checkpoint where one is asked for, or one that newer ones
            do not follow from; or the newest state is not there now and may come back, such as a
            drive that is not mounted.
        FileFormatError: the named checkpoint is damaged or cannot be resumed.
    """
    _refuse_unwritable(folder)
    all_kept, unreadable = ((), ()) if scratch is None else find_kept(scratch)
    kept = tuple(each for each in all_kept if each.owner == name_owner(folder))
    match resume:
        case StartFresh():
            _refuse_state(folder)
            for each in all_kept:
                # A run that is alive is told as such: its state is not to be given up.
                claim_scratch(scratch or folder).close()
                raise refuse_kept(each, scratch or folder)
            _refuse_away(unreadable, scratch or folder)
            return Beginning(checkpoint=None, skipped=())
        case ResumeNewest(required=required):
            newest = _find_newest(folder, scratch or folder, kept, unreadable)
            if newest.checkpoint is None and newest.kept is None and required:
                reasons = "\n".join(f"{s.path.name}: {s.reason}" for s in newest.skipped)
                raise InputError(
                    "there is no checkpoint to resume from",
                    where="\n".join(filter(None, (str(folder), reasons))),
                    fix="set resume_from_checkpoint: false, or use --resume, which then starts"
                    " afresh",
                )
            return newest
        case ResumeFrom(path=path):
            if not path.is_dir():
                raise InputError(
                    f"there is no checkpoint folder {path}",
                    where="--resume",
                    fix=f"have: {_list_names(folder)}",
                )
            step = verify_checkpoint(path).run.step
            _refuse_newer(folder, path, step)
            for each in kept:
                if each.entry.step > step:
                    raise _refuse_branch(step, path, each)
            older, away = _split_away(folder, unreadable, step)
            _refuse_away(away, scratch or folder)
            return Beginning(checkpoint=path, skipped=(), obsolete=(*kept, *older))
    assert_never(resume)


def _find_newest(
    folder: Path, scratch: Path, kept: tuple[KeptState, ...], unreadable: tuple[Unreadable, ...]
) -> Beginning:
    """Take the newest of checkpoints and kept state; of equal ones what is kept, it is in place.

    What is taken is whole; of what is newer, and is not, the reasons are told.
    """
    skipped = [
        Skipped(path=each.path, reason=each.reason) for each in unreadable if not each.may_return
    ]
    newest_saved = max((checkpoint_step(path) for path in find_checkpoints(folder)), default=0)
    saved, taken, step = None, None, 0
    for each in kept:
        if saved is None and each.entry.step < newest_saved:
            saved = _find_whole(folder, skipped)
        if saved is not None and each.entry.step < saved[1]:
            break
        skipped += [Skipped(path=each.record, reason=reason) for reason in each.damaged]
        try:
            verify_kept(each)
        except (FileFormatError, StorageError) as error:
            reason = f"{error.what}; it is the state after step {each.entry.step}"
            skipped.append(Skipped(path=each.file, reason=reason))
        else:
            taken, step = each, each.entry.step
            break
    checkpoint = None
    if taken is None:
        checkpoint, step = saved or _find_whole(folder, skipped)
    older, away = _split_away(folder, unreadable, step)
    _refuse_away(away, scratch)
    return Beginning(
        checkpoint=checkpoint,
        skipped=tuple(skipped),
        kept=taken,
        obsolete=(*(each for each in kept if each is not taken), *older),
        again=max(0, count_finished(folder, kept) - step),
    )


def _find_whole(folder: Path, skipped: list[Skipped]) -> tuple[Path | None, int]:
    """Find the newest whole checkpoint and its step; adds those that are not to `skipped`."""
    newest = newest_complete(folder)
    skipped += newest.skipped
    return newest.path, 0 if newest.path is None else checkpoint_step(newest.path)


def count_finished(folder: Path, kept: tuple[KeptState, ...] = ()) -> int:
    """Count the steps that the run is known to have finished, whatever became of their state."""
    written = [line.get("step") or 0 for line in read_metrics(folder / METRICS_NAME)]
    return int(max([*written, *(each.entry.step for each in kept)], default=0))


def _split_away(
    folder: Path, unreadable: tuple[Unreadable, ...], step: int
) -> tuple[tuple[Unreadable, ...], tuple[Unreadable, ...]]:
    """Split what may come back: what the run has gone beyond, and what it would lose."""
    away = [each for each in unreadable if each.may_return]
    older = [
        each
        for each in away
        if each.owner == name_owner(folder) and each.step is not None and each.step <= step
    ]
    return tuple(older), tuple(each for each in away if each not in older)


def _refuse_away(unreadable: tuple[Unreadable, ...], scratch: Path) -> None:
    for each in unreadable:
        if each.may_return:
            raise refuse_unreadable(each, scratch)


def refuse_complete(folder: Path, num_steps: int) -> None:
    """Refuse to train a finished run anew only because nothing of it is left to go on from.

    Raises:
        InputError: all steps are in metrics.jsonl and the model is saved.
    """
    if _is_saved(folder) and count_finished(folder) >= num_steps:
        raise InputError(
            f"the run is complete: {num_steps} steps are done and its model is saved",
            where=f"output_dir: {folder}",
            fix="nothing is left to do; to train it anew, choose another output_dir, or remove"
            " this one yourself;\nto train on from its weights, name it as model_name_or_path",
        )


def say_finished(folder: Path) -> str | None:
    """Say how many steps of a run are finished by its metrics; None where none is."""
    count = count_finished(folder)
    if not count:
        return None
    steps = "1 step is" if count == 1 else f"{count} steps are"
    saved = "; the model was saved at the end" if _is_saved(folder) else ""
    return f"{steps} finished in {folder}{saved}"


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MODEL_NAME, INDEX_NAME))


def clear_leftovers(folder: Path) -> tuple[Path, ...]:
    """Remove what an interrupted save left behind, and tell what it was."""
    return clean_leftovers(folder)


class RunFolder:
    """An open run folder: writes its files, metrics and log.

    Args:
        finished_steps: steps that the run resumes after; later lines of metrics are cut off.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, path: Path, *, finished_steps: int) -> None:
        self.path = path
        log = path / LOG_NAME
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            _cut_metrics(path / METRICS_NAME, finished_steps)
            self._metrics: TextIO = (path / METRICS_NAME).open("a", encoding="utf-8")
            self._log: TextIO = log.open("a", encoding="utf-8")
        except OSError as error:
            raise explain_failure(error, path, "use the run folder") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StorageError:
            # What ended the run says more than that its last lines were lost as well.
            if error is None:
                raise

    def write_file(self, name: str, text: str) -> None:
        """Replace one of the folder's files durably.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        write_durably(self.path / name, text)

    def write_metrics(self, metrics: Mapping[str, float | int | None]) -> None:
        """Append a line to metrics.jsonl; it must have `step`.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        clean = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        self._append(self._metrics, json.dumps(clean) + "\n", METRICS_NAME)

    def has_evaluation(self, step: int) -> bool:
        """Tell whether metrics.jsonl has the evaluation after a step."""
        lines = read_metrics(self.path / METRICS_NAME)
        return any(line.get("step") == step and "eval_loss" in line for line in lines)

    def write_log(self, text: str) -> None:
        """Append a line with the time to the log.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        self._append(self._log, stamp_line(text), LOG_NAME)

    def close(self) -> None:
        """Close metrics and log.

        Raises:
            StorageError: the disk is full, so that their last lines are lost; both are closed.
        """
        failures: list[tuple[OSError, str]] = []
        for file, name in ((self._metrics, METRICS_NAME), (self._log, LOG_NAME)):
            try:
                file.close()
            except OSError as error:
                failures.append((error, name))
        if failures:
            error, name = failures[0]
            raise explain_failure(error, self.path / name, f"append to {name}") from error

    def _append(self, file: TextIO, line: str, name: str) -> None:
        try:
            file.write(line)
            file.flush()
        except OSError as error:
            raise explain_failure(error, self.path / name, f"append to {name}") from error


def stamp_line(text: str) -> str:
    """Write a line of a log, with the time."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"


def read_metrics(path: Path) -> tuple[Mapping[str, float | int | None], ...]:
    """Read metrics.jsonl; a last line that a kill cut short is left out."""
    lines: list[Mapping[str, float | int | None]] = []
    if not path.is_file():
        return ()
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            content: object = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            lines.append(cast("dict[str, float | int | None]", content))  # as written here
    return tuple(lines)


def _cut_metrics(path: Path, finished_steps: int) -> None:
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if (line.get("step") or 0) <= finished_steps]
    if not finished_steps:
        kept = []
    write_durably(path, "".join(json.dumps(line) + "\n" for line in kept))


def _refuse_unwritable(folder: Path) -> None:
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "may not be written" if nearest.is_dir() else "is no folder"
        raise InputError(
            f"the run folder cannot be used: {nearest} {reason}",
            where=f"output_dir: {folder}",
            fix="name a folder that this user may write, new or of an earlier run",
        )


def _refuse_state(folder: Path) -> None:
    found = [*(p.name for p in find_checkpoints(folder)), *(p.name for p in find_leftovers(folder))]
    metrics = folder / METRICS_NAME
    # A run that was refused before its first step leaves an empty file: nothing could be lost.
    if metrics.exists() and metrics.stat().st_size:
        found.append(METRICS_NAME)
    if found:
        raise InputError(
            f"{folder} holds state of an earlier run: {', '.join(found[:4])}"
            + (f" and {len(found) - 4} more" if len(found) > 4 else ""),
            where=f"output_dir: {folder}",
            fix="to continue it, add --resume;"
            "\nto begin anew, choose another output_dir, or remove this one yourself",
        )


def _refuse_newer(folder: Path, path: Path, step: int) -> None:
    """Refuse to leave checkpoints behind that a later `--resume` would take for this run's own."""
    newer: list[Path] = []
    for other in find_checkpoints(folder):
        try:
            found = verify_checkpoint(other, checksums=False).run.step
        except FileFormatError:
            continue
        if found >= step and other.resolve() != path.resolve():
            newer.append(other)
    if newer:
        names = ", ".join(other.name for other in newer)
        raise InputError(
            f"resuming after step {step} would begin a second branch: {folder} has {names} already,"
            " which the next --resume would take",
            where=f"--resume {path}",
            fix="to go on from the newest, give --resume alone;"
            f"\nto go back, move {names} away yourself, or choose another output_dir",
        )


def _refuse_branch(step: int, path: Path, kept: KeptState) -> InputError:
    return InputError(
        f"resuming after step {step} would give up what the scratch folder keeps: the state after"
        f" step {kept.entry.step}",
        where=f"--resume {path}\n{kept.file}",
        fix="to go on from the newest, give --resume alone;"
        f"\nto go back, give it up yourself: packhorse clean {kept.file.parent}",
    )


def _list_names(folder: Path) -> str:
    return ", ".join(path.name for path in find_checkpoints(folder)) or "none"
