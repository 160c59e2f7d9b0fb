"""A timed schedule in words and tables, and as a timeline for each rank.

In: a schedule, its timing, costs. Out: what the command shows. Peaks are in shares: what one
microbatch saves in one rank's share of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from packhorse.program.buffers import PoolId
from packhorse.report.tables import plain_table
from packhorse.schedule.costs import Cost, Costs
from packhorse.schedule.families import FAMILIES, make_named
from packhorse.schedule.replicas import Replicas, time_replicas
from packhorse.schedule.spec import (
    Backward,
    Forward,
    InputGrad,
    Schedule,
    Task,
    WeightGrad,
    name_task,
)
from packhorse.schedule.timing import RankTiming, Timing, find_excess
from packhorse.timeline.names import ALL_REDUCE, words_for
from packhorse.timeline.spec import MemoryPoint, Span, Timeline
from packhorse.units import format_ns, format_percent

_KINDS: Final[Mapping[type[Task], str]] = {
    Forward: "forward",
    Backward: "backward",
    InputGrad: "input_grad",
    WeightGrad: "weight_grad",
}
_SAVED: Final = PoolId("saved")
NOTES_HEAD: Final = "idle, in its span, peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSchedule:
    """One named schedule among the others."""

    name: str
    about: str
    num_stages: int
    makespan_ns: int
    bubble: float
    idle_in_span: float
    peak_shares: float
    fits: bool


def make_timelines(schedule: Schedule, timing: Timing, costs: Costs) -> tuple[Timeline, ...]:
    """Give each rank's tasks, reductions and saved bytes over time."""
    stages = costs.cut(schedule.num_stages)
    return tuple(
        Timeline(
            source="simulated",
            rank=rank,
            spans=(
                *(
                    Span(
                        index=at,
                        name=f"{words_for(_KINDS[type(task)])} {task.stage}@{task.microbatch}",
                        kind=_KINDS[type(task)],
                        lane="compute",
                        start_ns=times.starts_ns[at],
                        end_ns=times.ends_ns[at],
                    )
                    for at, task in enumerate(order)
                ),
                *(
                    Span(
                        index=at,
                        name=f"{words_for(ALL_REDUCE)}, stage {each.stage}",
                        kind=ALL_REDUCE,
                        lane=ALL_REDUCE,
                        start_ns=each.start_ns,
                        end_ns=each.end_ns,
                    )
                    for at, each in enumerate(times.reductions, len(order))
                ),
            ),
            memory={_SAVED: tuple(_list_points(order, times, stages))},
        )
        for rank, (order, times) in enumerate(zip(schedule.orders, timing.ranks, strict=True))
    )


def _list_points(
    order: Sequence[Task], times: RankTiming, stages: Sequence[Cost]
) -> Iterator[MemoryPoint]:
    used_bytes = 0
    yield MemoryPoint(at_ns=0, used_bytes=0)
    for task, start_ns, end_ns in zip(order, times.starts_ns, times.ends_ns, strict=True):
        match task:
            case Forward():
                used_bytes += stages[task.stage].saved_bytes
                yield MemoryPoint(at_ns=start_ns, used_bytes=used_bytes)
            case Backward() | WeightGrad():
                used_bytes -= stages[task.stage].saved_bytes
                yield MemoryPoint(at_ns=end_ns, used_bytes=used_bytes)
            case InputGrad():
                pass


def describe_schedule(name: str, replicas: Replicas) -> str:
    """Say what a schedule is of, for example `zb-v: 4 ranks, 8 stages, 8 microbatches`."""
    schedule = replicas.first
    sizes = (
        (schedule.num_ranks, "rank"),
        (schedule.num_stages, "stage"),
        (schedule.num_microbatches, "microbatch"),
        *([(replicas.count, "replica")] if replicas.count > 1 else []),
    )
    return f"{name}: {', '.join(count_words(count, word) for count, word in sizes)}"


def describe_replicas(replicas: Replicas) -> str:
    """Say how many there are of what is shown, for example `one of 16 alike: 64 ranks, ...`."""
    ranks = count_words(replicas.num_ranks, "rank")
    return (
        f"one of {replicas.count} replicas, all alike: {ranks} in all,"
        f" {count_words(replicas.num_microbatches, 'microbatch')} a step"
    )


def count_words(count: int, word: str) -> str:
    """Count things in words: `1 rank`, `2 microbatches`."""
    ending = "" if count == 1 else "es" if word.endswith("ch") else "s"
    return f"{count:,} {word}{ending}"


