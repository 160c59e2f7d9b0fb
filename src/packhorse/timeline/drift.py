"""Is a run as fast as it was planned to be? Lane by lane, over the last steps.

In: the planned timeline of a step, what the lanes did in measured steps, and the bytes that they
move. Out: the lanes that are too far off to leave it at that. Lanes overlap, so a step's time does
not tell which of them is to blame; their busy times do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.program.lanes import assign_lanes
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Lane
from packhorse.timeline.names import words_for
from packhorse.timeline.spec import Timeline
from packhorse.units import format_bytes, format_ns

WATCHED: Final[tuple[Lane, ...]] = ("disk_read", "disk_write", "compute")
NUM_STEPS: Final = 20
TOLERANCE: Final = 0.2
# Of the measured step: by less, nobody would notice.
WORTH_A_LINE: Final = 0.02

BusyTimes = Mapping[Lane, int]
"""How long each watched lane worked in a step, in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDrift:
    """A lane's busy time in a step, planned and measured; `size_bytes` is what it moves in it."""

    lane: Lane
    planned_ns: int
    measured_ns: int
    size_bytes: int

    @property
    def factor(self) -> float:
        """Measured rate over planned rate."""
        return self.planned_ns / self.measured_ns


def busy_times(timeline: Timeline) -> BusyTimes:
    """Add up what the watched lanes did in a step."""
    busy: dict[Lane, int] = dict.fromkeys(WATCHED, 0)
    for span in timeline.spans:
        if span.lane in busy:
            busy[span.lane] += span.duration_ns
    return busy


def moved_bytes(program: Program) -> Mapping[Lane, int]:
    """Add up what each lane moves in a step."""
    moved: dict[Lane, int] = {}
    for task, lane in zip(program.tasks, assign_lanes(program.tasks), strict=True):
        if isinstance(task, Copy):
            moved[lane] = moved.get(lane, 0) + program.buffers[task.buffer].size_bytes
    return moved


def find_drift(
    planned: BusyTimes, measured: Sequence[BusyTimes], *, step_ns: int, moved: Mapping[Lane, int]
) -> tuple[LaneDrift, ...]:
    """Find the lanes whose rate is off by more than `TOLERANCE`, in the mean over the steps.

    Args:
        planned: of one step.
        measured: of each step.
        step_ns: the mean length of a measured step.
        moved: bytes that each lane moves in a step.
    """
    found: list[LaneDrift] = []
    for lane in WATCHED:
        mean_ns = round(sum(busy[lane] for busy in measured) / len(measured)) if measured else 0
        if not planned[lane] or not mean_ns:
            continue
        drift = LaneDrift(
            lane=lane,
            planned_ns=planned[lane],
            measured_ns=mean_ns,
            size_bytes=moved.get(lane, 0),
        )
        matters = abs(mean_ns - planned[lane]) >= WORTH_A_LINE * step_ns
        if matters and abs(drift.factor - 1) > TOLERANCE:
            found.append(drift)
    return tuple(found)


class DriftWatch:
    """Looks at every `NUM_STEPS` steps of a run until something is off, and speaks once.

    Args:
        planned: the timeline of a step, as simulated.
        moved: bytes that each lane moves in a step.
    """

    def __init__(self, planned: Timeline, moved: Mapping[Lane, int]) -> None:
        self._planned = busy_times(planned)
        self._moved = moved
        self._measured: list[BusyTimes] = []
        self._steps_ns = 0
        self._is_warm = False
        self._has_spoken = False

    def add(self, timeline: Timeline) -> tuple[LaneDrift, ...]:
        """Take a measured step; gives the lanes that are off once enough steps say so.

        The first step of a process still warms up and does not count.
        """
        if self._has_spoken or not self._is_warm:
            self._is_warm = True
            return ()
        self._measured.append(busy_times(timeline))
        self._steps_ns += timeline.step_ns
        if len(self._measured) < NUM_STEPS:
            return ()
        step_ns = round(self._steps_ns / NUM_STEPS)
        found = find_drift(self._planned, self._measured, step_ns=step_ns, moved=self._moved)
        self._measured, self._steps_ns = [], 0
        self._has_spoken = bool(found)
        return found


def say_drift(drifts: Sequence[LaneDrift]) -> str:
    """Word what is off: lane, planned, measured."""
    parts = [f"{words_for(drift.lane)}: {_say_pair(drift)}" for drift in drifts]
    return f"over {NUM_STEPS} steps not as planned: {'; '.join(parts)}"


def _say_pair(drift: LaneDrift) -> str:
    if not drift.size_bytes:
        planned, measured = format_ns(drift.planned_ns), format_ns(drift.measured_ns)
        return f"planned {planned} a step, measured {measured}"
    planned_rate, measured_rate = (
        format_bytes(drift.size_bytes * 1e9 / busy_ns)
        for busy_ns in (drift.planned_ns, drift.measured_ns)
    )
    return f"planned {planned_rate}/s, measured {measured_rate}/s"
