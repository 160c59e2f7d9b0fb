"""The plans of several ranks, explained: order, cuts, and for each rank memory, time and choices.

In: `RankPlans` and, where known, their predicted timelines and an estimate of the run. Out: a rich
renderable that fits 80 columns and reads the same without colours. Choices that several ranks share
stand once, with the ranks where they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from packhorse.plan.ranks import RankPlans
from packhorse.plan.spec import Plan
from packhorse.report.choices import ChoiceGroup, fold_choices
from packhorse.report.explain import memory_legend, memory_section, say_run
from packhorse.report.rank_loads import find_busiest, say_busiest, say_busiest_link
from packhorse.report.rank_plans import (
    ESTIMATED,
    name_plans,
    ranks_table,
    say_blocks,
    say_joint_step,
)
from packhorse.report.run import RunEstimate
from packhorse.report.sections import (
    bullet_lines,
    choices_table,
    heading,
    indent,
    largest_first,
    share_bars,
)
from packhorse.report.tables import plain_table
from packhorse.timeline.spec import Timeline
from packhorse.units import format_ns

_NO_TIMELINES: Final = (
    "Which rank and which link are the busiest is worked out from the plan's model, machine and"
    " profile, which are not beside it."
)


def explain_rank_plans(
    plans: RankPlans,
    run: RunEstimate | None = None,
    timelines: Sequence[Timeline] | None = None,
) -> RenderableType:
    """Render plans in full: order and cuts, ranks, memory and time by cause, choices, run."""
    pipeline = plans.pipeline
    stages = f"{pipeline.schedule.num_stages} stages"
    estimate = f"{ESTIMATED[0].upper()}{ESTIMATED[1:]}"
    lines = [
        f"{estimate}: {pipeline.name.because}.",
        f"Cut after {_say_cuts(plans)}{pipeline.bounds.because}.",
    ]
    if timelines:
        busiest = find_busiest(timelines)
        words = f"{say_busiest(busiest)}; {say_busiest_link(busiest)}."
        lines.append(words[0].upper() + words[1:])
    else:
        lines.append(_NO_TIMELINES)
    step = "" if plans.step_ns is None else f", step {say_joint_step(plans)}"
    parts: list[RenderableType] = [
        Text(name_plans(plans), style="bold"),
        heading(f"Order, {pipeline.name.value} of {stages}"),
        indent(bullet_lines(lines)),
        *_rejected_section(plans),
        heading(f"Ranks{step}"),
        indent(ranks_table(plans)),
    ]
    causes: list[str] = []
    for rank, plan in enumerate(plans.ranks):
        parts += _rank_section(plans, rank, plan)
        for used in plan.prediction.peak_bytes.values() if plan.prediction else ():
            causes += largest_first(used)
    parts += [Text(), *memory_legend(causes)]
    parts += [heading("Choices"), indent(choices_table(fold_rank_choices(plans)))]
    if plans.ranks[0].pins:
        parts.append(indent(Text(f"Pinned by hand: {', '.join(plans.ranks[0].pins)}")))
    if run is not None:
        parts += [heading("Run"), indent(bullet_lines(say_run(run)))]
    return Group(*parts)


def fold_rank_choices(plans: RankPlans) -> tuple[ChoiceGroup, ...]:
    """Fold the choices of all ranks: equal ones once, with the ranks and places where they hold."""
    found: dict[str, dict[tuple[str, str], list[tuple[int, str]]]] = {}
    for rank, plan in enumerate(plans.ranks):
        for group in fold_choices(plan):
            same = found.setdefault(group.choice, {})
            same.setdefault((group.value, group.because), []).append((rank, group.where))
    num_ranks = len(plans.ranks)
    return tuple(
        ChoiceGroup(
            choice=choice, value=value, where=_say_where(places, num_ranks), because=because
        )
        for choice, same in found.items()
        for (value, because), places in same.items()
    )


def _say_where(places: Sequence[tuple[int, str]], num_ranks: int) -> str:
    """Name ranks and places in them; nothing where a choice without a place is that of all."""
    by_place: dict[str, list[int]] = {}
    for rank, where in places:
        by_place.setdefault(where, []).append(rank)
    said: list[str] = []
    for where, ranks in by_place.items():
        if not where and len(ranks) == num_ranks:
            continue
        said.append(", ".join(filter(None, (say_ranks(ranks), where))))
    return "; ".join(said)


def say_ranks(ranks: Iterable[int]) -> str:
    """Name ranks, runs of them as ranges: `rank 0`, `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    said = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {said}"


def _say_cuts(plans: RankPlans) -> str:
    inner = [str(bound - 1) for bound in plans.pipeline.bounds.value[1:-1]]
    return f"block{'s' if len(inner) > 1 else ''} {', '.join(inner)}: " if inner else "no block: "


def _rejected_section(plans: RankPlans) -> list[RenderableType]:
    if not plans.rejected:
        return []
    table = plain_table()
    table.add_column("order", no_wrap=True)
    table.add_column("stages", justify="right", no_wrap=True)
    table.add_column("not taken because", ratio=1)
    for each in plans.rejected:
        table.add_row(each.name, str(each.num_stages), each.because)
    return [Text(), indent(table)]


def _rank_section(plans: RankPlans, rank: int, plan: Plan) -> list[RenderableType]:
    prediction = plan.prediction
    title = f"Rank {rank}, blocks {say_blocks(plans, rank)}"
    if prediction is None:
        return [heading(f"{title}: no prediction")]
    parts: list[RenderableType] = []
    for at, (tier, causes) in enumerate(prediction.peak_bytes.items()):
        parts += memory_section(plan, tier, causes, head=f"Rank {rank}" if at else title)
    spent = largest_first(prediction.time_ns)
    step_ns = prediction.step_ns or 1
    parts.append(heading(f"Rank {rank}, at work in a step of {format_ns(step_ns)}"))
    parts.append(indent(share_bars(spent, step_ns, format_ns)))
    return parts
