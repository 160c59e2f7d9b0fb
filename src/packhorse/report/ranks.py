"""Several ranks as a picture for pages: SVG, a row for each rank, a box for each task.

In: a timeline for each rank, and a note for each. Out: an SVG in the look of the other pictures. A
box has the number of its microbatch, where the longest of them has room; boxes of a rank's later
stages are paler. A row has a ground from its first task to its last, so that what a rank idles in
its own span and what the flush costs are told apart. Where tasks are narrower than a pixel, a
column shows the mean colour of those in it, so that a picture of a million tasks stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from xml.sax.saxutils import escape

from packhorse.report.axes import time_ticks
from packhorse.report.colours import ink_on
from packhorse.report.rank_tasks import PASSES, RankTask, list_rank_tasks, shade_of
from packhorse.report.svg import CHAR, MARGIN, WIDTH, draw_box, draw_page, draw_text
from packhorse.timeline.names import words_for
from packhorse.timeline.spec import Timeline

_LEFT: Final = 76
_TOP: Final = 92
_HEIGHTS: Final = ((16, 26, 4), (32, 18, 3), (64, 12, 2))
_LEAST_HEIGHT: Final = (8, 1)
_TEXT_HEIGHT: Final = 14
_SEEN: Final = 1.5  # pixels that a task has on average, or columns are drawn
_COLUMN: Final = 3
_LEVELS: Final = 20
_MOST_TIPS: Final = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where rows lie, and from ns to pixels."""

    longest_ns: int
    right: float
    height: int
    gap: int

    def x(self, at_ns: float) -> float:
        return _LEFT + (self.right - _LEFT) * at_ns / self.longest_ns

    def y(self, row: int) -> float:
        return _TOP + row * (self.height + self.gap)


def draw_ranks(
    timelines: Sequence[Timeline],
    *,
    title: str,
    facts: str = "",
    notes: Sequence[str] = (),
    notes_head: str = "",
) -> str:
    """Draw what ranks compute, as the text of an SVG file.

    Args:
        timelines: one for each rank, from the same start.
        title: what the picture is of.
        facts: a line in the corner.
        notes: a few words for each rank, shown behind its row; none for no notes.
        notes_head: what the notes are.
    """
    tasks = list_rank_tasks(timelines)
    longest_ns = max((task.end_ns for row in tasks for task in row), default=0)
    note_width = max((CHAR * len(note) for note in (*notes, notes_head)), default=0.0)
    height, gap = next(
        ((height, gap) for most, height, gap in _HEIGHTS if len(tasks) <= most), _LEAST_HEIGHT
    )
    frame = _Frame(
        longest_ns=max(longest_ns, 1),
        right=WIDTH - MARGIN - (note_width + 12 if notes else 0),
        height=height,
        gap=gap,
    )
    bottom = frame.y(len(tasks)) - gap
    parts = [
        f"<title>{escape(title)}</title>",
        draw_text(MARGIN, 32, title, "ink title"),
        draw_text(WIDTH - MARGIN, 32, facts, "soft", anchor="end"),
        *_draw_legend(tasks),
        *_draw_axis(frame, bottom),
    ]
    if notes_head:
        parts.append(draw_text(WIDTH - MARGIN, _TOP - 8, notes_head, "soft", anchor="end"))
    tips = sum(map(len, tasks)) <= _MOST_TIPS
    label_width = CHAR * max((len(task.microbatch) for rank in tasks for task in rank), default=0)
    every = -(-12 // (height + gap))
    for row, rank in enumerate(tasks):
        base = frame.y(row) + height / 2 + 4
        if row % every == 0:
            name = f"rank {timelines[row].rank}"
            parts.append(draw_text(_LEFT - 10, base, name, "ink", anchor="end"))
            if notes:
                parts.append(draw_text(WIDTH - MARGIN, base, notes[row], "soft", anchor="end"))
        if not rank:
            continue
        first, last = frame.x(rank[0].start_ns), frame.x(rank[-1].end_ns)
        ground = f'y="{frame.y(row):.1f}" width="{last - first:.1f}" height="{height}"'
        parts.append(f'<rect class="row" x="{first:.1f}" {ground}/>')
        if last - first < _SEEN * len(rank):
            parts += _draw_columns(frame, row, rank)
        else:
            parts += _draw_boxes(frame, row, rank, label_width=label_width, tips=tips)
    return draw_page(bottom + 32, parts)


def _draw_legend(tasks: Sequence[Sequence[RankTask]]) -> list[str]:
    turns: dict[str, int] = {}
    for row in tasks:
        for task in row:
            turns[task.kind] = max(turns.get(task.kind, 0), task.turn)
    parts: list[str] = []
    x = float(MARGIN)
    for kind in (kind for kind in PASSES if kind in turns):
        for turn in range(min(turns[kind], 3) + 1):
            parts.append(draw_box(x, 49, 10, 10, shade_of(kind, turn), radius=2))
            x += 12
        label = f"{PASSES[kind]} {words_for(kind)}"
        parts.append(draw_text(x + 4, 58, label, "ink"))
        x += 4 + CHAR * len(label) + 18
    if any(turns.values()):
        parts.append(draw_text(x, 58, "paler: later stages of a rank", "soft"))
    return parts


def _draw_axis(frame: _Frame, bottom: float) -> list[str]:
    parts: list[str] = []
    for at_ns, label in time_ticks(frame.longest_ns):
        x = frame.x(at_ns)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom + 4:.1f}"/>'
        )
        anchor = "end" if x > frame.right - 20 else "middle"
        parts.append(draw_text(x, bottom + 18, label, "soft", anchor=anchor))
    return parts


