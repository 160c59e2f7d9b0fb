"""DualPipe-V: forwards and backwards of different microbatches in pairs (DeepSeek, 2025).

In: ranks, microbatches, costs (not looked at). Out: a schedule with two stages on each rank, on a
V. A pair is a forward and a whole backward side by side in a rank's order, made so that transfers
of one may hide behind the other. A rank saves up to 2p+1 microbatches of one stage, and with
F = I = W idles for (p-1)F/2 of a step, once there are 2p microbatches; for fewer, the schedule is
that of 2p with the rest left out.
"""

from __future__ import annotations

from collections import deque

from packhorse.schedule.costs import Costs
from packhorse.schedule.placements import place_vee
from packhorse.schedule.spec import (
    Backward,
    Forward,
    InputGrad,
    Schedule,
    Task,
    WeightGrad,
    crop_schedule,
)


def make_dualpipe_v(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Order the eight phases of DualPipe-V."""
    del costs
    enough = max(num_microbatches, 2 * num_ranks)
    whole = Schedule(
        placement=place_vee(num_ranks),
        orders=tuple(_order_rank(rank, num_ranks, enough) for rank in range(num_ranks)),
    )
    return crop_schedule(whole, num_stages=2 * num_ranks, num_microbatches=num_microbatches)


def _order_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Task, ...]:
    down, back = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - 1 - rank
    tasks: list[Task] = []
    forwards, gradients = {down: 0, back: 0}, {down: 0, back: 0}
    left = deque[WeightGrad]()

    def forward(stage: int) -> None:
        tasks.append(Forward(stage=stage, microbatch=forwards[stage]))
        forwards[stage] += 1

    def backward(stage: int, *, split: bool = False) -> None:
        microbatch = gradients[stage]
        gradients[stage] += 1
        if split:
            tasks.append(InputGrad(stage=stage, microbatch=microbatch))
            left.append(WeightGrad(stage=stage, microbatch=microbatch))
        else:
            tasks.append(Backward(stage=stage, microbatch=microbatch))

    def weights() -> None:
        if left:
            tasks.append(left.popleft())

    for _ in range(2 * behind):
        forward(down)
    for _ in range(rank + 1):
        forward(down)
        forward(back)
    for _ in range(behind):
        backward(back, split=True)
        weights()
        forward(back)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        forward(down)
        backward(back)
        forward(back)
        backward(down)
    for _ in range(behind):
        backward(back)
        forward(back)
        backward(down)
    # From the middle of what is left on, weight gradients wait until nothing else is to be done.
    middle = (rank + 1) // 2
    for at in range(rank + 1):
        backward(back, split=at > middle or (at == middle and rank % 2 == 1))
        backward(down, split=at >= middle)
    for _ in range(behind):
        weights()
        backward(down, split=True)
    while left:
        weights()
    return tuple(tasks)
