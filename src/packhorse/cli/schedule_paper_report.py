"""A model on paper in words and tables: what a step of all ranks takes, holds, and rests upon.

In: a `DryRun`. Out: what the command shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

from packhorse.cli.schedule_report import count_words, describe_replicas, describe_schedule
from packhorse.report.tables import plain_table
from packhorse.timeline.names import ALL_REDUCE
from packhorse.units import (
    format_bytes,
    format_count,
    format_ns,
    format_part,
    format_percent,
)

if TYPE_CHECKING:
    from packhorse.cli.schedule_on_paper import DryRun

_MOST_ROWS: Final = 16
_NUM_EVENLY: Final = 8


def title_of(name: str, run: DryRun) -> str:
    """Say what was looked at."""
    return f"{run.cut.model.name}, {describe_schedule(name, run.replicas)}"


def describe_dry_run(run: DryRun) -> str:
    """Say how long a step takes, how much of it is idle, and how many tokens a second that is."""
    return (
        f"step {format_ns(run.step_ns)}, idle {format_percent(run.bubble)},"
        f" {format_count(run.tokens_per_s)} tokens/s"
    )


def list_facts(run: DryRun) -> tuple[str, ...]:
    """Say what there is of it, who is the fullest, and what all of that rests upon."""
    fleet, fullest = run.fleet, run.fullest
    peak = format_part(run.peak_bytes[fullest], fleet.budget_bytes)
    num_ranks = count_words(fleet.num_ranks, "rank")
    num_again = sum(share.recomputes for share in run.cut.cuts.shares)
    words = f"fullest: rank {fullest}, {peak}; {num_again} of {num_ranks} recompute"
    others: tuple[str, ...] = ()
    if fleet.num_replicas > 1:
        spans = run.timelines[fullest].spans
        taken_ns = sum(span.duration_ns for span in spans if span.kind == ALL_REDUCE)
        others = (describe_replicas(run.replicas),)
        words = f"{words}; its all-reduce takes {format_ns(taken_ns)}"
    return (
        *others,
        words,
        f"links between ranks: {run.link_words}",
        f"times of blocks: estimated for {fleet.machine.name}",
        "updates: AdamW with clipping, all states in the device",
    )


def note_ranks(run: DryRun) -> tuple[str, ...]:
    """Say of each rank how much it idles, and its peak."""
    return tuple(
        f"{format_percent(run.bubble_of(rank))}, {format_bytes(peak_bytes)}"
        for rank, peak_bytes in enumerate(run.peak_bytes)
    )


def rank_table(run: DryRun) -> Table:
    """Give a row for each rank, or of many for some, with the fullest; and one for all."""
    num_ranks = run.fleet.num_ranks
    shown = set(range(num_ranks))
    if num_ranks > _MOST_ROWS:
        shown = {0, run.fullest, num_ranks - 1}
        shown |= {at * num_ranks // _NUM_EVENLY for at in range(_NUM_EVENLY)}
    table = plain_table()
    table.add_column("rank", no_wrap=True)
    for heading in ("blocks", "tasks", "idle", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for rank in sorted(shown):
        marks = ["fullest"] * (rank == run.fullest)
        marks += ["recomputes"] * run.cut.cuts.shares[rank].recomputes
        table.add_row(
            str(rank),
            str(run.num_blocks[rank]),
            str(run.num_tasks[rank]),
            format_percent(run.bubble_of(rank)),
            format_bytes(run.peak_bytes[rank]),
            ", ".join(marks),
        )
    table.add_row(
        "all" if len(shown) == num_ranks else f"all {num_ranks}",
        str(sum(run.num_blocks)),
        str(sum(run.num_tasks)),
        format_percent(run.bubble),
        format_bytes(max(run.peak_bytes)),
        "",
        style="bold",
    )
    return table


def part_table(run: DryRun) -> Table:
    """Give the seconds that each part of the work took."""
    table = plain_table()
    for part in run.taken_s:
        table.add_column(part, justify="right", no_wrap=True)
    table.add_column("in all", justify="right", no_wrap=True)
    times = [*run.taken_s.values(), sum(run.taken_s.values())]
    table.add_row(*(f"{each:.1f} s" for each in times))
    return table
