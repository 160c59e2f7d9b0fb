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

Training steps run into each other: the next one is issued as soon as the step's values are there,
while its last writes are on their way. So a step is simulated behind another one and counted from
the end of that one to its own: that is how long each of many steps takes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final, NamedTuple

from packhorse.machine.spec import Machine
from packhorse.program.buffers import Pool, PoolId
from packhorse.program.bulk import collector_waits
from packhorse.program.lanes import has_transfers, lanes_used
from packhorse.program.program import Program
from packhorse.program.tasks import Emit, Lane, Task
from packhorse.simulator.costs import CostModel, TaskCosts
from packhorse.simulator.footprints import Footprint, find_footprints
from packhorse.simulator.ledger import Ledger
from packhorse.simulator.sharing import PathCalendar, SharedPath, sharing_of
from packhorse.timeline.names import LANES, kind_of, name_of
from packhorse.timeline.spec import Span, Timeline

ISSUER: Final = "issuer"
"""The worker that is the issuing thread itself: nothing is issued while it works."""

INLINE: Final[Mapping[Lane, str]] = dict.fromkeys(LANES, ISSUER)
"""Every lane on the issuing thread: tasks run one after another in program order."""

OVERLAPPED: Final[Mapping[Lane, str]] = {lane: lane for lane in LANES}
"""Every lane on a worker of its own, and so are those to and from other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When each task of a program starts and ends, and the most that each pool holds.

    The program is counted from `since_ns` on: where the one before it ended, or where it started.
    """

    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    since_ns: int
    peak_bytes: Mapping[PoolId, int]

    @property
    def makespan_ns(self) -> int:
        """When the last task ends."""
        return max(self.ends_ns, default=0)

    @property
    def step_ns(self) -> int:
        """How long it takes, counted so."""
        return max(self.makespan_ns - self.since_ns, 0)


def simulate_run(program: Program, *, costs: TaskCosts) -> Timeline:
    """Predict a program as the runtime runs it: lanes overlap where something is moved.

    A training step is one of many. How reads and writes share a drive is the machine's to say: see
    `sharing`.

    Raises:
        RuleError, ValueError: as `simulate_program`.
    """
    workers, shared = lanes_of_run(program, costs.machine)
    return simulate_program(
        program,
        costs=costs,
        workers=workers,
        shared=shared,
        rounds=rounds_of(program),
    )


def time_run(program: Program, *, costs: CostModel, machine: Machine) -> Times:
    """Give the times of `simulate_run` alone.

    Raises:
        RuleError, ValueError: as `simulate_program`.
    """
    return Rehearsal(program, costs=costs, machine=machine).time(program.tasks, program.pools)


class Rehearsal:
    """The tasks of a program, to be timed as `simulate_run` times them in many orders and pools.

    Raises:
        ValueError: a duration is negative.
    """

    def __init__(self, program: Program, *, costs: CostModel, machine: Machine) -> None:
        self._workers, self._shared = lanes_of_run(program, machine)
        self._rounds = rounds_of(program)
        self._footprints = find_footprints(program, costs=costs, shared=self._shared)
        self._by_task = {id(each.task): each for each in self._footprints.of_tasks}

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of the program's tasks, in its order."""
        return tuple(each.lane for each in self._footprints.of_tasks)

    def time(self, tasks: Sequence[Task], pools: Sequence[Pool]) -> Times:
        """Time the very tasks of the program in another order, within other pools.

        Each Free has to follow the same task that touches its buffer as in the program.

        Raises:
            RuleError: as `simulate_program`.
        """
        ordered = [self._by_task[id(task)] for task in tasks]
        ledger = Ledger(self._footprints, ordered, pools)
        return _run(ordered, ledger, self._workers, self._shared, self._rounds)


@collector_waits()
def simulate_program(
    program: Program,
    *,
    costs: CostModel,
    workers: Mapping[Lane, str] = INLINE,
    shared: Sequence[SharedPath] = (),
    rounds: int = 1,
) -> Timeline:
    """Predict when each task runs and how much of each pool is in use.

    Args:
        program: any program; one that the verifier accepts always gets through.
        costs: gives each task's duration in ns.
        workers: the worker that executes each lane; lanes that share one run one after another.
        shared: lanes that share a path, such as a drive that reads and writes at one total rate.
        rounds: how many times the program runs, each time into the next; the last one is told.

    Raises:
        RuleError: a task touches a buffer that is not there (`present`), or needs more than a
            pool can ever have free (`capacity`).
        ValueError: a lane has no worker, or a duration is negative.
    """
    footprints = find_footprints(program, costs=costs, shared=shared)
    ordered = footprints.of_tasks
    ledger = Ledger(footprints, ordered, program.pools)
    times = _run(ordered, ledger, workers, shared, rounds)
    zero_ns = min(times.starts_ns, default=0)
    return tell_times(program.rank, ordered, times, ledger, zero_ns)


