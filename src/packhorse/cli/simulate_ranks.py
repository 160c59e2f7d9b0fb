"""`packhorse simulate` of the plans of several ranks: one clock, a row for each rank.

In: what was typed, and the plans. Out: a picture and a table on the screen; a timeline for each
rank, one trace of all, and where asked for an SVG picture; a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packhorse.errors import InputError
from packhorse.units import format_bytes, format_ns, format_percent

if TYPE_CHECKING:
    from rich.table import Table

    from packhorse.cli.rank_reading import RankSet
    from packhorse.cli.screen import Screen
    from packhorse.plan.ranks import RankPlans
    from packhorse.timeline.spec import Timeline

_NOTES_HEAD: Final = "idle, peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """What was typed: see the options of `packhorse simulate`."""

    path: Path
    model: Path | None
    machine: str | None
    one_by_one: bool
    out: Path | None
    trace: Path | None
    svg: Path | None


def look_for_rank_plans(path: Path) -> RankPlans | None:
    """Read the plans of several ranks, where a path means such; else None.

    Raises:
        FileFormatError: it is missing or damaged.
    """
    from packhorse.cli.companions import plan_path
    from packhorse.cli.kinds import detect_kind
    from packhorse.plan.rank_files import read_rank_plans

    kind = detect_kind(path)
    file = plan_path(path)
    if kind == "run folder" and file.is_file():
        kind = detect_kind(file)
    return read_rank_plans(file) if kind == "rank plans" else None


def simulate_rank_plans(plans: RankPlans, request: SimulateRequest, screen: Screen) -> None:
    """Predict a step of all ranks together; show it and write it.

    Raises:
        InputError: an option does not go with several ranks, or something beside the plans is not
            there.
        RuleError: a program breaks a rule, alone or with the others.
    """
    from packhorse.cli.companions import plan_path
    from packhorse.cli.outputs import write_output
    from packhorse.cli.rank_reading import choose_cluster, read_rank_set, simulate_rank_set
    from packhorse.cli.stage_names import show_stages
    from packhorse.report.rank_loads import (
        find_busiest,
        links_as_dict,
        say_busiest,
        say_busiest_link,
    )
    from packhorse.report.rank_rows import picture_ranks
    from packhorse.report.ranks import draw_ranks
    from packhorse.timeline.files import format_timeline, name_for_rank
    from packhorse.timeline.perfetto import format_trace

    if request.one_by_one:
        raise InputError(
            "ranks work beside each other, and never task by task",
            where="--one-by-one",
            fix="leave it out",
        )
    path = plan_path(request.path)
    found = read_rank_set(path, plans, request.model)
    cluster = choose_cluster(found, request.machine)
    timelines = simulate_rank_set(found, cluster, elsewhere=request.machine is not None)
    out = request.out or path.with_name("timeline.json")
    trace = request.trace or out.with_name(f"{out.stem}.trace.json")
    written = [
        write_output(out.with_name(name_for_rank(out.name, each.rank)), format_timeline(each))
        for each in timelines
    ]
    written.append(write_output(trace, format_trace(*timelines)))
    step_ns = max(each.step_ns for each in timelines)
    title = _title_of(found)
    shown = [
        show_stages(timeline, part, plans.pipeline.stages)
        for timeline, part in zip(timelines, found.parts, strict=True)
    ]
    idle = [_idle_of(timeline, step_ns) for timeline in timelines]
    facts = f"step {format_ns(step_ns)}, idle {format_percent(sum(idle) / len(idle))}"
    if request.svg is not None:
        notes = [
            f"{format_percent(share)}, {format_bytes(_device_bytes(timeline))}"
            for share, timeline in zip(idle, timelines, strict=True)
        ]
        drawn = draw_ranks(shown, title=title, facts=facts, notes=notes, notes_head=_NOTES_HEAD)
        written.append(write_output(request.svg, drawn))
    busiest = find_busiest(timelines)
    screen.show(
        title,
        picture_ranks(shown),
        f"{facts}; {say_busiest(busiest)}; {say_busiest_link(busiest)}",
        "",
        _rank_table(plans, timelines, idle),
    )
    screen.wrote(*written)
    screen.answer(
        {
            "step_ns": step_ns,
            "idle": sum(idle) / len(idle),
            "ranks": [
                {
                    "rank": timeline.rank,
                    "step_ns": timeline.step_ns,
                    "compute_ns": timeline.busy_ns("compute"),
                    "idle": share,
                    "tasks": len(timeline.spans),
                    "peak_bytes": dict(timeline.peak_bytes),
                }
                for share, timeline in zip(idle, timelines, strict=True)
            ],
            "bottleneck": say_busiest(busiest),
            "links": links_as_dict(timelines),
            "files": [str(each) for each in written],
        }
    )


def _title_of(found: RankSet) -> str:
    pipeline = found.plans.pipeline
    schedule = pipeline.schedule
    return (
        f"{found.model.name}, {pipeline.name.value}: {schedule.num_ranks} ranks,"
        f" {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
    )


def _idle_of(timeline: Timeline, step_ns: int) -> float:
    """The share of the step of all ranks in which this one computes nothing."""
    return max(1 - timeline.busy_ns("compute") / step_ns, 0.0) if step_ns else 0.0


def _device_bytes(timeline: Timeline) -> int:
    """What the pools of the device hold at most, each at its own moment."""
    from packhorse.compiler.buffers import CHUNKS, DEVICE, HEAP

    return sum(timeline.peak_bytes.get(pool, 0) for pool in (DEVICE, CHUNKS, HEAP))


def _rank_table(plans: RankPlans, timelines: Sequence[Timeline], idle: Sequence[float]) -> Table:
    from packhorse.report.rank_plans import say_blocks
    from packhorse.report.tables import plain_table

    table = plain_table()
    table.add_column("rank", no_wrap=True)
    table.add_column("blocks")
    for heading in ("tasks", "computes", "idle", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for timeline, share in zip(timelines, idle, strict=True):
        table.add_row(
            str(timeline.rank),
            say_blocks(plans, timeline.rank),
            str(len(timeline.spans)),
            format_ns(timeline.busy_ns("compute")),
            format_percent(share),
            format_bytes(_device_bytes(timeline)),
        )
    return table
