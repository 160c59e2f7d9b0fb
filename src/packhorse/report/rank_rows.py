"""Several ranks as a picture for terminals: a row for each rank.

In: a timeline for each rank. Out: a rich renderable as wide as the terminal. A task shows its
letter (capital on a rank's first stage, small on later ones) and, where there is room, its
microbatch; `-` fills what is left of it and `.` is idle. Where tasks do not begin and end at whole
characters, a character shows the kind that fills most of it. It reads the same without colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.text import Text

from packhorse.report.axes import time_ticks
from packhorse.report.colours import ink_on
from packhorse.report.rank_tasks import PASSES, RankTask, list_rank_tasks, shade_of
from packhorse.timeline.names import words_for
from packhorse.timeline.spec import Timeline

_WIDEST: Final = 4  # characters for the shortest task


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPicture:
    """Draws what ranks compute, one below the other."""

    timelines: tuple[Timeline, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tasks = list_rank_tasks(self.timelines)
        heads = [f"rank {timeline.rank}" for timeline in self.timelines]
        left = max(map(len, heads), default=0) + 2
        width = max(options.max_width - left, 8)
        end_ns = max((task.end_ns for row in tasks for task in row), default=0)
        cell_ns, whole = _choose_cell(tasks, end_ns, width)
        columns = min(max(round(end_ns / cell_ns), 1), width)
        for head, row in zip(heads, tasks, strict=True):
            drawn = _draw_row(row, cell_ns, columns, labelled=whole)
            yield Text(head.ljust(left), style="bold") + drawn
        yield Text(" " * left + _axis_row(end_ns, cell_ns, columns), style="dim")
        yield from _legend(tasks, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(40, options.max_width), options.max_width)


def picture_ranks(timelines: Sequence[Timeline]) -> RanksPicture:
    """Picture what ranks compute for a terminal."""
    return RanksPicture(timelines=tuple(timelines))


def _choose_cell(
    tasks: Sequence[Sequence[RankTask]], end_ns: int, width: int
) -> tuple[float, bool]:
    """Choose how long a character is, and say whether all tasks then are whole characters."""
    unit_ns = gcd(*(at for row in tasks for task in row for at in (task.start_ns, task.end_ns)))
    if unit_ns and end_ns // unit_ns <= width:
        return unit_ns / min(width * unit_ns // end_ns, _WIDEST), True
    return max(end_ns, 1) / width, False


def _draw_row(tasks: Sequence[RankTask], cell_ns: float, columns: int, *, labelled: bool) -> Text:
    row = Text()
    for mark, cells in groupby(_mark_cells(tasks, cell_ns, columns)):
        length = sum(1 for _ in cells)
        if mark is None:
            row.append("." * length, style="dim")
            continue
        letter, colour, microbatch = mark
        word = f"{letter}{microbatch}"
        if not labelled:
            shown = letter * length
        else:
            shown = (word if len(word) <= length else letter).ljust(length, "-")
        row.append(shown, style=Style(color=ink_on(colour), bgcolor=colour))
    return row


def _mark_cells(
    tasks: Sequence[RankTask], cell_ns: float, columns: int
) -> list[tuple[str, str, str] | None]:
    """Give letter, colour and microbatch of what fills most of each character; None for idle."""
    shares: list[dict[tuple[str, str], float]] = [{} for _ in range(columns)]
    owners = [""] * columns
    for task in tasks:
        start, stop = task.start_ns / cell_ns, task.end_ns / cell_ns
        look = task.letter, task.colour
        for at in range(int(start), min(int(stop) + 1, columns)):
            covered = min(stop, at + 1) - max(start, at)
            if covered > 1e-6:
                shares[at][look] = shares[at].get(look, 0.0) + covered
                owners[at] = task.microbatch
    return [
        (*max(looks, key=lambda look: looks[look]), owner)
        # Idle wins only where nothing fills at least an eighth of the character.
        if sum(looks.values()) >= 0.125
        else None
        for looks, owner in zip(shares, owners, strict=True)
    ]


def _axis_row(end_ns: int, cell_ns: float, columns: int) -> str:
    row = " " * columns
    until = -1
    for at_ns, label in time_ticks(end_ns, num_ticks=max(columns // 12, 2)):
        cell = min(round(at_ns / cell_ns), columns - 1)
        mark = f"|{label}"
        if cell > until and cell + len(mark) <= columns:
            row = row[:cell] + mark + row[cell + len(mark) :]
            until = cell + len(mark)
    return row


def _legend(tasks: Sequence[Sequence[RankTask]], width: int) -> Iterator[Text]:
    kinds = {task.kind for row in tasks for task in row}
    line = Text()
    for kind in (kind for kind in PASSES if kind in kinds):
        colour = shade_of(kind, 0)
        style = Style(color=ink_on(colour), bgcolor=colour)
        words = f" {words_for(kind)}"
        if line and len(line) + 4 + len(words) > width:
            yield line
            line = Text()
        line = line + Text.assemble("   " if line else "", (PASSES[kind], style), words)
    if any(task.turn for row in tasks for task in row):
        words = "small: later stages of a rank"
        if len(line) + 3 + len(words) > width:
            yield line
            line = Text()
        line = line + Text(("   " if line else "") + words, style="dim")
    yield line
