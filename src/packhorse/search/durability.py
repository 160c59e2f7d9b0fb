"""How often finished steps are kept: every step where that is nearly free, else at an interval.

In: a plan with a prediction, its model and profile, the machine. Out: a `Choice` with its cost.

    every state that steps change lies on the disk: each step is written anyway, to a second slot
    states lie in memory too: they are written behind at the smallest interval that costs at most
    3 % of the steps
    no disk, or none large enough: off

What a killed run loses is bounded in time as well: writing everything takes 3 % of an interval.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final

from packhorse.compiler.durability import slot_bytes, states_with_slots, states_written_behind
from packhorse.compiler.layout import lay_out_chunks
from packhorse.compiler.lower import lower_plan
from packhorse.errors import DoesNotFitError, RecipeError
from packhorse.machine.spec import Machine
from packhorse.model.spec import Model
from packhorse.plan.spec import Choice, Durable, Plan
from packhorse.profile.spec import Profile
from packhorse.simulator.costs import TaskCosts
from packhorse.units import format_bytes, format_ns, format_percent

MOST_SHARE: Final = 0.03
PINNED: Final = "pinned"


def choose_durable(
    plan: Plan,
    model: Model,
    profile: Profile,
    machine: Machine,
    *,
    pin: Durable | None,
    resumable: bool,
) -> Choice[Durable]:
    """Choose whether and how often finished steps are kept.

    Args:
        plan: with a prediction, and not keeping steps yet.
        pin: what a person fixed.
        resumable: whether whoever runs the plan can go on from kept steps.

    Raises:
        RecipeError: steps cannot be kept here, but are pinned to be.
        DoesNotFitError: the slots that are pinned need more than the disk has.
    """
    if pin == "off":
        return Choice(value="off", because=f"{PINNED}: checkpoints alone are kept")
    reason = _find_obstacle(plan, machine)
    if not resumable:
        reason = "a loop in Python saves where it says so"
    if reason is not None:
        if pin is not None:
            raise RecipeError(
                f"durable is pinned to {pin}, but {reason}",
                where="recipe: plan.durable",
                fix="leave it out, or name a disk in the budget: disk=scratch",
            )
        return Choice(value="off", because=f"{reason}: checkpoints alone are kept")
    kept = replace(plan, durable=Choice(value=1, because=""))
    layout = lay_out_chunks(kept, model)
    need_bytes, have_bytes = slot_bytes(kept, layout), _left_bytes(plan)
    if need_bytes > have_bytes:
        words = f"its slots need {format_bytes(need_bytes)} of disk, {format_bytes(have_bytes)} are"
        if pin is not None:
            raise DoesNotFitError(
                f"durable is pinned to {pin}: {words} left of the disk budget",
                where="recipe: plan.durable",
                fix="raise the disk budget, or leave the pin out",
            )
        return Choice(value="off", because=f"{words} left: checkpoints alone are kept")
    if not states_written_behind(kept, layout):
        step_words = "each step" if pin in (None, 1) else f"every {pin} steps"
        because = (
            f"all that {step_words} changes is written to the disk anyway: a second slot of"
            f" {format_bytes(need_bytes)}, a flush behind the next step and a small record"
        )
        return Choice(value=pin or 1, because=f"{PINNED}: {because}" if pin else because)
    assert plan.prediction is not None
    step_ns = max(plan.prediction.step_ns, 1)
    write_ns = _persist_ns(kept, model, profile, machine)
    every = pin or max(1, ceil(write_ns / (MOST_SHARE * step_ns)))
    behind = set(states_written_behind(kept, layout))
    size_bytes = sum(
        buffer.size_bytes
        for name, buffer in states_with_slots(kept, layout).items()
        if name in behind
    )
    because = (
        f"{format_bytes(size_bytes)} lie in memory and take {format_ns(write_ns)} to write:"
        f" {format_percent(write_ns / (every * step_ns))} of {every} steps"
        f" ({format_ns(every * step_ns)}), {format_bytes(need_bytes)} of disk"
    )
    return Choice(value=every, because=f"{PINNED}: {because}" if pin else because)


def _find_obstacle(plan: Plan, machine: Machine) -> str | None:
    disk = machine.tier("disk")
    if disk is None or not plan.budget_bytes.get("disk", 0):
        return "the budget has no disk"
    if machine.link("device", "disk") is None or machine.link("disk", "device") is None:
        return "nothing is known of the way to the disk"
    if not plan.numerics.device.startswith("cpu"):
        return f"nothing goes from {plan.numerics.device} to the disk yet"
    if not any(chunk.trainable for chunk in plan.chunks):
        return "nothing is trained"
    if plan.pipeline is not None:
        return "ranks that share a model do not keep steps each for itself"
    return None


def _left_bytes(plan: Plan) -> int:
    assert plan.prediction is not None
    used = sum(plan.prediction.peak_bytes.get("disk", {}).values())
    return max(0, plan.budget_bytes["disk"] - used)


def _persist_ns(plan: Plan, model: Model, profile: Profile, machine: Machine) -> int:
    program = lower_plan(plan, model, "persist")
    costs = TaskCosts(
        machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
    )
    return sum(costs.duration_ns(task) for task in program.tasks)
