"""How long a program really takes: its lanes beside each other, memory as large as it is.

In: a program lowered without limits, the budgets of the tiers, how far copies run ahead. Out: the
same program as it would run under those budgets, and its time.

A step of many micro-batches is looked at with a few. From the second one on they are all alike, so
the time from the second one's Feed to the third's stands for each one that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from packhorse.compiler.buffers import size_pools
from packhorse.compiler.durability import slot_bytes
from packhorse.compiler.passes.prefetch import Hoist, hoist_copies
from packhorse.machine.spec import Machine, TierName
from packhorse.plan.spec import Plan
from packhorse.program.buffers import Pool
from packhorse.program.lanes import assign_lanes, has_transfers
from packhorse.program.program import Program
from packhorse.program.tasks import Feed, Lane, Task
from packhorse.simulator.costs import CostModel
from packhorse.simulator.engine import Rehearsal, Times, time_run

MESSAGES: Final = "messages"
BUSY: Final[Mapping[Lane, str]] = {
    "compute": "compute",
    "update": "update",
    "copy_in": "copy_in",
    "copy_out": "copy_out",
    "disk_read": "disk",
    "disk_write": "disk",
}
"""What is busy while a lane works; a disk reads and writes over one path. Others are messages."""


def limit_program(
    program: Program, plan: Plan, budget_bytes: Mapping[TierName, int], depth: int
) -> Program:
    """Give a program that was lowered without limits the pools of budgets, and let copies hurry.

    Args:
        program: in the order of `plan` without prefetch.
        plan: what the program was lowered from.
        budget_bytes: at least what the program needs, slots counted.
        depth: how many compute tasks a copy may come before its use.
    """
    pools = _limit_pools(program, plan, budget_bytes)
    tasks = hoist_copies(
        program.tasks,
        program.buffers,
        pools,
        workspace_pool=program.workspace_pool,
        depth=depth,
    )
    return replace(program, pools=pools, tasks=tasks)


def _limit_pools(
    program: Program, plan: Plan, budget_bytes: Mapping[TierName, int]
) -> tuple[Pool, ...]:
    keeps = plan.heap.value == "keep"
    heap_bytes = next(
        (p.capacity_bytes for p in program.pools if keeps and p.id == program.workspace_pool), 0
    )
    return size_pools(
        replace(plan, budget_bytes=budget_bytes), heap_bytes, slot_bytes(plan, program.layout)
    )


def time_program(
    program: Program, *, costs: CostModel, machine: Machine, num_microbatches: int
) -> tuple[int, Times]:
    """Time a program as the runtime runs it; returns the time of all micro-batches, and the run's.

    Args:
        program: with all its micro-batches, or with fewer.
        costs: of the program's tasks.
        machine: says how lanes share paths.
        num_microbatches: how many there really are.
    """
    times = time_run(program, costs=costs, machine=machine)
    more = num_microbatches - program.num_microbatches
    return _add_periods(program.tasks, times, more), times


def time_limited(
    program: Program,
    plan: Plan,
    budget_bytes: Mapping[TierName, int],
    *,
    costs: CostModel,
    machine: Machine,
    num_microbatches: int,
    depths: Sequence[int],
) -> tuple[int, ...]:
    """Time a program that was lowered without limits at each of some depths of prefetch."""
    if not has_transfers(program.tasks):
        weights = weights_of(program.tasks, num_microbatches)
        whole_ns = sum(
            costs.duration_ns(task) * weight
            for task, weight in zip(program.tasks, weights, strict=True)
        )
        return (whole_ns,) * len(depths)
    pools = _limit_pools(program, plan, budget_bytes)
    rehearsal = Rehearsal(program, costs=costs, machine=machine)
    hoist = Hoist(
        program.tasks,
        program.buffers,
        workspace_pool=program.workspace_pool,
        lanes=rehearsal.lanes,
    )
    more = num_microbatches - program.num_microbatches
    # Deeper prefetch often finds no more room: the same order is timed once.
    known_ns: dict[tuple[int, ...], int] = {}
    found_ns: list[int] = []
    for depth in depths:
        tasks = hoist.order(pools, depth)
        order = tuple(map(id, tasks))
        if order not in known_ns:
            known_ns[order] = _add_periods(tasks, rehearsal.time(tasks, pools), more)
        found_ns.append(known_ns[order])
    return tuple(found_ns)


def _add_periods(tasks: Sequence[Task], times: Times, more: int) -> int:
    # The time of a step that has so many more micro-batches.
    if more <= 0:
        return times.step_ns
    feeds = [i for i, task in enumerate(tasks) if isinstance(task, Feed)]
    period_ns = times.starts_ns[feeds[2]] - times.starts_ns[feeds[1]]
    return times.step_ns + more * period_ns


def weights_of(tasks: Sequence[Task], num_microbatches: int) -> list[int]:
    """How many times each task of a shortened program stands for one of the whole.

    The tasks from the second micro-batch's Feed to the third's stand for all micro-batches but
    the first and the last.
    """
    count = sum(isinstance(task, Feed) for task in tasks)
    more = num_microbatches - count
    weights: list[int] = []
    weight = 1
    for task in tasks:
        if isinstance(task, Feed):
            weight = 1 + more if more > 0 and task.microbatch == 1 else 1
        weights.append(weight)
    return weights


def busy_lanes(tasks: Sequence[Task]) -> tuple[str, ...]:
    """What is busy with each task."""
    return tuple(BUSY.get(lane, MESSAGES) for lane in assign_lanes(tasks))