def tell_times(
    rank: int, ordered: Sequence[Footprint], times: Times, ledger: Ledger, zero_ns: int
) -> Timeline:
    """Put times into a timeline that begins at `zero_ns`."""
    return Timeline(
        source="simulated",
        rank=rank,
        spans=tuple(
            Span(
                index=index,
                name=name_of(footprint.task),
                kind=kind_of(footprint.task),
                lane=footprint.lane,
                start_ns=start_ns - zero_ns,
                end_ns=end_ns - zero_ns,
            )
            for index, (footprint, start_ns, end_ns) in enumerate(
                zip(ordered, times.starts_ns, times.ends_ns, strict=True)
            )
        ),
        memory=ledger.curves(zero_ns),
        since_ns=times.since_ns - zero_ns,
    )


def lanes_of_run(
    program: Program, machine: Machine
) -> tuple[Mapping[Lane, str], Sequence[SharedPath]]:
    """Give the worker of each lane as the runtime has them, and the paths that lanes share."""
    if has_transfers(program.tasks):
        lanes = {lane: lane for lane in lanes_used(program.tasks)}
        return {**OVERLAPPED, **lanes}, sharing_of(machine)
    return INLINE, ()


def rounds_of(program: Program) -> int:
    """How often a program is simulated: what a step does depends on the one before it alone."""
    return 2 if program.kind == "train_step" and has_transfers(program.tasks) else 1


class Meeting(NamedTuple):
    """A Send or Recv that waits for the other rank's part in it."""

    task: Task
    ready_ns: int
    duration_ns: int


Walk = Generator[Meeting, tuple[int, int], Times]
"""Asks when each meeting starts and ends; ends with the times."""


def _run(
    ordered: Sequence[Footprint],
    ledger: Ledger,
    workers: Mapping[Lane, str],
    shared: Sequence[SharedPath],
    rounds: int,
) -> Times:
    # One rank alone: others are always ready.
    walk = walk_tasks(ordered, ledger, workers, shared, rounds)
    try:
        meeting = next(walk)
        while True:
            meeting = walk.send((meeting.ready_ns, meeting.ready_ns + meeting.duration_ns))
    except StopIteration as end:
        times: Times = end.value
        return times


def walk_tasks(
    ordered: Sequence[Footprint],
    ledger: Ledger,
    workers: Mapping[Lane, str],
    shared: Sequence[SharedPath],
    rounds: int,
) -> Walk:
    """Go through the tasks of one rank and give the times of the last round; fills the ledger."""
    # This is the inner loop of the search.
    for lane in {footprint.lane for footprint in ordered}:
        if lane not in workers:
            raise ValueError(f"lane {lane} has no worker")
    calendars: dict[Lane, PathCalendar] = {}
    for path in shared:
        calendars |= dict.fromkeys(path.lanes, PathCalendar(path))
    issue_ns = 0
    free_at_ns = dict.fromkeys(workers.values(), 0)
    written_ns = [0] * ledger.num_places
    used_ns = [0] * ledger.num_places
    starts_ns: list[int] = []
    ends_ns: list[int] = []
    emits = [at for at, footprint in enumerate(ordered) if isinstance(footprint.task, Emit)]
    since_ns = 0
    for index, footprint in chain.from_iterable(repeat(tuple(enumerate(ordered)), rounds)):
        if not index and ends_ns:
            # Whoever runs steps looks at the values of one before the next.
            issue_ns = max((issue_ns, *(ends_ns[at] for at in emits)))
            since_ns = max(ends_ns)
            starts_ns, ends_ns = [], []
        issue_ns = ledger.reserve(index, footprint, issue_ns)

        lane, duration_ns, reads = footprint.lane, footprint.duration_ns, footprint.reads
        changed = footprint.waits_for
        worker = workers[lane]
        start_ns = free_at_ns[worker]
        if issue_ns > start_ns:
            start_ns = issue_ns
        for place in reads:
            if written_ns[place] > start_ns:
                start_ns = written_ns[place]
        for place in changed:
            if used_ns[place] > start_ns:
                start_ns = used_ns[place]
        end_ns = start_ns + duration_ns
        if footprint.meets:
            start_ns, end_ns = yield Meeting(footprint.task, start_ns, duration_ns)
        elif footprint.shares:
            start_ns, end_ns = calendars[lane].book(lane, start_ns, duration_ns)
        for place in reads:
            if end_ns > used_ns[place]:
                used_ns[place] = end_ns
        for place in changed:
            written_ns[place] = used_ns[place] = end_ns

        free_at_ns[worker] = end_ns
        if footprint.gives_back:
            ledger.release_at(end_ns, footprint)
        if worker == ISSUER:
            issue_ns = end_ns
        starts_ns.append(start_ns)
        ends_ns.append(end_ns)
    return Times(
        starts_ns=tuple(starts_ns),
        ends_ns=tuple(ends_ns),
        since_ns=max(since_ns, min(starts_ns, default=0)),
        peak_bytes=ledger.peak_bytes,
    )
