"""When does each task run, and how much memory is in use meanwhile?

In: a program, a cost model, and which lanes share a worker. Out: a predicted `Timeline` in whole
nanoseconds. It follows the memory contract of the executor:

    for task in program order:                       (the issuing thread)
        wait until every pool has room for what the task creates and its workspace
        reserve it                                   issue_ns
        start = max(issue_ns, the worker is free, every conflicting earlier task is complete)
        end   = start + duration                     (later, and slower, on a path that is shared)
        at end: release the workspace; a Free releases its buffer
        if the task's worker is the issuing thread itself, issue nothing before `end`

Two tasks conflict when they touch the same buffer in the same tier and one of them writes or
frees it. A task waits only for earlier ones and every lane is first in, first out, so one pass in
program order finds all times; memory that is still to be released waits in a heap by time. A
program that passes the sequential replay always gets through: when all earlier tasks are complete,
the ledger is the replay's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from types import MappingProxyType
from typing import Final

from packhorse.errors import RuleError
from packhorse.machine.spec import Machine
from packhorse.program.buffers import BufferId, PoolId, TierName
from packhorse.program.lanes import assign_lanes, has_transfers
from packhorse.program.program import Program
from packhorse.program.tasks import Free, Lane, Task, reads_of, workspace_of, writes_of
from packhorse.simulator.costs import CostModel, TaskCosts
from packhorse.simulator.crowding import crowding_of
from packhorse.simulator.sharing import PathCalendar, SharedPath, sharing_of, stretch_of
from packhorse.timeline.names import LANES, kind_of, name_of
from packhorse.timeline.spec import MemoryPoint, Span, Timeline
from packhorse.units import format_bytes

ISSUER: Final = "issuer"
"""The worker that is the issuing thread itself: nothing is issued while it works."""

INLINE: Final[Mapping[Lane, str]] = dict.fromkeys(LANES, ISSUER)
"""Every lane on the issuing thread: tasks run one after another in program order."""

OVERLAPPED: Final[Mapping[Lane, str]] = {lane: lane for lane in LANES}
"""Every lane on a worker of its own."""

_Place = tuple[BufferId, TierName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When each task of a program starts and ends, and the most that each pool holds."""

    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    peak_bytes: Mapping[PoolId, int]

    @property
    def makespan_ns(self) -> int:
        """When the last task ends."""
        return max(self.ends_ns, default=0)


def simulate_run(program: Program, *, costs: TaskCosts) -> Timeline:
    """Predict a program as the runtime runs it: lanes overlap where something is moved.

    How reads and writes share a drive is the machine's to say: see `sharing`.

    Raises:
        RuleError, ValueError: as `simulate_program`.
    """
    workers, shared = _lanes_of_run(program, costs.machine)
    crowding = crowding_of(program, costs.machine, costs)
    return simulate_program(
        program, costs=costs, workers=workers, shared=shared, slowed={"compute": crowding}
    )


def time_run(program: Program, *, costs: CostModel, machine: Machine) -> Times:
    """Give the times of `simulate_run` alone, for who looks at many programs.

    Raises:
        RuleError, ValueError: as `simulate_program`.
    """
    workers, shared = _lanes_of_run(program, machine)
    lanes = assign_lanes(program.tasks)
    slowed: Mapping[Lane, float] = {"compute": crowding_of(program, machine, costs)}
    starts_ns, ends_ns, ledger = _run(program, lanes, costs, workers, shared, slowed)
    return Times(
        starts_ns=tuple(starts_ns), ends_ns=tuple(ends_ns), peak_bytes=dict(ledger.peak_bytes)
    )


def simulate_program(
    program: Program,
    *,
    costs: CostModel,
    workers: Mapping[Lane, str] = INLINE,
    shared: Sequence[SharedPath] = (),
    slowed: Mapping[Lane, float] = MappingProxyType({}),
) -> Timeline:
    """Predict when each task runs and how much of each pool is in use.

    Args:
        program: any program; one that the verifier accepts always gets through.
        costs: gives each task's duration in ns.
        workers: the worker that executes each lane; lanes that share one run one after another.
        shared: lanes that share a path, such as a drive that reads and writes at one total rate.
        slowed: how many times as long the tasks of a lane take because of the others.

    Raises:
        RuleError: a task touches a buffer that is not there (`present`), or needs more than a
            pool can ever have free (`capacity`).
        ValueError: a lane has no worker, or a duration is negative.
    """
    lanes = assign_lanes(program.tasks)
    starts_ns, ends_ns, ledger = _run(program, lanes, costs, workers, shared, slowed)
    return Timeline(
        source="simulated",
        rank=program.rank,
        spans=tuple(
            Span(
                index=index,
                name=name_of(task),
                kind=kind_of(task),
                lane=lanes[index],
                start_ns=starts_ns[index],
                end_ns=ends_ns[index],
            )
            for index, task in enumerate(program.tasks)
        ),
        memory=ledger.curves(),
    )


