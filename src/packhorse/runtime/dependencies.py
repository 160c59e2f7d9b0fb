"""Which earlier tasks a task must follow, from what tasks read and write.

In: a program's tasks. Out: for each task the places of the nearest conflicting tasks before it:
the last writer of what it reads; for what it writes or frees, also all readers since.
"""

from __future__ import annotations

from collections.abc import Sequence

from packhorse.program.buffers import BufferId, TierName
from packhorse.program.tasks import Free, Task, reads_of, writes_of

Place = tuple[BufferId, TierName]


def find_dependencies(tasks: Sequence[Task]) -> tuple[tuple[int, ...], ...]:
    """Give each task's dependencies, in ascending order."""
    writer: dict[Place, int] = {}
    readers: dict[Place, list[int]] = {}
    found: list[tuple[int, ...]] = []
    for index, task in enumerate(tasks):
        after: set[int] = set()
        changed = list(writes_of(task))
        if isinstance(task, Free):
            changed.append((task.buffer, task.tier))
        for place in reads_of(task):
            if place in writer:
                after.add(writer[place])
            readers.setdefault(place, []).append(index)
        for place in changed:
            if place in writer:
                after.add(writer[place])
            after.update(readers.pop(place, []))
            writer[place] = index
        after.discard(index)
        found.append(tuple(sorted(after)))
    return tuple(found)
