"""Is this schedule right? Every rule that a schedule must keep, and the words for a broken one.

In: a schedule. Out: nothing, or a `RuleError` that names the rule, the rank, the task with its
neighbours, and what it lacks. A schedule that passes runs to its end on any transport.

    placement   stages are numbered from 0, each has a rank, and tasks are where their stage is
    coverage    every stage has every microbatch's forward once, and its backward once, whole or in
                halves
    order       a stage's backwards go over its microbatches first in, first out, and a rank has a
                contiguous run of them: the order in which gradients are summed, and so their bits,
                are those of every other schedule
    deadlock    no ranks wait for each other in a circle, neither for values nor, where a send ends
                only when its receive has begun, for messages

Schedules have up to millions of tasks. So each rule is first looked at in whole numbers, and tasks
are looked up, and words found, only for a schedule that breaks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from packhorse.errors import RuleError
from packhorse.schedule.messages import prove_messages, time_evenly
from packhorse.schedule.needs import list_needs
from packhorse.schedule.numbering import (
    BACKWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Numbered,
    number_tasks,
)
from packhorse.schedule.spec import (
    Backward,
    Forward,
    InputGrad,
    Schedule,
    Task,
    WeightGrad,
    name_task,
)

RULES: Final = ("placement", "coverage", "order", "deadlock")
_NEIGHBOURS: Final = 3
_MOST_RANKS: Final = 12

Places = Mapping[Task, tuple[int, int]]
"""Rank and position of each task."""


def check_schedule(schedule: Schedule) -> None:
    """Check a schedule by every rule.

    Raises:
        RuleError: names the first rule that it breaks, with the place.
    """
    _check_placement(schedule)
    _check_microbatches(schedule)
    numbered = number_tasks(schedule)
    _check_coverage(schedule, numbered)
    _check_order(schedule, numbered)
    _check_runs(schedule, numbered)
    try:
        timing = time_evenly(numbered)
    except ValueError:
        raise _find_circle(schedule) from None
    prove_messages(schedule, numbered, timing)


def format_place(schedule: Schedule, rank: int, at: int) -> str:
    """Show a task of a rank between its neighbours, the task itself marked with `>`."""
    order = schedule.orders[rank]
    first, stop = max(at - _NEIGHBOURS, 0), min(at + _NEIGHBOURS + 1, len(order))
    words = [f"{'>' if each == at else ''}{name_task(order[each])}" for each in range(first, stop)]
    before, after = "... " if first else "", " ..." if stop < len(order) else ""
    return f"rank {rank}, task {at}: {before}{' '.join(words)}{after}"


def _check_placement(schedule: Schedule) -> None:
    placement = schedule.placement
    if not placement or not schedule.orders:
        raise RuleError(
            "the schedule has no stages" if not placement else "the schedule has no ranks",
            rule="placement",
            fix="give each stage a rank, and each rank its order of tasks",
        )
    if set(placement) != set(range(len(placement))):
        missing = min(set(range(len(placement))) - set(placement))
        raise RuleError(
            f"stage {missing} is missing: {len(placement)} stages are numbered 0 to"
            f" {len(placement) - 1}",
            rule="placement",
            where=f"placement: stages {', '.join(map(str, sorted(placement)))}",
            fix="number the stages from 0 without gaps",
        )
    for stage, ranks in sorted(placement.items()):
        wrong = [rank for rank in ranks if not 0 <= rank < schedule.num_ranks]
        if wrong or not ranks:
            found = f"rank {wrong[0]}" if wrong else "no rank"
            raise RuleError(
                f"stage {stage} is placed on {found}, but there are orders for ranks 0 to"
                f" {schedule.num_ranks - 1}",
                rule="placement",
                where=f"placement[{stage}]",
                fix="place each stage on ranks that have an order",
            )
    for rank, order in enumerate(schedule.orders):
        own = {stage for stage, ranks in placement.items() if rank in ranks}
        for at, task in enumerate(order):
            if task.stage in own:
                continue
            homes = placement.get(task.stage)
            if homes is None:
                raise RuleError(
                    f"{name_task(task)} is of stage {task.stage}, but there are stages 0 to"
                    f" {len(placement) - 1}",
                    rule="placement",
                    where=format_place(schedule, rank, at),
                    fix="place the stage, or take the task out",
                )
            raise RuleError(
                f"rank {rank} computes {name_task(task)}, but stage {task.stage} is placed on"
                f" {_name_ranks(homes)}",
                rule="placement",
                where=format_place(schedule, rank, at),
                fix="move the task to its stage's rank, or change the placement",
            )


def _check_microbatches(schedule: Schedule) -> None:
    for rank, order in enumerate(schedule.orders):
        for at, task in enumerate(order):
            if task.microbatch < 0:
                raise RuleError(
                    f"{name_task(task)} is of microbatch {task.microbatch}; they count from 0",
                    rule="coverage",
                    where=format_place(schedule, rank, at),
                    fix="number the microbatches from 0",
                )


def _check_coverage(schedule: Schedule, numbered: Numbered) -> None:
    if len(numbered.rank_of) < schedule.num_tasks:
        _refuse_repeated(schedule)
    find, count = numbered.rank_of.get, numbered.num_microbatches
    rows = numbered.num_stages * count
    for forward in range(rows):
        kinds = (forward, forward + rows, forward + 2 * rows, forward + 3 * rows)
        homes = home, _, _, _ = tuple(map(find, kinds))
        whole, in_halves = (home, home, None, None), (home, None, home, home)
        if home is None or homes not in (whole, in_halves):
            _check_passes(schedule, _locate(schedule), *divmod(forward, count))


def _refuse_repeated(schedule: Schedule) -> None:
    places: dict[Task, tuple[int, int]] = {}
    for rank, order in enumerate(schedule.orders):
        for at, task in enumerate(order):
            if task in places:
                raise RuleError(
                    f"{name_task(task)} is computed twice",
                    rule="coverage",
                    where=f"{format_place(schedule, *places[task])}\n"
                    f"{format_place(schedule, rank, at)}",
                    fix="take one of the two out",
                )
            places[task] = rank, at


def _locate(schedule: Schedule) -> Places:
    return {
        task: (rank, at)
        for rank, order in enumerate(schedule.orders)
        for at, task in enumerate(order)
    }


def _check_passes(schedule: Schedule, places: Places, stage: int, microbatch: int) -> None:
    forward, whole, input_grad, weight_grad = (
        kind(stage=stage, microbatch=microbatch)
        for kind in (Forward, Backward, InputGrad, WeightGrad)
    )
    found = tuple(task for task in (forward, whole, input_grad, weight_grad) if task in places)
    if found not in ((forward, whole), (forward, input_grad, weight_grad)):
        halves = input_grad in places or weight_grad in places
        if whole in places and halves:
            half = input_grad if input_grad in places else weight_grad
            what = f"{name_task(whole)} and its half {name_task(half)} are both computed"
            fix = "keep the whole backward, or its two halves"
        else:
            wanted = (forward, input_grad, weight_grad) if halves else (forward, whole)
            lost = ", ".join(name_task(task) for task in wanted if task not in places)
            what = f"no rank computes {lost}"
            fix = f"add it to {_name_ranks(schedule.placement[stage])}"
        where = "\n".join(format_place(schedule, *places[task]) for task in found)
        raise RuleError(
            what,
            rule="coverage",
            where=where
            or f"stage {stage}, microbatch {microbatch} of"
            f" {schedule.num_microbatches}, {_name_ranks(schedule.placement[stage])}",
            fix=fix,
        )
    home = places[forward][0]
    for task in found[1:]:
        if places[task][0] != home:
            raise RuleError(
                f"rank {places[task][0]} computes {name_task(task)}, but what it needs was saved"
                f" on rank {home}, by {name_task(forward)}",
                rule="placement",
                where="\n".join(format_place(schedule, *places[each]) for each in found),
                fix="keep all passes of a microbatch through a stage on one rank",
            )


def _check_order(schedule: Schedule, numbered: Numbered) -> None:
    stages, count = numbered.num_stages, numbered.num_microbatches
    for rank, order in enumerate(numbered.orders):
        # A whole backward is both halves at once.
        input_grads, weight_grads = [-1] * stages, [-1] * stages
        for at, code in enumerate(order):
            row, microbatch = divmod(code, count)
            kind, stage = divmod(row, stages)
            if kind in (BACKWARD, INPUT_GRAD):
                if microbatch < input_grads[stage]:
                    raise _word_order(schedule, rank, at, (Backward, InputGrad))
                input_grads[stage] = microbatch
            if kind in (BACKWARD, WEIGHT_GRAD):
                if microbatch < weight_grads[stage]:
                    raise _word_order(schedule, rank, at, (Backward, WeightGrad))
                weight_grads[stage] = microbatch


def _word_order(schedule: Schedule, rank: int, at: int, kinds: tuple[type[Task], ...]) -> RuleError:
    order = schedule.orders[rank]
    task = order[at]
    before = next(
        each for each in reversed(order[:at]) if each.stage == task.stage and type(each) in kinds
    )
    return RuleError(
        f"rank {rank} computes {name_task(task)} after {name_task(before)}: the"
        f" gradients of stage {task.stage} would be summed in another order",
        rule="order",
        where=format_place(schedule, rank, at),
        fix="let a stage's backwards go over its microbatches first in, first out",
    )


def _check_runs(schedule: Schedule, numbered: Numbered) -> None:
    num_microbatches = numbered.num_microbatches
    for stage, homes in sorted(schedule.placement.items()):
        if len(homes) == 1:
            continue
        first = stage * num_microbatches
        ranks = [numbered.rank_of[first + each] for each in range(num_microbatches)]
        for microbatch in range(1, num_microbatches):
            rank = ranks[microbatch]
            if rank != ranks[microbatch - 1] and rank in ranks[:microbatch]:
                task = Forward(stage=stage, microbatch=microbatch)
                own = [each for each, home in enumerate(ranks) if home == rank]
                raise RuleError(
                    f"rank {rank} has microbatches {own[0]} to {own[-1]} of stage {stage}, but"
                    f" {name_task(Forward(stage=stage, microbatch=microbatch - 1))} between them is"
                    f" on rank {ranks[microbatch - 1]}: gradients would be summed in another order",
                    rule="order",
                    where=format_place(schedule, rank, schedule.orders[rank].index(task)),
                    fix="give each rank of a stage a contiguous run of its microbatches",
                )


def _find_circle(schedule: Schedule) -> RuleError:
    """Run all ranks until none moves any more, and word what they wait for."""
    places = _locate(schedule)
    at = [0] * schedule.num_ranks
    done: set[Task] = set()
    waits: dict[Task, list[int]] = {}
    stuck: dict[int, Task] = {}
    pending = list(range(schedule.num_ranks))
    while pending:
        rank = pending.pop()
        stuck.pop(rank, None)
        order = schedule.orders[rank]
        while at[rank] < len(order):
            task = order[at[rank]]
            needs = list_needs(task, schedule.num_stages, places)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                stuck[rank] = missing
                waits.setdefault(missing, []).append(rank)
                break
            done.add(task)
            at[rank] += 1
            pending += waits.pop(task, ())
    return _word_circle(schedule, places, at, stuck)


def _word_circle(
    schedule: Schedule, places: Places, at: list[int], stuck: Mapping[int, Task]
) -> RuleError:
    seen: list[int] = []
    rank = min(stuck)
    while rank not in seen:
        seen.append(rank)
        rank = places[stuck[rank]][0]
    circle = seen[seen.index(rank) :]
    lines: list[str] = []
    for each in circle:
        missing = stuck[each]
        holder, place = places[missing]
        behind = schedule.orders[holder][at[holder]]
        order = (
            f"which comes later on the same rank, as task {place}"
            if holder == each
            else f"which rank {holder} has as task {place}, behind {name_task(behind)}"
        )
        task = schedule.orders[each][at[each]]
        lines.append(
            f"rank {each} waits at task {at[each]}, {name_task(task)}, for"
            f" {name_task(missing)}, {order}"
        )
    if len(lines) > _MOST_RANKS:
        half = _MOST_RANKS // 2
        lines[half:-half] = [f"... {len(lines) - 2 * half} more ranks ..."]
    first = circle[0]
    task = schedule.orders[first][at[first]]
    ranks = "rank waits for itself" if len(circle) == 1 else "ranks wait for each other in a circle"
    return RuleError(
        f"{len(circle)} {ranks}: rank {first} cannot begin {name_task(task)} before"
        f" {name_task(stuck[first])}",
        rule="deadlock",
        where="\n".join(lines) + f"\n{format_place(schedule, first, at[first])}",
        fix=f"put {name_task(stuck[first])} earlier on rank {places[stuck[first]][0]}, or"
        f" {name_task(task)} later on rank {first}",
    )


def _name_ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
