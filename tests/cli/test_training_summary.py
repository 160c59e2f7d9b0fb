"""The summary of a run as a document."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from packhorse.cli.training_screen import Summary, TrainingScreen
from packhorse.cli.training_summary import render_summary, summary_as_dict
from packhorse.trainer.observer import RunStart, StepReport


def make_screen(file, *, logging_steps):
    return TrainingScreen(
        Console(file=file, width=80),
        predicted_ns=None,
        base_bytes=0,
        budget_bytes={},
        logging_steps=logging_steps,
        at_start=lambda: None,
    )


def make_report(step, loss):
    return StepReport(
        step=step, epoch=1.0, loss=loss, grad_norm=None, learning_rate=0.1, step_s=1.0,
        tokens_per_second=8.0, mfu=0.1, peak_bytes={}, process_bytes=None,
        disk_read_bytes=0, disk_written_bytes=0,
    )  # fmt: skip


def test_each_column_has_a_name_of_its_own_above_it():
    file = io.StringIO()
    screen = make_screen(file, logging_steps=1)
    screen.started(
        RunStart(
            first_step=1, num_steps=2, steps_per_epoch=2, global_rows=1, row_length=8,
            resumed_from=None, scratch_bytes=0, checkpoint_bytes=0,
        )
    )  # fmt: skip
    screen.stepped(make_report(1, 2.0))
    _, head, line = file.getvalue().splitlines()
    names = re.split(r"\s{2,}", head.strip())
    assert names == ["step", "loss", "grad norm", "learn rate", "tokens/s", "time", "device"]
    ends = [found.end() for found in re.finditer(r"\S+(?: \S+)*", head)]
    assert [found.end() for found in re.finditer(r"\S+(?: \S+)*", line)] == ends
    assert len(head) < 80


def run_losses(losses):
    screen = make_screen(io.StringIO(), logging_steps=1000)
    for step, loss in enumerate(losses, 1):
        screen.stepped(make_report(step, loss))
    planned = SimpleNamespace(
        joint=None,
        plan=SimpleNamespace(prediction=None, budget_bytes={}),
        machine=SimpleNamespace(device="cpu"),
    )
    console = Console(file=io.StringIO(), width=200)
    console.print(render_summary(planned, screen.summary, baseline_bytes=300 << 20))
    return console.file.getvalue()


def test_losses_are_compared_by_means_where_there_are_enough_steps():
    text = run_losses([4.0, 2.0, *[1.5] * 17, 9.0, 1.0, 0.5])
    assert "3.0000 -> 0.7500, means of the first and the last 2 steps" in text
    assert "single steps: 4.0000 in step 1 -> 0.5000 in step 22" in text


def test_few_losses_are_called_noisy():
    text = run_losses([4.0, 3.0, 2.0])
    assert "4.0000 in step 1 -> 2.0000 in step 3 (single batches: noisy)" in text
    assert "means" not in text


def test_the_process_is_more_than_the_budget_and_says_why():
    assert (
        "of memory at its largest: what the device's budget counts, and Python, torch and other"
        " libraries (300 MiB), which no budget counts"
    ) in " ".join(run_losses([1.0]).split())


def test_an_eval_loss_that_is_not_finite_is_null():
    planned = SimpleNamespace(
        joint=None,
        plan=SimpleNamespace(prediction=None, budget_bytes={}),
        prepared=SimpleNamespace(recipe=SimpleNamespace(run_folder=Path("run"))),
    )
    summary = Summary(
        first_loss=(1, 2.0),
        last_loss=(2, 1.0),
        tenth_losses=None,
        num_in_tenth=0,
        eval_losses=((1, float("nan")), (2, 1.5)),
        step_s=(1.0, 1.0),
        tokens_per_second=8.0,
        peak_bytes={},
        result=None,
    )
    document = json.loads(json.dumps(summary_as_dict(planned, summary), allow_nan=False))
    assert [each["eval_loss"] for each in document["eval_losses"]] == [None, 1.5]
