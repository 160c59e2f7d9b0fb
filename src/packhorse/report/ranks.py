"""Several ranks as a picture for pages: SVG, a row for each rank, a box for each task.

In: a timeline for each rank, and a note for each. Out: an SVG in the look of the other pictures. A
box has the number of its microbatch, where the longest of them has room; boxes of a rank's later
stages are paler. A row has a ground from its first task to its last, so that what a rank idles in
its own span and what the flush costs are told apart. Sums of gradients over replicas, which run
beside computing, lie along the lower edge of a row. Where tasks of a rank are narrower than a
pixel, rows become areas: each kind is as high in a column as the share of its time there, and what
is left of the height is idle. So a picture of a million tasks stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from xml.sax.saxutils import escape

from packhorse.report.axes import time_ticks
from packhorse.report.colours import ink_on
from packhorse.report.rank_tasks import (
    MARKS,
    RankTask,
    list_rank_tasks,
    list_reductions,
    shade_of,
)
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
_STEP: Final = 0.5
_MOST_TIPS: Final = 6000
_STRIP: Final = 0.4  # of a row's height


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
    tasks, reductions = list_rank_tasks(timelines), list_reductions(timelines)
    longest_ns = max((task.end_ns for row in (*tasks, *reductions) for task in row), default=0)
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
        *_draw_legend([*tasks, *reductions]),
        *_draw_axis(frame, bottom),
    ]
    if notes_head:
        parts.append(draw_text(WIDTH - MARGIN, _TOP - 8, notes_head, "soft", anchor="end"))
    tips = sum(map(len, tasks)) <= _MOST_TIPS
    label_width = CHAR * max((len(task.microbatch) for rank in tasks for task in rank), default=0)
    every = -(-12 // (height + gap))
    in_areas = any(_is_crowded(frame, rank) for rank in tasks)
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
        if in_areas:
            parts += _draw_areas(frame, row, rank)
        else:
            parts += _draw_boxes(frame, row, rank, label_width=label_width, tips=tips)
        parts += _draw_strips(frame, row, reductions[row])
    return draw_page(bottom + 32, parts)


def _is_crowded(frame: _Frame, tasks: Sequence[RankTask]) -> bool:
    span = frame.x(tasks[-1].end_ns) - frame.x(tasks[0].start_ns) if tasks else 0.0
    return span < _SEEN * len(tasks)


def _draw_legend(tasks: Sequence[Sequence[RankTask]]) -> list[str]:
    turns: dict[str, int] = {}
    for row in tasks:
        for task in row:
            turns[task.kind] = max(turns.get(task.kind, 0), task.turn)
    parts: list[str] = []
    x = float(MARGIN)
    for kind in (kind for kind in MARKS if kind in turns):
        for turn in range(min(turns[kind], 3) + 1):
            parts.append(draw_box(x, 49, 10, 10, shade_of(kind, turn), radius=2))
            x += 12
        label = f"{MARKS[kind]} {words_for(kind)}"
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


def _draw_strips(frame: _Frame, row: int, tasks: Sequence[RankTask]) -> list[str]:
    """Draw the sums of gradients along the lower edge; those without a gap that is seen as one."""
    joined: list[tuple[float, float, list[str]]] = []
    for task in tasks:
        start, stop = frame.x(task.start_ns), frame.x(task.end_ns)
        if joined and start - joined[-1][1] < 1:
            first, _, words = joined[-1]
            joined[-1] = first, stop, [*words, task.words]
        else:
            joined.append((start, stop, [task.words]))
    height = max(frame.height * _STRIP, 3)
    y = frame.y(row) + frame.height - height
    return [
        f"<g><title>{escape('; '.join(words))}</title>"
        f"{draw_box(start, y, max(stop - start, 0.5), height, tasks[0].colour)}</g>"
        for start, stop, words in joined
    ]


def _draw_areas(frame: _Frame, row: int, tasks: Sequence[RankTask]) -> list[str]:
    """Draw how much of each column each colour fills, one above the other; equal neighbours as one.

    Heights are whole steps, rounded so that a column is as high as all that is in it.
    """
    num_columns = int((frame.right - _LEFT) / _COLUMN) + 1
    looks = sorted({(list(MARKS).index(task.kind), task.turn, task.colour) for task in tasks})
    places = {look[-1]: place for place, look in enumerate(looks)}
    shares = [[0.0] * num_columns for _ in looks]
    for task in tasks:
        start = (frame.x(task.start_ns) - _LEFT) / _COLUMN
        stop = (frame.x(task.end_ns) - _LEFT) / _COLUMN
        own = shares[places[task.colour]]
        for column in range(int(start), min(int(stop) + 1, num_columns)):
            own[column] += min(stop, column + 1) - max(start, column)
    tops = [0] * num_columns
    filled = [0.0] * num_columns
    num_steps = round(frame.height / _STEP)
    parts: list[str] = []
    for (_, _, colour), own in zip(looks, map(_smooth, shares), strict=True):
        filled = [low + share for low, share in zip(filled, own, strict=True)]
        ends = [min(round(share * num_steps), num_steps) for share in filled]
        path = _trace_area(frame, row, tops, ends)
        if path:
            parts.append(f'<path d="{path}" fill="{colour}"/>')
        tops = ends
    return parts


def _smooth(shares: Sequence[float]) -> list[float]:
    # Columns and tasks of nearly the same length would beat against each other.
    padded = [shares[0], *shares, shares[-1]]
    return [sum(padded[at : at + 3]) / 3 for at in range(len(shares))]


def _trace_area(frame: _Frame, row: int, tops: Sequence[int], ends: Sequence[int]) -> str:
    pairs = list(zip(tops, ends, strict=True))
    edges = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(pairs)) if a != b), len(pairs)]
    path: list[str] = []
    for start, stop in pairwise(edges):
        top, end = pairs[start]
        if end > top:
            width, height = (stop - start) * _COLUMN, (end - top) * _STEP
            y = frame.y(row) + top * _STEP
            path.append(f"M{_LEFT + start * _COLUMN} {y:g}h{width}v{height:g}h-{width}z")
    return "".join(path)
