"""A timeline: spans per lane and memory curves per pool.

The simulator predicts one, the runtime measures one; both are this type, so that the distance
between them is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from packhorse.program.buffers import PoolId
from packhorse.program.tasks import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One task on one lane; `index` is its place in the program."""

    index: int
    name: str
    kind: str
    lane: Lane
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


class MemoryPoint(NamedTuple):
    """Bytes in use in a pool from `at_ns` on; a long timeline has millions."""

    at_ns: int
    used_bytes: int


def curve_from(points: Sequence[tuple[int, int]], zero_ns: int) -> tuple[MemoryPoint, ...]:
    """Give a curve from a moment on, which becomes 0; what was in use before is its first point.

    Args:
        points: moments in order, and the bytes in use from each on.
    """
    first = len([at_ns for at_ns, _ in points if at_ns < zero_ns])
    later = [MemoryPoint(at_ns - zero_ns, used_bytes) for at_ns, used_bytes in points[first:]]
    before = [MemoryPoint(0, points[first - 1][1])] if first else []
    return (*before, *later)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one rank did in one step; times start at 0, when its first task starts.

    Steps run into each other: the last writes of the step before may still be on their way then.
    They end at `since_ns`, from where this step is counted; 0 where nothing was on its way.
    """

    source: Literal["simulated", "measured"]
    rank: int
    spans: tuple[Span, ...]
    memory: Mapping[PoolId, tuple[MemoryPoint, ...]]
    since_ns: int = 0

    @property
    def makespan_ns(self) -> int:
        """When the last task ends."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def step_ns(self) -> int:
        """How long the step takes: from the end of the one before it to its own."""
        return max(self.makespan_ns - self.since_ns, 0)

    @property
    def peak_bytes(self) -> Mapping[PoolId, int]:
        """Largest use of each pool."""
        return {
            pool: max((point.used_bytes for point in points), default=0)
            for pool, points in self.memory.items()
        }

    def busy_ns(self, lane: Lane) -> int:
        """How long a lane worked."""
        return sum(span.duration_ns for span in self.spans if span.lane == lane)

    @property
    def bubble(self) -> float:
        """Share of the step in which the compute lane is idle, between 0 and 1."""
        step_ns = self.step_ns
        # What the lane did before the step counts is part of its work all the same.
        return max(1 - self.busy_ns("compute") / step_ns, 0.0) if step_ns else 0.0

    @property
    def idle_in_span(self) -> float:
        """Share of the compute lane's own span (first start to last end) in which it is idle."""
        compute = [span for span in self.spans if span.lane == "compute"]
        if not compute:
            return 0.0
        span_ns = max(s.end_ns for s in compute) - min(s.start_ns for s in compute)
        return 1 - self.busy_ns("compute") / span_ns if span_ns else 0.0
