"""Spans cut to what a picture can show.

In: the spans of one lane, in order, and how long a pixel is. Out: strips; spans that are at least
a pixel long stay themselves, a run of shorter ones becomes one strip of its commonest kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from packhorse.timeline.names import words_for
from packhorse.timeline.spec import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A stretch of a lane in one colour; `short` is a name for small boxes."""

    kind: str
    name: str
    short: str
    start_ns: int
    end_ns: int


def cut_strips(spans: Sequence[Span], *, pixel_ns: float) -> list[Strip]:
    """Cut a lane into strips, in order; short spans join only where they nearly touch."""
    strips: list[Strip] = []
    run: list[Span] = []
    for span in spans:
        if span.duration_ns >= pixel_ns:
            strips += _join(run)
            run = []
            strips.append(_strip(span))
            continue
        if run and (
            span.start_ns - run[-1].end_ns >= pixel_ns
            or span.end_ns - run[0].start_ns >= 2 * pixel_ns
        ):
            strips += _join(run)
            run = []
        run.append(span)
    return strips + _join(run)


def _strip(span: Span) -> Strip:
    _, _, rest = span.name.partition(" ")
    return Strip(
        kind=span.kind,
        name=span.name,
        short=rest.split(" ")[0],
        start_ns=span.start_ns,
        end_ns=span.end_ns,
    )


def _join(run: Sequence[Span]) -> list[Strip]:
    # Spans without length (a free that takes no time) have nothing to show.
    if not run or run[-1].end_ns == run[0].start_ns:
        return []
    if len(run) == 1:
        return [_strip(run[0])]
    totals: Counter[str] = Counter()
    for span in run:
        totals[span.kind] += span.duration_ns
    kind = totals.most_common(1)[0][0]
    return [
        Strip(
            kind=kind,
            name=f"{len(run)} short tasks, mostly {words_for(kind)}",
            short="",
            start_ns=run[0].start_ns,
            end_ns=run[-1].end_ns,
        )
    ]
