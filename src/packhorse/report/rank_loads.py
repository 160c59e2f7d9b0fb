"""What keeps several ranks busy: which lane of which rank, and which link, is busy the longest?

In: a timeline for each rank, on one clock. Out: the busiest of each, in words or for `json.dumps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packhorse.timeline.names import words_for
from packhorse.timeline.spec import Timeline
from packhorse.units import format_percent

_SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Busiest:
    """The lane and the link that are busy the longest in a step of `step_ns`.

    `link` is (source, target), None where nothing is sent.
    """

    step_ns: int
    rank: int
    lane: str
    lane_ns: int
    link: tuple[int, int] | None
    link_ns: int


def find_busiest(timelines: Sequence[Timeline]) -> Busiest:
    """Find what is busy the longest.

    Args:
        timelines: by rank, at least one.
    """
    lanes = {
        (timeline.rank, lane): busy_ns
        for timeline in timelines
        for lane, busy_ns in _busy_lanes(timeline).items()
        if not _is_message(lane)
    }
    (rank, lane), lane_ns = max(lanes.items(), key=lambda item: item[1], default=((0, ""), 0))
    links = busy_links(timelines)
    link = max(links, key=lambda each: links[each], default=None)
    return Busiest(
        step_ns=max(timeline.step_ns for timeline in timelines),
        rank=rank,
        lane=lane,
        lane_ns=lane_ns,
        link=link,
        link_ns=0 if link is None else links[link],
    )


def busy_links(timelines: Sequence[Timeline]) -> Mapping[tuple[int, int], int]:
    """How long each link from rank to rank carries messages, in ns."""
    return {
        (timeline.rank, int(lane.partition(" ")[2])): busy_ns
        for timeline in timelines
        for lane, busy_ns in _busy_lanes(timeline).items()
        if lane.startswith(f"{_SEND} ")
    }


def say_busiest(busiest: Busiest) -> str:
    """Say which lane of which rank is busy the longest."""
    share = format_percent(busiest.lane_ns / max(busiest.step_ns, 1))
    return f"busiest: {words_for(busiest.lane)} of rank {busiest.rank}, {share} of the step"


def say_busiest_link(busiest: Busiest) -> str:
    """Say which link is busy the longest."""
    if busiest.link is None:
        return "nothing is sent"
    source, target = busiest.link
    share = format_percent(busiest.link_ns / max(busiest.step_ns, 1))
    return f"busiest link: rank {source} to {target}, {share}"


def links_as_dict(timelines: Sequence[Timeline]) -> list[dict[str, int]]:
    """Give how long each link is busy as what `json.dumps` takes."""
    return [
        {"source": source, "target": target, "busy_ns": busy_ns}
        for (source, target), busy_ns in sorted(busy_links(timelines).items())
    ]


def _busy_lanes(timeline: Timeline) -> Mapping[str, int]:
    busy: dict[str, int] = {}
    for span in timeline.spans:
        busy[span.lane] = busy.get(span.lane, 0) + span.duration_ns
    return busy


def _is_message(lane: str) -> bool:
    return lane.partition(" ")[0] in (_SEND, "receive")
