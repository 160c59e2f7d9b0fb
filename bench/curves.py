"""Curves over sizes as a picture for pages: SVG, without scripts or outside fonts.

In: points of named curves, sizes in bytes to times in ns. Out: the text of an SVG that follows the
reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from packhorse.report.axes import byte_ticks, time_ticks

WIDTH: Final = 720
HEIGHT: Final = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 64, 48
_COLOURS: Final = ("#3b7dd8", "#e07b39", "#2f9e6e", "#8e6bbf")
_STYLE: Final = """
  .page { fill: #ffffff; stroke: #d8dee4 }
  .ink { fill: #1f2328 }
  .soft { fill: #59636e }
  .grid { stroke: #d8dee4 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14171c; stroke: #30363d }
    .ink { fill: #e6edf3 }
    .soft { fill: #9aa4af }
    .grid { stroke: #30363d }
  }
  text { font: 11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  .title { font-size: 15px; font-weight: 600 }
"""

Points = Sequence[tuple[int, int]]


def draw_curves(curves: Mapping[str, Points], *, title: str, size_name: str) -> str:
    """Draw curves of (bytes, ns) points; each has at least one point."""
    most_bytes = max(size for points in curves.values() for size, _ in points)
    longest_ns = round(1.08 * max(time for points in curves.values() for _, time in points))

    def x_of(size_bytes: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * size_bytes / most_bytes

    def y_of(time_ns: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * time_ns / longest_ns

    parts = [f"<title>{escape(title)}</title>", _text(_LEFT, 28, title, "ink title")]
    for time_ns, label in time_ticks(longest_ns, num_ticks=6):
        y = y_of(time_ns)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 8, y + 4, label, "soft", anchor="end"))
    for size_bytes, label in byte_ticks(most_bytes, num_ticks=6):
        parts.append(_text(x_of(size_bytes), HEIGHT - _BOTTOM + 18, label, "soft", "middle"))
    parts.append(_text(WIDTH - _RIGHT, HEIGHT - 12, size_name, "soft", anchor="end"))
    for index, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [(x_of(size_bytes), y_of(time_ns)) for size_bytes, time_ns in sorted(points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        legend = _LEFT + 140 * index
        parts.append(f'<rect x="{legend}" y="40" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(legend + 16, 49, name, "ink"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' width="{WIDTH}" height="{HEIGHT}" role="img">\n<style>{_STYLE}</style>\n'
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(text)}</text>'
