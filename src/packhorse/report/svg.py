"""What all SVG pictures here share: the page with its two themes, boxes and texts.

In: places, sizes in pixels, colours, words. Out: elements of an SVG, as text. A picture carries its
own background and follows the reader's light or dark theme, without scripts or outside fonts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 1120
MARGIN: Final = 24
CHAR: Final = 6.2  # width of a character at 11 px, sans-serif, on the safe side

STYLE: Final = """
  .page { fill: #ffffff; stroke: #d8dee4 }
  .ink { fill: #1f2328 }
  .soft { fill: #59636e }
  .grid { stroke: #d8dee4 }
  .row { fill: #f3f5f7 }
  .area { fill: #3b7dd8; fill-opacity: 0.22 }
  .curve { stroke: #2a63b3; fill: none }
  .limit { stroke: #c4314b; stroke-dasharray: 6 4 }
  .limit-ink { fill: #b02a43 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14171c; stroke: #30363d }
    .ink { fill: #e6edf3 }
    .soft { fill: #9aa4af }
    .grid { stroke: #30363d }
    .row { fill: #1c2128 }
    .area { fill: #5b9bf0; fill-opacity: 0.28 }
    .curve { stroke: #7db2f7 }
    .limit { stroke: #f0718a }
    .limit-ink { fill: #f58a9f }
  }
  text { font: 11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  .title { font-size: 15px; font-weight: 600 }
"""


def draw_page(height: float, parts: Iterable[str]) -> str:
    """Put elements on a page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' width="{WIDTH}" height="{height}" role="img">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw_box(
    x: float, y: float, width: float, height: float, colour: str, *, radius: int = 0
) -> str:
    """Draw a filled box."""
    corner = f' rx="{radius}"' if radius else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' fill="{colour}"{corner}/>'
    )


def draw_text(x: float, y: float, text: str, style: str, *, anchor: str = "start") -> str:
    """Draw a text whose baseline starts, ends or has its middle at a point."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(text)}</text>'
