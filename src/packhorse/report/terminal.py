"""A timeline as a picture for terminals.

In: a timeline, and the capacities of its pools. Out: a rich renderable as wide as the terminal:
a row per lane with a letter per kind of task, a memory curve per pool, and a legend. It reads the
same without colours; where a terminal has ASCII only, curves are made of digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.text import Text

from packhorse.program.buffers import PoolId
from packhorse.report.axes import time_ticks
from packhorse.report.colours import colour_of, ink_on
from packhorse.timeline.names import KINDS, order_lanes, words_for
from packhorse.timeline.spec import MemoryPoint, Span, Timeline
from packhorse.units import format_bytes, format_ns, format_percent

_LETTERS: Final[Mapping[str, str]] = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "input_grad": "I",
    "weight_grad": "W",
    "norm": "N",
    "update": "U",
    "disk_read": "r",
    "disk_write": "w",
    "copy_in": "i",
    "copy_out": "o",
    "feed": "f",
    "free": "x",
    "emit": "e",
    "import": "I",
    "export": "E",
}
_LEVELS: Final = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_LEVELS: Final = " 12345678"
_LEFT: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePicture:
    """Draws a timeline; each character shows the kind that fills most of its time.

    A `.` is idle. A pool's curve shows the largest use within a character, relative to the
    capacity, or to the peak where `capacity_bytes` lacks the pool.
    """

    timeline: Timeline
    capacity_bytes: Mapping[PoolId, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - _LEFT, 8)
        end_ns = max(self.timeline.makespan_ns, 1)
        for lane in order_lanes(span.lane for span in self.timeline.spans):
            spans = [span for span in self.timeline.spans if span.lane == lane]
            yield _head(words_for(lane)) + _lane_row(spans, end_ns, width)
        yield Text(" " * _LEFT + _axis_row(end_ns, width), style="dim")
        for pool, points in self.timeline.memory.items():
            peak_bytes = max((point.used_bytes for point in points), default=0)
            if not peak_bytes:
                continue
            capacity_bytes = self.capacity_bytes.get(pool)
            levels = _ASCII_LEVELS if options.ascii_only else _LEVELS
            # A curve far below a roomy capacity would be a blank row: scale it to its own peak.
            roomy = capacity_bytes is None or capacity_bytes > 3 * peak_bytes
            top_bytes = peak_bytes if roomy else capacity_bytes
            curve = _curve_row(points, end_ns, width, top_bytes or peak_bytes, levels)
            yield _head(f"pool {pool}") + Text(curve, style=colour_of("forward"))
            fact = f"peak {format_bytes(peak_bytes)}"
            if capacity_bytes:
                share = format_percent(peak_bytes / capacity_bytes)
                fact += f", {share} of {format_bytes(capacity_bytes)}"
            yield Text(" " * _LEFT + fact, style="dim")
        yield from _legend(self.timeline, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(40, options.max_width), options.max_width)


def picture_timeline(
    timeline: Timeline, *, capacity_bytes: Mapping[PoolId, int] | None = None
) -> TimelinePicture:
    """Picture a timeline for a terminal; pools that `capacity_bytes` lacks scale to their peak."""
    return TimelinePicture(timeline=timeline, capacity_bytes=capacity_bytes or {})


def _head(name: str) -> Text:
    return Text(name[: _LEFT - 1].ljust(_LEFT), style="bold")


def _lane_row(spans: Sequence[Span], end_ns: int, width: int) -> Text:
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        start, stop = span.start_ns * width / end_ns, span.end_ns * width / end_ns
        for cell in range(int(start), min(int(stop) + 1, width)):
            covered = min(stop, cell + 1) - max(start, cell)
            if covered > 0:
                kinds = shares[cell]
                kinds[span.kind] = kinds.get(span.kind, 0.0) + covered
    row = Text()
    for kinds in shares:
        # Idle wins only where nothing fills at least an eighth of the cell.
        kind = max(kinds, key=lambda each: kinds[each]) if sum(kinds.values()) >= 0.125 else ""
        if kind:
            colour = colour_of(kind)
            style = Style(color=ink_on(colour), bgcolor=colour)
            row.append(_LETTERS.get(kind, "?"), style=style)
        else:
            row.append(".", style="dim")
    return row


def _axis_row(end_ns: int, width: int) -> str:
    row = " " * width
    until = -1
    for at_ns, label in time_ticks(end_ns, num_ticks=max(width // 12, 2)):
        cell = min(round(at_ns * width / end_ns), width - 1)
        mark = f"|{label}"
        if cell > until and cell + len(mark) <= width:
            row = row[:cell] + mark + row[cell + len(mark) :]
            until = cell + len(mark)
    return row


def _curve_row(
    points: Sequence[MemoryPoint], end_ns: int, width: int, top_bytes: int, levels: str
) -> str:
    most = [0] * width
    for at, point in enumerate(points):
        until_ns = points[at + 1].at_ns if at + 1 < len(points) else end_ns
        first = min(point.at_ns * width // end_ns, width - 1)
        last = min(max(until_ns - 1, point.at_ns) * width // end_ns, width - 1)
        for cell in range(first, last + 1):
            most[cell] = max(most[cell], point.used_bytes)
    top_level = len(levels) - 1
    # Rounded up, so that anything in use shows.
    return "".join(levels[min(-(-used * top_level // top_bytes), top_level)] for used in most)


def _legend(timeline: Timeline, width: int) -> Iterator[Text]:
    totals: dict[str, int] = {}
    for span in timeline.spans:
        totals[span.kind] = totals.get(span.kind, 0) + span.duration_ns
    line = Text()
    for kind in [*(k for k in KINDS if k in totals), *sorted(totals.keys() - set(KINDS))]:
        colour = colour_of(kind)
        style = Style(color=ink_on(colour), bgcolor=colour)
        words = f" {words_for(kind)} {format_ns(totals[kind])}"
        if line and len(line) + 4 + len(words) > width:
            yield line
            line = Text()
        line = line + Text.assemble("   " if line else "", (_LETTERS.get(kind, "?"), style), words)
    yield line
    idle = f", compute idle {format_percent(timeline.bubble)}" if timeline.step_ns else ""
    yield Text(f"step {format_ns(timeline.step_ns)}{idle}")
