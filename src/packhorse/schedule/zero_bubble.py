"""Zero bubble: weight gradients fill what 1F1B idles (Qi et al., 2024).

In: ranks, microbatches, costs (not looked at). Out: a schedule with a stage for each rank.

    zb-h1   as many microbatches saved as by the first rank of 1F1B, p, on every rank; with
            F = I = W a rank idles for (p-1)F of a step, a third of what it idles in 1F1B
    zb-h2   2p-1 microbatches saved; with F = I = W no rank idles between its first and its last
            task, once there are 2p-1 microbatches
"""

from __future__ import annotations

from packhorse.schedule.board import make_board
from packhorse.schedule.costs import Costs, even_costs
from packhorse.schedule.greedy import Policy, list_orders
from packhorse.schedule.placements import place_looped
from packhorse.schedule.spec import Forward, InputGrad, Schedule, Task, WeightGrad


def make_zb_h1(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Order as 1F1B does, with rank r's weight gradients r microbatches behind."""
    del costs

    def order(rank: int) -> tuple[Task, ...]:
        ahead = min(num_ranks - 1 - rank, num_microbatches)
        tasks: list[Task] = [Forward(stage=rank, microbatch=each) for each in range(ahead)]
        done = 0
        for microbatch in range(num_microbatches):
            draining = ahead + microbatch >= num_microbatches
            if not draining:
                tasks.append(Forward(stage=rank, microbatch=ahead + microbatch))
            tasks.append(InputGrad(stage=rank, microbatch=microbatch))
            if draining or microbatch >= rank:
                tasks.append(WeightGrad(stage=rank, microbatch=done))
                done += 1
        rest = (WeightGrad(stage=rank, microbatch=at) for at in range(done, num_microbatches))
        return *tasks, *rest

    return Schedule(
        placement=place_looped(num_ranks, num_ranks), orders=tuple(map(order, range(num_ranks)))
    )


def make_zb_h2(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """List the tasks for equal times, with room for 2p-1 microbatches on every rank."""
    del costs
    even = even_costs(num_ranks, saved_bytes=1)
    board = make_board(range(num_ranks), num_ranks, num_microbatches, even)
    room = [2 * num_ranks - 1] * num_ranks
    return board.schedule_of(list_orders(board, room, Policy()))
