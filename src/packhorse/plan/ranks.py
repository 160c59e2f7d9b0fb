"""The plans of all ranks that share a model, and what they promise together. Torch-free.

In: what the search decided. Out: a frozen `RankPlans`. Each rank has a `Plan` of its own, for its
part of the model and its own machine and budgets; the pipeline is the same in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.errors import MismatchError
from packhorse.plan.spec import PipelinePlan, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A schedule that was not taken, and why."""

    name: str
    num_stages: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlans:
    """The plan of every rank, by rank.

    `step_ns` is how long a step of all ranks takes together, None where nobody has predicted it;
    `compute_ns` how long each rank computes in it. `rejected` are the schedules that were not
    taken.
    """

    ranks: tuple[Plan, ...]
    step_ns: int | None
    compute_ns: tuple[int, ...]
    rejected: tuple[Rejected, ...]

    @property
    def pipeline(self) -> PipelinePlan:
        """How the ranks share the model."""
        pipeline = self.ranks[0].pipeline
        assert pipeline is not None
        return pipeline

    @property
    def idle(self) -> float | None:
        """The share of all ranks' time in which they do not compute."""
        if not self.step_ns:
            return None
        return 1 - sum(self.compute_ns) / (self.step_ns * len(self.ranks))


def check_num_ranks(plans: RankPlans, num_ranks: int, *, where: str) -> None:
    """Refuse plans of another number of ranks.

    Raises:
        MismatchError: says how many there are, and how many are wanted.
    """
    if len(plans.ranks) != num_ranks:
        raise MismatchError(
            f"the plan is for {len(plans.ranks)} ranks, and there are {num_ranks}",
            where=where,
            fix=f"start {len(plans.ranks)} ranks, or leave --plan out: a new plan is made",
        )
