"""Prefetch: what comes into the device is asked for some compute tasks before its use.

In: tasks with their copies and frees, the table of buffers, the pools with their capacities, and
how many compute tasks a copy may run ahead. Out: the same tasks, each Copy into the device as early
as its rules allow.

    for each Copy into the device, in program order:
        go up past earlier tasks while
            it has passed fewer than `depth` compute tasks
            the task above does not touch the buffer, and is no copy of the same lane
            the buffer fits into its pool while the task above runs

Lanes run ahead by themselves as far as reservations fit, in program order: a copy waits behind the
compute tasks that were issued before it and whose own reservations have to wait. One that was moved
up does not. What leaves the device through a slow lane is counted until the next compute task has
run, since a copy that waits for a write would hold up the compute tasks that it was moved past.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from packhorse.compiler.replay import replay_pools
from packhorse.program.buffers import Buffer, BufferId, Pool, PoolId
from packhorse.program.lanes import assign_lanes
from packhorse.program.tasks import (
    BlockTask,
    Copy,
    Export,
    Free,
    Lane,
    Task,
    Update,
    accesses_of,
    lane_of,
)


def hoist_copies(
    tasks: Sequence[Task],
    buffers: Mapping[BufferId, Buffer],
    pools: Sequence[Pool],
    *,
    workspace_pool: PoolId,
    depth: int,
) -> tuple[Task, ...]:
    """Move every Copy into the device up past at most `depth` compute tasks.

    A replay of the result holds no more of any pool than its capacity, if one of `tasks` does.
    """
    if depth == 0:
        return tuple(tasks)
    return Hoist(tasks, buffers, workspace_pool=workspace_pool).order(pools, depth)


class Hoist:
    """Moves the copies of one list of tasks up, for any pools and depths; replays them once.

    Args:
        lanes: those of the tasks, for who knows them.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        buffers: Mapping[BufferId, Buffer],
        *,
        workspace_pool: PoolId,
        lanes: Sequence[Lane] | None = None,
    ) -> None:
        self._tasks = tuple(tasks)
        self._loads: dict[int, tuple[Buffer, Lane]] = {
            position: (buffers[task.buffer], lane_of(task))
            for position, task in enumerate(tasks)
            if isinstance(task, Copy) and task.target == "device"
        }
        landing = {buffer.pools["device"] for buffer, _ in self._loads.values()}
        self._held: Mapping[PoolId, list[int]] = {}
        if landing:
            known = assign_lanes(tasks) if lanes is None else lanes
            self._held = _count_held(tasks, buffers, workspace_pool, landing, known)
        self._computes = [_computes(task) for task in tasks]
        self._copies = [lane_of(task) if isinstance(task, Copy) else None for task in tasks]
        self._touched = [_touched_by(task) for task in tasks]

    def order(self, pools: Sequence[Pool], depth: int) -> tuple[Task, ...]:
        """Give the tasks in their new order; see `hoist_copies`."""
        if depth == 0 or not self._loads:
            return self._tasks
        capacity_bytes = {pool.id: pool.capacity_bytes for pool in pools}
        # What the pools hold while each placed task runs.
        fills: dict[PoolId, list[int]] = {pool: [] for pool in self._held}
        placed: list[int] = []
        for position in range(len(self._tasks)):
            at = len(placed)
            load = self._loads.get(position)
            if load is not None:
                buffer, lane = load
                pool = buffer.pools["device"]
                at = self._find_place(
                    placed, fills[pool], capacity_bytes[pool], buffer, lane, depth
                )
                for between in range(at, len(placed)):
                    fills[pool][between] += buffer.size_bytes
            for pool, held in fills.items():
                # One that was moved up runs beside no more than the task that it was placed before.
                held.insert(at, held[at] if at < len(held) else self._held[pool][position])
            placed.insert(at, position)
        return tuple(self._tasks[position] for position in placed)

    def _find_place(
        self,
        placed: Sequence[int],
        fills: Sequence[int],
        capacity_bytes: int,
        buffer: Buffer,
        lane: Lane,
        depth: int,
    ) -> int:
        at, passed = len(placed), 0
        most = capacity_bytes - buffer.size_bytes
        while at and fills[at - 1] <= most:
            above = placed[at - 1]
            if self._copies[above] == lane or buffer.id in self._touched[above]:
                break
            passed += self._computes[above]
            if passed > depth:
                break
            at -= 1
        return at


def _count_held(
    tasks: Sequence[Task],
    buffers: Mapping[BufferId, Buffer],
    workspace_pool: PoolId,
    pools: Collection[PoolId],
    lanes: Sequence[Lane],
) -> Mapping[PoolId, list[int]]:
    # What pools hold while each task runs, with what a slow lane may not have released yet.
    replayed = replay_pools(tasks, buffers, workspace_pool=workspace_pool).task_bytes
    held: dict[PoolId, list[int]] = {pool: replayed[pool].tolist() for pool in pools}
    leaving: list[tuple[int, PoolId, int]] = []
    num_computed = 0
    for position, (task, lane) in enumerate(zip(tasks, lanes, strict=True)):
        num_computed += _computes(task)
        if leaving and leaving[0][0] < num_computed:
            leaving = [item for item in leaving if item[0] >= num_computed]
        for _, pool, size_bytes in leaving:
            held[pool][position] += size_bytes
        if isinstance(task, Free) and lane not in ("compute", "update"):
            freed = buffers[task.buffer]
            pool = freed.pools[task.tier]
            if pool in held:
                leaving.append((num_computed + 1, pool, freed.size_bytes))
    return held


def _computes(task: Task) -> bool:
    # What takes time beside copies; a save has only its exports.
    return isinstance(task, BlockTask | Update | Export)


def _touched_by(task: Task) -> tuple[BufferId, ...]:
    _, read, _, written = accesses_of(task)
    return read + written
