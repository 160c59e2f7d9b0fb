"""The plans of several ranks in short: who has what, does it fit, how long is a step?

In: `RankPlans` and, where known, an estimate of the run. Out: rich renderables that fit 80 columns
and read the same without colours, or what `json.dumps` takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from packhorse.plan.ranks import RankPlans
from packhorse.plan.spec import Plan
from packhorse.report.explain import explanation_as_dict, say_run
from packhorse.report.run import RunEstimate, run_as_dict
from packhorse.report.tables import plain_table
from packhorse.units import format_ns, format_part, format_percent

_MOST_REJECTED: Final = 4


def rank_plans_table(plans: RankPlans, run: RunEstimate | None = None) -> RenderableType:
    """Render the plans of all ranks: schedule, a line for each rank, step, run."""
    first, pipeline = plans.ranks[0], plans.pipeline
    numerics = first.numerics
    head = plain_table(heads=False)
    head.add_column(style="bold", no_wrap=True)
    head.add_column()
    count = numerics.num_microbatches
    head.add_row(
        "plan",
        f"{first.model_name} on {len(plans.ranks)} ranks: {count}"
        f" micro-batch{'es' if count > 1 else ''} of {numerics.microbatch_rows.value} x"
        f" {first.length} tokens",
    )
    num_stages = pipeline.schedule.num_stages
    head.add_row("order", f"{pipeline.name.value}, {num_stages} stages")
    head.add_row("", Text(pipeline.name.because, style="dim"))
    table = plain_table()
    for title in ("rank", "blocks", "memory", "computes", "away"):
        table.add_column(title, no_wrap=title != "blocks")
    for rank, plan in enumerate(plans.ranks):
        table.add_row(*_say_rank(plans, rank, plan))
    tail = plain_table(heads=False)
    tail.add_column(style="bold", no_wrap=True)
    tail.add_column()
    if plans.step_ns is not None:
        idle = "" if plans.idle is None else f", ranks idle {format_percent(plans.idle)} of it"
        tail.add_row("step", f"{format_ns(plans.step_ns)}{idle}")
    for at, line in enumerate(_say_rejected(plans)):
        tail.add_row("" if at else "others", Text(line, style="dim"))
    for at, line in enumerate(say_run(run) if run else ()):
        tail.add_row("" if at else "run", line)
    return Group(head, "", table, "", tail)


def rank_plans_as_dict(plans: RankPlans, run: RunEstimate | None = None) -> dict[str, object]:
    """Give the plans of all ranks as what `json.dumps` takes."""
    pipeline = plans.pipeline
    return {
        "schedule": pipeline.name.value,
        "bounds": list(pipeline.bounds.value),
        "step_ns": plans.step_ns,
        "compute_ns": list(plans.compute_ns),
        "idle": plans.idle,
        "ranks": [explanation_as_dict(plan) for plan in plans.ranks],
        "run": run_as_dict(run) if run else None,
    }


def _say_rank(plans: RankPlans, rank: int, plan: Plan) -> tuple[str, ...]:
    owned = [stage for stage, ranks in plans.pipeline.schedule.placement.items() if rank in ranks]
    blocks = ", ".join(_say_blocks(plans.pipeline.stages[stage]) for stage in sorted(owned))
    memory = "-"
    if plan.prediction is not None:
        need = sum(plan.prediction.peak_bytes.get("device", {}).values())
        memory = format_part(need, plan.budget_bytes["device"])
    computes = format_ns(plans.compute_ns[rank]) if plans.compute_ns else "-"
    return str(rank), blocks, memory, computes, _say_away(plan)


def _say_blocks(blocks: range) -> str:
    return f"{blocks[0]}" if len(blocks) == 1 else f"{blocks[0]}-{blocks[-1]}"


def _say_away(plan: Plan) -> str:
    """What leaves the device, or is made again."""
    said: list[str] = []
    again = sum(block.activations.value == "recompute" for block in plan.blocks)
    if again:
        said.append(f"recompute {again}")
    moved = sum(block.activations.value == "offload" for block in plan.blocks)
    if moved:
        said.append(f"offload {moved}")
    for state in ("parameters", "gradients", "optimizer"):
        tiers = [getattr(chunk, state).value for chunk in plan.chunks]
        gone = sum(tier != "device" for tier in tiers)
        if gone:
            part = "all" if gone == len(tiers) else f"{gone} of {len(tiers)}"
            said.append(f"{state} {part}")
    return ", ".join(said) or "nothing"


def _say_rejected(plans: RankPlans) -> Iterable[str]:
    for each in plans.rejected[:_MOST_REJECTED]:
        yield f"{each.name}, {each.num_stages} stages: {each.because}"
    rest = len(plans.rejected) - _MOST_REJECTED
    if rest > 0:
        yield f"and {rest} more"
