"""Which lane runs each task of a program, and whether lanes run beside each other.

In: tasks in program order. Out: a lane per task. A Free has no lane of its own: it runs on the
lane of the last task before it that touches its buffer in that tier, so that dropping what a slow
write still needs holds nothing else up.
"""

from __future__ import annotations

from collections.abc import Sequence

from packhorse.program.buffers import BufferId, TierName
from packhorse.program.tasks import (
    Copy,
    Free,
    Lane,
    Recv,
    Send,
    Task,
    lane_of,
    reads_of,
    writes_of,
)


def assign_lanes(tasks: Sequence[Task]) -> tuple[Lane, ...]:
    """Give each task's lane."""
    last: dict[tuple[BufferId, TierName], Lane] = {}
    lanes: list[Lane] = []
    for task in tasks:
        lane = lane_of(task)
        if isinstance(task, Free):
            lane = last.get((task.buffer, task.tier), lane)
        else:
            for place in (*reads_of(task), *writes_of(task)):
                last[place] = lane
        lanes.append(lane)
    return tuple(lanes)


def has_transfers(tasks: Sequence[Task]) -> bool:
    """Whether anything is moved between tiers or ranks; without, there is nothing to overlap."""
    return any(isinstance(task, Copy | Send | Recv) for task in tasks)
