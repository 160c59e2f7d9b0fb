"""Replicas: the same pipeline several times, each with microbatches of its own.

In: the schedule of one replica, and how many there are. Out: `Replicas`, which stores that one
alone. All compute in the same order at the same times, so what is proved or timed of the first
holds for all of them; written out, a stage has one rank in each replica:

    replica k    ranks k * p to (k + 1) * p - 1, microbatches k * m to (k + 1) * m - 1

A rank of every stage thus has a contiguous run of the microbatches. Behind a stage's last gradient
its ranks sum what they have by a fixed binary tree, beside computing and in the order in which
stages are ready: `time_replicas`. Replicas are alike, so no rank waits for another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from packhorse.schedule.costs import Costs
from packhorse.schedule.spec import Backward, Schedule, Task, WeightGrad
from packhorse.schedule.timing import RankTiming, Reduction, Timing, time_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """So many replicas of a pipeline, of which the first is stored."""

    first: Schedule
    count: int

    @property
    def num_ranks(self) -> int:
        """How many ranks compute, in all replicas."""
        return self.count * self.first.num_ranks

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a step has, in all replicas."""
        return self.count * self.first.num_microbatches

    @property
    def placement(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of each stage, replica by replica."""
        num_ranks = self.first.num_ranks
        return {
            stage: tuple(each * num_ranks + rank for each in range(self.count) for rank in ranks)
            for stage, ranks in self.first.placement.items()
        }

    def write_out(self) -> Schedule:
        """Give the schedule of all ranks, every task named."""
        num_microbatches = self.first.num_microbatches
        return Schedule(
            placement=self.placement,
            orders=tuple(
                tuple(_shift(task, each * num_microbatches) for task in order)
                for each in range(self.count)
                for order in self.first.orders
            ),
        )


def time_replicas(replicas: Replicas, costs: Costs) -> Timing:
    """Give each task of the first replica its time, and the reductions behind them.

    Raises:
        ValueError: the schedule never ends; `check_schedule` says why.
    """
    timing = time_schedule(replicas.first, costs)
    if replicas.count == 1:
        return timing
    reduce_ns = [cost.reduce_ns for cost in costs.cut(replicas.first.num_stages)]
    return Timing(
        ranks=tuple(
            replace(times, reductions=_list_reductions(order, times, reduce_ns))
            for order, times in zip(replicas.first.orders, timing.ranks, strict=True)
        )
    )


def _list_reductions(
    order: tuple[Task, ...], times: RankTiming, reduce_ns: list[int]
) -> tuple[Reduction, ...]:
    ready_ns: dict[int, int] = {}
    for task, end_ns in zip(order, times.ends_ns, strict=True):
        if isinstance(task, Backward | WeightGrad):
            ready_ns[task.stage] = end_ns
    found: list[Reduction] = []
    free_ns = 0
    for stage, end_ns in sorted(ready_ns.items(), key=lambda each: each[1]):
        start_ns = max(free_ns, end_ns)
        free_ns = start_ns + reduce_ns[stage]
        if reduce_ns[stage]:
            found.append(Reduction(stage=stage, start_ns=start_ns, end_ns=free_ns))
    return tuple(found)


def _shift(task: Task, num_microbatches: int) -> Task:
    return replace(task, microbatch=task.microbatch + num_microbatches)
