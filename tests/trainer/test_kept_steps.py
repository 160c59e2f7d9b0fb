"""Every step is a checkpoint: killed at any moment, a run goes on from its last kept step."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_training import (
    KillAt,
    Killed,
    Listener,
    SignalAt,
    assert_same_weights,
    curve,
    load,
    run,
)
from tiny_runs import ALL_IN_MEMORY, ALL_ON_DISK, make_machine, plan_run, prepare
from torch import Tensor

from packhorse.checkpoint.folders import find_checkpoints
from packhorse.errors import InputError, StoppedError, StorageError
from packhorse.program.buffers import BufferId, ChunkId
from packhorse.program.tasks import Copy
from packhorse.runtime.disk import DiskTier
from packhorse.runtime.executor import Executor
from packhorse.runtime.prepared import Prepared
from packhorse.runtime.running import Running, StepWork
from packhorse.runtime.updates import ChunkUpdates
from packhorse.storage.kept_state import KeptState, find_kept
from packhorse.storage.scratch_folder import find_leftovers
from packhorse.trainer.observer import SilentObserver, StepReport
from packhorse.trainer.run_folder import ResumeFrom, ResumeNewest, StartFresh

FRESH = StartFresh()
IN_MEMORY = {**ALL_IN_MEMORY, "durable": 2}
MIXED = {**ALL_IN_MEMORY, "optimizer": "disk", "durable": 2}
HALF_ON_DISK = {**ALL_ON_DISK, "parameters": {"*norm*": "device", "*": "disk"}, "durable": 1}
OFF = {**ALL_ON_DISK, "durable": "off"}


def kept_in(folder: Path) -> KeptState:
    ((kept,), unreadable) = find_kept(folder / "scratch")
    assert unreadable == ()
    return kept


def assert_ended_like(folder: Path, straight: Path) -> None:
    assert curve(folder / "run") == curve(straight / "run")
    assert_same_weights(load(folder / "run"), load(straight / "run"))
    assert find_leftovers(folder / "scratch") == ()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, plan=OFF, save_steps=None)
    return folder


@pytest.mark.parametrize(
    ("pins", "step"),
    [(ALL_ON_DISK, 1), (ALL_ON_DISK, 4), (IN_MEMORY, 5), (MIXED, 3), (HALF_ON_DISK, 2)],
    ids=["disk-1", "disk-4", "memory", "mixed", "half"],
)
def test_a_killed_run_goes_on_in_place_with_nothing_saved(
    tmp_path: Path, straight: Path, pins: dict[str, object], step: int
):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(step + 1), plan=pins, save_steps=None)
    assert find_checkpoints(tmp_path / "run") == ()
    kept = kept_in(tmp_path)
    every = plan_of(tmp_path, pins)
    assert kept.entry.step == step // every * every
    listener = Listener()
    result = run(tmp_path, resume=ResumeNewest(), observer=listener, plan=pins, save_steps=None)
    assert result.resumed_from == kept.file
    assert any("resumed in place" in note for note in listener.notes)
    assert_ended_like(tmp_path, straight)


def plan_of(folder: Path, pins: dict[str, object]) -> int:
    machine = make_machine(folder)
    plan = plan_run(prepare(folder, machine, per_device_train_batch_size=2, plan=pins), machine)
    assert plan.durable.value != "off"
    return plan.durable.value


@pytest.mark.parametrize(
    ("before", "after"),
    [(ALL_ON_DISK, IN_MEMORY), (IN_MEMORY, ALL_ON_DISK), (ALL_ON_DISK, OFF), (MIXED, HALF_ON_DISK)],
    ids=["to-memory", "to-disk", "to-off", "other-mix"],
)
def test_a_killed_run_goes_on_under_another_plan(
    tmp_path: Path, straight: Path, before: dict[str, object], after: dict[str, object]
):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(5), plan=before, save_steps=None)
    assert kept_in(tmp_path).entry.step == 4
    # Killed again at once: what was taken over must be there already.
    with pytest.raises(Killed):
        run(
            tmp_path,
            resume=ResumeNewest(),
            observer=KillAt(5),
            plan=after,
            save_steps=None,
        )
    listener = Listener()
    run(tmp_path, resume=ResumeNewest(), observer=listener, plan=after, save_steps=None)
    assert any("after step 4" in note for note in listener.notes)
    assert_ended_like(tmp_path, straight)


@pytest.mark.parametrize(
    ("before", "after"),
    [(ALL_ON_DISK, ALL_ON_DISK), (IN_MEMORY, IN_MEMORY), (IN_MEMORY, ALL_ON_DISK)],
    ids=["disk", "memory", "to-disk"],
)
def test_frozen_parameters_come_back_too(
    tmp_path: Path, before: dict[str, object], after: dict[str, object]
):
    options: dict[str, object] = {"freeze": ["*embed*", "*layers.0*"], "save_steps": None}
    run(tmp_path / "straight", plan=OFF, **options)
    killed = tmp_path / "killed"
    killed.mkdir()
    with pytest.raises(Killed):
        run(killed, observer=KillAt(5), plan=before, **options)
    assert kept_in(killed).entry.step == 4
    run(killed, resume=ResumeNewest(), plan=after, **options)
    assert_ended_like(killed, tmp_path / "straight")


@pytest.mark.parametrize("after", [ALL_ON_DISK, IN_MEMORY], ids=["in-place", "to-memory"])
def test_masters_are_kept_beside_narrow_parameters(tmp_path: Path, after: dict[str, object]):
    options: dict[str, object] = {"bf16": True, "save_steps": None}
    run(tmp_path / "straight", plan=OFF, **options)
    killed = tmp_path / "killed"
    killed.mkdir()
    with pytest.raises(Killed):
        run(killed, observer=KillAt(5), plan=ALL_ON_DISK, **options)
    run(killed, resume=ResumeNewest(), plan=after, **options)
    assert_ended_like(killed, tmp_path / "straight")


@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("pins", [ALL_ON_DISK, IN_MEMORY], ids=["disk", "memory"])
def test_a_signal_ends_the_run_without_a_save(
    tmp_path: Path, straight: Path, pins: dict[str, object], step: int
):
    with pytest.raises(StoppedError) as caught:
        run(tmp_path, observer=SignalAt(step, signal.SIGTERM), plan=pins)
    assert caught.value.exit_code == 75
    message = str(caught.value)
    assert f"stopped by SIGTERM after step {step} of 6; its state is kept in the" in message
    assert str(kept_in(tmp_path).file) in message
    assert "--resume" in message
    saved = [path.name for path in find_checkpoints(tmp_path / "run")]
    assert saved == [f"checkpoint-{at}" for at in (3, 6) if at < step]
    run(tmp_path, resume=ResumeNewest(), plan=pins)
    # What was due when the signal came is saved by the run that goes on.
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == [
        "checkpoint-3",
        "checkpoint-6",
    ]
    assert_ended_like(tmp_path, straight)


class SignalInStep(SilentObserver):
    """Sends a signal in the middle of the step after `step`."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = step
        self.patch = monkeypatch

    def stepped(self, report: StepReport) -> None:
        if report.step == self.step:
            inner = ChunkUpdates.apply

            def apply(
                updates: ChunkUpdates,
                chunk: ChunkId,
                tensors: Mapping[str, Tensor],
                norm: Tensor | None,
                *,
                step: int,
                learning_rate: float,
            ) -> None:
                # Updates of the step itself may still be on their way.
                if step > self.step:
                    os.kill(os.getpid(), signal.SIGTERM)
                inner(updates, chunk, tensors, norm, step=step, learning_rate=learning_rate)

            self.patch.setattr(ChunkUpdates, "apply", apply)


