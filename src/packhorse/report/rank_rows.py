"""Several ranks as a picture for terminals: a row for each rank.

In: a timeline for each rank. Out: a rich renderable as wide as the terminal. A task shows its
letter (capital on a rank's first stage, small on later ones) and, where there is room, its
microbatch; `-` fills what is left of it and `.` is idle. Where tasks do not begin and end at whole
characters, a character shows the kind that fills most of it; where they are shorter than one, kinds
and idle time share the characters of a row in the proportion of their times. Of many ranks several
neighbours share a row. It reads the same without colours.
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
from packhorse.report.rank_tasks import (
    MARKS,
    RankTask,
    list_rank_tasks,
    list_reductions,
    shade_of,
)
from packhorse.timeline.names import words_for
from packhorse.timeline.spec import Timeline

_WIDEST: Final = 4  # characters for the shortest task
_MOST_ROWS: Final = 32
_LEAST_SHARE: Final = 1e-6

_Look = tuple[str, str]
_Shares = list[dict[_Look, float]]
"""By character of a row: how much of it each letter and colour fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPicture:
    """Draws what ranks compute, one below the other."""

    timelines: tuple[Timeline, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tasks = list_rank_tasks(self.timelines)
        reductions = list_reductions(self.timelines)
        together = max(-(-len(tasks) // _MOST_ROWS), 1)
        groups = [
            range(at, min(at + together, len(tasks))) for at in range(0, len(tasks), together)
        ]
        heads = [self._name_rows(group) for group in groups]
        left = max(map(len, heads), default=0) + 2
        width = max(options.max_width - left, 8)
        end_ns = max((task.end_ns for row in (*tasks, *reductions) for task in row), default=0)
        cell_ns, whole = _choose_cell([*tasks, *reductions], end_ns, width)
        columns = min(max(round(end_ns / cell_ns), 1), width)
        for head, group in zip(heads, groups, strict=True):
            shares: _Shares = [{} for _ in range(columns)]
            owners = [""] * columns
            for rank in group:
                _fill(shares, owners, tasks[rank], cell_ns, len(group))
                _fill_gaps(shares, reductions[rank], cell_ns, len(group))
            if whole or not _is_crowded(tasks, cell_ns):
                marks = _pick_most(shares)
            else:
                marks = _pick_in_turn(shares)
            yield Text(head.ljust(left), style="bold") + _draw_row(
                marks, owners, labelled=whole and together == 1
            )
        yield Text(" " * left + _axis_row(end_ns, cell_ns, columns), style="dim")
        yield from _legend([*tasks, *reductions], options.max_width)

    def _name_rows(self, group: range) -> str:
        first, last = (self.timelines[at].rank for at in (group[0], group[-1]))
        return f"rank {first}" if len(group) == 1 else f"ranks {first}-{last}"

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


def _is_crowded(tasks: Sequence[Sequence[RankTask]], cell_ns: float) -> bool:
    # Whether tasks are shorter than a character on average.
    lengths_ns = [task.end_ns - task.start_ns for row in tasks for task in row]
    return sum(lengths_ns) < cell_ns * len(lengths_ns)


def _draw_row(marks: Sequence[_Look | None], owners: Sequence[str], *, labelled: bool) -> Text:
    row = Text()
    for (mark, microbatch), cells in groupby(zip(marks, owners, strict=True)):
        length = sum(1 for _ in cells)
        if mark is None:
            row.append("." * length, style="dim")
            continue
        letter, colour = mark
        word = f"{letter}{microbatch}"
        if not labelled:
            shown = letter * length
        else:
            shown = (word if len(word) <= length else letter).ljust(length, "-")
        row.append(shown, style=Style(color=ink_on(colour), bgcolor=colour))
    return row


def _fill(
    shares: _Shares, owners: list[str], tasks: Sequence[RankTask], cell_ns: float, num_ranks: int
) -> None:
    """Add what a rank computes, a share of a row that so many ranks have."""
    for task in tasks:
        look = task.letter, task.colour
        for at, covered in _cover(task, cell_ns, len(shares)):
            shares[at][look] = shares[at].get(look, 0.0) + covered / num_ranks
            owners[at] = task.microbatch


def _fill_gaps(
    shares: _Shares, reductions: Sequence[RankTask], cell_ns: float, num_ranks: int
) -> None:
    """Add what sums gradients, as far as nothing is computed meanwhile."""
    for task in reductions:
        look = task.letter, task.colour
        for at, covered in _cover(task, cell_ns, len(shares)):
            room = 1 - sum(shares[at].values())
            if room > _LEAST_SHARE:
                shares[at][look] = shares[at].get(look, 0.0) + min(covered / num_ranks, room)


def _cover(task: RankTask, cell_ns: float, columns: int) -> Iterator[tuple[int, float]]:
    start, stop = task.start_ns / cell_ns, task.end_ns / cell_ns
    for at in range(int(start), min(int(stop) + 1, columns)):
        covered = min(stop, at + 1) - max(start, at)
        if covered > _LEAST_SHARE:
            yield at, covered


def _pick_most(shares: _Shares) -> list[_Look | None]:
    """Give what fills most of each character; None for idle."""
    return [
        max(looks, key=lambda look: looks[look])
        # Idle wins only where nothing fills at least an eighth of the character.
        if sum(looks.values()) >= 0.125
        else None
        for looks in shares
    ]


def _pick_in_turn(shares: _Shares) -> list[_Look | None]:
    """Give each kind, and idle time, as many characters of a stretch as it fills.

    What a character does not show of a kind is carried over to the next one that has it.
    """
    owed: dict[_Look | None, float] = {}
    marks: list[_Look | None] = []
    for looks in shares:
        idle = 1 - sum(looks.values())
        there: dict[_Look | None, float] = {**looks}
        if idle > _LEAST_SHARE:
            there[None] = idle
        owed = {look: owed.get(look, 0.0) + share for look, share in there.items()}
        mark = max(owed, key=lambda look: owed[look])
        owed[mark] -= 1
        marks.append(mark)
    return marks


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
    for kind in (kind for kind in MARKS if kind in kinds):
        colour = shade_of(kind, 0)
        style = Style(color=ink_on(colour), bgcolor=colour)
        words = f" {words_for(kind)}"
        if line and len(line) + 4 + len(words) > width:
            yield line
            line = Text()
        line = line + Text.assemble("   " if line else "", (MARKS[kind], style), words)
    if any(task.turn for row in tasks for task in row):
        words = "small: later stages of a rank"
        if len(line) + 3 + len(words) > width:
            yield line
            line = Text()
        line = line + Text(("   " if line else "") + words, style="dim")
    yield line
