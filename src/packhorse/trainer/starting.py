"""Fills a session's states: from kept state, a checkpoint, or weights.

In: a session and where the run begins. Out: how many steps are finished, and what is to be told.
Kept state is in place when the scratch file of this plan would be the same; else its states are
read by name, and it goes once a file or a checkpoint of this plan holds them.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from packhorse.checkpoint.kept_run import KeptRun
from packhorse.checkpoint.resume import SavedRun
from packhorse.errors import InputError
from packhorse.storage.kept_state import KeptState, remove_kept
from packhorse.trainer.crew import Crew
from packhorse.trainer.run_folder import (
    Beginning,
    Resume,
    StartFresh,
    claim_run,
    clear_leftovers,
    find_beginning,
)
from packhorse.trainer.saving import RunSaver
from packhorse.trainer.session import Session
from packhorse.trainer.weights import WeightSource


def refuse_early(folder: Path, resume: Resume) -> None:
    """Refuse before anything that takes long what `begin` would refuse of a run folder.

    Raises:
        InputError: another process trains in the folder, or it holds state and the start is fresh.
    """
    if folder.is_dir():
        claim_run(folder).close()
    if isinstance(resume, StartFresh):
        find_beginning(folder, resume)


def begin(folder: Path, resume: Resume, scratch: Path | None) -> tuple[Beginning, tuple[Path, ...]]:
    """Find where to begin, and what was cleared away before: the newest may have to come back."""
    if isinstance(resume, StartFresh):
        return find_beginning(folder, resume, scratch), ()
    cleared = clear_leftovers(folder)
    beginning = find_beginning(folder, resume, scratch)
    for kept in beginning.obsolete:
        remove_kept(kept)
    return beginning, cleared


def begin_together(
    crew: Crew, held: ExitStack, folder: Path, resume: Resume, scratch: Path | None
) -> tuple[Beginning, tuple[Path, ...]]:
    """Find where all ranks begin; the first one takes the run folder and looks, until `held` ends.

    Raises:
        InputError, FileFormatError, StorageError: as `claim_run` and `find_beginning`.
        PeerLostError: on other ranks, when the first one was refused.
    """
    found: list[tuple[Beginning, tuple[Path, ...]]] = []

    def look() -> str:
        held.enter_context(claim_run(folder))
        if crew.num_ranks > 1 and scratch is not None:
            # Ranks have folders of their own in the one that a run of one rank has.
            _refuse_kept_alone(folder, resume, scratch.parent)
        found.append(begin(folder, resume, scratch))
        checkpoint = found[0][0].checkpoint
        return "" if checkpoint is None else str(checkpoint)

    checkpoint = crew.lead(look)
    if found:
        return found[0]
    return Beginning(checkpoint=Path(checkpoint) if checkpoint else None, skipped=()), ()


def _refuse_kept_alone(folder: Path, resume: Resume, scratch: Path) -> None:
    """Refuse to go on from older state than a run of one rank has kept."""
    if isinstance(resume, StartFresh):
        return
    kept = find_beginning(folder, resume, scratch).kept
    if kept is not None:
        raise InputError(
            f"the newest state, after step {kept.entry.step}, is kept in the scratch folder of one"
            " rank, and several ranks resume from checkpoints",
            where=str(kept.file),
            fix="go on with one rank: with `--set plan.durable=off` it saves a checkpoint at once",
        )


def fill_states(
    session: Session,
    saver: RunSaver,
    beginning: Beginning,
    weights: WeightSource,
    *,
    resume: Resume,
) -> tuple[int, list[str]]:
    """Fill every state; give the number of finished steps, and notes.

    Raises:
        InputError: the run is complete, and nothing is left to go on from.
        MismatchError: what is resumed is of another model, data or optimizer.
        FileFormatError: a state is missing or a file is damaged.
        StorageError: the disk is full or fails.
    """
    notes = [f"{each.path.name} is skipped: {each.reason}" for each in beginning.skipped]
    if beginning.again:
        count = beginning.again
        notes.append(
            f"{count} {'steps that were' if count > 1 else 'step that was'} finished before, but"
            " whose state is not there, will be done again"
        )
    if beginning.kept is not None:
        return beginning.kept.entry.step, notes + _go_on(session, saver, beginning.kept, weights)
    if beginning.checkpoint is not None:
        with SavedRun(beginning.checkpoint, checksums=False) as saved:
            notes += saver.check_state(saved.run)
            session.resume(saved)
        notes.append(f"resumed from {beginning.checkpoint} after step {saved.run.step}")
        return saved.run.step, notes
    if not isinstance(resume, StartFresh):
        saver.refuse_complete()
        notes.append("there is no state to resume from, so the run begins at step 1")
    session.begin(weights)
    return 0, notes


def resumed_from(beginning: Beginning) -> Path | None:
    """The file or folder that a run goes on from."""
    return beginning.checkpoint if beginning.kept is None else beginning.kept.file


def _go_on(session: Session, saver: RunSaver, kept: KeptState, weights: WeightSource) -> list[str]:
    step = kept.entry.step
    with KeptRun(kept) as saved:
        notes = list(saver.check_state(saved.run))
        if session.is_reopened:
            session.reopen(weights)
            return [*notes, f"resumed in place from {kept.file} after step {step}"]
        session.resume_kept(saved, weights)
    notes.append(f"resumed from {kept.file} after step {step}, laid out by another plan")
    if session.keeps:
        session.keep_now(saver.describe_state(step))
        remove_kept(kept)
    elif saver.is_resumable:
        notes.append(f"saved {saver.save_checkpoint(step).name}: this plan keeps no steps")
        remove_kept(kept)
    return notes
