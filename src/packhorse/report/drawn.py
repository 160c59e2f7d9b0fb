"""A timeline that notebooks draw.

In: a timeline, and the capacities of its pools. Out: its figures, and its picture as SVG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packhorse.program.buffers import PoolId
from packhorse.report.pictures import draw_timeline
from packhorse.timeline.spec import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTimeline:
    """A timeline with what a picture of it needs; `timeline` has every span."""

    timeline: Timeline
    capacity_bytes: Mapping[PoolId, int]
    title: str

    @property
    def makespan_ns(self) -> int:
        """When the last task ends."""
        return self.timeline.makespan_ns

    @property
    def step_ns(self) -> int:
        """From the end of the step before to its own."""
        return self.timeline.step_ns

    @property
    def bubble(self) -> float:
        """Share of the step in which the compute lane is idle, between 0 and 1."""
        return self.timeline.bubble

    @property
    def idle_in_span(self) -> float:
        """Share of the compute lane's own span in which it is idle."""
        return self.timeline.idle_in_span

    @property
    def peak_bytes(self) -> Mapping[PoolId, int]:
        """Largest use of each pool."""
        return self.timeline.peak_bytes

    def _repr_svg_(self) -> str:
        # The name by which notebooks ask for a picture.
        return draw_timeline(self.timeline, capacity_bytes=self.capacity_bytes, title=self.title)
