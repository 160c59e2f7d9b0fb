"""What the steps of a run took so far, from its metrics: shown beside what its plan says.

In: a run folder and its plan of now. Out: `MeasuredSteps`, None where no step was measured.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from packhorse.plan.ranks import RankPlans
    from packhorse.plan.spec import Plan
    from packhorse.report.run import MeasuredSteps, RunEstimate

_RECENT_STEPS: Final = 20


def read_measured_steps(
    folder: Path,
    plan: Plan | RankPlans,
    earlier: Plan | RankPlans | None,
    run: RunEstimate,
) -> MeasuredSteps | None:
    """Read the steps that a run folder has metrics of; the last few count.

    Args:
        plan: by which the run goes on; or those of all ranks.
        earlier: what is in the folder, by which those steps were made.
        run: gives the tokens of a mean step: metrics have rates, whatever a batch's size.
    """
    from packhorse.report.run import MeasuredSteps
    from packhorse.trainer.run_folder import METRICS_NAME, read_metrics

    path = folder / METRICS_NAME
    lines = read_metrics(path) if path.is_file() else ()
    rates = [
        (step, rate)
        for line in lines
        if (rate := line.get("tokens_per_second")) and (step := line.get("step"))
    ]
    if not rates:
        return None
    recent = [rate for _, rate in rates[-_RECENT_STEPS:]]
    return MeasuredSteps(
        num_done=int(max(step for step, _ in rates)),
        num_steps=run.num_steps,
        num_recent=len(recent),
        step_ns=round(run.tokens_per_step * 1e9 / statistics.median(recent)),
        by_this_plan=earlier is not None and _decisions(earlier) == _decisions(plan),
    )


def _decisions(plan: Plan | RankPlans) -> tuple[Plan, ...]:
    """The plan of each rank, without what is looked up anew at every start."""
    from packhorse.plan.ranks import RankPlans

    ranks = plan.ranks if isinstance(plan, RankPlans) else (plan,)
    return tuple(
        replace(each, prediction=None, budget_bytes={}, scratch=None, drives=()) for each in ranks
    )