@pytest.mark.parametrize(
    ("pins", "finished"), [(ALL_ON_DISK, 3), (IN_MEMORY, 4)], ids=["disk", "memory"]
)
def test_a_long_step_is_given_up_for_a_signal_where_the_one_before_is_kept(
    tmp_path: Path,
    straight: Path,
    pins: dict[str, object],
    finished: int,
    monkeypatch: pytest.MonkeyPatch,
):
    with monkeypatch.context() as patch:
        patch.setattr("packhorse.trainer.stop_signals.GRACE_S", 0.0)
        with pytest.raises(StoppedError, match=f"stopped by SIGTERM after step {finished} of 6"):
            run(tmp_path, observer=SignalInStep(3, patch), plan=pins, save_steps=None)
    assert kept_in(tmp_path).entry.step == finished
    run(tmp_path, resume=ResumeNewest(), plan=pins, save_steps=None)
    assert_ended_like(tmp_path, straight)


def test_a_run_that_is_killed_between_a_step_and_its_checkpoint_saves_it_when_it_goes_on(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("packhorse.trainer.saving.RunSaver.save_checkpoint", die)
        with pytest.raises(Killed):
            run(tmp_path, plan=ALL_ON_DISK)
    assert kept_in(tmp_path).entry.step == 3
    run(tmp_path, resume=ResumeNewest(), plan=ALL_ON_DISK)
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == [
        "checkpoint-3",
        "checkpoint-6",
    ]
    assert_ended_like(tmp_path, straight)


def test_a_damaged_entry_of_the_record_is_named_and_its_twin_used(tmp_path: Path, straight: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(5), plan=ALL_ON_DISK, save_steps=None)
    kept = kept_in(tmp_path)
    content = bytearray(kept.record.read_bytes())
    content[content.index(b'"step":4') + 7] ^= 1
    kept.record.write_bytes(content)
    listener = Listener()
    run(tmp_path, resume=ResumeNewest(), observer=listener, plan=ALL_ON_DISK, save_steps=None)
    assert any(note.startswith(f"{kept.record.name} is skipped: entry") for note in listener.notes)
    assert any(note.endswith("after step 4") for note in listener.notes)
    assert_ended_like(tmp_path, straight)


def test_kept_state_that_is_damaged_is_skipped_for_a_checkpoint(tmp_path: Path, straight: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(5), plan=ALL_ON_DISK)
    kept = kept_in(tmp_path)
    with kept.file.open("r+b") as file:
        file.truncate(4096)
    listener = Listener()
    result = run(tmp_path, resume=ResumeNewest(), observer=listener, plan=ALL_ON_DISK)
    assert result.resumed_from == tmp_path / "run" / "checkpoint-3"
    assert any(f"{kept.record.name} is skipped: the file it speaks of" in n for n in listener.notes)
    assert_ended_like(tmp_path, straight)


def test_kept_state_is_never_overwritten_unasked(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(5), plan=ALL_ON_DISK)
    kept = kept_in(tmp_path)
    with pytest.raises(InputError, match="holds state of an earlier run"):
        run(tmp_path, plan=ALL_ON_DISK)
    for path in (tmp_path / "run").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(InputError, match="after step 4") as caught:
        run(tmp_path, plan=ALL_ON_DISK)
    assert "--resume" in str(caught.value)
    assert f"packhorse clean {tmp_path / 'scratch'}" in str(caught.value)
    other = str(tmp_path / "other")
    for resume in (FRESH, ResumeNewest()):
        with pytest.raises(InputError, match=f"state of the run in {tmp_path / 'run'}"):
            run(tmp_path, resume=resume, plan=ALL_ON_DISK, output_dir=other)
    assert kept_in(tmp_path) == kept
    (tmp_path / "checkpoint-3").rename(tmp_path / "run" / "checkpoint-3")
    with pytest.raises(InputError, match="would give up what the scratch folder keeps"):
        run(tmp_path, resume=ResumeFrom(path=tmp_path / "run/checkpoint-3"), plan=ALL_ON_DISK)
    assert kept_in(tmp_path) == kept


def test_a_newer_checkpoint_stands_for_what_is_kept(tmp_path: Path, straight: Path):
    pins = {**ALL_IN_MEMORY, "durable": 2}
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4), plan=pins)
    assert kept_in(tmp_path).entry.step == 2
    result = run(tmp_path, resume=ResumeNewest(), plan=pins)
    assert result.resumed_from == tmp_path / "run" / "checkpoint-3"
    assert_ended_like(tmp_path, straight)


