"""How full each pool gets: a replay that only counts.

In: tasks over a table of buffers, or a finished program. Out: the peak of each pool. It checks
nothing; a program that breaks a rule gives a number without meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from packhorse.program.buffers import Buffer, BufferId, PoolId, TierName
from packhorse.program.program import Program
from packhorse.program.tasks import Free, Task, workspace_of, writes_of


def peak_of(program: Program) -> Mapping[PoolId, int]:
    """The most bytes that each pool of a program holds, workspace counted."""
    peaks = replay_peaks(
        program.tasks,
        program.buffers,
        workspace_pool=program.workspace_pool,
        finds=program.finds,
    )
    return {pool.id: peaks.get(pool.id, 0) for pool in program.pools}


def replay_peaks(
    tasks: Sequence[Task],
    buffers: Mapping[BufferId, Buffer],
    *,
    workspace_pool: PoolId,
    finds: Callable[[Buffer], bool] = lambda buffer: buffer.home is not None,
) -> Mapping[PoolId, int]:
    """The most bytes that each pool holds while the tasks run one after another.

    Buffers that are found lie in their homes at the start.
    """
    present: set[tuple[BufferId, TierName]] = set()
    used: dict[PoolId, int] = {}
    for buffer in buffers.values():
        if buffer.home is not None and finds(buffer):
            present.add((buffer.id, buffer.home))
            _add(used, buffer, buffer.home, 1)
    peaks = dict(used)
    for task in tasks:
        if isinstance(task, Free):
            present.discard((task.buffer, task.tier))
            _add(used, buffers[task.buffer], task.tier, -1)
            continue
        for buffer, tier in writes_of(task):
            if (buffer, tier) not in present:
                present.add((buffer, tier))
                _add(used, buffers[buffer], tier, 1)
        for pool, held in used.items():
            extra = workspace_of(task) if pool == workspace_pool else 0
            peaks[pool] = max(peaks.get(pool, 0), held + extra)
    return peaks


def _add(used: dict[PoolId, int], buffer: Buffer, tier: TierName, sign: int) -> None:
    pool = buffer.pools[tier]
    used[pool] = used.get(pool, 0) + sign * buffer.size_bytes
