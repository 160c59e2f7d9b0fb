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

from packhorse.program.buffers import Buffer, BufferId, Pool, PoolId, TierName
from packhorse.program.lanes import assign_lanes
from packhorse.program.tasks import (
    Backward,
    Copy,
    Export,
    Forward,
    Free,
    Recompute,
    Task,
    Update,
    lane_of,
    reads_of,
    workspace_of,
    writes_of,
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
    landing = {
        buffers[task.buffer].pools["device"]
        for task in tasks
        if isinstance(task, Copy) and task.target == "device"
    }
    if depth == 0 or not landing:
        return tuple(tasks)
    capacity_bytes = {pool.id: pool.capacity_bytes for pool in pools}
    ledger = _Ledger(buffers, workspace_pool, landing)
    placed: list[Task] = []
    touched: list[tuple[BufferId, ...]] = []
    for task, lane in zip(tasks, assign_lanes(tasks), strict=True):
        held = ledger.step(task, is_slow=lane not in ("compute", "update"))
        names = tuple(buffer for buffer, _ in (*reads_of(task), *writes_of(task)))
        at = len(placed)
        if isinstance(task, Copy) and task.target == "device":
            buffer = buffers[task.buffer]
            pool = buffer.pools["device"]
            fills = ledger.fills[pool]
            most = capacity_bytes[pool] - buffer.size_bytes
            passed = 0
            while at and fills[at - 1] <= most and task.buffer not in touched[at - 1]:
                above = placed[at - 1]
                if isinstance(above, Copy) and lane_of(above) == lane:
                    break
                passed += _computes(above)
                if passed > depth:
                    break
                at -= 1
            for between in range(at, len(placed)):
                fills[between] += buffer.size_bytes
        ledger.insert(at, held)
        placed.insert(at, task)
        touched.insert(at, names)
    return tuple(placed)


class _Ledger:
    """What the pools where copies land hold while each placed task runs, workspace counted.

    `fills` has a number per placed task; it also counts what a slow lane may not have released yet.
    """

    def __init__(
        self, buffers: Mapping[BufferId, Buffer], workspace_pool: PoolId, pools: Collection[PoolId]
    ) -> None:
        self.fills: dict[PoolId, list[int]] = {pool: [] for pool in pools}
        self._buffers = buffers
        self._workspace_pool = workspace_pool
        self._present: set[tuple[BufferId, TierName]] = set()
        self._used = dict.fromkeys(pools, 0)
        self._leaving: list[tuple[int, PoolId, int]] = []
        self._num_computed = 0
        for buffer in buffers.values():
            if buffer.home is not None:
                self._present.add((buffer.id, buffer.home))
                self._add(buffer, buffer.home, 1)

    def step(self, task: Task, *, is_slow: bool) -> Mapping[PoolId, int]:
        """Replay a task; returns what each pool holds while it runs."""
        self._num_computed += _computes(task)
        if self._leaving and self._leaving[0][0] < self._num_computed:
            self._leaving = [item for item in self._leaving if item[0] >= self._num_computed]
        for buffer, tier in writes_of(task):
            if (buffer, tier) not in self._present:
                self._present.add((buffer, tier))
                self._add(self._buffers[buffer], tier, 1)
        held = dict(self._used)
        if self._workspace_pool in held:
            held[self._workspace_pool] += workspace_of(task)
        for _, pool, size_bytes in self._leaving:
            held[pool] += size_bytes
        if isinstance(task, Free):
            self._present.discard((task.buffer, task.tier))
            freed = self._buffers[task.buffer]
            self._add(freed, task.tier, -1)
            pool = freed.pools[task.tier]
            if is_slow and pool in held:
                self._leaving.append((self._num_computed + 1, pool, freed.size_bytes))
        return held

    def insert(self, at: int, held: Mapping[PoolId, int]) -> None:
        """Note the fills of a task that is placed at `at`."""
        for pool, fills in self.fills.items():
            # One that was moved up runs beside no more than the task that it was placed before.
            fills.insert(at, fills[at] if at < len(fills) else held[pool])

    def _add(self, buffer: Buffer, tier: TierName, sign: int) -> None:
        pool = buffer.pools[tier]
        if pool in self._used:
            self._used[pool] += sign * buffer.size_bytes


def _computes(task: Task) -> bool:
    # What takes time beside copies; a save has only its exports.
    return isinstance(task, Forward | Recompute | Backward | Update | Export)
