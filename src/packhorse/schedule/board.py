"""A schedule as whole numbers: what list scheduling and local search compute with.

In: a placement with one rank for each stage, microbatches, costs. Out: a `Board`, which turns
orders of tasks into orders of codes (see `numbering`) and back, and times them. `Board.time` gives
the makespan that `time_schedule` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from packhorse.schedule.costs import Cost, Costs
from packhorse.schedule.numbering import FORWARD, WEIGHT_GRAD, decode_task, encode_task
from packhorse.schedule.spec import Schedule, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What the tasks of a step take, and where they run; `ranks` has the rank of each stage.

    `lags_ns` is how long what a task waits for is on its way, by kind and stage as `durations_ns`:
    nothing from the same rank.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    stages: tuple[Cost, ...]
    lags_ns: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.ranks)

    @property
    def durations_ns(self) -> tuple[int, ...]:
        """What a task takes, by kind and stage: at `kind * stages + stage`."""
        return (
            *(cost.forward_ns for cost in self.stages),
            *(cost.backward_ns for cost in self.stages),
            *(cost.input_grad_ns for cost in self.stages),
            *(cost.weight_half_ns for cost in self.stages),
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return tuple(stage for stage, place in enumerate(self.ranks) if place == rank)

    def encode(self, task: Task) -> int:
        """Give the code of a task."""
        return encode_task(task, self.num_stages, self.num_microbatches)

    def decode(self, code: int) -> Task:
        """Give the task of a code."""
        return decode_task(code, self.num_stages, self.num_microbatches)

    def schedule_of(self, orders: Sequence[Sequence[int]]) -> Schedule:
        """Give the schedule of each rank's codes."""
        return Schedule(
            placement={stage: (rank,) for stage, rank in enumerate(self.ranks)},
            orders=tuple(tuple(map(self.decode, order)) for order in orders),
        )

    def time(self, orders: Sequence[Sequence[int]]) -> int | None:
        """Give the makespan in ns; None where tasks wait for each other for ever."""
        ends_ns = self.ends_of(orders)
        return None if ends_ns is None else max(ends_ns, default=0)

    def ends_of(self, orders: Sequence[Sequence[int]]) -> list[int] | None:
        """Give the end of each code's task in ns, -1 for codes that are not there."""
        stages, count = self.num_stages, self.num_microbatches
        rows = stages * count
        durations_ns, lags_ns = self.durations_ns, self.lags_ns
        ends_ns = [-1] * (4 * rows)
        places, clocks_ns = [0] * self.num_ranks, [0] * self.num_ranks
        # The rank that waits for a stage's value, by forward and backward and microbatch.
        waiting: dict[int, int] = {}
        pending = list(range(self.num_ranks))
        left = sum(map(len, orders))
        while pending:
            rank = pending.pop()
            order = orders[rank]
            at, clock_ns = places[rank], clocks_ns[rank]
            while at < len(order):
                code = order[at]
                row, microbatch = divmod(code, count)
                kind, stage = divmod(row, stages)
                if kind == FORWARD:
                    if stage:
                        arrival_ns = ends_ns[code - count]
                        if arrival_ns < 0:
                            waiting[code - count] = rank
                            break
                        clock_ns = max(clock_ns, arrival_ns + lags_ns[row])
                    after = code + count if stage + 1 < stages else -1
                elif kind == WEIGHT_GRAD:
                    if ends_ns[code - rows] < 0:
                        break
                    after = -1
                else:
                    if ends_ns[stage * count + microbatch] < 0:
                        break
                    if stage + 1 < stages:
                        whole = (stages + stage + 1) * count + microbatch
                        arrival_ns = max(ends_ns[whole], ends_ns[whole + rows])
                        if arrival_ns < 0:
                            waiting[whole] = rank
                            break
                        clock_ns = max(clock_ns, arrival_ns + lags_ns[row])
                    after = (stages + stage) * count + microbatch
                clock_ns += durations_ns[row]
                ends_ns[code] = clock_ns
                at += 1
                key = code if kind == FORWARD else after
                if key >= 0 and key in waiting:
                    pending.append(waiting.pop(key))
            left -= at - places[rank]
            places[rank], clocks_ns[rank] = at, clock_ns
        return None if left else ends_ns


def make_board(ranks: Sequence[int], num_ranks: int, num_microbatches: int, costs: Costs) -> Board:
    """Lay a board out for a placement."""
    crossings = list(zip(costs.cross(len(ranks)), pairwise(ranks), strict=True))
    forward_ns = [each.forward_ns if one != other else 0 for each, (one, other) in crossings]
    gradient_ns = [each.gradient_ns if one != other else 0 for each, (one, other) in crossings]
    return Board(
        ranks=tuple(ranks),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages=costs.cut(len(ranks)),
        lags_ns=(0, *forward_ns, *gradient_ns, 0, *gradient_ns, 0, *([0] * len(ranks))),
    )
