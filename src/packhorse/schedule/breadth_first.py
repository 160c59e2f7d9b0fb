"""Breadth first: all microbatches through a stage before the rank's next stage.

In: ranks, microbatches, costs (not looked at), the number of stages. Out: a schedule.

    looped-bfs   Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2023): stages in a loop over
                 the ranks, by default two on each
    layered      Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism"
                 (2021): the same with every layer a stage, by default four on each

With v stages on each rank, a rank idles for (p-1)(F+B)/v of a step, if there are at least p
microbatches, and saves all of them. A stage's parameters are needed in one run in each pass, so
they are gathered, and their gradients reduced, once a step.
"""

from __future__ import annotations

from packhorse.schedule.costs import Costs
from packhorse.schedule.placements import place_looped
from packhorse.schedule.spec import Backward, Forward, Schedule, Task


def make_looped_bfs(
    num_ranks: int, num_microbatches: int, costs: Costs, *, num_stages: int | None = None
) -> Schedule:
    """Order stage by stage; two stages a rank if None."""
    del costs
    return _order_by_stage(num_ranks, num_microbatches, num_stages or 2 * num_ranks)


def make_layered(
    num_ranks: int, num_microbatches: int, costs: Costs, *, num_stages: int | None = None
) -> Schedule:
    """Order layer by layer; if None, a layer is a part of the costs, or a quarter of a rank's."""
    num_layers = num_stages or max(len(costs.parts), 4 * num_ranks)
    return _order_by_stage(num_ranks, num_microbatches, num_layers)


def _order_by_stage(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    def order(rank: int) -> tuple[Task, ...]:
        stages = range(rank, num_stages, num_ranks)
        microbatches = range(num_microbatches)
        forwards = (Forward(stage=stage, microbatch=at) for stage in stages for at in microbatches)
        backwards = (
            Backward(stage=stage, microbatch=at)
            for stage in reversed(stages)
            for at in microbatches
        )
        return *forwards, *backwards

    return Schedule(
        placement=place_looped(num_ranks, num_stages), orders=tuple(map(order, range(num_ranks)))
    )