def describe_step(timing: Timing) -> str:
    """Say how long a step takes and how much of it is idle, both ways."""
    return (
        f"step {format_ns(timing.makespan_ns)}, idle {format_percent(float(timing.bubble))} with"
        f" the flush, {format_percent(float(timing.idle_in_span))} in the ranks' own spans"
    )


def note_ranks(timing: Timing, costs: Costs) -> tuple[str, ...]:
    """Say of each rank how much it idles, in all and in its own span, and what it saves."""
    share_bytes = costs.share_bytes(len(timing.ranks))
    return tuple(
        f"{format_percent(float(timing.bubble_of(rank)))},"
        f" {format_percent(float(times.idle_in_span))},"
        f" {format_shares(times.peak_bytes, share_bytes)}"
        for rank, times in enumerate(timing.ranks)
    )


def format_shares(saved_bytes: int, share_bytes: int) -> str:
    """Render saved bytes as microbatches of a rank's share."""
    return f"{saved_bytes / share_bytes:.3g}"


def rank_table(schedule: Schedule, timing: Timing, costs: Costs) -> Table:
    """Give a row for each rank, and one for all."""
    share_bytes = costs.share_bytes(schedule.num_ranks)
    table = plain_table()
    table.add_column("rank", no_wrap=True)
    table.add_column("stages", no_wrap=True)
    for heading in ("tasks", "idle with the flush", "in its own span", "peak saved", "cap"):
        if heading != "cap" or costs.cap_bytes is not None:
            table.add_column(heading, justify="right", no_wrap=True)
    for rank, times in enumerate(timing.ranks):
        stages = [stage for stage, homes in sorted(schedule.placement.items()) if rank in homes]
        cells = [
            str(rank),
            _shorten(" ".join(map(str, stages)), 20),
            str(len(schedule.orders[rank])),
            format_percent(float(timing.bubble_of(rank))),
            format_percent(float(times.idle_in_span)),
            format_shares(times.peak_bytes, share_bytes),
        ]
        if costs.cap_bytes is not None:
            cap_bytes = costs.cap_bytes[rank]
            cells.append(format_shares(cap_bytes, share_bytes))
        table.add_row(*cells)
    table.add_row(
        "all",
        str(schedule.num_stages),
        str(schedule.num_tasks),
        format_percent(float(timing.bubble)),
        format_percent(float(timing.idle_in_span)),
        format_shares(max(timing.peak_bytes), share_bytes),
        style="bold",
    )
    return table


def list_lines(schedule: Schedule) -> tuple[str, ...]:
    """Give each rank's order on a line."""
    return tuple(
        f"rank {rank}: {' '.join(map(name_task, order))}"
        for rank, order in enumerate(schedule.orders)
    )


def compare_schedules(
    num_ranks: int, num_microbatches: int, costs: Costs, *, num_replicas: int = 1
) -> tuple[ComparedSchedule, ...]:
    """Time every named schedule with the same costs."""
    lines: list[ComparedSchedule] = []
    share_bytes = costs.share_bytes(num_ranks)
    for name, family in FAMILIES.items():
        schedule = make_named(name, num_ranks, num_microbatches, costs)
        timing = time_replicas(Replicas(first=schedule, count=num_replicas), costs)
        lines.append(
            ComparedSchedule(
                name=name,
                about=family.about,
                num_stages=schedule.num_stages,
                makespan_ns=timing.makespan_ns,
                bubble=float(timing.bubble),
                idle_in_span=float(timing.idle_in_span),
                peak_shares=max(timing.peak_bytes) / share_bytes,
                fits=not find_excess(timing.peak_bytes, costs.cap_bytes),
            )
        )
    return tuple(lines)


def compare_table(lines: Sequence[ComparedSchedule]) -> Table:
    """Give a row for each named schedule; the shortest that keeps the caps stands out."""
    table = plain_table()
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages", "step", "idle", "own span", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    least_ns = min((line.makespan_ns for line in lines if line.fits), default=None)
    for line in lines:
        best = line.fits and line.makespan_ns == least_ns
        table.add_row(
            line.name,
            str(line.num_stages),
            format_ns(line.makespan_ns),
            format_percent(line.bubble),
            format_percent(line.idle_in_span),
            f"{line.peak_shares:.3g}" if line.fits else f"{line.peak_shares:.3g} over",
            line.about,
            style="bold" if best else "" if line.fits else "dim",
        )
    return table


def _shorten(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 3] + "..."