class KillLater(SilentObserver):
    """Kills its process a random part of a step's time after its first or second step."""

    def __init__(self, draw: random.Random) -> None:
        self.num_steps = draw.randrange(1, 3)
        self.share = draw.random() * 1.5

    def stepped(self, report: StepReport) -> None:
        self.num_steps -= 1
        if self.num_steps == 0:
            kill = threading.Timer(
                self.share * report.step_s, os.kill, (os.getpid(), signal.SIGKILL)
            )
            kill.start()


def run_until_killed(folder: Path, observer: KillLater, options: Mapping[str, object]) -> None:
    """Train in a process of its own, which has this one's memory, until it is killed."""
    with warnings.catch_warnings():
        # Its threads are none of the lanes'.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            run(folder, resume=ResumeNewest(), observer=observer, **options)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("pins", "interval"), [(ALL_ON_DISK, 1), (IN_MEMORY, 2)], ids=["disk", "memory"]
)
def test_sigkill_at_random_moments_loses_at_most_what_is_stated(
    tmp_path: Path, pins: dict[str, object], interval: int
):
    # More steps than are taken between six kills, also when the first of each run is a slow one.
    options: dict[str, object] = {"save_steps": None, "max_steps": 28}
    run(tmp_path / "straight", plan=OFF, **options)
    killed = tmp_path / "killed"
    killed.mkdir()
    draw = random.Random(interval)
    last_kept = 0
    for _ in range(6):
        run_until_killed(killed, KillLater(draw), {**options, "plan": pins})
        found, _ = find_kept(killed / "scratch")
        kept = found[0].entry.step if found else 0
        finished = max((int(str(line["step"])) for line in curve(killed / "run")), default=0)
        assert last_kept <= kept <= finished
        assert finished - kept <= interval
        last_kept = kept
    assert last_kept > 0
    run(killed, resume=ResumeNewest(), plan=pins, **options)
    assert_ended_like(killed, tmp_path / "straight")


