"""What each task asks of lanes and memory, looked up once for every order in which it is timed.

In: a program, its costs, and how lanes share paths. Out: `Footprints`: for each task its lane, its
duration and the places that it touches, by number. A place is a buffer in a tier.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

from packhorse.program.buffers import Buffer, BufferId, PoolId, TierName
from packhorse.program.lanes import assign_lanes
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Free,
    Lane,
    Recv,
    Send,
    Task,
    accesses_of,
    workspace_of,
)
from packhorse.simulator.costs import CostModel
from packhorse.simulator.sharing import SharedPath, stretch_of
from packhorse.timeline.names import name_of

Place = tuple[BufferId, TierName]

# Making a union for each task takes longer than asking for it.
_MEETING: Final = (Send, Recv)


class Footprint(NamedTuple):
    """What one task asks for; places by number. A search makes them by the hundred thousand.

    `waits_for` are the places whose users it has to wait for: those that it writes, or frees.
    `shares` says that it takes its turn on a path that its lane shares, `gives_back` that something
    is released when it is over, `meets` that another rank has its part in it.
    """

    task: Task
    lane: Lane
    duration_ns: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    waits_for: tuple[int, ...]
    workspace_bytes: int
    frees: bool
    shares: bool
    gives_back: bool
    meets: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprints:
    """The footprints of a program's tasks in its order, and the table of places.

    A place that no pool has room for has the pool None. `homes` are what is there at the start.
    """

    of_tasks: tuple[Footprint, ...]
    places: tuple[Place, ...]
    pools: tuple[PoolId | None, ...]
    sizes: tuple[int, ...]
    homes: tuple[int, ...]
    workspace_pool: PoolId


def find_footprints(
    program: Program,
    *,
    costs: CostModel,
    shared: Sequence[SharedPath] = (),
) -> Footprints:
    """Look up what every task of a program asks for.

    Args:
        costs: gives each task's duration in ns.
        shared: lanes that share a path.

    Raises:
        ValueError: a duration is negative.
    """
    stretch = {
        lane: factor
        for path in shared
        for factor in (stretch_of(path, program, costs),)
        for lane in path.lanes
    }
    # A place gets the next number when it is first asked for.
    count = itertools.count()
    numbers: dict[TierName, dict[BufferId, int]] = {
        "device": defaultdict(count.__next__),
        "host": defaultdict(count.__next__),
        "disk": defaultdict(count.__next__),
    }
    of_tasks: list[Footprint] = []
    for task, lane in zip(program.tasks, assign_lanes(program.tasks), strict=True):
        duration_ns = costs.duration_ns(task)
        workspace_bytes = workspace_of(task)
        if duration_ns < 0:
            raise ValueError(f"the cost of {name_of(task)} is negative: {duration_ns} ns")
        frees = isinstance(task, Free)
        shares = lane in stretch and not frees
        if shares:
            duration_ns = ceil(duration_ns * stretch[lane])
        read_tier, read, write_tier, written = accesses_of(task)
        reads = tuple(map(numbers[read_tier].__getitem__, read))
        writes = tuple(map(numbers[write_tier].__getitem__, written))
        of_tasks.append(
            Footprint(
                task,
                lane,
                duration_ns,
                reads,
                writes,
                # A buffer may be dropped only when all its users are done.
                reads if frees else writes,
                workspace_bytes,
                frees,
                shares,
                frees or workspace_bytes > 0,
                isinstance(task, _MEETING),
            )
        )
    homes = tuple(
        [
            numbers[buffer.home][buffer.id]
            for buffer in program.buffers.values()
            if buffer.home is not None and program.finds(buffer)
        ]
    )
    named: dict[int, Place] = {
        at: (name, tier) for tier, found in numbers.items() for name, at in found.items()
    }
    places = tuple([named[at] for at in range(len(named))])
    found = [program.buffers.get(name) for name, _ in places]
    return Footprints(
        of_tasks=tuple(of_tasks),
        places=places,
        pools=tuple(
            _pool_in(buffer, tier) for buffer, (_, tier) in zip(found, places, strict=True)
        ),
        sizes=tuple(0 if buffer is None else buffer.size_bytes for buffer in found),
        homes=homes,
        workspace_pool=program.workspace_pool,
    )


def _pool_in(buffer: Buffer | None, tier: TierName) -> PoolId | None:
    return None if buffer is None else buffer.pools.get(tier)
