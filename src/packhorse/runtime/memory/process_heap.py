"""The C heap of this process while an engine lives: its mode, its room, and its limit.

In: the plan's heap mode, pools and programs, and what the process may hold. Out: a process within
that. The ledger counts what lives; a heap that keeps what is freed holds more, and what it holds in
pieces may serve none of the blocks of a body. Where a body, or a value that comes back from another
tier, could take the process above what it may hold, free pages go back first; where that does not
do, a kept heap is mapped for as long: that costs time, and holds what lives.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from threading import Condition, Lock
from typing import Final, Literal, NamedTuple

from packhorse.graph.liveness import HeapUse
from packhorse.machine.process_memory import ResidentMeter
from packhorse.program.buffers import BufferId, Pool, PoolId
from packhorse.program.program import Program, Proof
from packhorse.program.tasks import Task, workspace_of, writes_of
from packhorse.runtime.kept_heap import find_heap_buffers, find_kept_bytes
from packhorse.runtime.memory.heap import (
    count_live_blocks,
    open_holes,
    seal_holes,
    set_heap_mode,
    settle_heap,
    trim_heap,
)
from packhorse.units import MIB

# What was trimmed in vain of a mapped heap is not trimmed again before the process has grown by so
# much.
_REPEAT_BYTES: Final = 4 * MIB
# What objects, other lanes and the kernel's own count may add while a body runs.
_RESERVE_BYTES: Final = 6 * MIB
# Blocks of other sizes leave half of a kept heap's unused pages in pieces that serve no block of a
# body; and what the body itself frees may serve none of its later ones: measured, a quarter of it.
_USABLE: Final = 2
_WASTED: Final = 4
# Where as many times what a body may take is left, room will not be short at once.
_NEAR: Final = 3


class _Taking(NamedTuple):
    # What the process held before a task began to take so much.
    held_bytes: int
    size_bytes: int
    is_body: bool


class _Room(NamedTuple):
    # What a task may take, and whether it could be too much.
    taking: _Taking
    is_short: bool


_Kind = tuple[type[Task], HeapUse]


class ProcessHeap:
    """Sets the mode for the whole process; `close` opens the holes that it occupied.

    Args:
        pools: those that are this process's memory; none of them: there is no limit.
        programs: all that will run.
        limit_bytes: what the process may hold as the kernel counts it; None: what it holds now and
            the pools.
        unfilled_bytes: what chunk states of a pool may still take pages for, while a body runs.
        drop_spare: gives back memory that is kept for what comes next.
    """

    def __init__(
        self,
        mode: Literal["keep", "map"],
        pools: Iterable[Pool],
        programs: Iterable[Program] = (),
        limit_bytes: int | None = None,
        unfilled_bytes: Callable[[PoolId], int] = lambda _: 0,
        drop_spare: Callable[[], None] = lambda: None,
    ) -> None:
        self._drop_spare = drop_spare
        self._mode: Literal["keep", "map"] = mode
        self._meter = ResidentMeter()
        pools, programs = tuple(pools), tuple(programs)
        # A pool that bodies share with chunks is filled by the one or the other.
        shared = {program.workspace_pool for program in programs}
        self._chunk_pools = [pool.id for pool in pools if pool.id not in shared]
        self._unfilled_bytes = unfilled_bytes
        set_heap_mode(mode)
        self._sealed = seal_holes(mode)
        self._is_settled = mode == "map"
        granted_bytes = sum(pool.capacity_bytes for pool in pools)
        trim_heap()
        self._limit_bytes: int | None = None
        if granted_bytes:
            limit_bytes = limit_bytes or self._meter.read() + granted_bytes
            self._limit_bytes = limit_bytes - _RESERVE_BYTES
        self._sizes: Mapping[BufferId, int] = find_heap_buffers(programs) if mode == "keep" else {}
        self._repeat_bytes = 0
        self._changed = Condition(Lock())
        self._num_waiting = 0
        self._taking: dict[object, _Taking] = {}
        # A kept heap that is mapped now: the tasks for which it is, and the holes occupied for it.
        self._mapped_for: set[object] = set()
        self._sealed_for_now: tuple[int, ...] = ()
        # Since free pages went back last: what the process held beyond live blocks then, and by how
        # much the heap grew when a kind of body ran last.
        self._tight_bytes = self._beyond_blocks_bytes()
        self._growth_bytes: dict[_Kind, int] = {}

    def settle(self, program: Program, proof: Proof) -> None:
        """Let a kept heap take what a program will use, once, so that it peaks the first time."""
        if not self._is_settled:
            self._sealed += settle_heap(*find_kept_bytes(program, proof))
        self._is_settled = True

    def keep_as_is(self) -> None:
        """Do not settle it any more: what runs now takes as much."""
        self._is_settled = True

    @contextmanager
    def room(self, task: Task, use: HeapUse | None = None) -> Generator[None]:
        """Inside, a lane takes what a task makes; free pages go back before if they have to.

        Lanes may do so beside each other: what one of them is still to take counts for the others.
        A value waits for the bodies that run where there is no room beside them.

        Args:
            use: what the task's body takes of the heap. Nothing of a kept heap can serve large
                blocks, and the pages that its small blocks had stay when large ones come. None: a
                value is made once, in one place.
        """
        if self._limit_bytes is None:
            yield
            return
        place = object()
        with self._changed:
            if use is None and self._mode == "keep":
                self._await_bodies(self._limit_bytes, task)
            room = self._make_room(self._limit_bytes, place, task, use)
            self._taking[place] = room.taking
            # Counting blocks takes a walk over all that are free, for which there is a reason only
            # where room is short, or may soon be.
            before_bytes = self._unmapped_bytes() if use is not None and room.is_short else None
        try:
            yield
        finally:
            with self._changed:
                self._end_taking(place)
                if use is not None and before_bytes is not None and not self._mapped_for:
                    grown_bytes = self._unmapped_bytes() - before_bytes
                    self._growth_bytes[type(task), use] = max(0, grown_bytes)
                self._keep_again(place)
                if self._num_waiting:
                    self._changed.notify_all()

    def _await_bodies(self, limit_bytes: int, task: Task) -> None:
        """Let a value wait for the bodies that run now, where there is no room beside them.

        What a body has of a kept heap it cannot give back before it ends, and it never waits for
        another task.
        """
        size_bytes = self._body_bytes(task)

        def fits() -> bool:
            held_bytes = self._held_bytes()
            return held_bytes + size_bytes + self._beside_bytes(held_bytes) <= limit_bytes

        def is_beside_body() -> bool:
            return any(taking.is_body for taking in self._taking.values())

        if fits() or not is_beside_body():
            return
        self._give_back()
        self._num_waiting += 1
        try:
            while is_beside_body() and not fits():
                self._changed.wait()
        finally:
            self._num_waiting -= 1

    def _give_back(self) -> int:
        """Give all free pages back; returns what the process holds then."""
        self._drop_spare()
        trim_heap()
        held_bytes = self._held_bytes()
        self._tight_bytes = self._beyond_blocks_bytes()
        self._growth_bytes.clear()
        self._repeat_bytes = held_bytes + _REPEAT_BYTES
        return held_bytes

    def _make_room(self, limit_bytes: int, place: object, task: Task, use: HeapUse | None) -> _Room:
        """Give back what has to go; returns what the task may take."""
        held_bytes, most_bytes = self._held_bytes(), self._body_bytes(task)
        beside_bytes = self._beside_bytes(held_bytes)
        is_body = use is not None
        if self._mode == "map" or self._mapped_for or use is None:
            if held_bytes + most_bytes + beside_bytes <= limit_bytes:
                return _Room(_Taking(held_bytes, most_bytes, is_body), is_short=False)
            if self._mode == "map" and held_bytes < self._repeat_bytes:
                return _Room(_Taking(held_bytes, most_bytes, is_body), is_short=False)
        else:
            small_bytes = max(use.small_bytes, most_bytes - use.large_bytes)
            new_bytes = small_bytes + small_bytes // _WASTED
            most_bytes = use.large_bytes + new_bytes
            if held_bytes + most_bytes + beside_bytes <= limit_bytes:
                is_short = held_bytes + _NEAR * most_bytes + beside_bytes > limit_bytes
                return _Room(_Taking(held_bytes, most_bytes, is_body), is_short=is_short)
            # What is kept for others goes before anything is guessed.
            self._drop_spare()
            held_bytes = self._held_bytes()
            beside_bytes = self._beside_bytes(held_bytes)
            if held_bytes + most_bytes + beside_bytes <= limit_bytes:
                return _Room(_Taking(held_bytes, most_bytes, is_body), is_short=True)
            # What such a body found in the heap the last time it may find again.
            known_bytes = self._growth_bytes.get((type(task), use))
            if known_bytes is not None:
                new_bytes = max(known_bytes, new_bytes - self._unused_bytes() // _USABLE)
                likely_bytes = use.large_bytes + new_bytes
                if held_bytes + likely_bytes + beside_bytes <= limit_bytes:
                    return _Room(_Taking(held_bytes, likely_bytes, is_body), is_short=True)
        held_bytes = self._give_back()
        if self._mode == "keep" and held_bytes + most_bytes + beside_bytes > limit_bytes:
            self._map(place)
            most_bytes = self._body_bytes(task)
        return _Room(_Taking(held_bytes, most_bytes, is_body), is_short=True)

    def _unused_bytes(self) -> int:
        """Pages that the heap holds beyond what lives in it: those that it got since they went."""
        return max(0, self._beyond_blocks_bytes() - self._tight_bytes)

    def _beyond_blocks_bytes(self) -> int:
        live = count_live_blocks()
        # Where nobody counts nothing is known to be free.
        return 0 if live is None else self._held_bytes() - live.heap_bytes - live.mapped_bytes

    def _unmapped_bytes(self) -> int:
        live = count_live_blocks()
        return self._held_bytes() - (0 if live is None else live.mapped_bytes)

    def _beside_bytes(self, held_bytes: int) -> int:
        """What other lanes are still to take: what the process has grown by since is there."""
        if not self._taking:
            return 0
        wanted_bytes = sum(taking.size_bytes for taking in self._taking.values())
        before_bytes = min(taking.held_bytes for taking in self._taking.values())
        return max(0, wanted_bytes - max(0, held_bytes - before_bytes))

    def _end_taking(self, place: object) -> None:
        """What a task took is there from now on: others have not grown by it."""
        ended = self._taking.pop(place)
        if self._taking:
            grown_bytes = max(0, self._held_bytes() - ended.held_bytes)
            taken_bytes = min(ended.size_bytes, grown_bytes)
            self._taking = {
                place: taking._replace(held_bytes=taking.held_bytes + taken_bytes)
                for place, taking in self._taking.items()
            }

    def _held_bytes(self) -> int:
        """What the process holds, with chunks as they may become."""
        return self._meter.read() + sum(map(self._unfilled_bytes, self._chunk_pools))

    def _body_bytes(self, task: Task) -> int:
        made_bytes = sum([self._sizes.get(buffer, 0) for buffer, _ in writes_of(task)])
        return made_bytes + workspace_of(task)

    def _map(self, place: object) -> None:
        if not self._mapped_for:
            set_heap_mode("map")
            self._sealed_for_now = seal_holes("map")
        self._mapped_for.add(place)

    def _keep_again(self, place: object) -> None:
        if place not in self._mapped_for:
            return
        self._mapped_for.remove(place)
        if not self._mapped_for:
            open_holes(self._sealed_for_now)
            self._sealed_for_now = ()
            set_heap_mode("keep")
            # The holes that are open again have no pages, and what else is free is not known.
            self._tight_bytes = self._beyond_blocks_bytes()

    def close(self) -> None:
        """Open the holes. Closing twice is harmless."""
        self._meter.close()
        open_holes((*self._sealed, *self._sealed_for_now))
        self._sealed = self._sealed_for_now = ()
