"""What would make a plan faster: more memory, no clipping, another heap mode, another order.

In: a plan with its model, profile and machine. Out: `Relief`s, the one that saves most first. Each
changes one kind of choice, keeps the rest, and is lowered and costed like the plan itself. Only
those that really are faster are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from packhorse.machine.spec import Machine, TierName
from packhorse.model.spec import Model
from packhorse.plan.pins import State
from packhorse.plan.spec import ActivationChoice, Choice, ChunkPlan, Order, Plan, Prediction
from packhorse.profile.spec import Profile
from packhorse.search.prediction import AHEAD, predict_plan
from packhorse.search.settings import MOST_LAYERED_RUNS
from packhorse.search.space import STATES
from packhorse.units import format_bytes, format_ns, format_percent

_FREE: Final = "Gradients are not clipped, which costs nothing."
NO_CLIPPING: Final = "no clipping (max_grad_norm: null)"
_WORDS: Final[Mapping[State, str]] = {
    "parameters": "the parameters",
    "gradients": "the gradients",
    "optimizer": "the optimizer states",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """One change: what it is, the budget it takes more (or less, below 0), the time it saves.

    `share` is the part of the step that is saved. `changes_numbers` says that the loss curve would
    be another one.
    """

    change: str
    device_bytes: int
    saved_ns: int
    share: float
    changes_numbers: bool

    @property
    def text(self) -> str:
        """One line for a screen."""
        more = "no more memory"
        if self.device_bytes > 0:
            more = f"{format_bytes(self.device_bytes)} more"
        elif self.device_bytes < 0:
            more = f"{format_bytes(-self.device_bytes)} less"
        return (
            f"{self.change}: {more} of the device, {format_ns(self.saved_ns)} "
            f"({format_percent(self.share)}) less a step"
        )


def find_relief(plan: Plan, model: Model, profile: Profile, machine: Machine) -> tuple[Relief, ...]:
    """List the single changes that make a plan faster, the most helpful first.

    Raises:
        MismatchError: the plan or profile belongs to another model.
    """
    now = predict_plan(plan, model, profile, machine)
    need = _need_bytes(now)
    found: list[Relief] = []
    for words, changed in (*list_changes(plan, machine), *_in_layers(plan, model)):
        then = predict_plan(changed, model, profile, machine)
        more = _need_bytes(then) - need
        if more > 0:
            # With as much room for lanes to run ahead as now.
            device_bytes = plan.budget_bytes["device"] + more
            roomy = replace(changed, budget_bytes={**plan.budget_bytes, "device": device_bytes})
            then = predict_plan(roomy, model, profile, machine)
        saved_ns = now.step_ns - then.step_ns
        if saved_ns > 0:
            found.append(
                Relief(
                    change=words,
                    device_bytes=more,
                    saved_ns=saved_ns,
                    share=saved_ns / now.step_ns,
                    changes_numbers=(changed.optimizer, changed.numerics)
                    != (plan.optimizer, plan.numerics),
                )
            )
    return tuple(sorted(found, key=lambda relief: -relief.saved_ns))


def cost_of_clipping(plan: Plan, model: Model, profile: Profile, machine: Machine) -> Relief | None:
    """What a step would save without clipping; None when the plan does not clip.

    The saving may be 0 or less, for example where the update then interrupts the backward.
    """
    if not plan.optimizer.clips:
        return None
    now = predict_plan(plan, model, profile, machine)
    then = predict_plan(_without_clipping(plan), model, profile, machine)
    return Relief(
        change=NO_CLIPPING,
        device_bytes=_need_bytes(then) - _need_bytes(now),
        saved_ns=now.step_ns - then.step_ns,
        share=(now.step_ns - then.step_ns) / now.step_ns,
        changes_numbers=True,
    )


def describe_clipping(plan: Plan, model: Model, profile: Profile, machine: Machine) -> str:
    """Say in a sentence what clipping by the global norm costs."""
    cost = cost_of_clipping(plan, model, profile, machine)
    if cost is None:
        return _FREE
    time = "no time"
    if cost.saved_ns > 0:
        time = f"{format_ns(cost.saved_ns)} ({format_percent(cost.share)}) of a step"
    memory = ""
    if cost.device_bytes < 0:
        memory = f" and {format_bytes(-cost.device_bytes)} of the device"
    return f"Clipping takes {time}{memory}; max_grad_norm: null does without."


def list_changes(plan: Plan, machine: Machine) -> tuple[tuple[str, Plan], ...]:
    """All single changes that could help, as words and the changed plan."""
    changes: list[tuple[str, Plan]] = []
    for state in STATES:
        away = [i for i, chunk in enumerate(plan.chunks) if _tier(chunk, state) != "device"]
        for count in _portions(len(away)):
            words = f"{_WORDS[state]} of {_count(count, 'chunk')} stay on the device"
            changes.append((words, _bring_back(plan, state, frozenset(away[:count]))))
    others: tuple[tuple[ActivationChoice, str], ...] = (
        ("recompute", "recomputed"),
        ("offload", "offloaded"),
    )
    for choice, done in others:
        again = [i for i, b in enumerate(plan.blocks) if b.activations.value == choice]
        for count in _portions(len(again)):
            words = f"activations of {_count(count, 'block')} are kept instead of {done}"
            changes.append((words, _keep(plan, frozenset(again[:count]))))
    if plan.heap.value == "map":
        kept = replace(
            plan, heap=replace(plan.heap, value="keep"), heap_slack=machine.heap.keep_slack
        )
        changes.append(("the heap keeps what is freed", kept))
    if plan.optimizer.clips:
        changes.append((NO_CLIPPING, _without_clipping(plan)))
    return tuple(changes)


def _in_layers(plan: Plan, model: Model) -> tuple[tuple[str, Plan], ...]:
    numerics = plan.numerics
    away = any(_tier(chunk, state) != "device" for chunk in plan.chunks for state in STATES)
    num_runs = numerics.num_microbatches * len(model.blocks)
    if plan.order.value == "layered" or numerics.num_microbatches == 1 or not away:
        return ()
    if num_runs > MOST_LAYERED_RUNS:
        return ()
    order: Choice[Order] = Choice(value="layered", because="tried, to see what it would save")
    if not model.summed_parameters or numerics.tied_sum == "per_step":
        return (("all micro-batches in layers (order: layered)", replace(plan, order=order)),)
    changed = replace(plan, order=order, numerics=replace(numerics, tied_sum="per_step"))
    return (("all micro-batches in layers (tied_sum: per_step; other last bits)", changed),)


def _need_bytes(prediction: Prediction) -> int:
    causes = prediction.peak_bytes["device"]
    return sum(size for cause, size in causes.items() if cause != AHEAD)


def _portions(count: int) -> tuple[int, ...]:
    # All of them, and a quarter: a smaller step that a person may afford.
    return tuple(sorted({max(count // 4, 1), count})) if count else ()


def _count(count: int, noun: str) -> str:
    return f"one {noun}" if count == 1 else f"{count} {noun}s"


def _tier(chunk: ChunkPlan, state: State) -> TierName:
    match state:
        case "parameters":
            return chunk.parameters.value
        case "gradients":
            return chunk.gradients.value
        case "optimizer":
            return chunk.optimizer.value


def _bring_back(plan: Plan, state: State, indices: frozenset[int]) -> Plan:
    here: Choice[TierName] = Choice(value="device", because="tried, to see what it would save")
    chunks = list(plan.chunks)
    for index in indices:
        match state:
            case "parameters":
                chunks[index] = replace(chunks[index], parameters=here)
            case "gradients":
                chunks[index] = replace(chunks[index], gradients=here)
            case "optimizer":
                chunks[index] = replace(chunks[index], optimizer=here)
    return replace(plan, chunks=tuple(chunks))


def _keep(plan: Plan, indices: frozenset[int]) -> Plan:
    return replace(
        plan,
        blocks=tuple(
            replace(block, activations=replace(block.activations, value="keep"))
            if index in indices
            else block
            for index, block in enumerate(plan.blocks)
        ),
    )


def _without_clipping(plan: Plan) -> Plan:
    return replace(plan, optimizer=replace(plan.optimizer, clips=False))
