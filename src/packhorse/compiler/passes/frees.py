"""Frees: every buffer that lives only inside a step is dropped after its last use.

In: tasks and the table of buffers. Out: the same tasks with a Free after the last task that
touches a buffer without a home. One that is created again, such as a gradient that went to another
rank and comes back, has several lives, each with its end. Buffers that may leave the device are the
residency pass's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packhorse.program.buffers import Buffer, BufferId
from packhorse.program.tasks import Free, Task, accesses_of


def add_frees(tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer]) -> tuple[Task, ...]:
    """Insert a Free of every transient buffer directly after its last use."""
    passing = {name for name, each in buffers.items() if each.home is None and len(each.pools) == 1}
    last: dict[BufferId, int] = {}
    ends: list[tuple[BufferId, int]] = []
    for position, task in enumerate(tasks):
        # A buffer that is passing has one tier.
        _, read, _, written = accesses_of(task)
        for buffer in read:
            if buffer in passing:
                last[buffer] = position
        for buffer in written:
            if buffer in passing and buffer not in read:
                if buffer in last:
                    ends.append((buffer, last[buffer]))
                last[buffer] = position
    ending: dict[int, list[Task]] = {}
    for buffer, position in (*ends, *last.items()):
        ending.setdefault(position, []).append(Free(buffer=buffer, tier="device"))
    result: list[Task] = []
    for position, task in enumerate(tasks):
        result.append(task)
        if position in ending:
            result += ending[position]
    return tuple(result)
