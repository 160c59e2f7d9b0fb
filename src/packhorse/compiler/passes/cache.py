"""Cache: what would leave the device and come back stays where there is room for it meanwhile.

In: tasks with all copies and frees, the table of buffers, and how full each pool may be. Out: fewer
copies, no pool fuller than that. An absence of a buffer is its Free from the device, the Copy that
brings it back, and the Copy out before the Free where it was changed:

    Copy(b, device -> away)   goes where b is changed again, or dropped for good, after its return;
                              else what comes later still needs it
    Free(b, device)           goes
    ...                       b takes room here instead
    Copy(b, away -> device)   goes

Absences are taken greedily, those first that save most transfers for the room and the tasks over
which they take it; of equal ones those of the earlier buffer, then the earlier ones, so that
micro-batches that are alike are treated alike. Each is taken if every task between has room. An
absence in which another tier changes the buffer is none: what stayed would be out of date.

Belady's choice (MIN) has the same order of merit for chunks of one size in a cache that is always
as large: the nearest next use wins. Here the room changes from task to task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.compiler.replay import Bytes, replay_pools
from packhorse.program.buffers import Buffer, BufferId, PoolId, TierName
from packhorse.program.tasks import Copy, Free, Task, reads_of, writes_of

IN_FLIGHT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A buffer is away from the device between two tasks; positions are those of its tasks.

    `copied_out` is None where nothing was changed, or where what was copied out is needed later.
    """

    buffer: BufferId
    copied_out: int | None
    freed: int
    brought: int

    @property
    def num_moves(self) -> int:
        """The transfers that are saved if it stays."""
        return 1 if self.copied_out is None else 2


def keep_in_valleys(
    tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer], *, workspace_pool: PoolId
) -> tuple[Task, ...]:
    """Keep what has room beneath the fullest task, less two chunks on their way in and out."""
    moved = [buffers[task.buffer].size_bytes for task in tasks if isinstance(task, Copy)]
    if not moved:
        return tuple(tasks)
    used = _left_after(tasks, buffers, workspace_pool)
    limits = {pool: int(held.max()) - IN_FLIGHT * max(moved) for pool, held in used.items()}
    return _keep(tasks, buffers, used, limits)


def keep_between_uses(
    tasks: Sequence[Task],
    buffers: Mapping[BufferId, Buffer],
    *,
    workspace_pool: PoolId,
    limit_bytes: Mapping[PoolId, int],
) -> tuple[Task, ...]:
    """Remove the copies and frees of absences for which there is room.

    Args:
        limit_bytes: how full a pool of the device may be; pools that it lacks take nothing in.
    """
    return _keep(tasks, buffers, _left_after(tasks, buffers, workspace_pool), limit_bytes)


def _keep(
    tasks: Sequence[Task],
    buffers: Mapping[BufferId, Buffer],
    used: Mapping[PoolId, Bytes],
    limit_bytes: Mapping[PoolId, int],
) -> tuple[Task, ...]:
    # Fills `used` with what stays.
    taken: list[Absence] = []
    order = {name: index for index, name in enumerate(buffers)}
    absences = find_absences(tasks, buffers)
    for absence in sorted(
        absences,
        key=lambda a: (-a.num_moves / (a.brought - a.freed), order[a.buffer], a.freed),
    ):
        buffer = buffers[absence.buffer]
        pool = buffer.pools["device"]
        between = used[pool][absence.freed : absence.brought]
        if int(between.max()) + buffer.size_bytes <= limit_bytes.get(pool, 0):
            between += buffer.size_bytes
            taken.append(absence)
    return _remove(tasks, buffers, taken)


def find_absences(tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer]) -> tuple[Absence, ...]:
    """Find every absence from the device after which a buffer comes back unchanged."""
    stays: dict[BufferId, list[_Stay]] = {}
    for position, task in enumerate(tasks):
        for name, tier in _touches(task):
            own = stays.setdefault(name, [])
            if tier != "device":
                if own and not isinstance(task, Copy):
                    own[-1].used_away = True
                continue
            if not own or own[-1].freed is not None:
                own.append(_Stay(began=position))
            match task:
                case Copy(source="device"):
                    own[-1].copied_out = position
                case Free():
                    own[-1].freed = position
                case Copy():
                    own[-1].brought = True
                case _:
                    own[-1].changed |= (name, tier) in writes_of(task)
    return tuple(
        absence
        for name, own in stays.items()
        for index in range(len(own) - 1)
        if (absence := _absence(buffers[name], own, index)) is not None
    )


@dataclass(slots=True, kw_only=True)
class _Stay:
    # A buffer is in the device from `began` to `freed`; `brought` if a Copy brought it.
    began: int
    freed: int | None = None
    copied_out: int | None = None
    brought: bool = False
    changed: bool = False
    used_away: bool = False


def _absence(buffer: Buffer, stays: Sequence[_Stay], index: int) -> Absence | None:
    stay, following = stays[index], stays[index + 1]
    if stay.freed is None or stay.used_away or not following.brought:
        return None
    ends = buffer.home is None and index + 2 == len(stays)
    return Absence(
        buffer=buffer.id,
        copied_out=stay.copied_out if following.changed or ends else None,
        freed=stay.freed,
        brought=following.began,
    )


def _touches(task: Task) -> tuple[tuple[BufferId, TierName], ...]:
    # In this order a Copy to the device finds the stay that it begins.
    return tuple(dict.fromkeys((*reads_of(task), *writes_of(task))))


def _remove(
    tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer], taken: Sequence[Absence]
) -> tuple[Task, ...]:
    gone = {a.freed for a in taken} | {a.brought for a in taken}
    gone |= {a.copied_out for a in taken if a.copied_out is not None}
    kept = [task for position, task in enumerate(tasks) if position not in gone]
    # What never lies in another tier any more is not dropped there either.
    placed = {place for task in kept for place in writes_of(task)}
    return tuple(
        task
        for task in kept
        if not isinstance(task, Free)
        or buffers[task.buffer].home is not None
        or (task.buffer, task.tier) in placed
    )


def _left_after(
    tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer], workspace_pool: PoolId
) -> Mapping[PoolId, Bytes]:
    # How full each pool is at each task, its workspace counted, and after a Free what is left.
    used = replay_pools(tasks, buffers, workspace_pool=workspace_pool).task_bytes
    for position, task in enumerate(tasks):
        if isinstance(task, Free):
            buffer = buffers[task.buffer]
            used[buffer.pools[task.tier]][position] -= buffer.size_bytes
    return used
