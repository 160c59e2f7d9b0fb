"""A plan, explained: does it fit, how long is a step, what was chosen and why?

In: a plan and, where known, an estimate of the run and what would make it faster. Out: rich
renderables that fit 80 columns and read the same without colours, or what `json.dumps` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from packhorse.plan.spec import Plan, Prediction
from packhorse.report.bars import StackedBar
from packhorse.report.choices import fold_choices, say_durable
from packhorse.report.colours import colour_of
from packhorse.report.run import MeasuredSteps, RunEstimate, run_as_dict
from packhorse.report.sections import (
    bullet_lines,
    choices_table,
    heading,
    indent,
    largest_first,
    share_bars,
)
from packhorse.report.tables import plain_table
from packhorse.timeline.names import words_for
from packhorse.units import format_bytes, format_count, format_ns, format_part, format_percent

_WORTH_A_BAR: Final = 0.1
_NO_PREDICTION: Final = (
    "This plan has no prediction; `packhorse train RECIPE --plan PLAN` predicts it before it runs."
)
_NO_ADVICE: Final = (
    "What would make it faster is worked out from the plan's model, machine and profile, which are"
    " not beside it."
)
_NO_RELIEF: Final = "Nothing but compute: a faster device, or fewer operations."
_MOST_SHOWN: Final = 5
UNCOUNTED: Final = "Python, torch and other libraries themselves come on top"
# Causes of memory whose names do not say it all.
_LEGEND: Final[Mapping[str, str]] = {
    "base": "objects of the traced model, data and code loaded later; libraries are not counted",
    "slots": "the disk's second copy of what steps change, so that a killed run can go on",
    "ahead": "what lanes bring or keep before its turn, where memory is left",
    "heap": "by how much the C heap outgrows what lives in it",
    "workspace": "what a task needs only while it runs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would make a plan faster, the most helpful first, and what clipping costs."""

    relief: tuple[str, ...]
    clipping: str


