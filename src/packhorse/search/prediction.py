"""What a plan promises, read from its own program.

In: a plan (searched, pinned or edited by hand), its model, profile and machine. Out: a
`Prediction`: the lowered step is simulated as it will run, lanes beside each other within the
plan's budgets, for the time and for what memory really holds; causes come from its replay.

A peak adds up by cause: what the fullest moment holds task by task, and as `ahead` what is there
beyond it because lanes run ahead. Times by cause are what something is busy for; lanes work beside
each other and wait for each other, so those add up to the work and not to the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from packhorse.compiler.buffers import HEAP
from packhorse.compiler.durability import kept_bytes_per_step, slot_bytes
from packhorse.compiler.lower import Lowerer
from packhorse.compiler.peak import peak_of
from packhorse.machine.spec import Machine, TierName
from packhorse.model.spec import Model
from packhorse.plan.spec import NO_PREFETCH, Plan, Prediction
from packhorse.profile.spec import Profile
from packhorse.program.buffers import PoolId
from packhorse.program.program import Program, ProgramKind
from packhorse.program.tasks import Copy, Task
from packhorse.search.evaluation import count_modelled, need_of
from packhorse.search.peaks import explain_peaks
from packhorse.search.space import AWAY, UNLIMITED_BYTES
from packhorse.search.timing import busy_lanes, limit_program, time_program, weights_of
from packhorse.simulator.costs import KnownCosts, TaskCosts
from packhorse.timeline.names import kind_of
from packhorse.units import format_bytes, format_percent

AHEAD: Final = "ahead"
_SMALL: Final = ("feed", "free", "emit")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulated:
    # A program in the order of its plan without prefetch, and how it runs within the budgets.
    program: Program
    costs: KnownCosts
    whole_ns: int
    peak_bytes: Mapping[TierName, Mapping[str, int]]


def predict_plan(
    plan: Plan,
    model: Model,
    profile: Profile,
    machine: Machine,
    *,
    lowerer: Lowerer | None = None,
) -> Prediction:
    """Predict one training step.

    A plan that needs more than its budgets is predicted as if they were what it needs.

    Args:
        lowerer: of the model, for who predicts several plans of it.

    Raises:
        MismatchError: the plan or profile belongs to another model.
        InputError: the machine lacks a rate that the plan needs.
    """
    count = plan.numerics.num_microbatches
    lowerer = lowerer or Lowerer(model)
    step = _simulate(plan, model, profile, machine, lowerer, "train_step", count)
    evaluation = _simulate(plan, model, profile, machine, lowerer, "evaluate", count)
    tasks = step.program.tasks
    weights = weights_of(tasks, count)
    time_ns: dict[str, int] = {}
    lane_ns: dict[str, int] = {}
    for task, lane, weight in zip(tasks, busy_lanes(tasks), weights, strict=True):
        duration_ns = step.costs.duration_ns(task) * weight
        cause = time_cause(task)
        time_ns[cause] = time_ns.get(cause, 0) + duration_ns
        lane_ns[lane] = lane_ns.get(lane, 0) + duration_ns
    moved = _count_disk_bytes(step.program, weights)
    peaks = dict(_larger(step.peak_bytes, evaluation.peak_bytes))
    slots = slot_bytes(plan, step.program.layout)
    if slots:
        peaks["disk"] = {**peaks.get("disk", {}), "slots": slots}
    return Prediction(
        step_ns=step.whole_ns,
        peak_bytes=peaks,
        time_ns=time_ns,
        lane_ns=lane_ns,
        disk_read_bytes=moved["disk"],
        disk_written_bytes=moved["device"],
        scratch_bytes=sum(peaks.get("disk", {}).values()),
        bottleneck=_name_bottleneck(lane_ns, step.whole_ns, moved),
        kept_bytes_per_step=kept_bytes_per_step(plan, model),
    )


def predict_evaluation_ns(
    plan: Plan, model: Model, profile: Profile, machine: Machine, num_microbatches: int
) -> int:
    """Predict how long the evaluation of so many micro-batches takes.

    Raises:
        MismatchError: the plan or profile belongs to another model.
    """
    lowerer = Lowerer(model)

    def time_ns(count: int) -> int:
        return _simulate(plan, model, profile, machine, lowerer, "evaluate", count).whole_ns

    if plan.order.value != "layered":
        return time_ns(num_microbatches)
    # In layers a round of micro-batches goes through all blocks before the next; they are alike.
    together = plan.numerics.num_microbatches
    num_rounds, rest = divmod(num_microbatches, together)
    if num_rounds < 2:
        return time_ns(num_microbatches)
    more_ns = time_ns(2 * together) - time_ns(together)
    return time_ns(together + rest) + (num_rounds - 1) * more_ns


def _simulate(
    plan: Plan,
    model: Model,
    profile: Profile,
    machine: Machine,
    lowerer: Lowerer,
    kind: ProgramKind,
    num_microbatches: int,
) -> _Simulated:
    order = plan.order.value
    count = count_modelled(order, plan.numerics.num_microbatches)
    short = replace(
        plan,
        budget_bytes=dict.fromkeys(("device", *AWAY), UNLIMITED_BYTES),
        numerics=replace(plan.numerics, num_microbatches=count),
        prefetch=NO_PREFETCH,
    )
    evaluated = count_modelled(order, num_microbatches) if kind == "evaluate" else None
    program = lowerer.lower(short, kind, eval_microbatches=evaluated)
    costs = TaskCosts(
        machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
    )
    known = KnownCosts(program.tasks, costs)
    needs = need_of(short, program)
    slots = slot_bytes(plan, program.layout)
    if slots:
        needs["disk"] = needs.get("disk", 0) + slots
    budget_bytes = dict(plan.budget_bytes)
    for tier, need in needs.items():
        budget_bytes[tier] = max(budget_bytes.get(tier, 0), need)
    limited = limit_program(program, plan, budget_bytes, plan.prefetch.value)
    whole_ns, times = time_program(
        limited, costs=known, machine=machine, num_microbatches=num_microbatches
    )
    peaks: dict[TierName, dict[str, int]] = {
        tier: dict(causes) for tier, causes in explain_peaks(short, model, program).items()
    }
    for tier, ahead_bytes in _find_ahead(program, limited, times.peak_bytes).items():
        peaks[tier][AHEAD] = ahead_bytes
    return _Simulated(program=program, costs=known, whole_ns=whole_ns, peak_bytes=peaks)


def _find_ahead(
    program: Program, limited: Program, peak_bytes: Mapping[PoolId, int]
) -> Mapping[TierName, int]:
    # What each tier holds beyond its replay. A heap that is kept is granted whole in any case.
    one_by_one = peak_of(program)
    ahead: dict[TierName, int] = {}
    for pool in limited.pools:
        more = peak_bytes[pool.id] - one_by_one[pool.id]
        if more > 0 and pool.id != HEAP:
            ahead[pool.tier] = ahead.get(pool.tier, 0) + more
    return ahead


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


def _count_disk_bytes(program: Program, weights: Sequence[int]) -> Mapping[TierName, int]:
    # By source: what comes from the disk is read, what goes from the device to it is written.
    moved: dict[TierName, int] = {"disk": 0, "device": 0}
    for task, weight in zip(program.tasks, weights, strict=True):
        if isinstance(task, Copy) and "disk" in (task.source, task.target):
            source: TierName = "disk" if task.source == "disk" else "device"
            moved[source] += program.buffers[task.buffer].size_bytes * weight
    return moved


def _name_bottleneck(
    lane_ns: Mapping[str, int], step_ns: int, moved: Mapping[TierName, int]
) -> str:
    worst = max(lane_ns, key=lambda lane: lane_ns[lane])
    share = format_percent(lane_ns[worst] / max(step_ns, 1))
    if worst != "disk":
        return f"{worst.replace('_', ' ')}: busy {share} of the step"
    return (
        f"disk: busy {share} of the step, {format_bytes(moved['disk'])} read and "
        f"{format_bytes(moved['device'])} written"
    )
