"""Tasks as whole numbers: what proofs and timings of a million tasks compute with.

In: a schedule. Out: a `Numbered`. A code is `(kind * stages + stage) * microbatches + microbatch`,
with the kinds forward, whole backward, input gradient, weight gradient in this order; equal tasks
have equal codes, and codes sort by kind, stage and microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from packhorse.schedule.spec import Backward, Forward, InputGrad, Schedule, Task, WeightGrad

FORWARD: Final = 0
BACKWARD: Final = 1
INPUT_GRAD: Final = 2
WEIGHT_GRAD: Final = 3
_TYPES: Final[tuple[type[Task], ...]] = (Forward, Backward, InputGrad, WeightGrad)
_KINDS: Final[Mapping[type[Task], int]] = {each: kind for kind, each in enumerate(_TYPES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A schedule's orders as codes, and the rank of every code that is there.

    Where a task is there twice, its rank is that of the last.
    """

    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[int, ...], ...]
    rank_of: Mapping[int, int]

    def decode(self, code: int) -> Task:
        """Give the task of a code."""
        return decode_task(code, self.num_stages, self.num_microbatches)

    def needs_of(self, code: int) -> tuple[int, ...]:
        """List what must have ended: the codes of what `list_needs` gives."""
        count = self.num_microbatches
        rows = self.num_stages * count
        if code < rows:
            return (code - count,) if code >= count else ()
        if code >= 3 * rows:
            return (code - rows,)
        whole = code if code < 2 * rows else code - rows
        own = whole - rows
        if own + count >= rows:
            return (own,)
        half = whole + rows + count
        return own, half if half in self.rank_of else whole + count


def number_tasks(schedule: Schedule) -> Numbered:
    """Number the tasks of a schedule whose tasks are all of its stages."""
    stages, count, kinds = schedule.num_stages, schedule.num_microbatches, _KINDS
    orders = tuple(
        tuple(
            [(kinds[type(task)] * stages + task.stage) * count + task.microbatch for task in order]
        )
        for order in schedule.orders
    )
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(orders):
        rank_of.update(dict.fromkeys(order, rank))
    return Numbered(num_stages=stages, num_microbatches=count, orders=orders, rank_of=rank_of)


def encode_task(task: Task, num_stages: int, num_microbatches: int) -> int:
    """Give the code of a task."""
    return (_KINDS[type(task)] * num_stages + task.stage) * num_microbatches + task.microbatch


def decode_task(code: int, num_stages: int, num_microbatches: int) -> Task:
    """Give the task of a code."""
    row, microbatch = divmod(code, num_microbatches)
    kind, stage = divmod(row, num_stages)
    return _TYPES[kind](stage=stage, microbatch=microbatch)
