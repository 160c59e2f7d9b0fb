"""The replay: one rank's program run task by task, with versions and ledgers, without data.

In: a program whose buffers are all declared. Out: a `Replay` that rules look at before each task
and after each step, and that then lets the task happen.

A *place* is a buffer in a tier; places, buffers and pools are numbered so that a task costs a few
list look-ups. Each place holds a version of its buffer or nothing; a write makes a newer version,
so that copies in other tiers are stale from then on. While a task runs, the pools carry what they
held before, what the task creates, and its workspace; what it frees is given back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packhorse.program.buffers import BufferId, PoolId, TierName
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Free, Task, reads_of, workspace_of, writes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A buffer in a tier: what it takes of which pool, and the same buffer's other places."""

    buffer: BufferId
    tier: TierName
    buffer_index: int
    pool_index: int
    size_bytes: int
    home: TierName | None
    siblings: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a task does to places: it reads and changes, creates, copies into, or frees.

    `next_read` of a Free is the next task that reads the buffer before it is created anew.
    """

    reads: tuple[int, ...]
    changes: tuple[int, ...]
    creates: tuple[int, ...]
    copies_into: int | None
    frees: int | None
    next_read: int | None
    workspace_bytes: int


class Replay:
    """The state between two tasks, and what the task at `index` would need while it runs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pools: tuple[PoolId, ...] = tuple(pool.id for pool in program.pools)
        self.capacity_bytes = [pool.capacity_bytes for pool in program.pools]
        self.places, self._place_of = _number_places(program, self.pools)
        self.accesses = _find_accesses(program, self._place_of)
        self.workspace_pool = self.pools.index(program.workspace_pool)
        self.held: list[int | None] = [None] * len(self.places)
        self.newest = [0] * len(program.buffers)
        self.used_bytes = [0] * len(self.pools)
        self.peak_bytes = self.used_bytes
        self.step = 0
        self.index = 0
        for place_index, place in enumerate(self.places):
            if place.tier == place.home and program.finds(program.buffers[place.buffer]):
                self.held[place_index] = 0
                self.used_bytes[place.pool_index] += place.size_bytes

    @property
    def access(self) -> Access:
        """What the task at `index` does."""
        return self.accesses[self.index]

    def begin_task(self, index: int) -> None:
        """Turn to a task: set `peak_bytes`, each pool's use while the task runs."""
        self.index = index
        access = self.accesses[index]
        growing = access.creates
        target = access.copies_into
        if target is not None and self.held[target] is None:
            growing = (target,)
        if not growing and not access.workspace_bytes:
            self.peak_bytes = self.used_bytes
            return
        peak_bytes = self.used_bytes.copy()
        for place_index in growing:
            place = self.places[place_index]
            peak_bytes[place.pool_index] += place.size_bytes
        peak_bytes[self.workspace_pool] += access.workspace_bytes
        self.peak_bytes = peak_bytes

    def end_task(self) -> None:
        """Let the task happen: new versions, new copies, frees."""
        access = self.accesses[self.index]
        held, newest = self.held, self.newest
        if access.frees is not None:
            place = self.places[access.frees]
            self.used_bytes = self.used_bytes.copy()
            self.used_bytes[place.pool_index] -= place.size_bytes
            held[access.frees] = None
            return
        target = access.copies_into
        if target is not None:
            if held[target] is None:
                self._reserve((target,))
            held[target] = held[access.reads[0]]
            return
        if access.creates:
            self._reserve(access.creates)
        for place_index in (*access.creates, *access.changes):
            buffer_index = self.places[place_index].buffer_index
            newest[buffer_index] += 1
            held[place_index] = newest[buffer_index]

    def num_newest_copies(self, place_index: int) -> int:
        """Count the tiers that hold the newest version of a place's buffer."""
        place = self.places[place_index]
        newest = self.newest[place.buffer_index]
        return sum(self.held[sibling] == newest for sibling in place.siblings)

    def tiers_with(self, place_index: int) -> str:
        """Say where a place's buffer lies now, for an error."""
        place = self.places[place_index]
        newest = self.newest[place.buffer_index]
        found = [
            f"{self.places[i].tier} ({'newest' if self.held[i] == newest else 'stale'})"
            for i in place.siblings
            if self.held[i] is not None
        ]
        return f"it lies in {', '.join(found)}" if found else "it lies in no tier"

    def find_last(self, touches: Callable[[Access], bool]) -> int | None:
        """Find the last task before this one whose access passes a test."""
        return next((i for i in range(self.index - 1, -1, -1) if touches(self.accesses[i])), None)

    def find_next(self, touches: Callable[[Access], bool]) -> int | None:
        """Find the first task after this one whose access passes a test."""
        later = range(self.index + 1, len(self.accesses))
        return next((i for i in later if touches(self.accesses[i])), None)

    def _reserve(self, place_indices: tuple[int, ...]) -> None:
        self.used_bytes = self.used_bytes.copy()
        for place_index in place_indices:
            place = self.places[place_index]
            self.used_bytes[place.pool_index] += place.size_bytes


def _number_places(
    program: Program, pools: tuple[PoolId, ...]
) -> tuple[list[Place], dict[tuple[BufferId, TierName], int]]:
    places: list[Place] = []
    place_of: dict[tuple[BufferId, TierName], int] = {}
    pool_index = {pool: index for index, pool in enumerate(pools)}
    for buffer_index, buffer in enumerate(program.buffers.values()):
        siblings = tuple(range(len(places), len(places) + len(buffer.pools)))
        for tier, pool in buffer.pools.items():
            place_of[buffer.id, tier] = len(places)
            places.append(
                Place(
                    buffer=buffer.id,
                    tier=tier,
                    buffer_index=buffer_index,
                    pool_index=pool_index[pool],
                    size_bytes=buffer.size_bytes,
                    home=buffer.home,
                    siblings=siblings,
                )
            )
    return places, place_of


def _find_accesses(
    program: Program, place_of: dict[tuple[BufferId, TierName], int]
) -> tuple[Access, ...]:
    # Backwards, so that a Free knows the next read of its buffer.
    next_read: dict[BufferId, int | None] = {}
    accesses: list[Access] = []
    for index in range(len(program.tasks) - 1, -1, -1):
        task = program.tasks[index]
        if isinstance(task, Free):
            accesses.append(
                Access(
                    reads=(),
                    changes=(),
                    creates=(),
                    copies_into=None,
                    frees=place_of[task.buffer, task.tier],
                    next_read=next_read.get(task.buffer),
                    workspace_bytes=0,
                )
            )
            continue
        accesses.append(_find_access(task, place_of))
        for buffer, _ in writes_of(task):
            next_read[buffer] = None
        for buffer, _ in reads_of(task):
            next_read[buffer] = index
    accesses.reverse()
    return tuple(accesses)


def _find_access(task: Task, place_of: dict[tuple[BufferId, TierName], int]) -> Access:
    reads = tuple([place_of[key] for key in reads_of(task)])
    writes = tuple([place_of[key] for key in writes_of(task)])
    copies = isinstance(task, Copy)
    return Access(
        reads=reads,
        changes=() if copies else tuple([place for place in writes if place in reads]),
        creates=() if copies else tuple([place for place in writes if place not in reads]),
        copies_into=writes[0] if copies else None,
        frees=None,
        next_read=None,
        workspace_bytes=workspace_of(task),
    )
