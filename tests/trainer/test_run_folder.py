"""The run folder: where a run may begin, metrics without doubles, signals, reporters."""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path

import pytest

from packhorse.errors import InputError, StorageError
from packhorse.trainer.recipe_files import make_recipe
from packhorse.trainer.reporters import open_reporters
from packhorse.trainer.run_folder import (
    LOG_NAME,
    METRICS_NAME,
    ResumeFrom,
    ResumeNewest,
    RunFolder,
    StartFresh,
    find_beginning,
    read_metrics,
    read_resume,
)
from packhorse.trainer.stop_signals import StopSignals


def write_steps(folder: Path, *steps: int) -> None:
    with RunFolder(folder, finished_steps=0) as run:
        for step in steps:
            run.write_metrics({"step": step, "loss": 1.0 / step})


def recipe(tmp_path: Path, **changes: object):
    content = {"model_name_or_path": "m", "train_data": "d", "output_dir": str(tmp_path / "run")}
    return make_recipe({**content, **changes}).recipe


@pytest.mark.parametrize("resume", [StartFresh(), ResumeNewest(), ResumeNewest(required=True)])
def test_a_folder_that_cannot_be_one_is_refused_before_long_work(tmp_path: Path, resume):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(InputError, match=r"the run folder cannot be used: .*file is no folder"):
            find_beginning(folder, resume)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_without_a_step_leaves_no_state_behind(tmp_path: Path):
    write_steps(tmp_path)
    assert find_beginning(tmp_path, StartFresh()).checkpoint is None
    write_steps(tmp_path, 1)
    with pytest.raises(InputError, match="holds state of an earlier run: metrics"):
        find_beginning(tmp_path, StartFresh())


def test_a_disk_that_fills_up_under_the_log_is_said_in_words(tmp_path: Path):
    log = tmp_path / LOG_NAME
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    run = RunFolder(tmp_path, finished_steps=0)
    words = "the disk is full: cannot append to logs"
    with pytest.raises(StorageError, match=words), run:
        run.write_log("a line that stays in the buffer and fails once more when it closes")
    run = RunFolder(tmp_path, finished_steps=0)
    with pytest.raises(StorageError, match=words):
        run.write_log("a line")
    with pytest.raises(StorageError, match=words):
        run.close()


def test_metrics_beyond_the_resumed_step_are_cut_off(tmp_path: Path):
    write_steps(tmp_path, 1, 2, 3, 4)
    with RunFolder(tmp_path, finished_steps=2) as run:
        run.write_metrics({"step": 3, "loss": 9.0})
    assert [line["step"] for line in read_metrics(tmp_path / METRICS_NAME)] == [1, 2, 3]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path):
    write_steps(tmp_path, 1, 2)
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write('{"step": 3, "lo')
    with RunFolder(tmp_path, finished_steps=3) as run:
        run.write_metrics({"step": 3, "loss": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path / METRICS_NAME)] == [1, 2, 3]


def test_what_is_no_number_is_null(tmp_path: Path):
    with RunFolder(tmp_path, finished_steps=0) as run:
        run.write_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert read_metrics(tmp_path / METRICS_NAME)[0] == {"step": 1, "loss": None, "grad_norm": None}


def test_evaluations_are_found(tmp_path: Path):
    with RunFolder(tmp_path, finished_steps=0) as run:
        run.write_metrics({"step": 1, "loss": 1.0})
        run.write_metrics({"step": 1, "eval_loss": 1.0})
        run.write_metrics({"step": 2, "loss": 1.0})
        assert run.has_evaluation(1)
        assert not run.has_evaluation(2)


def test_a_fresh_start_needs_a_folder_without_state(tmp_path: Path):
    assert find_beginning(tmp_path / "absent", StartFresh()).checkpoint is None
    write_steps(tmp_path, 1)
    with pytest.raises(InputError) as caught:
        find_beginning(tmp_path, StartFresh())
    assert "metrics.jsonl" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert find_beginning(tmp_path, ResumeNewest()).checkpoint is None
    with pytest.raises(InputError, match="no checkpoint folder"):
        find_beginning(tmp_path, ResumeFrom(path=tmp_path / "checkpoint-9"))


@pytest.mark.parametrize(
    ("given", "fallback", "resume"),
    [
        (None, None, StartFresh()),
        (None, False, StartFresh()),
        (True, None, ResumeNewest()),
        (None, True, ResumeNewest(required=True)),
        (True, True, ResumeNewest()),
        ("a", True, ResumeFrom(path=Path("a"))),
        (None, "b", ResumeFrom(path=Path("b"))),
    ],
)
def test_the_command_line_and_the_recipe_say_where_to_begin(
    given: bool | str | None, fallback: bool | str | None, resume: object
):
    assert read_resume(given, fallback) == resume


def test_the_first_signal_is_noted_and_the_second_interrupt_ends():
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        assert signals.name is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.name == "SIGUSR2"
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.name == "SIGUSR2"
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reporter_whose_package_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        open_reporters(recipe(tmp_path, report_to="wandb"))
    assert open_reporters(recipe(tmp_path, report_to="none")) == ()


def test_a_tracker_takes_what_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: list[object] = []
    tracker = types.SimpleNamespace(
        init=lambda **options: sent.append(options["name"]),
        log=lambda values, step: sent.append((step, values)),
        finish=lambda: sent.append("end"),
    )
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    (reporter,) = open_reporters(recipe(tmp_path, report_to=["trackio"]))
    reporter.report(3, {"loss": 1.5, "grad_norm": None})
    reporter.close()
    assert sent == ["run", (3, {"loss": 1.5}), "end"]
