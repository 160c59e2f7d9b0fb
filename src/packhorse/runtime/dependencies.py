"""Which earlier tasks a task must follow, from what tasks read and write.

In: a program's tasks, and what programs before it did. Out: for each task the nearest conflicting
tasks before it: the last writer of what it reads; for what it writes or frees, also all readers
since. Within a program they are found once, by place; from one program to the next a `History`
knows them, by numbers that are never used again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from packhorse.program.buffers import BufferId, TierName
from packhorse.program.tasks import Free, Task, reads_of, writes_of

Place = tuple[BufferId, TierName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Of the tasks of one program.

    `inner` gives each task's dependencies in the program, in ascending order. `entering` gives for
    a task the places that no task of the program has written before it, and whether it changes
    them. `writers` and `readers` tell what the program leaves: the last writer of each place that
    it changes, and who reads a place after that.
    """

    inner: tuple[tuple[int, ...], ...]
    entering: Mapping[int, Mapping[Place, bool]]
    writers: Mapping[Place, int]
    readers: Mapping[Place, tuple[int, ...]]


def find_dependencies(tasks: Sequence[Task]) -> Dependencies:
    """Give the dependencies of a program's tasks."""
    writer: dict[Place, int] = {}
    readers: dict[Place, list[int]] = {}
    inner: list[tuple[int, ...]] = []
    entering: dict[int, Mapping[Place, bool]] = {}
    for index, task in enumerate(tasks):
        after: set[int] = set()
        enters: dict[Place, bool] = {}
        changed = list(writes_of(task))
        if isinstance(task, Free):
            changed.append((task.buffer, task.tier))
        for place in reads_of(task):
            if place in writer:
                after.add(writer[place])
            else:
                enters[place] = False
            readers.setdefault(place, []).append(index)
        for place in changed:
            if place in writer:
                after.add(writer[place])
            else:
                enters[place] = True
            after.update(readers.pop(place, []))
            writer[place] = index
        after.discard(index)
        inner.append(tuple(sorted(after)))
        if enters:
            entering[index] = enters
    return Dependencies(
        inner=tuple(inner),
        entering=entering,
        writers=writer,
        readers={place: tuple(found) for place, found in readers.items()},
    )


def merge_tasks(dependencies: Dependencies, heads: Sequence[int]) -> Dependencies:
    """Give the dependencies of jobs, which go by their first tasks.

    Args:
        heads: for each task the first one of its job; only that one may be in `entering`.
    """
    inner: list[set[int]] = [set() for _ in heads]
    for index, head in enumerate(heads):
        inner[head].update(heads[other] for other in dependencies.inner[index])
        inner[head].discard(head)
    return Dependencies(
        inner=tuple(tuple(sorted(after)) for after in inner),
        entering=dependencies.entering,
        writers={place: heads[index] for place, index in dependencies.writers.items()},
        readers={
            place: tuple(dict.fromkeys(heads[index] for index in found))
            for place, found in dependencies.readers.items()
        },
    )


class History:
    """What tasks that may not have completed yet did with places; tasks go by their numbers."""

    def __init__(self) -> None:
        self._writers: dict[Place, int] = {}
        self._readers: dict[Place, list[int]] = {}

    def before(self, places: Mapping[Place, bool]) -> set[int]:
        """Give the tasks that one must follow which uses places, and changes some of them."""
        found: set[int] = set()
        for place, changes in places.items():
            if place in self._writers:
                found.add(self._writers[place])
            if changes:
                found.update(self._readers.get(place, ()))
        return found

    def add(self, program: Dependencies, first: int, pending: Collection[int]) -> None:
        """Note what a program leaves.

        Args:
            first: number of its first task.
            pending: tasks that have not completed; all others are forgotten.
        """
        if not pending:
            self._writers, self._readers = {}, {}
            return
        self._writers = {p: task for p, task in self._writers.items() if task in pending}
        self._readers = {
            place: left
            for place, readers in self._readers.items()
            if place not in program.writers and (left := [t for t in readers if t in pending])
        }
        for place, index in program.writers.items():
            if first + index in pending:
                self._writers[place] = first + index
            else:
                self._writers.pop(place, None)
        for place, readers in program.readers.items():
            left = [first + index for index in readers if first + index in pending]
            if left:
                self._readers.setdefault(place, []).extend(left)
