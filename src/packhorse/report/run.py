"""What a whole run costs: hours, tokens, checkpoints, disk space, wear.

In: a plan with its prediction, the machine, and how long and how often. Out: a `RunEstimate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.errors import InputError
from packhorse.machine.spec import Machine
from packhorse.plan.spec import Plan
from packhorse.report.disk_rates import describe_disk_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """A run of `num_steps` steps, saved `num_saves` times, the last `num_kept` saves staying.

    `first_step_ns` is the time until the first step starts, None if unknown. `evaluation_ns` is one
    of `num_evaluations` passes over the evaluation data. `checkpoint_ns` is one save and
    `weights_ns` that of the finished model at the top of the run folder, of `weights_bytes`; None
    for a machine that has no rate for writing to disk. `endurance_bytes` is what the drive may be
    written in its life, None if unknown. `disk_rates` says which rates of the disk the times count
    on, None without one.
    """

    num_steps: int
    tokens_per_step: int
    step_ns: int
    first_step_ns: int | None
    num_saves: int
    num_kept: int
    num_evaluations: int
    evaluation_ns: int
    weights_bytes: int
    checkpoint_bytes: int
    checkpoint_ns: int | None
    scratch_bytes: int
    written_bytes_per_step: int
    endurance_bytes: int | None
    disk_rates: str | None = None
    weights_ns: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over the time of a step."""
        return self.tokens_per_step * 1e9 / self.step_ns if self.step_ns else 0.0

    @property
    def total_ns(self) -> int:
        """All steps, saves and evaluations, the way to the first step, and the model's save."""
        saves_ns = self.num_saves * (self.checkpoint_ns or 0) + (self.weights_ns or 0)
        evaluations_ns = self.num_evaluations * self.evaluation_ns
        steps_ns = self.num_steps * self.step_ns
        return steps_ns + saves_ns + evaluations_ns + (self.first_step_ns or 0)

    @property
    def hours(self) -> float:
        """`total_ns` in hours."""
        return self.total_ns / 3.6e12

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps."""
        return self.num_steps * self.tokens_per_step

    @property
    def worst_disk_bytes(self) -> int:
        """Scratch, kept checkpoints and the finished model; a new save lands before an old goes."""
        held = min(self.num_saves, self.num_kept + 1)
        return self.scratch_bytes + held * self.checkpoint_bytes + self.weights_bytes

    @property
    def written_bytes(self) -> int:
        """Everything written to disk in the whole run."""
        saved = self.num_saves * self.checkpoint_bytes + self.weights_bytes
        return self.num_steps * self.written_bytes_per_step + saved

    @property
    def endurance_share(self) -> float | None:
        """Share of the drive's life that the run writes; None if the drive is unknown."""
        return self.written_bytes / self.endurance_bytes if self.endurance_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What the steps of a run took that are done; `step_ns` is the median of the last few.

    `by_this_plan` is False where the run had another plan then.
    """

    num_done: int
    num_steps: int
    num_recent: int
    step_ns: int
    by_this_plan: bool

    @property
    def num_left(self) -> int:
        """Steps that are still to come."""
        return max(0, self.num_steps - self.num_done)

    @property
    def rest_ns(self) -> int:
        """How long those take by what was measured; steps alone."""
        return self.num_left * self.step_ns


def estimate_run(
    plan: Plan,
    machine: Machine,
    *,
    num_steps: int,
    num_saves: int,
    num_kept: int,
    weights_bytes: int,
    checkpoint_bytes: int,
    checkpoint_ns: int | None = None,
    weights_ns: int | None = None,
    num_evaluations: int = 0,
    evaluation_ns: int = 0,
    tokens_per_step: int | None = None,
    first_step_ns: int | None = None,
) -> RunEstimate:
    """Estimate a run.

    Args:
        plan: a plan that has a prediction.
        machine: gives the rates of its disk, and the drive's endurance.
        num_steps: optimizer steps of the whole run.
        num_saves: checkpoints written in the whole run.
        num_kept: checkpoints that stay.
        weights_bytes: size of the finished model.
        checkpoint_bytes: size of a checkpoint.
        checkpoint_ns: time of saving one, if known.
        weights_ns: time of saving the finished model, if known.
        num_evaluations: passes over the evaluation data in the whole run.
        evaluation_ns: time of one of them.
        tokens_per_step: None takes all rows at full length.
        first_step_ns: loading and whatever else comes before step 1, if known.

    Raises:
        InputError: the plan has no prediction.
    """
    if plan.prediction is None:
        raise InputError(
            "the plan has no prediction, so its run cannot be estimated",
            where=f"plan of {plan.model_name} for {plan.machine}",
            fix="make it with `packhorse plan RECIPE`, which predicts, or train by it: `packhorse"
            " train RECIPE --plan PLAN` predicts first",
        )
    disk = machine.tier("disk")
    numerics = plan.numerics
    all_tokens = numerics.microbatch_rows.value * numerics.num_microbatches * plan.length
    return RunEstimate(
        num_steps=num_steps,
        tokens_per_step=all_tokens if tokens_per_step is None else tokens_per_step,
        step_ns=plan.prediction.step_ns,
        first_step_ns=first_step_ns,
        num_saves=num_saves,
        num_kept=num_kept,
        num_evaluations=num_evaluations,
        evaluation_ns=evaluation_ns,
        weights_bytes=weights_bytes,
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_ns=checkpoint_ns,
        weights_ns=weights_ns,
        scratch_bytes=plan.prediction.scratch_bytes,
        written_bytes_per_step=plan.prediction.disk_written_bytes
        + plan.prediction.kept_bytes_per_step,
        endurance_bytes=None if disk is None else disk.endurance_bytes,
        disk_rates=describe_disk_rates(machine, plan.prediction.scratch_bytes),
    )


def run_as_dict(run: RunEstimate) -> dict[str, object]:
    """Give a run as what `json.dumps` takes."""
    return {
        "steps": run.num_steps,
        "tokens_per_step": run.tokens_per_step,
        "tokens": run.num_tokens,
        "tokens_per_s": run.tokens_per_s,
        "step_ns": run.step_ns,
        "total_ns": run.total_ns,
        "first_step_ns": run.first_step_ns,
        "saves": run.num_saves,
        "evaluations": run.num_evaluations,
        "evaluation_ns": run.evaluation_ns,
        "checkpoint_bytes": run.checkpoint_bytes,
        "checkpoint_ns": run.checkpoint_ns,
        "weights_bytes": run.weights_bytes,
        "weights_ns": run.weights_ns,
        "scratch_bytes": run.scratch_bytes,
        "worst_disk_bytes": run.worst_disk_bytes,
        "written_bytes_per_step": run.written_bytes_per_step,
        "written_bytes": run.written_bytes,
        "endurance_share": run.endurance_share,
        "disk_rates": run.disk_rates,
    }