def _lanes_of_run(
    program: Program, machine: Machine
) -> tuple[Mapping[Lane, str], Sequence[SharedPath]]:
    if has_transfers(program.tasks):
        return OVERLAPPED, sharing_of(machine)
    return INLINE, ()


def _run(
    program: Program,
    lanes: Sequence[Lane],
    costs: CostModel,
    workers: Mapping[Lane, str],
    shared: Sequence[SharedPath],
    slowed: Mapping[Lane, float],
) -> tuple[list[int], list[int], _Ledger]:
    # Starts, ends and what memory held. This is the inner loop of the search.
    ledger = _Ledger(program)
    issue_ns = 0
    free_at_ns: dict[str, int] = {}
    written_ns: dict[_Place, int] = {}
    used_ns: dict[_Place, int] = {}
    starts_ns: list[int] = []
    ends_ns: list[int] = []
    calendars: dict[Lane, PathCalendar] = {}
    stretch: dict[Lane, float] = {}
    for path in shared:
        calendars |= dict.fromkeys(path.lanes, PathCalendar(path))
        stretch |= dict.fromkeys(path.lanes, stretch_of(path, program, costs))
    for index, (task, lane) in enumerate(zip(program.tasks, lanes, strict=True)):
        worker = workers.get(lane)
        if worker is None:
            raise ValueError(f"lane {lane} has no worker")
        duration_ns = costs.duration_ns(task)
        if duration_ns < 0:
            raise ValueError(f"the cost of {name_of(task)} is negative: {duration_ns} ns")
        if lane in slowed:
            duration_ns = ceil(duration_ns * slowed[lane])
        reads, writes = reads_of(task), writes_of(task)
        is_free = isinstance(task, Free)

        issue_ns = ledger.reserve(index, task, reads, writes, issue_ns)

        start_ns = max(issue_ns, free_at_ns.get(worker, 0))
        # A buffer may be dropped only when all its users are done, so a Free counts as a change.
        changed = reads if is_free else writes
        for place in reads:
            if (at_ns := written_ns.get(place, 0)) > start_ns:
                start_ns = at_ns
        for place in changed:
            if (at_ns := used_ns.get(place, 0)) > start_ns:
                start_ns = at_ns
        end_ns = start_ns + duration_ns
        if lane in calendars and not is_free:
            duration_ns = ceil(duration_ns * stretch[lane])
            start_ns, end_ns = calendars[lane].book(lane, start_ns, duration_ns)
        for place in reads:
            if end_ns > used_ns.get(place, 0):
                used_ns[place] = end_ns
        for place in changed:
            written_ns[place] = used_ns[place] = end_ns

        free_at_ns[worker] = end_ns
        ledger.release_at(end_ns, task)
        if worker == ISSUER:
            issue_ns = end_ns
        starts_ns.append(start_ns)
        ends_ns.append(end_ns)
    ledger.finish()
    return starts_ns, ends_ns, ledger


