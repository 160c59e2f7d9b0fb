"""A timeline as a picture for pages: SVG.

In: a timeline, and the capacities of its pools. Out: an SVG that carries its own background and
follows the reader's light or dark theme, without scripts or outside fonts.

Lanes are rows; a span narrower than a pixel is drawn together with its neighbours in the colour of
the kind that fills the pixel most, so that a picture of a hundred thousand tasks stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from packhorse.program.buffers import PoolId
from packhorse.report.axes import byte_ticks, time_ticks
from packhorse.report.colours import colour_of, ink_on
from packhorse.report.strips import Strip, cut_strips
from packhorse.report.svg import CHAR, WIDTH, draw_page
from packhorse.report.svg import draw_box as _rect
from packhorse.report.svg import draw_text as _text
from packhorse.timeline.names import KINDS, order_lanes, words_for
from packhorse.timeline.spec import MemoryPoint, Timeline
from packhorse.units import format_bytes, format_ns, format_percent

_LEFT: Final = 128
_RIGHT: Final = 24
_PLOT: Final = WIDTH - _LEFT - _RIGHT
_LANE: Final = 30
_LANE_GAP: Final = 8
_POOL: Final = 96
_POOL_GAP: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """From ns to pixels."""

    longest_ns: int

    def x(self, at_ns: float) -> float:
        return _LEFT + _PLOT * at_ns / self.longest_ns


def draw_timeline(
    timeline: Timeline, *, capacity_bytes: Mapping[PoolId, int] | None = None, title: str = ""
) -> str:
    """Draw a timeline as the text of an SVG file.

    Args:
        timeline: what to draw; it may be empty.
        capacity_bytes: capacity of pools, drawn as a line; pools that it lacks have no line.
        title: what the picture is of; by default rank and source.
    """
    scale = _Scale(longest_ns=max(timeline.makespan_ns, 1))
    lanes = order_lanes(span.lane for span in timeline.spans)
    strips = {
        lane: cut_strips(
            [span for span in timeline.spans if span.lane == lane],
            pixel_ns=scale.longest_ns / _PLOT,
        )
        for lane in lanes
    }
    pools = [
        pool
        for pool, points in timeline.memory.items()
        if any(point.used_bytes for point in points)
    ]
    parts = _draw_head(timeline, title)
    legend, top = _draw_legend(timeline)
    parts += legend

    bottom = top + len(lanes) * (_LANE + _LANE_GAP)
    pools_bottom = bottom + 24 + len(pools) * (_POOL + _POOL_GAP)
    parts += _draw_axis(scale, top, bottom, pools_bottom if pools else bottom)
    for at, lane in enumerate(lanes):
        share = timeline.busy_ns(lane) / scale.longest_ns
        parts += _draw_lane(
            words_for(lane), share, strips[lane], scale, top + at * (_LANE + _LANE_GAP)
        )
    capacities = capacity_bytes or {}
    for at, pool in enumerate(pools):
        pool_top = bottom + 24 + _POOL_GAP - 14 + at * (_POOL + _POOL_GAP)
        parts += _draw_pool(pool, timeline.memory[pool], capacities.get(pool), scale, pool_top)
    height = pools_bottom + 16 if pools else bottom + 36
    return draw_page(height, parts)


def _draw_head(timeline: Timeline, title: str) -> list[str]:
    facts = [f"{len(timeline.spans)} tasks", f"step {format_ns(timeline.step_ns)}"]
    if timeline.step_ns:
        facts.append(f"compute idle {format_percent(timeline.bubble)}")
    title = title or f"Rank {timeline.rank}, {timeline.source}"
    return [
        f"<title>{escape(title)}</title>",
        _text(_RIGHT, 32, title, "ink title"),
        _text(WIDTH - _RIGHT, 32, ", ".join(facts), "soft", anchor="end"),
    ]


def _draw_legend(timeline: Timeline) -> tuple[list[str], int]:
    """Draw the kinds that occur with their share of busy time; returns the y below it too."""
    totals: dict[str, int] = {}
    for span in timeline.spans:
        totals[span.kind] = totals.get(span.kind, 0) + span.duration_ns
    kinds = [kind for kind in KINDS if kind in totals]
    kinds += sorted(totals.keys() - set(KINDS))
    parts: list[str] = []
    x, y = float(_RIGHT), 58
    for kind in kinds:
        label = f"{words_for(kind)} {format_ns(totals[kind])}"
        width = 16 + CHAR * len(label) + 18
        if x + width > WIDTH - _RIGHT and x > _RIGHT:
            x, y = float(_RIGHT), y + 20
        parts.append(_rect(x, y - 9, 10, 10, colour_of(kind), radius=2))
        parts.append(_text(x + 16, y, label, "ink"))
        x += width
    return parts, y + 24


def _draw_axis(scale: _Scale, top: int, bottom: int, pools_bottom: int) -> list[str]:
    parts: list[str] = []
    for at_ns, label in time_ticks(scale.longest_ns):
        x = scale.x(at_ns)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{pools_bottom}"/>'
        )
        # The last label stays inside the page.
        anchor = "end" if x > WIDTH - _RIGHT - 24 else "middle"
        parts.append(_text(x, bottom + 14, label, "soft", anchor=anchor))
    return parts


def _draw_lane(
    name: str, busy_share: float, strips: list[Strip], scale: _Scale, y: int
) -> list[str]:
    parts = [
        f'<rect class="row" x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_LANE}"/>',
        _text(_LEFT - 10, y + 13, name, "ink", anchor="end"),
        _text(_LEFT - 10, y + 26, f"busy {format_percent(busy_share)}", "soft", anchor="end"),
    ]
    for strip in strips:
        x = scale.x(strip.start_ns)
        width = max(scale.x(strip.end_ns) - x, 0.6)
        colour = colour_of(strip.kind)
        # A hair of background tells neighbours apart where there is room for it.
        shown = width - 0.6 if width > 3 else width
        tip = f"{strip.name}, {format_ns(strip.end_ns - strip.start_ns)}"
        box = _rect(x, y + 1, shown, _LANE - 2, colour, radius=2 if width > 6 else 0)
        parts.append(f"<g><title>{escape(tip)}</title>{box}</g>")
        label = next(
            (text for text in (strip.name, strip.short) if CHAR * len(text) + 6 < width), ""
        )
        if label:
            middle = x + shown / 2
            parts.append(
                f'<text x="{middle:.1f}" y="{y + 19}" text-anchor="middle"'
                f' fill="{ink_on(colour)}" pointer-events="none">{escape(label)}</text>'
            )
    return parts


def _draw_pool(
    pool: PoolId,
    points: tuple[MemoryPoint, ...],
    capacity_bytes: int | None,
    scale: _Scale,
    y: int,
) -> list[str]:
    peak_bytes = max(point.used_bytes for point in points)
    # A capacity far above the peak would press the curve flat: then it is named, not drawn.
    drawn = capacity_bytes is not None and capacity_bytes <= 3 * peak_bytes
    top_bytes = max(peak_bytes, capacity_bytes or 0) if drawn else peak_bytes
    top_bytes = max(round(top_bytes * 1.08), 1)

    def height_of(used_bytes: float) -> float:
        return y + _POOL * (1 - used_bytes / top_bytes)

    facts = f"peak {format_bytes(peak_bytes)}"
    if capacity_bytes:
        share = format_percent(peak_bytes / capacity_bytes)
        facts += f", {share} of {format_bytes(capacity_bytes)}"
    parts = [
        f'<rect class="row" x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_POOL}"/>',
        _text(_LEFT, y - 6, f"pool {pool}", "ink"),
        _text(WIDTH - _RIGHT, y - 6, facts, "soft", anchor="end"),
    ]
    for size_bytes, label in byte_ticks(top_bytes, num_ticks=4):
        at = height_of(size_bytes)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>'
        )
        parts.append(_text(_LEFT - 10, at + 4, label, "soft", anchor="end"))
    path = _trace(points, scale, height_of)
    floor = f"V{y + _POOL} H{_LEFT}Z"
    parts.append(f'<path class="area" d="{path} {floor}"/>')
    parts.append(f'<path class="curve" d="{path}"/>')
    if drawn and capacity_bytes is not None:
        at = height_of(capacity_bytes)
        parts.append(
            f'<line class="limit" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>'
        )
    return parts


def _trace(
    points: tuple[MemoryPoint, ...], scale: _Scale, height_of: Callable[[float], float]
) -> str:
    """Draw the steps of a curve; within a pixel only its extremes are kept."""
    parts = [f"M{_LEFT} {height_of(points[0].used_bytes):.1f}"]
    low = high = last = points[0].used_bytes
    column = _LEFT
    for point in points:
        here = round(scale.x(min(point.at_ns, scale.longest_ns)))
        if here != column:
            parts += _column(low, high, last, height_of)
            parts.append(f"H{here}")
            column, low, high = here, last, last
        low, high, last = (
            min(low, point.used_bytes),
            max(high, point.used_bytes),
            point.used_bytes,
        )
    parts += _column(low, high, last, height_of)
    parts.append(f"H{WIDTH - _RIGHT}")
    return " ".join(parts)


def _column(low: int, high: int, last: int, height_of: Callable[[float], float]) -> list[str]:
    ordered = [stop for stop in dict.fromkeys((low, high)) if stop != last] + [last]
    return [f"V{height_of(stop):.1f}" for stop in ordered]
