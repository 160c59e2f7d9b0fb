"""The plans of several ranks in short: who has what, does it fit, how long is a step?

In: `RankPlans` and, where known, their predicted timelines and an estimate of the run. Out: rich
renderables that fit 80 columns and read the same without colours, or what `json.dumps` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from packhorse.machine.spec import TierName
from packhorse.plan.ranks import RankPlans
from packhorse.plan.spec import Plan
from packhorse.report.explain import UNCOUNTED, explanation_as_dict, say_run, say_so_far
from packhorse.report.rank_loads import find_busiest, links_as_dict, say_busiest, say_busiest_link
from packhorse.report.run import MeasuredSteps, RunEstimate, run_as_dict
from packhorse.report.tables import plain_table
from packhorse.timeline.spec import Timeline
from packhorse.units import format_count, format_ns, format_part, format_percent

# What schedules are compared by: lists of tasks, not the programs that the step is told of.
ESTIMATED: Final = "by an estimate without updates"
_MOST_REJECTED: Final = 4
_STATES: Final = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer states"),
)


def rank_plans_table(
    plans: RankPlans,
    run: RunEstimate | None = None,
    timelines: Sequence[Timeline] | None = None,
    so_far: MeasuredSteps | None = None,
) -> RenderableType:
    """Render the plans of all ranks: schedule, cuts, a line for each rank, step, run.

    Args:
        so_far: of a run that goes on.
    """
    pipeline = plans.pipeline
    head = plain_table(heads=False)
    head.add_column(style="bold", no_wrap=True)
    head.add_column()
    head.add_row("plan", name_plans(plans))
    head.add_row("order", f"{pipeline.name.value}, {pipeline.schedule.num_stages} stages")
    head.add_row("", Text(f"{ESTIMATED}: {pipeline.name.because}", style="dim"))
    head.add_row("cuts", Text(pipeline.bounds.because, style="dim"))
    tail = plain_table(heads=False)
    tail.add_column(style="bold", no_wrap=True)
    tail.add_column()
    if plans.ranks[0].numerics.device == "cpu":
        tail.add_row("", Text(f"({UNCOUNTED})", style="dim"))
    if plans.step_ns is not None:
        tail.add_row("step", say_joint_step(plans))
    if timelines:
        busiest = find_busiest(timelines)
        tail.add_row("", Text(f"{say_busiest(busiest)}; {say_busiest_link(busiest)}", style="dim"))
    for at, line in enumerate(_say_rejected(plans)):
        tail.add_row("" if at else "others", Text(line, style="dim"))
    for at, line in enumerate(say_run(run) if run else ()):
        tail.add_row("" if at else "run", line)
    if so_far is not None:
        tail.add_row("so far", say_so_far(so_far, plans.step_ns))
    return Group(head, "", ranks_table(plans), "", tail)


def ranks_table(plans: RankPlans) -> Table:
    """Render a line for each rank: its blocks, memory, computing, and what spares memory."""
    unlike = len({plan.machine for plan in plans.ranks}) > 1
    table = plain_table()
    table.add_column("rank", no_wrap=True)
    if unlike:
        table.add_column("machine")
    table.add_column("blocks")
    table.add_column("memory")
    table.add_column("computes")
    table.add_column("to spare memory")
    for rank, plan in enumerate(plans.ranks):
        machine = (plan.machine,) if unlike else ()
        table.add_row(
            str(rank),
            *machine,
            say_blocks(plans, rank),
            _say_memory(plan),
            _say_computing(plans, rank),
            _say_spared(plan),
        )
    return table


def rank_plans_as_dict(
    plans: RankPlans,
    run: RunEstimate | None = None,
    timelines: Sequence[Timeline] | None = None,
) -> dict[str, object]:
    """Give the plans of all ranks as what `json.dumps` takes."""
    pipeline = plans.pipeline
    return {
        "schedule": pipeline.name.value,
        "schedule_because": pipeline.name.because,
        "bounds": list(pipeline.bounds.value),
        "bounds_because": pipeline.bounds.because,
        "owners": list(pipeline.owners),
        "step_ns": plans.step_ns,
        "compute_ns": list(plans.compute_ns),
        "idle": plans.idle,
        "bottleneck": say_busiest(find_busiest(timelines)) if timelines else None,
        "links": links_as_dict(timelines) if timelines else None,
        "rejected": [
            {"schedule": each.name, "stages": each.num_stages, "because": each.because}
            for each in plans.rejected
        ],
        "ranks": [explanation_as_dict(plan) for plan in plans.ranks],
        "run": run_as_dict(run) if run else None,
    }


def name_plans(plans: RankPlans) -> str:
    """Say what is planned: model, ranks, micro-batches."""
    first = plans.ranks[0]
    rows, count = first.numerics.microbatch_rows.value, first.numerics.num_microbatches
    batches = f"{count} micro-batch{'es' if count > 1 else ''}"
    num_ranks = len(plans.ranks)
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    return f"{first.model_name} on {ranks}: {batches} of {rows} x {first.length} tokens"


def say_joint_step(plans: RankPlans) -> str:
    """Say how long a step of all ranks takes, how much of it they idle, and tokens a second.

    Args:
        plans: with a predicted step.
    """
    first, step_ns = plans.ranks[0], plans.step_ns or 0
    tokens = first.numerics.microbatch_rows.value * first.numerics.num_microbatches * first.length
    rate = tokens * 1e9 / step_ns if step_ns else 0.0
    idle = "" if plans.idle is None else f", ranks idle {format_percent(plans.idle)} of it"
    return f"{format_ns(step_ns)}{idle}, {format_count(rate)} tokens/s (full rows)"


def say_blocks(plans: RankPlans, rank: int) -> str:
    """Name the blocks of a rank by number, stage by stage: `0-2, 9-11`."""
    placement = plans.pipeline.schedule.placement
    owned = sorted(stage for stage, ranks in placement.items() if rank in ranks)
    stages = [plans.pipeline.stages[stage] for stage in owned]
    return ", ".join(f"{s[0]}" if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stages)


def _say_memory(plan: Plan) -> str:
    if plan.prediction is None:
        return "-"
    need = sum(plan.prediction.peak_bytes.get("device", {}).values())
    return format_part(need, plan.budget_bytes["device"])


def _say_computing(plans: RankPlans, rank: int) -> str:
    if not plans.compute_ns or not plans.step_ns:
        return "-"
    compute_ns = plans.compute_ns[rank]
    return f"{format_ns(compute_ns)}, {format_percent(compute_ns / plans.step_ns)}"


def _say_spared(plan: Plan) -> str:
    """What is made again, or lies elsewhere between its uses, so that the rank fits."""
    said: list[str] = []
    count = len(plan.blocks)
    for verb, choice in (("recomputes", "recompute"), ("offloads", "offload")):
        num = sum(block.activations.value == choice for block in plan.blocks)
        if num:
            said.append(f"{verb} {_say_share(num, count)} block{'s' if count > 1 else ''}")
    trained = [chunk for chunk in plan.chunks if chunk.trainable]
    tiers: dict[str, list[TierName]] = {
        "parameters": [chunk.parameters.value for chunk in plan.chunks],
        "gradients": [chunk.gradients.value for chunk in trained],
        "optimizer": [chunk.optimizer.value for chunk in trained],
    }
    for state, words in _STATES:
        for tier in sorted(set(tiers[state]) - {"device"}):
            num = tiers[state].count(tier)
            part = "" if num == len(tiers[state]) else f" of {num} of {len(tiers[state])} chunks"
            said.append(f"{words}{part} on {tier}")
    return "; ".join(said) or "nothing"


def _say_share(num: int, count: int) -> str:
    return "all" if num == count else f"{num} of {count}"


def _say_rejected(plans: RankPlans) -> Iterable[str]:
    if plans.rejected:
        # Beside the step, which has its updates, a rejected one would look shorter than it is.
        yield f"{ESTIMATED}, as above:"
    for each in plans.rejected[:_MOST_REJECTED]:
        yield f"{each.name}, {each.num_stages} stages: {each.because}"
    rest = len(plans.rejected) - _MOST_REJECTED
    if rest > 0:
        yield f"and {rest} more; `packhorse explain` lists them"
