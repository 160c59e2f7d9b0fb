"""What a plan promises, read from its own program.

In: a plan (searched, pinned or edited by hand), its model, profile and machine. Out: a
`Prediction`: the lowered step and evaluation are replayed for the peaks, and the step is simulated,
one task after another, for the time. Peaks and times add up to the whole: nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from packhorse.compiler.durability import kept_bytes_per_step, slot_bytes
from packhorse.compiler.lower import lower_plan
from packhorse.machine.spec import Machine, TierName
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan, Prediction
from packhorse.profile.spec import Profile
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Task
from packhorse.search.evaluation import MODEL_MICROBATCHES, count_modelled, weights_of
from packhorse.search.peaks import explain_peaks
from packhorse.search.space import AWAY, UNLIMITED_BYTES
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_program
from packhorse.timeline.names import kind_of
from packhorse.units import format_bytes, format_percent

_SMALL: Final = ("feed", "free", "emit")


def predict_plan(plan: Plan, model: Model, profile: Profile, machine: Machine) -> Prediction:
    """Predict one training step.

    Raises:
        MismatchError: the plan or profile belongs to another model.
        InputError: the machine lacks a rate that the plan needs.
    """
    count = plan.numerics.num_microbatches
    short = replace(
        _without_limits(plan),
        numerics=replace(plan.numerics, num_microbatches=count_modelled(plan.order.value, count)),
    )
    program = lower_plan(short, model, "train_step")
    costs = TaskCosts(
        machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
    )
    timeline = simulate_program(program, costs=costs)
    weights = weights_of(program.tasks, count)
    time_ns: dict[str, int] = {}
    for span in timeline.spans:
        task, weight = program.tasks[span.index], weights[span.index]
        cause = time_cause(task)
        time_ns[cause] = time_ns.get(cause, 0) + span.duration_ns * weight
    moved = _count_disk_bytes(program, weights)
    peaks = _larger(
        explain_peaks(short, model, program),
        explain_peaks(short, model, lower_plan(short, model, "evaluate")),
    )
    slots = slot_bytes(plan, program.layout)
    if slots:
        disk: Mapping[str, int] = {**peaks.get("disk", {}), "slots": slots}
        peaks = {tier: causes for tier, causes in peaks.items() if tier != "disk"}
        peaks["disk"] = disk
    return Prediction(
        step_ns=sum(time_ns.values()),
        peak_bytes=peaks,
        time_ns=time_ns,
        disk_read_bytes=moved["disk"],
        disk_written_bytes=moved["device"],
        scratch_bytes=sum(peaks.get("disk", {}).values()),
        bottleneck=_name_bottleneck(time_ns, moved),
        kept_bytes_per_step=kept_bytes_per_step(plan, model),
    )


def predict_evaluation_ns(
    plan: Plan, model: Model, profile: Profile, machine: Machine, num_microbatches: int
) -> int:
    """Predict how long the evaluation of so many micro-batches takes.

    Raises:
        MismatchError: the plan or profile belongs to another model.
    """

    def time_ns(count: int) -> int:
        program = lower_plan(_without_limits(plan), model, "evaluate", eval_microbatches=count)
        costs = TaskCosts(
            machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
        )
        weights = weights_of(program.tasks, num_microbatches if short else count)
        timeline = simulate_program(program, costs=costs)
        return sum(span.duration_ns * weights[span.index] for span in timeline.spans)

    short = plan.order.value == "depth_first"
    if short:
        return time_ns(min(num_microbatches, MODEL_MICROBATCHES))
    # In layers a round of micro-batches goes through all blocks before the next; they are alike.
    together = plan.numerics.num_microbatches
    num_rounds, rest = divmod(num_microbatches, together)
    if num_rounds < 2:
        return time_ns(num_microbatches)
    more_ns = time_ns(2 * together) - time_ns(together)
    return time_ns(together + rest) + (num_rounds - 1) * more_ns


def _without_limits(plan: Plan) -> Plan:
    return replace(plan, budget_bytes=dict.fromkeys(("device", *AWAY), UNLIMITED_BYTES))


def time_cause(task: Task) -> str:
    """What the time of a task counts for: its kind, or `other` for small work around tasks."""
    kind = kind_of(task)
    return "other" if kind in _SMALL else kind


def _larger(
    step: Mapping[TierName, Mapping[str, int]], evaluation: Mapping[TierName, Mapping[str, int]]
) -> Mapping[TierName, Mapping[str, int]]:
    # A plan promises room for its evaluation too; a tier's causes are those of its fullest moment.
    fullest = dict(step)
    for tier, causes in evaluation.items():
        if sum(causes.values()) > sum(fullest.get(tier, {}).values()):
            fullest[tier] = causes
    return fullest


def _count_disk_bytes(program: Program, weights: list[int]) -> Mapping[TierName, int]:
    # By source: what comes from the disk is read, what goes from the device to it is written.
    moved: dict[TierName, int] = {"disk": 0, "device": 0}
    for task, weight in zip(program.tasks, weights, strict=True):
        if isinstance(task, Copy) and "disk" in (task.source, task.target):
            source: TierName = "disk" if task.source == "disk" else "device"
            moved[source] += program.buffers[task.buffer].size_bytes * weight
    return moved


def _name_bottleneck(time_ns: Mapping[str, int], moved: Mapping[TierName, int]) -> str:
    shares = {
        "compute": sum(time_ns.get(cause, 0) for cause in ("forward", "backward", "recompute")),
        "disk": time_ns.get("disk_read", 0) + time_ns.get("disk_write", 0),
        "host link": time_ns.get("copy_in", 0) + time_ns.get("copy_out", 0),
        "update": time_ns.get("update", 0) + time_ns.get("norm", 0),
    }
    worst = max(shares, key=lambda name: shares[name])
    share = format_percent(shares[worst] / max(sum(time_ns.values()), 1))
    if worst != "disk":
        return f"{worst}: {share} of the step"
    return (
        f"disk: {share} of the step, {format_bytes(moved['disk'])} read and "
        f"{format_bytes(moved['device'])} written"
    )
