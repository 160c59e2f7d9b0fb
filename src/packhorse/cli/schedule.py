"""`packhorse schedule`: in which order does each rank compute? Picture, idle time, peaks, lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.options import AsJson, BudgetText, NumMicrobatches, NumRanks
from packhorse.errors import DoesNotFitError, InputError

if TYPE_CHECKING:
    from packhorse.cli.schedule_reading import ScheduleRequest
    from packhorse.cli.screen import Screen
    from packhorse.schedule.costs import Costs
    from packhorse.schedule.replicas import Replicas

NumStages = Annotated[
    int | None,
    typer.Option(
        "--stages", min=1, metavar="N", help="How many stages; where a schedule leaves it open."
    ),
]
CostsText = Annotated[
    str,
    typer.Option(
        "--costs",
        metavar="F=1,...",
        help="Times in ms of a rank's share: F=1,I=1,W=1,send=0.1,reduce=2; along the depth"
        " F=1:1:2.",
    ),
]
NumReplicas = Annotated[
    int,
    typer.Option(
        "--replicas",
        min=1,
        metavar="N",
        help="Data-parallel replicas. --ranks and --microbatches are those of each; all are alike,"
        " so one is stored, proved and timed.",
    ),
]
PaperModel = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FILE",
        help="A model.json, as `packhorse plan` writes it: cut it for the schedule, lower, verify"
        " and simulate every rank's program.",
    ),
]
PaperMachine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="FILE|NAME",
        help="With --model: the machine of every rank, a file or a known one such as a100-80gb."
        " Absent: this machine, probed.",
    ),
]
LinkText = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="RATE,LATENCY",
        help="With --model: the link between any two ranks, 25GB,5us. Absent: the machine's, or"
        " 12.5 GB/s and 10 us.",
    ),
]
MemoryCap = Annotated[
    str | None,
    typer.Option(
        "--memory-cap",
        metavar="SHARES",
        help="What a rank may save, in microbatches of its share: 4, or one each: 4,4,3,3.",
    ),
]


def show_schedule(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A schedule, searched, file.py:function, or torch's file.csv."
            " Absent: all named ones beside each other.",
        ),
    ] = None,
    ranks: NumRanks = None,
    microbatches: NumMicrobatches = None,
    replicas: NumReplicas = 1,
    stages: NumStages = None,
    costs: CostsText = "",
    memory_cap: MemoryCap = None,
    model: PaperModel = None,
    machine: PaperMachine = None,
    budget: BudgetText = None,
    link: LinkText = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as an SVG picture.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write torch's CSV of it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a schedule: picture, idle time, peaks, each rank's order.

    With --model, that of a model on machines that need not be here.
    """
    from packhorse.cli.schedule_reading import ScheduleRequest, take_schedule
    from packhorse.cli.screen import Screen
    from packhorse.schedule.replicas import Replicas

    screen = Screen(as_json=as_json)
    request = ScheduleRequest(
        name=name or "",
        num_ranks=ranks,
        num_microbatches=microbatches,
        num_stages=stages,
        num_replicas=replicas,
        costs=costs,
        memory_cap=memory_cap,
    )
    _refuse_idle_options(
        {"--machine": machine, "--budget": budget, "--link": link}
        if model is None
        else {"--costs": costs or None, "--memory-cap": memory_cap},
        has_model=model is not None,
    )
    if name is None:
        one = {"--svg": svg, "--csv": csv, "--stages": stages, "--model": model}
        for option, value in one.items():
            if value is not None:
                raise InputError(
                    f"{option} is for one schedule, and none is named",
                    where="packhorse schedule",
                    fix="name one, for example interleaved",
                )
        _compare_all(screen, request)
        return
    if model is not None:
        from packhorse.cli.schedule_on_paper import PaperRequest, show_on_paper

        paper = PaperRequest(model=model, machine=machine, budget=budget, link=link)
        show_on_paper(screen, request, paper, svg=svg, csv=csv)
        return
    with screen.progress("schedule") as tell:
        schedule, given = take_schedule(request, tell)
    _show_one(screen, name, Replicas(first=schedule, count=replicas), given, svg, csv)


def _refuse_idle_options(options: Mapping[str, object], *, has_model: bool) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(
                f"{option} has no effect with --model: times and room follow from the machine"
                if has_model
                else f"{option} has no effect without --model",
                where="packhorse schedule",
                fix="leave one of them out" if has_model else "name the model: --model model.json",
            )