def plan_table(
    plan: Plan, run: RunEstimate | None = None, so_far: MeasuredSteps | None = None
) -> RenderableType:
    """Render a plan in short: fits, step, run; and beside them what its run took so far."""
    table = plain_table(heads=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("plan", _name_plan(plan))
    prediction = plan.prediction
    if prediction is None:
        table.add_row("fits", Text(_NO_PREDICTION, style="yellow"))
    else:
        for at, (tier, causes) in enumerate(prediction.peak_bytes.items()):
            table.add_row("" if at else "fits", _say_peak(plan, tier, causes))
            if tier == "device" and plan.numerics.device == "cpu":
                table.add_row("", Text(f"({UNCOUNTED})", style="dim"))
        table.add_row("step", _say_step(plan, prediction))
        table.add_row("", Text(f"bound by {words_for(prediction.bottleneck)}", style="dim"))
    table.add_row("resume", _say_kept(plan))
    for at, line in enumerate(say_run(run) if run else ()):
        table.add_row("" if at else "run", line)
    if so_far is not None:
        promised_ns = plan.prediction.step_ns if plan.prediction else None
        table.add_row("so far", say_so_far(so_far, promised_ns))
    return table


def explain_plan(
    plan: Plan, run: RunEstimate | None = None, advice: Advice | None = None
) -> RenderableType:
    """Render a plan in full: memory and time by cause, bottleneck, relief, choices, run."""
    parts: list[RenderableType] = [Text(_name_plan(plan), style="bold")]
    prediction = plan.prediction
    if prediction is None:
        parts.append(Text(_NO_PREDICTION, style="yellow"))
    else:
        for tier, causes in prediction.peak_bytes.items():
            parts += memory_section(plan, tier, causes)
            parts += memory_legend(largest_first(causes))
        parts += _time_section(plan, prediction, advice)
    parts += _choices_section(plan)
    if run is not None:
        parts += [heading("Run"), indent(bullet_lines(say_run(run)))]
    return Group(*parts)


def explanation_as_dict(
    plan: Plan, run: RunEstimate | None = None, advice: Advice | None = None
) -> dict[str, object]:
    """Give an explanation as what `json.dumps` takes."""
    prediction = plan.prediction
    return {
        "model": plan.model_name,
        "machine": plan.machine,
        "budget_bytes": dict(plan.budget_bytes),
        "peak_bytes": {tier: dict(causes) for tier, causes in prediction.peak_bytes.items()}
        if prediction
        else None,
        "time_ns": dict(prediction.time_ns) if prediction else None,
        "lane_ns": dict(prediction.lane_ns) if prediction else None,
        "step_ns": prediction.step_ns if prediction else None,
        "bottleneck": prediction.bottleneck if prediction else None,
        "relief": list(advice.relief) if advice else None,
        "clipping": advice.clipping if advice else None,
        "choices": [
            {
                "choice": group.choice,
                "value": group.value,
                "where": group.where,
                "because": group.because,
            }
            for group in fold_choices(plan)
        ],
        "run": run_as_dict(run) if run else None,
    }


def _name_plan(plan: Plan) -> str:
    numerics = plan.numerics
    rows, count = numerics.microbatch_rows.value, numerics.num_microbatches
    batches = f"{count} micro-batch{'es' if count > 1 else ''}"
    return f"{plan.model_name} on {plan.machine}: {batches} of {rows} x {plan.length} tokens"


def _say_peak(plan: Plan, tier: str, causes: Mapping[str, int]) -> str:
    peak_bytes = sum(causes.values())
    budget_bytes = _budget_of(plan, tier)
    if not budget_bytes:
        return f"{tier}: {format_bytes(peak_bytes)} at the peak"
    share = format_percent(peak_bytes / budget_bytes)
    return f"{tier}: {format_part(peak_bytes, budget_bytes)} at the peak, {share}"


def _say_step(plan: Plan, prediction: Prediction) -> str:
    numerics = plan.numerics
    tokens = numerics.microbatch_rows.value * numerics.num_microbatches * plan.length
    rate = tokens * 1e9 / prediction.step_ns if prediction.step_ns else 0.0
    return (
        f"{format_ns(prediction.step_ns)}, {format_count(rate)} tokens/s (full rows);"
        f" disk: {format_bytes(prediction.disk_read_bytes)} read,"
        f" {format_bytes(prediction.disk_written_bytes)} written"
    )


def _say_kept(plan: Plan) -> str:
    """From where a killed run could go on, and what that takes of the disk."""
    if plan.durable.value == "off":
        return f"from checkpoints alone: {plan.durable.because}"
    every = plan.durable.value
    words = "every step is kept" if every == 1 else f"{say_durable(every)} the state is kept"
    prediction = plan.prediction
    if prediction is None:
        return words
    slots_bytes = prediction.peak_bytes.get("disk", {}).get("slots", 0)
    behind = prediction.kept_bytes_per_step
    written = f", {format_bytes(behind)} more written a step" if behind else ""
    return f"{words}, {format_bytes(slots_bytes)} of disk for it{written}"


def say_so_far(so_far: MeasuredSteps, promised_ns: int | None) -> str:
    """What the steps that are done took, and what is left by that and by what a plan promises."""
    if not so_far.num_left:
        return f"all {so_far.num_steps} steps are done"
    one = so_far.num_recent == 1
    steps = "step" if one else f"{so_far.num_recent} steps"
    whose = "" if so_far.by_this_plan else ", by another plan,"
    line = (
        f"{so_far.num_done} of {so_far.num_steps} steps are done; the last {steps}{whose} took"
        f" {format_ns(so_far.step_ns)}{'' if one else ' each'}: {format_ns(so_far.rest_ns)} for the"
        f" {so_far.num_left} that are left"
    )
    if promised_ns is None or not so_far.by_this_plan:
        return line
    return (
        f"{line}; the plan says {format_ns(promised_ns)} a step,"
        f" {format_ns(promised_ns * so_far.num_left)}"
    )


def say_run(run: RunEstimate) -> list[str]:
    """Say in lines what a run costs."""
    first = ""
    if run.first_step_ns:
        first = f", {format_ns(run.first_step_ns)} of it before step 1 begins"
    rate = f"{format_count(run.tokens_per_s)} tokens/s with the data's rows"
    tokens = f"{format_count(run.num_tokens)} tokens, {rate}"
    lines = [f"{format_ns(run.total_ns)} in all{first}: {run.num_steps} steps, {tokens}"]
    if run.num_saves:
        seconds = f", {format_ns(run.checkpoint_ns)} to save" if run.checkpoint_ns else ""
        lines.append(
            f"checkpoint: {format_bytes(run.checkpoint_bytes)}{seconds},"
            f" {run.num_saves} in the run, {min(run.num_kept, run.num_saves)} kept"
        )
    if run.weights_ns:
        took = format_ns(run.weights_ns)
        lines.append(f"model at the end: {format_bytes(run.weights_bytes)}, {took} to save")
    if run.num_evaluations:
        times = "once" if run.num_evaluations == 1 else f"{run.num_evaluations} times"
        lines.append(f"evaluation: {format_ns(run.evaluation_ns)}, {times} in the run")
    lines.append(
        f"disk space: {format_bytes(run.worst_disk_bytes)} at worst"
        f" ({format_bytes(run.scratch_bytes)} of it scratch)"
    )
    if run.disk_rates is not None:
        lines.append(f"disk rates: {run.disk_rates}")
    share = run.endurance_share
    wear = f", {format_percent(share)} of the drive's endurance" if share is not None else ""
    lines.append(
        f"written: {format_bytes(run.written_bytes_per_step)} a step,"
        f" {format_bytes(run.written_bytes)} in all{wear}"
    )
    return lines


def memory_section(
    plan: Plan, tier: str, causes: Mapping[str, int], *, head: str = "Memory"
) -> list[RenderableType]:
    """Render what the peak of a tier is made of."""
    peak_bytes = sum(causes.values())
    budget_bytes = _budget_of(plan, tier)
    used = largest_first(causes)
    parts = [heading(f"{head}, {_say_peak(plan, tier, causes)}")]
    # In a budget that is nearly empty there would be nothing to see.
    if peak_bytes >= _WORTH_A_BAR * budget_bytes > 0:
        shares = [(size / budget_bytes, colour_of(cause)) for cause, size in used.items()]
        parts.append(indent(StackedBar(parts=shares)))
    return [*parts, indent(share_bars(used, peak_bytes or 1, format_bytes))]


def memory_legend(causes: Iterable[str]) -> list[RenderableType]:
    """Say what causes of memory are whose names do not say it."""
    named = dict.fromkeys(cause for cause in causes if cause in _LEGEND)
    lines = [f"{words_for(cause)}: {_LEGEND[cause]}" for cause in named]
    return [indent(Text(line, style="dim")) for line in lines]


def _time_section(
    plan: Plan, prediction: Prediction, advice: Advice | None
) -> list[RenderableType]:
    spent = largest_first(prediction.time_ns)
    step_ns = prediction.step_ns or 1
    notes = [f"Bound by {words_for(prediction.bottleneck)}."]
    if len(prediction.lane_ns) > 1:
        notes.append(_say_lanes(prediction))
    if advice is None:
        notes.append(_NO_ADVICE)
    else:
        notes += [f"Faster: {each}." for each in advice.relief[:_MOST_SHOWN]] or [_NO_RELIEF]
        notes.append(advice.clipping)
    return [
        heading(f"Step, {_say_step(plan, prediction)}"),
        indent(share_bars(spent, step_ns, format_ns)),
        Text(),
        indent(bullet_lines(notes)),
    ]


def _say_lanes(prediction: Prediction) -> str:
    # What works at the same time adds up to more than the step; what compute does not fill, it
    # waits.
    busy = [
        f"{words_for(lane)} {format_ns(lane_ns)}"
        for lane, lane_ns in largest_first(prediction.lane_ns).items()
    ]
    words = f"At work beside each other in a step of {format_ns(prediction.step_ns)}: "
    words += ", ".join(busy)
    waiting_ns = prediction.step_ns - prediction.lane_ns.get("compute", 0)
    if waiting_ns > 0:
        words += f"; compute waits {format_ns(waiting_ns)}"
    return words + "."


def _choices_section(plan: Plan) -> list[RenderableType]:
    parts: list[RenderableType] = [heading("Choices"), indent(choices_table(fold_choices(plan)))]
    if plan.pins:
        parts.append(indent(Text(f"Pinned by hand: {', '.join(plan.pins)}")))
    return parts


def _budget_of(plan: Plan, tier: str) -> int:
    return next((size for name, size in plan.budget_bytes.items() if name == tier), 0)
