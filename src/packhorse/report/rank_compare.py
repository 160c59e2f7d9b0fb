"""How far is what was predicted of several ranks from what was measured?

In: a `Comparison` for each rank. Out: a rich table that fits 80 columns and stays readable without
colours: step, compute, idle time and peak, rank by rank; or what `json.dumps` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from packhorse.report.compare import Comparison, Difference
from packhorse.report.tables import add_rows, plain_table
from packhorse.units import format_bytes, format_ns, format_percent

_ELSEWHERE: Final = ("host", "disk")


def rank_comparison_table(
    comparisons: Sequence[Comparison], *, num_tasks: int = 5
) -> RenderableType:
    """Render predicted against measured of all ranks.

    Args:
        comparisons: by rank.
        num_tasks: how many of the tasks that differ most, of all ranks, are listed.
    """
    table = plain_table()
    table.add_column("", no_wrap=True)
    for heading in ("predicted", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    add_rows(table, "step", _by_rank(each.step for each in comparisons), format_ns)
    add_rows(table, "computing", _by_rank(map(_find_compute, comparisons)), format_ns)
    _add_idle(table, comparisons)
    add_rows(table, "peak in the device", _by_rank(map(_find_peak, comparisons)), format_bytes)
    process = _by_rank(each.process for each in comparisons)
    add_rows(table, "process, libraries left out", process, format_bytes)
    tasks = [
        replace(each, name=f"rank {rank}: {each.name}")
        for rank, comparison in enumerate(comparisons)
        for each in comparison.tasks
    ]
    tasks.sort(key=lambda each: -abs(each.excess))
    add_rows(table, "tasks that differ most", tasks[:num_tasks], format_ns)
    others = [str(rank) for rank, each in enumerate(comparisons) if not each.same_tasks]
    if not others:
        return table
    note = (
        f"The two timelines of rank {', '.join(others)} are of different tasks, so single tasks are"
        " not compared."
    )
    return Group(table, Text(note, style="yellow"))


def idle_as_dict(comparison: Comparison) -> dict[str, float]:
    """Give the share of its step in which a rank computes nothing, on both sides."""
    predicted, measured = _find_idle(comparison)
    return {"predicted": predicted, "measured": measured}


def _by_rank(differences: Iterable[Difference | None]) -> list[Difference]:
    """Name what is known of each rank by it."""
    return [
        replace(each, name=f"rank {rank}")
        for rank, each in enumerate(differences)
        if each is not None
    ]


def _find_compute(comparison: Comparison) -> Difference:
    none = Difference(name="compute", predicted=0, measured=0)
    return next((lane for lane in comparison.lanes if lane.name == "compute"), none)


def _find_peak(comparison: Comparison) -> Difference:
    pools = [pool for pool in comparison.pools if pool.name not in _ELSEWHERE]
    return Difference(
        name="device",
        predicted=sum(pool.predicted for pool in pools),
        measured=sum(pool.measured for pool in pools),
    )


def _find_idle(comparison: Comparison) -> tuple[float, float]:
    compute, step = _find_compute(comparison), comparison.step
    predicted = max(1 - compute.predicted / step.predicted, 0.0) if step.predicted else 0.0
    measured = max(1 - compute.measured / step.measured, 0.0) if step.measured else 0.0
    return predicted, measured


def _add_idle(table: Table, comparisons: Sequence[Comparison]) -> None:
    table.add_row()
    table.add_row(Text("idle, of its step", style="dim"))
    for rank, comparison in enumerate(comparisons):
        predicted, measured = _find_idle(comparison)
        # Shares of a step: how far they are apart, and not what part of the measured one that is.
        points = 100 * (predicted - measured)
        table.add_row(
            f"  rank {rank}",
            format_percent(predicted),
            format_percent(measured),
            f"{points:+.1f} pp",
        )