def _show_one(
    screen: Screen,
    name: str,
    replicas: Replicas,
    costs: Costs,
    svg: Path | None,
    csv: Path | None,
) -> None:
    from packhorse.cli.outputs import write_output
    from packhorse.cli.schedule_report import (
        NOTES_HEAD,
        describe_replicas,
        describe_schedule,
        describe_step,
        list_lines,
        make_timelines,
        note_ranks,
        rank_table,
    )
    from packhorse.report.rank_rows import picture_ranks
    from packhorse.report.ranks import draw_ranks
    from packhorse.schedule.csv_text import format_csv
    from packhorse.schedule.replicas import time_replicas
    from packhorse.schedule.spec import name_task

    schedule = replicas.first
    timing = time_replicas(replicas, costs)
    title = describe_schedule(name, replicas)
    others = [describe_replicas(replicas)] if replicas.count > 1 else []
    timelines = make_timelines(schedule, timing, costs)
    written: list[Path] = []
    if svg is not None:
        drawn = draw_ranks(
            timelines,
            title=title,
            facts=describe_step(timing),
            notes=note_ranks(timing, costs),
            notes_head=NOTES_HEAD,
        )
        written.append(write_output(svg, drawn))
    if csv is not None:
        written.append(write_output(csv, format_csv(schedule)))
    screen.show(
        title,
        *others,
        picture_ranks(timelines),
        describe_step(timing),
        "",
        rank_table(schedule, timing, costs),
        "",
    )
    _show_lists(screen, list_lines(schedule))
    if written:
        screen.wrote(*written)
    share_bytes = costs.share_bytes(schedule.num_ranks)
    _refuse_excess(timing.peak_bytes, costs, share_bytes)
    screen.answer(
        {
            "name": name,
            "ranks": schedule.num_ranks,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "tasks": schedule.num_tasks,
            "replicas": replicas.count,
            "ranks_of_all": replicas.num_ranks,
            "microbatches_of_all": replicas.num_microbatches,
            "placement": {str(s): list(r) for s, r in sorted(replicas.placement.items())},
            "makespan_ns": timing.makespan_ns,
            "bubble": float(timing.bubble),
            "idle_in_span": float(timing.idle_in_span),
            "bubble_of_rank": [float(timing.bubble_of(r)) for r in range(schedule.num_ranks)],
            "idle_in_span_of_rank": [float(rank.idle_in_span) for rank in timing.ranks],
            "peak_shares": [peak / share_bytes for peak in timing.peak_bytes],
            "orders": [list(map(name_task, order)) for order in schedule.orders],
            "files": [str(each) for each in written],
        }
    )


def _show_lists(screen: Screen, lines: tuple[str, ...]) -> None:
    """Show a line for each rank: cut where a terminal ends, whole in a file or pipe."""
    from rich.padding import Padding
    from rich.text import Text

    if screen.out.is_terminal:
        # Each in a box of its own, or they would be printed as one text that is not cut.
        screen.show(*(Padding(Text(line, no_wrap=True, overflow="ellipsis"), 0) for line in lines))
    else:
        screen.show_text("".join(f"{line}\n" for line in lines))


def _refuse_excess(peak_bytes: tuple[int, ...], costs: Costs, share_bytes: int) -> None:
    from packhorse.schedule.timing import find_excess

    excess = find_excess(peak_bytes, costs.cap_bytes)
    if excess:
        raise DoesNotFitError(
            "1 rank saves more than it may"
            if len(excess) == 1
            else f"{len(excess)} ranks save more than they may",
            where="\n".join(
                f"rank {rank} saves {peak / share_bytes:.3g} and may save {cap / share_bytes:.3g}"
                for rank, (peak, cap) in list(excess.items())[:8]
            ),
            fix="raise --memory-cap, or search: packhorse schedule searched",
        )


def _compare_all(screen: Screen, request: ScheduleRequest) -> None:
    from packhorse.cli.schedule_reading import need_sizes, read_request_costs
    from packhorse.cli.schedule_report import compare_schedules, compare_table, count_words

    num_ranks, num_microbatches = need_sizes(request)
    costs = read_request_costs(request, num_ranks)
    lines = compare_schedules(num_ranks, num_microbatches, costs, num_replicas=request.num_replicas)
    screen.show(
        f"{count_words(num_ranks, 'rank')}, {count_words(num_microbatches, 'microbatch')}",
        compare_table(lines),
    )
    screen.answer(
        {
            "ranks": num_ranks,
            "microbatches": num_microbatches,
            "replicas": request.num_replicas,
            "schedules": [
                {
                    "name": line.name,
                    "about": line.about,
                    "stages": line.num_stages,
                    "makespan_ns": line.makespan_ns,
                    "bubble": line.bubble,
                    "idle_in_span": line.idle_in_span,
                    "peak_shares": line.peak_shares,
                    "fits": line.fits,
                }
                for line in lines
            ],
        }
    )