def _draw_boxes(
    frame: _Frame, row: int, tasks: Sequence[RankTask], *, label_width: float, tips: bool
) -> list[str]:
    y = frame.y(row)
    parts: list[str] = []
    for task in tasks:
        x = frame.x(task.start_ns)
        width = frame.x(task.end_ns) - x
        colour = task.colour
        # A hair of ground tells neighbours apart where there is room for it.
        shown = width - 0.6 if width > 5 else max(width - 0.2, 0.1)
        box = draw_box(x, y, shown, frame.height, colour, radius=2 if width > 8 else 0)
        if tips:
            box = f"<g><title>{escape(task.words)}</title>{box}</g>"
        parts.append(box)
        if frame.height >= _TEXT_HEIGHT and label_width + 2 < width:
            parts.append(
                f'<text x="{x + shown / 2:.1f}" y="{y + frame.height / 2 + 4:.1f}"'
                f' text-anchor="middle" fill="{ink_on(colour)}" pointer-events="none">'
                f"{escape(task.microbatch)}</text>"
            )
    return parts


def _draw_columns(frame: _Frame, row: int, tasks: Sequence[RankTask]) -> list[str]:
    """Draw the mean colour of each column, as opaque as it is busy; equal neighbours as one."""
    num_columns = int((frame.right - _LEFT) / _COLUMN) + 1
    sums = [[0.0, 0.0, 0.0, 0.0] for _ in range(num_columns)]
    for task in tasks:
        start = (frame.x(task.start_ns) - _LEFT) / _COLUMN
        stop = (frame.x(task.end_ns) - _LEFT) / _COLUMN
        channels = [int(task.colour[at : at + 2], 16) for at in (1, 3, 5)]
        for column in range(int(start), min(int(stop) + 1, num_columns)):
            covered = min(stop, column + 1) - max(start, column)
            for channel, value in enumerate((*channels, 1)):
                sums[column][channel] += covered * value
    looks = [_mix(*column) for column in sums]
    edges = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(looks)) if a != b), num_columns]
    shapes: dict[str, list[str]] = {}
    for start, stop in pairwise(edges):
        look = looks[start]
        if look is not None:
            width = (stop - start) * _COLUMN
            shapes.setdefault(look, []).append(
                f"M{_LEFT + start * _COLUMN} {frame.y(row):.0f}h{width}v{frame.height}h-{width}z"
            )
    return [f'<path d="{"".join(path)}" {look}/>' for look, path in shapes.items()]


def _mix(red: float, green: float, blue: float, covered: float) -> str | None:
    """Give the look of a column, in few enough steps that neighbours are often equal."""
    opacity = round(covered * _LEVELS)
    if not opacity:
        return None
    step = 255 / _LEVELS
    mean = (round(round(each / covered / step) * step) for each in (red, green, blue))
    colour = "#" + "".join(f"{min(each, 255):02x}" for each in mean)
    return f'fill="{colour}" fill-opacity="{min(opacity / _LEVELS, 1):.2g}"'
