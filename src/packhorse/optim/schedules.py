"""Learning rates over optimizer steps: constant, linear and cosine, each with a warm-up.

In: a step, counted from 0, and the length of the run. Out: the rate that this step's update uses.
The values equal those of `transformers.get_scheduler` to the last bit.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

from packhorse.errors import RecipeError

ScheduleKind = Literal["constant", "linear", "cosine"]


def count_warmup_steps(warmup_steps: float, total_steps: int) -> int:
    """Resolve a warm-up: 1 and above counts steps, below 1 is a share of all steps, rounded up.

    Raises:
        RecipeError: it is negative.
    """
    if warmup_steps < 0:
        raise RecipeError(
            f"warmup_steps is {warmup_steps}, it must be 0 or more",
            where="warmup_steps",
            fix="give a number of steps, or a share of all steps below 1, such as 0.03",
        )
    return int(warmup_steps) if warmup_steps >= 1 else math.ceil(total_steps * warmup_steps)


def say_warmup(warmup_steps: float, total_steps: int) -> tuple[str, ...]:
    """Warn of a warm-up in which a whole run changes nothing: its first step has rate 0."""
    if total_steps != 1 or not count_warmup_steps(warmup_steps, total_steps):
        return ()
    said = (
        f"the run's only step is warm-up (warmup_steps {warmup_steps:g}) with a learning rate of 0,"
        " so no weight will change: set warmup_steps: 0, or train more steps"
    )
    return (said,)


def learning_rate_at(
    step: int, *, base: float, kind: ScheduleKind, warmup_steps: float, total_steps: int
) -> float:
    """Give the learning rate of the update that follows `step` finished optimizer steps.

    Args:
        base: the rate that the warm-up reaches; for a parameter group its own `lr`.
        warmup_steps: steps, or below 1 a share of `total_steps`.
    """
    return base * _factor_at(step, kind, count_warmup_steps(warmup_steps, total_steps), total_steps)


def _factor_at(step: int, kind: ScheduleKind, warmup: int, total_steps: int) -> float:
    if step < warmup:
        return float(step) / float(max(1, warmup))
    rest = float(max(1, total_steps - warmup))
    match kind:
        case "constant":
            return 1.0
        case "linear":
            return max(0.0, float(total_steps - step) / rest)
        case "cosine":
            progress = float(step - warmup) / rest
            # The factors are in transformers' order: 0.5 cycles times 2.0.
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))
        case _:
            assert_never(kind)


def scale_rate(own: float, base: float, scheduled: float) -> float:
    """A group's rate now; at the base rate it is the group's own in every bit."""
    if own == base:
        return scheduled
    return own * (scheduled / base) if base else own
