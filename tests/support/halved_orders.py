"""Orders of runs that take backwards in halves, for tests on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from packhorse.compiler.runs import Direction, Run, run_alone
from packhorse.model.spec import Model


def halve(run: Run) -> tuple[Run, ...]:
    """The two halves of a backward in a row; anything else as it is."""
    if run.direction != "backward":
        return (run,)
    halves: tuple[Direction, ...] = ("input_grad", "weight_grad")
    return tuple(Run(half, run.block, run.microbatch) for half in halves)


def in_turn(model: Model, count: int) -> tuple[Run, ...]:
    """Depth first; each WeightGrad follows its InputGrad."""
    return tuple(half for run in run_alone(model, count, "depth_first") for half in halve(run))


def in_layers(model: Model, count: int) -> tuple[Run, ...]:
    """Layered; each WeightGrad follows its InputGrad."""
    return tuple(half for run in run_alone(model, count, "layered") for half in halve(run))


def after_each(model: Model, count: int) -> tuple[Run, ...]:
    """Depth first; the WeightGrads of a micro-batch follow all of its InputGrads."""
    return delayed(model, count, by=0)


def two_later(model: Model, count: int) -> tuple[Run, ...]:
    """Depth first; the WeightGrads of a micro-batch follow the InputGrads of the next but one."""
    return delayed(model, count, by=2)


def at_the_end(model: Model, count: int) -> tuple[Run, ...]:
    """Depth first; all WeightGrads come at the end of the step."""
    return delayed(model, count, by=count)


def every_other(model: Model, count: int) -> tuple[Run, ...]:
    """Depth first; backwards of every other micro-batch whole, the others halved and delayed."""
    ordered: list[Run] = []
    waiting: list[Run] = []
    for run in run_alone(model, count, "depth_first"):
        first, *second = halve(run) if run.microbatch % 2 else (run,)
        if run.direction == "backward" and not run.microbatch % 2:
            ordered += [each for each in waiting if each.block == run.block]
            waiting = [each for each in waiting if each.block != run.block]
        ordered.append(first)
        waiting += second
    return (*ordered, *waiting)


def delayed(model: Model, count: int, *, by: int) -> tuple[Run, ...]:
    """Depth first; WeightGrads of a micro-batch follow the InputGrads of that `by` later."""
    ordered: list[Run] = []
    waiting: list[list[Run]] = []
    for microbatch in range(count):
        waiting.append([])
        for run in run_alone(model, count, "depth_first"):
            if run.microbatch == microbatch:
                first, *second = halve(run)
                ordered.append(first)
                waiting[-1] += second
        if len(waiting) > by:
            ordered += waiting.pop(0)
    return (*ordered, *(run for each in waiting for run in each))


ORDERS: Mapping[str, Callable[[Model, int], tuple[Run, ...]]] = {
    "in turn": in_turn,
    "in layers": in_layers,
    "after each micro-batch": after_each,
    "two micro-batches later": two_later,
    "at the end": at_the_end,
    "every other micro-batch": every_other,
}
