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
    accesses_of,
    lane_of,
)


def assign_lanes(tasks: Sequence[Task]) -> tuple[Lane, ...]:
    """Give each task's lane."""
    last: dict[TierName, dict[BufferId, Lane]] = {"device": {}, "host": {}, "disk": {}}
    lanes: list[Lane] = []
    for task in tasks:
        if isinstance(task, Free):
            lanes.append(last[task.tier].get(task.buffer, lane_of(task)))
            continue
        lane = lane_of(task)
        read_tier, read, write_tier, written = accesses_of(task)
        there = last[read_tier]
        for buffer in read:
            there[buffer] = lane
        there = last[write_tier]
        for buffer in written:
            there[buffer] = lane
        lanes.append(lane)
    return tuple(lanes)


def lanes_used(tasks: Sequence[Task]) -> frozenset[Lane]:
    """The lanes of a program's tasks."""
    return frozenset(map(lane_of, tasks))


def has_transfers(tasks: Sequence[Task]) -> bool:
    """Whether anything is moved between tiers or ranks; without, there is nothing to overlap."""
    return any(isinstance(task, Copy | Send | Recv) for task in tasks)
