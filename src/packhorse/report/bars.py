"""Bars for terminals: rich renderables that take the width they are given.

In: shares of a whole. Out: lines of block characters, or of `#` and `-` where the terminal cannot
show those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

_EIGHTHS: Final = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
_FULL: Final = "\u2588"
_TRACK: Final = "\u2591"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar that fills `share` of its column; more than all is drawn as all."""

    share: float
    style: str = "cyan"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        share = min(max(self.share, 0.0), 1.0)
        if options.ascii_only:
            text = "#" * _at_least_one(round(share * width), share)
        else:
            eighths = _at_least_one(round(share * width * 8), share)
            text = _FULL * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        yield Segment(text, Style.parse(self.style))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBar:
    """Parts of a whole, side by side, as (share, style); what is left is a faint track."""

    parts: Sequence[tuple[float, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        done, total = 0, 0.0
        for at, (share, style) in enumerate(self.parts):
            total += share
            until = min(width, round(total * width))
            if until > done:
                full = "#=+*o%"[at % 6] if options.ascii_only else _FULL
                yield Segment(full * (until - done), Style.parse(style))
                done = until
        yield Segment(
            ("." if options.ascii_only else _TRACK) * (width - done), Style.parse("bright_black")
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


def _at_least_one(count: int, share: float) -> int:
    return max(count, 1) if share > 0 else 0
