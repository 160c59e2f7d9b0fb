"""What each pool holds while each task runs: the one replay that passes and peaks look at.

In: tasks over a table of buffers, and which buffers are there before the first. Out: `Holdings`,
bytes per pool and task, the tasks one after another. It checks nothing; a program that breaks a
rule gives numbers without meaning.

    a task runs     what it writes and is not there takes its room; workspace is held beside it
    it is over      workspace goes; a Free gives back the room of its buffer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhorse.program.buffers import Buffer, BufferId, PoolId, TierName
from packhorse.program.tasks import Free, Task, accesses_of, workspace_of

Bytes = npt.NDArray[np.int64]


def has_home(buffer: Buffer) -> bool:
    """Whether a step finds a buffer in its home."""
    return buffer.home is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What pools hold: before the first task, and while each one runs, its workspace counted.

    What a Free drops still counts while the Free runs. Pools where nothing ever lies are left out.
    """

    start_bytes: Mapping[PoolId, int]
    task_bytes: Mapping[PoolId, Bytes]

    @property
    def peak_bytes(self) -> Mapping[PoolId, int]:
        """The most that each pool holds at any time."""
        return {
            pool: max(self.start_bytes[pool], int(held.max(initial=0)))
            for pool, held in self.task_bytes.items()
        }


def replay_pools(
    tasks: Sequence[Task],
    buffers: Mapping[BufferId, Buffer],
    *,
    workspace_pool: PoolId,
    finds: Callable[[Buffer], bool] = has_home,
) -> Holdings:
    """Replay tasks one after another.

    Args:
        finds: whether a buffer with a home lies there before the first task.
    """
    pools = {pool: 0 for buffer in buffers.values() for pool in buffer.pools.values()}
    start_bytes = {workspace_pool: 0, **pools}
    present: dict[TierName, set[BufferId]] = {"device": set(), "host": set(), "disk": set()}
    for buffer in buffers.values():
        if buffer.home is not None and finds(buffer):
            present[buffer.home].add(buffer.id)
            start_bytes[buffer.pools[buffer.home]] += buffer.size_bytes
    # One place more than tasks: what the last one frees goes after it.
    changes = {pool: [0] * (len(tasks) + 1) for pool in start_bytes}
    workspace = [workspace_of(task) for task in tasks]
    for position, task in enumerate(tasks):
        if isinstance(task, Free):
            present[task.tier].discard(task.buffer)
            buffer = buffers[task.buffer]
            changes[buffer.pools[task.tier]][position + 1] -= buffer.size_bytes
            continue
        _, _, tier, written = accesses_of(task)
        there = present[tier]
        for name in written:
            if name not in there:
                there.add(name)
                buffer = buffers[name]
                changes[buffer.pools[tier]][position] += buffer.size_bytes
    task_bytes = {
        pool: start_bytes[pool] + np.cumsum(np.asarray(change[: len(tasks)], dtype=np.int64))
        for pool, change in changes.items()
    }
    task_bytes[workspace_pool] += np.asarray(workspace, dtype=np.int64)
    return Holdings(start_bytes=start_bytes, task_bytes=task_bytes)
