"""Sections of an explanation: headings, bars, lines, tables of choices.

In: texts, sizes, choices. Out: rich renderables that fit 80 columns and read the same without
colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from packhorse.report.bars import Bar
from packhorse.report.choices import ChoiceGroup
from packhorse.report.colours import colour_of
from packhorse.report.tables import plain_table
from packhorse.timeline.names import words_for
from packhorse.units import format_percent


def share_bars(sizes: Mapping[str, int], whole: int, render: Callable[[float], str]) -> Table:
    """Render each part of a whole: its name, size, share, and a bar as long as that."""
    table = plain_table(heads=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.expand = True
    for name, size in sizes.items():
        share = size / whole
        table.add_row(
            words_for(name),
            render(size),
            format_percent(share),
            Bar(share=share, style=colour_of(name)),
        )
    return table


def choices_table(groups: Iterable[ChoiceGroup]) -> Table:
    """Render choices, each with its value, where it holds, and why."""
    table = plain_table()
    table.add_column("choice", no_wrap=True)
    table.add_column("value", style="bold")
    table.add_column("because", ratio=1)
    last = ""
    for group in groups:
        reason = Text(group.because)
        if group.where:
            reason = Text.assemble((f"{group.where}: ", "dim"), group.because)
        table.add_row("" if group.choice == last else group.choice, group.value, reason)
        last = group.choice
    return table


def largest_first(sizes: Mapping[str, int]) -> dict[str, int]:
    """Put what there is of each name in order; what is 0 is left out."""
    return {name: size for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size}


def heading(text: str) -> RenderableType:
    """Head a section: a blank line, and the words."""
    return Padding(Text(text, style="bold"), (1, 0, 0, 0))


def indent(body: RenderableType) -> RenderableType:
    """Set what belongs to a section in."""
    return Padding(body, (0, 0, 0, 2))


def bullet_lines(lines: Iterable[str]) -> RenderableType:
    """List lines, which may wrap, each behind a dash."""
    table = plain_table(heads=False)
    table.add_column(width=1)
    table.add_column(ratio=1)
    for line in lines:
        table.add_row("-", Text(line))
    return table
