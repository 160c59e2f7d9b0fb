"""Tables for terminals: a comparison of two timelines.

In: the data of `report/compare.py`. Out: rich renderables that fit 80 columns and stay readable
without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from packhorse.report.compare import MESSAGES, Comparison, Difference
from packhorse.timeline.names import words_for
from packhorse.units import format_bytes, format_ns, format_percent

_WAITS: Final = "Messages: what was measured has the wait for the other rank in it."
_OTHER_TASKS: Final = "The two timelines are of different tasks, so single tasks are not compared."


def comparison_table(comparison: Comparison) -> RenderableType:
    """Render predicted against measured: step, lanes, kinds, peaks, tasks that differ most."""
    table = plain_table()
    table.add_column("", no_wrap=True)
    for heading in ("predicted", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    add_rows(table, "time", (comparison.step,), format_ns, bold=True)
    add_rows(table, "busy time by lane", comparison.lanes, format_ns)
    add_rows(table, "busy time by kind of task", comparison.kinds, format_ns)
    add_rows(table, "peak by pool", comparison.pools, format_bytes)
    if comparison.process is not None:
        add_rows(table, "process, libraries left out", (comparison.process,), format_bytes)
    add_rows(table, "tasks that differ most", comparison.tasks, format_ns)
    notes: list[RenderableType] = []
    if any(kind.name in MESSAGES for kind in comparison.kinds):
        notes.append(Text(_WAITS, style="dim"))
    if not comparison.same_tasks:
        notes.append(Text(_OTHER_TASKS, style="yellow"))
    return Group(table, *notes) if notes else table


def plain_table(*, heads: bool = True) -> Table:
    """Give a table without a frame, as all tables here are."""
    return Table(
        box=None, show_header=heads, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )


def format_error(error: float | None) -> Text:
    """Render a relative error with its sign; a large one stands out."""
    if error is None:
        return Text("not measured", style="yellow")
    style = "green" if abs(error) <= 0.1 else "yellow" if abs(error) <= 0.25 else "red"
    sign = "+" if error > 0 else ""
    return Text(f"{sign}{format_percent(error)}", style=style)


def add_rows(
    table: Table,
    title: str,
    differences: Iterable[Difference],
    render: Callable[[float], str],
    *,
    bold: bool = False,
) -> None:
    """Add quantities under a title; nothing where there are none."""
    rows = tuple(differences)
    if not rows:
        return
    if table.row_count:
        table.add_row()
    table.add_row(Text(title, style="dim"))
    for each in rows:
        table.add_row(
            Text("  " + words_for(each.name)),
            render(each.predicted),
            render(each.measured),
            format_error(each.error),
            style="bold" if bold else None,
        )
