"""The replay: one rank's program run task by task, with versions and ledgers, without data.

In: a program and what its tasks touch. Out: a `Replay` that rules look at before each task and
after the last one, and that then lets the task happen.

Each place holds its buffer or nothing; a write makes a newer version, so that copies in other tiers
are stale from then on. While a task runs, the pools carry what they held before, what the task
creates, and its workspace; what it frees is given back after it. Ledgers are never changed once
they are there: whoever keeps one has it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from packhorse.program.buffers import Buffer, PoolId, TierName
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Free, Task, workspace_of
from packhorse.verifier.touches import Places, Touches

Ledger = Mapping[PoolId, int]


class Replay:
    """The state between two tasks, and what the task at `index` would need while it runs.

    `homes` are the places where a step finds and leaves buffers, `shared` those of buffers that may
    lie in several tiers. `there` are the places that hold a version of their buffer, `stale` those
    of them whose version is not the newest. `task` is the one at `index`, `reads` and `writes` are
    its places, `grows` those of them that it would fill and where nothing lies.
    """

    def __init__(self, program: Program, touches: Touches) -> None:
        self.program = program
        self.touches = touches
        self.capacity_bytes = {pool.id: pool.capacity_bytes for pool in program.pools}
        self.buffers = tuple(program.buffers.values())
        self.homes: set[int] = set()
        self.there: set[int] = set()
        self.stale: set[int] = set()
        self.index = 0
        self.task: Task | None = None
        self.reads: Places = ()
        self.writes: Places = ()
        self.grows: Places = ()
        self._size_of: dict[int, int] = {}
        self._pool_of: dict[int, PoolId] = {}
        self._siblings: dict[int, Places] = {}
        self._workspace_bytes = 0
        used_bytes = dict.fromkeys(self.capacity_bytes, 0)
        for buffer in self.buffers:
            siblings = tuple([touches.place(buffer.id, tier) for tier in buffer.pools])
            for place, (tier, pool) in zip(siblings, buffer.pools.items(), strict=True):
                self._size_of[place] = buffer.size_bytes
                self._pool_of[place] = pool
                if len(siblings) > 1:
                    self._siblings[place] = siblings
                if tier == buffer.home:
                    self.homes.add(place)
                    if program.finds(buffer):
                        self.there.add(place)
                        used_bytes[pool] += buffer.size_bytes
        self.shared = frozenset(self._siblings)
        self.used_bytes: Ledger = used_bytes
        self.peak_bytes: Ledger = used_bytes

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the task."""
        return self._workspace_bytes

    def begin_task(self, index: int) -> None:
        """Turn to a task: set `peak_bytes`, each pool's use while the task runs."""
        self.index = index
        self.task = task = self.program.tasks[index]
        self.reads = self.touches.reads[index]
        self.writes = writes = self.touches.writes[index]
        there = self.there
        grows = writes
        if not there.isdisjoint(writes):
            grows = tuple([place for place in writes if place not in there])
        self.grows = grows
        self._workspace_bytes = workspace_bytes = workspace_of(task)
        if not grows and not workspace_bytes:
            self.peak_bytes = self.used_bytes
            return
        peak_bytes = dict(self.used_bytes)
        for place in grows:
            peak_bytes[self._pool_of[place]] += self._size_of[place]
        if workspace_bytes:
            peak_bytes[self.program.workspace_pool] += workspace_bytes
        self.peak_bytes = peak_bytes

    def end_task(self) -> None:
        """Let the task happen: new versions, new copies, frees."""
        if isinstance(self.task, Free):
            (place,) = self.reads
            used_bytes = dict(self.used_bytes)
            used_bytes[self._pool_of[place]] -= self._size_of[place]
            self.used_bytes = used_bytes
            self.there.discard(place)
            self.stale.discard(place)
            return
        if self.grows:
            if self._workspace_bytes:
                used_bytes = dict(self.used_bytes)
                for place in self.grows:
                    used_bytes[self._pool_of[place]] += self._size_of[place]
                self.used_bytes = used_bytes
            else:
                self.used_bytes = self.peak_bytes
            self.there.update(self.grows)
        if not self.shared.isdisjoint(self.writes):
            for place in self.writes:
                self.stale.discard(place)
                if not isinstance(self.task, Copy):
                    others = [each for each in self.siblings(place) if each != place]
                    self.stale.update(self.there.intersection(others))

    def siblings(self, place: int) -> Places:
        """All places of the buffer of a place."""
        return self._siblings.get(place, (place,))

    def is_newest(self, place: int) -> bool:
        """Whether a place holds the newest version of its buffer."""
        return place in self.there and place not in self.stale

    def has_other_newest(self, place: int) -> bool:
        """Whether another tier holds the newest version of a place's buffer."""
        return any(each != place and self.is_newest(each) for each in self.siblings(place))

    def may_create(self, place: int) -> bool:
        """Whether a buffer may be made anew in a place: it is nowhere, or waits only at home."""
        if place in self.there:
            return False
        siblings = self._siblings.get(place)
        if siblings is None or self.buffer_at(place).home is not None:
            return True
        return self.there.isdisjoint(siblings)

    def buffer_at(self, place: int) -> Buffer:
        """The buffer of a place."""
        return self.buffers[place % len(self.buffers)]

    def tier_at(self, place: int) -> TierName:
        """The tier of a place."""
        return self.touches.tier_at(place)

    def pool_at(self, place: int) -> PoolId:
        """The pool of a place."""
        return self._pool_of[place]

    def tiers_with(self, place: int) -> str:
        """Say where a place's buffer lies now, for an error."""
        found = [
            f"{self.tier_at(each)} ({'stale' if each in self.stale else 'newest'})"
            for each in self.siblings(place)
            if each in self.there
        ]
        return f"it lies in {', '.join(found)}" if found else "it lies in no tier"

    def frees(self, index: int, place: int) -> bool:
        """Whether a task frees a place."""
        return isinstance(self.program.tasks[index], Free) and place in self.touches.reads[index]

    def makes(self, index: int, place: int) -> bool:
        """Whether a task writes a new version of a buffer in a place."""
        copies = isinstance(self.program.tasks[index], Copy)
        return not copies and place in self.touches.writes[index]

    def brings(self, index: int, place: int) -> bool:
        """Whether a task creates a buffer in a place or copies it there."""
        if place not in self.touches.writes[index]:
            return False
        return not self.makes(index, place) or place not in self.touches.reads[index]

    def find_last(self, holds: Callable[[int], bool]) -> int | None:
        """Find the last task before this one that passes a test."""
        return next((index for index in range(self.index - 1, -1, -1) if holds(index)), None)

    def find_next(self, holds: Callable[[int], bool]) -> int | None:
        """Find the first task after this one that passes a test."""
        later = range(self.index + 1, len(self.program.tasks))
        return next((index for index in later if holds(index)), None)