class LateFailure:
    """Fails the last write of a step once the next one is being issued.

    `recorded` is the step that the scratch folder keeps at that moment.
    """

    def __init__(self, step: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.recorded: int | None = None
        began = threading.Event()
        left = 0
        issue, write = Executor.issue, DiskTier.write

        def note(executor: Executor, prepared: Prepared, work: StepWork) -> Running:
            nonlocal left
            if work.name == "step 1":
                tasks = prepared.program.tasks
                left = step * sum(isinstance(t, Copy) and t.target == "disk" for t in tasks)
            if work.name == f"step {step + 1}":
                began.set()
            return issue(executor, prepared, work)

        def fail(disk: DiskTier, buffer: BufferId, address: int) -> None:
            nonlocal left
            if left == 1:
                assert began.wait(30), "nothing is issued while a write goes on"
                self.recorded = kept_in(folder).entry.step
                raise StorageError("the drive is gone", where=str(disk.path))
            left -= left > 0
            write(disk, buffer, address)

        patch.setattr(Executor, "issue", note)
        patch.setattr(DiskTier, "write", fail)


@pytest.mark.parametrize("clip", [1.0, None], ids=["clipped", "unclipped"])
def test_a_write_that_fails_behind_its_step_loses_that_step_alone(
    tmp_path: Path, clip: float | None, monkeypatch: pytest.MonkeyPatch
):
    """No record speaks of a step whose last write is on its way."""
    options: dict[str, object] = {"save_steps": None, "max_grad_norm": clip}
    run(tmp_path / "straight", plan=OFF, **options)
    broken = tmp_path / "broken"
    broken.mkdir()
    with monkeypatch.context() as patch:
        late = LateFailure(3, broken, patch)
        with pytest.raises(StorageError, match="the drive is gone") as caught:
            run(broken, plan=ALL_ON_DISK, **options)
    assert "of step 3: " in str(caught.value)
    assert late.recorded == 2
    assert kept_in(broken).entry.step == 2
    run(broken, resume=ResumeNewest(), plan=ALL_ON_DISK, **options)
    assert_ended_like(broken, tmp_path / "straight")
