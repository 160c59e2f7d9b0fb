"""A schedule: which rank computes each stage, and in which order each rank computes.

In: nothing. Out: frozen values. A stage is a run of blocks along the depth of the model, stage 0
the first; a task is one pass of one microbatch through one stage. A schedule says nothing of
transfers, memory or time: those follow from it.

    Forward       needs the Forward of the stage before
    Backward      needs its own Forward, and the gradient that the stage after hands back
    InputGrad     the half of a Backward that the stage before waits for
    WeightGrad    the other half, at any time after its InputGrad, on the same rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from packhorse.schedule.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Compute a stage's outputs for one microbatch."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Compute the gradients of a stage's inputs and of its parameters."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGrad:
    """Compute only the gradients of a stage's inputs."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGrad:
    """Compute the gradients of a stage's parameters that an InputGrad has left over."""

    stage: int
    microbatch: int


Task = Forward | Backward | InputGrad | WeightGrad
LETTERS: Final[Mapping[type[Task], str]] = {
    Forward: "F",
    Backward: "B",
    InputGrad: "I",
    WeightGrad: "W",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ranks of each stage, and each rank's tasks in order.

    A stage has one rank as a rule; with several, each computes a contiguous run of the
    microbatches.
    """

    placement: Mapping[int, tuple[int, ...]]
    orders: tuple[tuple[Task, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks compute."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.placement)

    @property
    def num_microbatches(self) -> int:
        """How many microbatches there are in a step."""
        return 1 + max((task.microbatch for order in self.orders for task in order), default=-1)

    @property
    def num_tasks(self) -> int:
        """How many tasks there are on all ranks."""
        return sum(map(len, self.orders))


Family = Callable[[int, int, Costs], Schedule]
"""Makes a schedule of ranks, microbatches and costs: a pure function."""


def name_task(task: Task) -> str:
    """Name a task in a few letters: stage, kind, microbatch, such as `2F0`."""
    return f"{task.stage}{LETTERS[type(task)]}{task.microbatch}"


def crop_schedule(schedule: Schedule, *, num_stages: int, num_microbatches: int) -> Schedule:
    """Take out the tasks of all but the first stages and microbatches.

    What is left needs nothing of what is gone, and keeps its order: a right schedule stays right.
    """
    return Schedule(
        placement={
            stage: ranks for stage, ranks in schedule.placement.items() if stage < num_stages
        },
        orders=tuple(
            tuple(
                task
                for task in order
                if task.stage < num_stages and task.microbatch < num_microbatches
            )
            for order in schedule.orders
        ),
    )
