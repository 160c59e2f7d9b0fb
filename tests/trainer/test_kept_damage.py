"""Kept state that is not what it was: named, with what it costs, and the run goes on or waits."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from test_kept_steps import HALF_ON_DISK, IN_MEMORY, MIXED, OFF, assert_ended_like, kept_in
from test_training import KillAt, Killed, Listener, SignalAt, run
from tiny_runs import ALL_ON_DISK, write_model

from packhorse.checkpoint.folders import find_checkpoints
from packhorse.data.batches import Batch, Batches
from packhorse.errors import InputError, MismatchError, StoppedError
from packhorse.storage.kept_state import KeptState, find_kept
from packhorse.storage.scratch_folder import claim_scratch, find_leftovers
from packhorse.trainer.run_folder import ResumeNewest, StartFresh, find_beginning

PAGE = 4096


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, plan=OFF, save_steps=None)
    return folder


def kill(folder: Path, pins: Mapping[str, object], step: int = 5, **options: object) -> KeptState:
    """Kill a run in its fifth step; the fourth is kept."""
    with pytest.raises(Killed):
        run(folder, observer=KillAt(step), plan=pins, **options)
    return kept_in(folder)


def resume(folder: Path, pins: Mapping[str, object], **options: object) -> list[str]:
    listener = Listener()
    run(folder, resume=ResumeNewest(), observer=listener, plan=pins, **options)
    return listener.notes


def spoil_page(kept: KeptState, name: str) -> None:
    """Lose a page of a buffer, as a drive does that says it wrote it."""
    slots = dict(zip(kept.layout.in_slots, kept.entry.slots, strict=True))
    _, *offsets = kept.layout.buffers[name]
    with kept.file.open("r+b") as file:
        file.seek(offsets[slots.get(name, 0)])
        file.write(bytes(PAGE))


def spoil_parameter(kept: KeptState) -> None:
    spoil_page(kept, "param/0")


def spoil_moment(kept: KeptState) -> None:
    spoil_page(kept, "exp_avg/0")


def truncate(kept: KeptState) -> None:
    os.truncate(kept.file, PAGE)


def extend(kept: KeptState) -> None:
    os.truncate(kept.file, kept.file.stat().st_size + PAGE)


def zero_record(kept: KeptState) -> None:
    kept.record.write_bytes(bytes(kept.record.stat().st_size))


def cut_record(kept: KeptState) -> None:
    os.truncate(kept.record, PAGE // 2)


@pytest.mark.parametrize("pins", [ALL_ON_DISK, IN_MEMORY], ids=["disk", "memory"])
@pytest.mark.parametrize(
    "damage", [spoil_parameter, spoil_moment, truncate, extend, zero_record, cut_record]
)
def test_damaged_state_is_skipped_for_the_checkpoint_before_it(
    tmp_path: Path, straight: Path, pins: Mapping[str, object], damage: Callable[[KeptState], None]
) -> None:
    kept = kill(tmp_path, pins)
    damage(kept)
    notes = resume(tmp_path, pins)
    assert any(note.endswith("checkpoint-3 after step 3") for note in notes)
    (skipped,) = (note for note in notes if "is skipped:" in note)
    assert skipped.startswith((kept.file.name, kept.record.name))
    assert (
        "2 steps that were finished before, but whose state is not there, will be done again"
        in notes
    )
    assert_ended_like(tmp_path, straight)


def test_damaged_state_without_a_checkpoint_begins_anew_and_says_so(
    tmp_path: Path, straight: Path
) -> None:
    kept = kill(tmp_path, ALL_ON_DISK, save_steps=None)
    spoil_moment(kept)
    with pytest.raises(InputError, match="no checkpoint to resume from") as caught:
        run(tmp_path, resume=ResumeNewest(required=True), plan=ALL_ON_DISK, save_steps=None)
    assert "exp_avg/0 is not what was written" in str(caught.value)
    assert kept_in(tmp_path) == kept
    notes = resume(tmp_path, ALL_ON_DISK, save_steps=None)
    assert any(
        "exp_avg/0 is not what was written; it is the state after step 4" in n for n in notes
    )
    assert any(note.startswith("5 steps that were finished before") for note in notes)
    assert any("the run begins at step 1" in note for note in notes)
    assert_ended_like(tmp_path, straight)


def test_a_drive_that_cannot_be_read_is_no_reason_to_stop(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kill(tmp_path, ALL_ON_DISK)
    inner, place = os.preadv, kept.file.stat()
    failed: list[int] = []

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not failed and os.path.samestat(os.fstat(descriptor), place) and offset > PAGE:
            failed.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return inner(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(Killed):
            run(tmp_path, resume=ResumeNewest(), observer=KillAt(4), plan=OFF)
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert f"{kept.file.name} is skipped: cannot read" in log
    assert "2 steps that were finished before" in log
    resume(tmp_path, ALL_ON_DISK)
    assert_ended_like(tmp_path, straight)


def test_state_whose_file_is_away_is_waited_for(tmp_path: Path, straight: Path) -> None:
    kept = kill(tmp_path, ALL_ON_DISK)
    kept.file.rename(tmp_path / "away")
    for other in ({}, {"output_dir": str(tmp_path / "other")}):
        with pytest.raises(InputError, match="after step 4, which cannot be read") as caught:
            run(tmp_path, resume=ResumeNewest(), plan=ALL_ON_DISK, **other)
        assert f"packhorse clean {tmp_path / 'scratch'}" in str(caught.value)
    (tmp_path / "away").rename(kept.file)
    notes = resume(tmp_path, ALL_ON_DISK)
    assert f"resumed in place from {kept.file} after step 4" in notes
    assert_ended_like(tmp_path, straight)


def test_state_that_is_away_is_given_up_for_a_checkpoint_of_the_same_step(
    tmp_path: Path, straight: Path
) -> None:
    kept = kill(tmp_path, ALL_ON_DISK, save_steps=4)
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    kept.file.unlink()
    notes = resume(tmp_path, ALL_ON_DISK, save_steps=4)
    assert any(note.endswith("checkpoint-4 after step 4") for note in notes)
    assert_ended_like(tmp_path, straight)


@pytest.mark.parametrize("other", [{"seed": 1}, {"optim": "sgd"}, {"max_length": 12}])
@pytest.mark.parametrize("pins", [ALL_ON_DISK, IN_MEMORY], ids=["disk", "memory"])
def test_another_recipe_is_refused_and_the_state_left_alone(
    tmp_path: Path, pins: Mapping[str, object], other: Mapping[str, object], straight: Path
) -> None:
    kept = kill(tmp_path, pins)
    with pytest.raises(InputError, match=r"the checkpoint's|the checkpoint is of|has no"):
        run(tmp_path, resume=ResumeNewest(), plan=pins, **other)
    assert kept_in(tmp_path) == kept
    resume(tmp_path, pins)
    assert_ended_like(tmp_path, straight)


@pytest.mark.parametrize("pins", [ALL_ON_DISK, IN_MEMORY], ids=["disk", "memory"])
def test_what_was_frozen_has_no_moments_to_go_on_from(
    tmp_path: Path, pins: Mapping[str, object]
) -> None:
    kept = kill(tmp_path, pins, freeze=["*embed*"], save_steps=None)
    with pytest.raises(InputError, match=r"has no \w+ of 'model\.embed_tokens\.weight'"):
        run(tmp_path, resume=ResumeNewest(), plan=pins, save_steps=None)
    assert kept_in(tmp_path) == kept


def test_the_state_of_another_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    kept = kill(tmp_path, ALL_ON_DISK)
    (tmp_path / "model").rename(tmp_path / "first")
    write_model(tmp_path / "model", intermediate_size=64)
    with pytest.raises(MismatchError, match="belongs to another model"):
        run(tmp_path, resume=ResumeNewest(), plan=ALL_ON_DISK)
    assert kept_in(tmp_path) == kept


@pytest.mark.parametrize("finish", [True, False], ids=["finished", "stopped"])
def test_state_that_a_plan_without_keeping_went_on_from_goes_when_the_run_is_complete(
    tmp_path: Path, straight: Path, finish: bool
) -> None:
    """With save_only_model nothing else can be resumed from: until then it stays."""
    options: dict[str, object] = {"save_only_model": True, "save_steps": None}
    kept = kill(tmp_path, ALL_ON_DISK, **options)
    if not finish:
        with pytest.raises(StoppedError):
            run(
                tmp_path,
                resume=ResumeNewest(),
                observer=SignalAt(5, signal.SIGTERM),
                plan=OFF,
                **options,
            )
        assert kept_in(tmp_path) == kept
    resume(tmp_path, OFF, **options)
    assert_ended_like(tmp_path, straight)


@pytest.mark.parametrize("after", [MIXED, ALL_ON_DISK, HALF_ON_DISK], ids=["same", "disk", "half"])
def test_a_step_without_labels_is_kept_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: Mapping[str, object]
) -> None:
    """Nothing of it is written to the disk but what lies in memory, behind the step."""
    make_batch = Batches.batch

    def mask_two(batches: Batches, step: int) -> Batch:
        batch = make_batch(batches, step)
        return replace(batch, num_items=0) if step in (2, 3) else batch

    monkeypatch.setattr(Batches, "batch", mask_two)
    run(tmp_path / "straight", plan=OFF, save_steps=None)
    killed = tmp_path / "killed"
    killed.mkdir()
    kept = kill(killed, MIXED, save_steps=None)
    assert len(set(kept.entry.slots)) == 2
    notes = resume(killed, after, save_steps=None)
    assert any(f"{kept.file} after step 4" in note for note in notes)
    assert_ended_like(killed, tmp_path / "straight")


def test_a_run_that_is_resumed_twice_in_place_and_then_elsewhere(
    tmp_path: Path, straight: Path
) -> None:
    kill(tmp_path, ALL_ON_DISK, 2, save_steps=None)
    for step in (3, 4, 5):
        with pytest.raises(Killed):
            run(
                tmp_path,
                resume=ResumeNewest(),
                observer=KillAt(step),
                plan=ALL_ON_DISK,
                save_steps=None,
            )
        assert kept_in(tmp_path).entry.step == step - 1
    resume(tmp_path, IN_MEMORY, save_steps=None)
    assert_ended_like(tmp_path, straight)
    assert find_kept(tmp_path / "scratch") == ((), ())


def test_a_complete_run_is_not_trained_anew(tmp_path: Path) -> None:
    run(tmp_path, plan=ALL_ON_DISK, save_steps=None)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="the run is complete: 6 steps are done and its model"):
        run(tmp_path, resume=ResumeNewest(), plan=ALL_ON_DISK, save_steps=None)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before
    assert find_leftovers(tmp_path / "scratch") == ()


def test_a_scratch_folder_of_a_run_that_is_alive_is_told_as_such(tmp_path: Path) -> None:
    kept = kill(tmp_path, ALL_ON_DISK)
    scratch = kept.file.parent
    with pytest.raises(InputError, match="the scratch folder holds the state of the run"):
        find_beginning(tmp_path / "other", StartFresh(), scratch)
    with claim_scratch(scratch), pytest.raises(InputError, match="is in use by process"):
        find_beginning(tmp_path / "other", StartFresh(), scratch)
