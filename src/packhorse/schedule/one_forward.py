"""1F1B: after its first forwards, a rank does one forward, one backward in turn.

In: ranks, microbatches, costs (not looked at). Out: a schedule with a stage for each rank.

    1f1b    PipeDream-Flush, DAPPLE (Narayanan et al., 2021; Fan et al., 2021): rank r begins with
            p-1-r forwards and saves min(m, p-r) microbatches
    eager   rank r begins with 2(p-1-r) forwards (JaxPP) and saves min(m, 2(p-1-r)+1), so that a
            transfer of up to a forward's time is hidden

A rank idles for (p-1)(F+B) of a step in both, as long as transfers take no time.
"""

from __future__ import annotations

from packhorse.schedule.costs import Costs
from packhorse.schedule.placements import place_looped
from packhorse.schedule.spec import Backward, Forward, Schedule, Task


def make_1f1b(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Order one forward, one backward, after as many forwards as there are ranks behind."""
    del costs
    return _alternate(num_ranks, num_microbatches, forwards_per_rank=1)


def make_eager_1f1b(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Order one forward, one backward, after twice as many forwards as there are ranks behind."""
    del costs
    return _alternate(num_ranks, num_microbatches, forwards_per_rank=2)


def _alternate(num_ranks: int, num_microbatches: int, *, forwards_per_rank: int) -> Schedule:
    def order(rank: int) -> tuple[Task, ...]:
        ahead = min(forwards_per_rank * (num_ranks - 1 - rank), num_microbatches)
        tasks: list[Task] = [Forward(stage=rank, microbatch=each) for each in range(ahead)]
        for microbatch in range(num_microbatches):
            if ahead + microbatch < num_microbatches:
                tasks.append(Forward(stage=rank, microbatch=ahead + microbatch))
            tasks.append(Backward(stage=rank, microbatch=microbatch))
        return tuple(tasks)

    return Schedule(
        placement=place_looped(num_ranks, num_ranks), orders=tuple(map(order, range(num_ranks)))
    )
