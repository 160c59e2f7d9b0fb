"""Who watches a run: everything that a person sees of it goes through an `Observer`.

In: what the training loop tells. Out: whatever the observer makes of it; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from packhorse.timeline.spec import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known before the first step; `first_step` is 1 unless the run was resumed."""

    first_step: int
    num_steps: int
    steps_per_epoch: int
    global_rows: int
    row_length: int
    resumed_from: Path | None
    scratch_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step whose values are there.

    `step_s` is from the end of the step before to its own, as the training loop counts it.
    `grad_norm` is the norm before clipping, None without it. `mfu` is the share of the machine's
    best matmul rate that forward and backward of the model make up. `peak_bytes` is by tier, the
    largest use of its pools in this step, as the runtime's ledger has it. `process_bytes` is the
    most that the process held so far beside its libraries, as the kernel has it; None where
    nobody said what the libraries take.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float | None
    learning_rate: float
    step_s: float
    tokens_per_second: float
    mfu: float
    peak_bytes: Mapping[str, int]
    process_bytes: int | None
    disk_read_bytes: int
    disk_written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """One finished evaluation after `step` optimizer steps."""

    step: int
    epoch: float
    eval_loss: float
    eval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended: the model lies in `output_dir`."""

    num_steps: int
    loss: float | None
    eval_loss: float | None
    output_dir: Path
    resumed_from: Path | None
    wall_s: float


Watch = Callable[[Timeline], str | None]
"""Looks at what a step did when; gives a line for a person, as a rule none."""


class Observer(Protocol):
    """Watches a run; no method may change it. Calls come from the thread that trains."""

    def started(self, start: RunStart) -> None:
        """Take what is known before the first step."""
        ...

    def noted(self, text: str) -> None:
        """Take a line that a person should read."""
        ...

    def progressed(self, what: str, done: int, total: int | None) -> None:
        """Take progress of something other than steps: loading, evaluating, saving."""
        ...

    def stepped(self, report: StepReport) -> None:
        """Take a finished step."""
        ...

    def evaluated(self, report: EvaluationReport) -> None:
        """Take a finished evaluation."""
        ...

    def saved(self, path: Path, save_s: float) -> None:
        """Take a finished save of a checkpoint or of the final model."""
        ...

    def finished(self, result: TrainResult) -> None:
        """Take the end of a run that was neither stopped nor failed."""
        ...


class SilentObserver:
    """Watches and says nothing."""

    def started(self, start: RunStart) -> None:
        """See Observer."""

    def noted(self, text: str) -> None:
        """See Observer."""

    def progressed(self, what: str, done: int, total: int | None) -> None:
        """See Observer."""

    def stepped(self, report: StepReport) -> None:
        """See Observer."""

    def evaluated(self, report: EvaluationReport) -> None:
        """See Observer."""

    def saved(self, path: Path, save_s: float) -> None:
        """See Observer."""

    def finished(self, result: TrainResult) -> None:
        """See Observer."""
