"""GPipe: all forwards, then all backwards (Huang et al., 2019).

In: ranks, microbatches, costs (not looked at). Out: a schedule with a stage for each rank. A rank
idles for (p-1)(F+B) of a step and saves all microbatches.
"""

from __future__ import annotations

from packhorse.schedule.costs import Costs
from packhorse.schedule.placements import place_looped
from packhorse.schedule.spec import Backward, Forward, Schedule, Task


def make_gpipe(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Order all forwards before all backwards."""
    del costs

    def order(rank: int) -> tuple[Task, ...]:
        forwards = (Forward(stage=rank, microbatch=each) for each in range(num_microbatches))
        backwards = (Backward(stage=rank, microbatch=each) for each in range(num_microbatches))
        return *forwards, *backwards

    return Schedule(
        placement=place_looped(num_ranks, num_ranks), orders=tuple(map(order, range(num_ranks)))
    )