class _Ledger:
    """Bytes in use per pool over time, and what will be released when.

    Reservations arrive in the order of time; a release that is due is booked before any later
    reservation, so each curve is recorded in the order of time too.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._capacity_bytes = {pool.id: pool.capacity_bytes for pool in program.pools}
        self._used_bytes = dict.fromkeys(self._capacity_bytes, 0)
        self._present: set[_Place] = set()
        self._due: list[tuple[int, int, PoolId, int]] = []
        self._num_due = 0
        # A load fills a machine on which nothing lies yet; every other program starts from homes.
        if program.kind != "load":
            for buffer in program.buffers.values():
                if buffer.home is not None:
                    self._present.add((buffer.id, buffer.home))
                    self._used_bytes[buffer.pools[buffer.home]] += buffer.size_bytes
        for pool, used_bytes in self._used_bytes.items():
            if used_bytes > self._capacity_bytes[pool]:
                raise RuleError(
                    f"pool {pool} starts with {format_bytes(used_bytes)} and holds"
                    f" {format_bytes(self._capacity_bytes[pool])}",
                    rule="capacity",
                    where="before the first task",
                    fix="plan again with the budget that the machine has",
                )
        self.peak_bytes = dict(self._used_bytes)
        self._points: dict[PoolId, list[tuple[int, int]]] = {
            pool: [(0, used_bytes)] for pool, used_bytes in self._used_bytes.items()
        }

    def reserve(
        self,
        index: int,
        task: Task,
        reads: Sequence[_Place],
        writes: Sequence[_Place],
        now_ns: int,
    ) -> int:
        """Reserve what a task creates and works in; returns when all of it fits, from `now_ns`."""
        need_bytes: dict[PoolId, int] = {}
        workspace_bytes = workspace_of(task)
        if workspace_bytes:
            need_bytes[self._program.workspace_pool] = workspace_bytes
        for place in reads:
            if place not in self._present:
                raise RuleError(
                    f"{name_of(task)} needs {place[0]}, which is not in the tier {place[1]}",
                    rule="present",
                    where=self._surroundings(index),
                )
        for place in writes:
            if place not in self._present:
                self._present.add(place)
                pool = self._pool_of(index, place)
                size_bytes = self._program.buffers[place[0]].size_bytes
                need_bytes[pool] = need_bytes.get(pool, 0) + size_bytes
        if isinstance(task, Free):
            self._present.discard((task.buffer, task.tier))
        while self._due and self._due[0][0] <= now_ns:
            self._book_release()
        while not self._fits(need_bytes.items()):
            if not self._due:
                raise self._never_fits(index, task, need_bytes)
            now_ns = max(now_ns, self._due[0][0])
            self._book_release()
            while self._due and self._due[0][0] <= now_ns:
                self._book_release()
        for pool, size_bytes in need_bytes.items():
            self._record(now_ns, pool, size_bytes)
        return now_ns

    def release_at(self, end_ns: int, task: Task) -> None:
        """Note what a task gives back when it completes."""
        workspace_bytes = workspace_of(task)
        if workspace_bytes:
            self._push(end_ns, self._program.workspace_pool, workspace_bytes)
        if isinstance(task, Free):
            buffer = self._program.buffers[task.buffer]
            self._push(end_ns, buffer.pools[task.tier], buffer.size_bytes)

    def finish(self) -> None:
        """Book what is released after the last reservation."""
        while self._due:
            self._book_release()

    def curves(self) -> Mapping[PoolId, tuple[MemoryPoint, ...]]:
        """Give the use of each pool over time."""
        return {
            pool: tuple(MemoryPoint(at_ns=at, used_bytes=used) for at, used in points)
            for pool, points in self._points.items()
        }

    def _push(self, end_ns: int, pool: PoolId, size_bytes: int) -> None:
        heappush(self._due, (end_ns, self._num_due, pool, size_bytes))
        self._num_due += 1

    def _book_release(self) -> None:
        at_ns, _, pool, size_bytes = heappop(self._due)
        self._record(at_ns, pool, -size_bytes)

    def _record(self, at_ns: int, pool: PoolId, change_bytes: int) -> None:
        used_bytes = self._used_bytes[pool] = self._used_bytes[pool] + change_bytes
        if used_bytes > self.peak_bytes[pool]:
            self.peak_bytes[pool] = used_bytes
        points = self._points[pool]
        # Two rises, or two falls, at one moment are one; a rise and a fall stay two points, or
        # the peak of a task that takes no time would be lost.
        if len(points) > 1 and points[-1][0] == at_ns:
            rose = points[-1][1] > points[-2][1]
            if rose == (change_bytes > 0):
                points[-1] = (at_ns, used_bytes)
                return
        points.append((at_ns, used_bytes))

    def _fits(self, need_bytes: Iterable[tuple[PoolId, int]]) -> bool:
        return all(
            self._used_bytes[pool] + size_bytes <= self._capacity_bytes[pool]
            for pool, size_bytes in need_bytes
        )

    def _pool_of(self, index: int, place: _Place) -> PoolId:
        buffer = self._program.buffers.get(place[0])
        if buffer is None or place[1] not in buffer.pools:
            raise RuleError(
                f"{place[0]} has no place in the tier {place[1]}",
                rule="present",
                where=self._surroundings(index),
            )
        return buffer.pools[place[1]]

    def _never_fits(self, index: int, task: Task, need_bytes: Mapping[PoolId, int]) -> RuleError:
        pool, size_bytes = next(
            (pool, size)
            for pool, size in need_bytes.items()
            if self._used_bytes[pool] + size > self._capacity_bytes[pool]
        )
        used, capacity = self._used_bytes[pool], self._capacity_bytes[pool]
        return RuleError(
            f"{name_of(task)} needs {format_bytes(size_bytes)} of pool {pool}, where"
            f" {format_bytes(capacity - used)} of {format_bytes(capacity)} are free and no earlier"
            " task will release more",
            rule="capacity",
            where=self._surroundings(index),
            fix="plan again with a larger budget, or free a buffer before this task",
        )

    def _surroundings(self, index: int) -> str:
        tasks = self._program.tasks
        near = range(max(0, index - 3), min(len(tasks), index + 4))
        return "\n".join(f"{'>' if at == index else ' '} {at} {name_of(tasks[at])}" for at in near)
