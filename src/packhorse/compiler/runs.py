"""In which order blocks run over micro-batches: lists of runs, for one rank or for many.

In: a model, or a schedule with the blocks of its stages. Out: `Run`s in one total order of all
ranks, blocks by their numbers in the whole model. What a rank's tasks are, and what ranks send each
other, follows from such a list and the model alone. A backward runs whole or in its two halves.

    depth first    for each micro-batch: every block forward; every block backward, last first
    layered        for each block: all micro-batches forward, and in the last block each backward
                   at once; then for each block, last first: all micro-batches backward
    pipelined      the tasks of a schedule in the order in which they begin: all blocks of a stage
                   forward, or backward or half of it, last first

A block's backward, and so its second half, goes over the micro-batches in order in each of them, so
all have the same sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from packhorse.model.spec import Block, BlockId, Model
from packhorse.plan.spec import Order, PipelinePlan
from packhorse.program.bulk import collector_waits
from packhorse.schedule.messages import order_tasks
from packhorse.schedule.spec import Backward, Forward, InputGrad, WeightGrad

Direction = Literal["forward", "backward", "input_grad", "weight_grad"]


@dataclass(frozen=True, slots=True)
class Run:
    """A block that runs for a micro-batch, forward, backward, or half of its backward."""

    direction: Direction
    block: BlockId
    microbatch: int


Runs = Sequence[Run]


def run_alone(model: Model, num_microbatches: int, order: Order) -> tuple[Run, ...]:
    """Order a training step of one rank."""
    everything = range(num_microbatches)
    match order:
        case "depth_first":
            return tuple(
                run
                for microbatch in everything
                for run in (
                    *_forwards(model, [microbatch]),
                    *_backwards(model.blocks[::-1], [microbatch]),
                )
            )
        case "layered":
            last = model.blocks[-1:]
            return (
                *_forwards(model, everything, model.blocks[:-1]),
                *(
                    run
                    for microbatch in everything
                    for run in (
                        *_forwards(model, [microbatch], last),
                        *_backwards(last, [microbatch]),
                    )
                ),
                *_backwards(model.blocks[-2::-1], everything),
            )
        case "scheduled":
            raise ValueError("a schedule gives the order of several ranks, not of one alone")
        case _:
            assert_never(order)


def run_forward(model: Model, num_microbatches: int, *, num_together: int = 1) -> tuple[Run, ...]:
    """Order an evaluation; so many micro-batches go through a block before the next block."""
    return tuple(
        run
        for first in range(0, num_microbatches, num_together)
        for run in _forwards(model, range(first, min(first + num_together, num_microbatches)))
    )


@collector_waits()
def run_pipelined(model: Model, pipeline: PipelinePlan) -> tuple[Run, ...]:
    """Order a training step of all the ranks that share a model, the whole of it."""
    runs: list[Run] = []
    stages = [[model.blocks[block] for block in blocks] for blocks in pipeline.stages]
    for _, task in order_tasks(pipeline.schedule):
        blocks = stages[task.stage]
        match task:
            case Forward():
                runs += _forwards(model, [task.microbatch], blocks)
            case Backward():
                runs += _backwards(blocks[::-1], [task.microbatch])
            case InputGrad():
                runs += _backwards(blocks[::-1], [task.microbatch], "input_grad")
            case WeightGrad():
                runs += _backwards(blocks[::-1], [task.microbatch], "weight_grad")
            case _:
                assert_never(task)
    return tuple(runs)


def _forwards(
    model: Model, microbatches: Iterable[int], blocks: Sequence[Block] | None = None
) -> list[Run]:
    found = model.blocks if blocks is None else blocks
    everything = list(microbatches)
    return [Run("forward", block.id, each) for block in found for each in everything]


def _backwards(
    blocks: Sequence[Block], microbatches: Iterable[int], direction: Direction = "backward"
) -> list[Run]:
    everything = list(microbatches)
    return [
        Run(direction, block.id, each)
        for block in blocks
        if block.has_backward
        for each in everything
    ]
