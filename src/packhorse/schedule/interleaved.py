"""Interleaved 1F1B: several stages on each rank, in a loop (Narayanan et al., 2021).

In: ranks, microbatches, costs (not looked at), the number of stages. Out: a schedule. With v stages
on each rank, and microbatches a multiple of p, a rank idles for (p-1)(F+B)/v of a step and rank r
saves ((v-1)p + 2(p-1-r) + 1)/v microbatches, if there are enough.

Microbatches go in groups of p through a rank's stages, one stage after another. Where microbatches
or stages are no multiple of p, the schedule is that for the next multiple with the rest left out.
"""

from __future__ import annotations

from packhorse.schedule.costs import Costs
from packhorse.schedule.placements import place_looped
from packhorse.schedule.spec import Backward, Forward, Schedule, Task, crop_schedule


def make_interleaved(
    num_ranks: int, num_microbatches: int, costs: Costs, *, num_stages: int | None = None
) -> Schedule:
    """Order groups of microbatches through the stages of each rank; two stages a rank if None."""
    del costs
    num_stages = num_stages or 2 * num_ranks
    rounds = -(-num_stages // num_ranks)
    groups = -(-num_microbatches // num_ranks)
    total = groups * rounds * num_ranks

    def place(at: int) -> tuple[int, int]:
        group, within = divmod(at, rounds * num_ranks)
        turn, member = divmod(within, num_ranks)
        return turn, group * num_ranks + member

    def forward(rank: int, at: int) -> Task:
        turn, microbatch = place(at)
        return Forward(stage=turn * num_ranks + rank, microbatch=microbatch)

    def backward(rank: int, at: int) -> Task:
        turn, microbatch = place(at)
        return Backward(stage=(rounds - 1 - turn) * num_ranks + rank, microbatch=microbatch)

    def order(rank: int) -> tuple[Task, ...]:
        ahead = min(2 * (num_ranks - 1 - rank) + (rounds - 1) * num_ranks, total)
        tasks = [forward(rank, at) for at in range(ahead)]
        for at in range(total):
            if ahead + at < total:
                tasks.append(forward(rank, ahead + at))
            tasks.append(backward(rank, at))
        return tuple(tasks)

    whole = Schedule(
        placement=place_looped(num_ranks, rounds * num_ranks),
        orders=tuple(map(order, range(num_ranks))),
    )
    return crop_schedule(whole, num_stages=num_stages, num_microbatches=num_microbatches)
