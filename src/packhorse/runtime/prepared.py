"""A program made ready to run: what does not change from step to step is found once.

In: a program and its proof. Out: its jobs, in program order: what is handed to a lane at once, with
all that is taken from the pools and given back by it.

To hand something to a lane costs more than to drop a buffer, so a Free goes along with the task
right before it, if it runs on the same lane and waits for nothing that this task does not wait for.
Nothing is issued between the two, and both replays see them one behind the other as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packhorse.program.audit import check_same_tasks
from packhorse.program.buffers import PoolId
from packhorse.program.lanes import assign_lanes
from packhorse.program.program import Program, Proof
from packhorse.program.tasks import Copy, Free, Lane, Task, workspace_of, writes_of
from packhorse.runtime.dependencies import Dependencies, Place, find_dependencies, merge_tasks
from packhorse.storage.extents import align_up
from packhorse.timeline.names import name_of

Sizes = tuple[tuple[PoolId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task, and the frees that go along with it.

    `index` is the place of the task in the program; the frees follow it. `created` are the places
    that it makes, `reserved` the bytes that those and its workspace take; `released` what all of
    the tasks give back when the job is complete, `each_released` what each does. Places between
    programs are those of the states with a home, so all of this is the same in every run.
    """

    index: int
    task: Task
    frees: tuple[Free, ...]
    lane: Lane
    created: tuple[Place, ...]
    reserved: Sizes
    each_released: tuple[tuple[Task, Sizes], ...]
    released: Sizes

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All of them, in program order."""
        return (self.task, *self.frees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A program made ready to run many times.

    `dependencies` are those of its jobs, which go by the places of their first tasks.
    `disk_read_bytes` and `disk_written_bytes` are what its copies move, in whole pages.
    """

    program: Program
    proof: Proof
    jobs: tuple[Job, ...]
    dependencies: Dependencies
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    disk_read_bytes: int
    disk_written_bytes: int


def prepare_program(program: Program, proof: Proof) -> Prepared:
    """Find jobs, dependencies and names once.

    Raises:
        AuditError: the proof is of another program.
    """
    check_same_tasks(proof, program)
    copies = [task for task in program.tasks if isinstance(task, Copy)]
    sizes = {task.buffer: align_up(program.buffers[task.buffer].size_bytes) for task in copies}
    dependencies, lanes = find_dependencies(program.tasks), assign_lanes(program.tasks)
    heads = _find_heads(program.tasks, dependencies, lanes)
    return Prepared(
        program=program,
        proof=proof,
        jobs=_make_jobs(program, heads, lanes),
        dependencies=merge_tasks(dependencies, heads),
        lanes=lanes,
        names=tuple(name_of(task) for task in program.tasks),
        disk_read_bytes=sum(sizes[task.buffer] for task in copies if task.source == "disk"),
        disk_written_bytes=sum(sizes[task.buffer] for task in copies if task.target == "disk"),
    )


def _find_heads(
    tasks: Sequence[Task], dependencies: Dependencies, lanes: Sequence[Lane]
) -> tuple[int, ...]:
    """Give for each task the one that it goes along with: itself, or one before it for a Free."""
    heads: list[int] = []
    waits: set[int] = set()
    for index, task in enumerate(tasks):
        head = heads[-1] if heads else index
        joins = (
            isinstance(task, Free)
            and index > 0
            and lanes[index] == lanes[head]
            and index not in dependencies.entering
            and all(
                other >= head or other in waits or lanes[other] == lanes[head]
                for other in dependencies.inner[index]
            )
        )
        if not joins:
            head, waits = index, set(dependencies.inner[index])
        heads.append(head)
    return tuple(heads)


def _make_jobs(program: Program, heads: Sequence[int], lanes: Sequence[Lane]) -> tuple[Job, ...]:
    found = program.buffers.values()
    present: set[Place] = {
        (buffer.id, buffer.home)
        for buffer in found
        if buffer.home is not None and program.finds(buffer)
    }
    members: dict[int, list[Free]] = {}
    created: dict[int, tuple[Place, ...]] = {}
    for index, task in enumerate(program.tasks):
        if isinstance(task, Free):
            present.discard((task.buffer, task.tier))
        created[index] = tuple(
            place for place in dict.fromkeys(writes_of(task)) if place not in present
        )
        present.update(created[index])
        if heads[index] != index and isinstance(task, Free):
            members.setdefault(heads[index], []).append(task)
    jobs: list[Job] = []
    for index, task in enumerate(program.tasks):
        if heads[index] == index:
            frees = tuple(members.get(index, ()))
            each = tuple((task, _releases(program, task)) for task in (task, *frees))
            jobs.append(
                Job(
                    index=index,
                    task=task,
                    frees=frees,
                    lane=lanes[index],
                    created=created[index],
                    reserved=_reserves(program, task, created[index]),
                    each_released=each,
                    released=_add_sizes([sizes for _, sizes in each]),
                )
            )
    return tuple(jobs)


def _reserves(program: Program, task: Task, created: Sequence[Place]) -> Sizes:
    sizes: list[Sizes] = []
    for name, tier in created:
        buffer = program.buffers[name]
        sizes.append(((buffer.pools[tier], buffer.size_bytes),))
    if workspace := workspace_of(task):
        sizes.append(((program.workspace_pool, workspace),))
    return _add_sizes(sizes)


def _releases(program: Program, task: Task) -> Sizes:
    if isinstance(task, Free):
        buffer = program.buffers[task.buffer]
        return ((buffer.pools[task.tier], buffer.size_bytes),)
    workspace = workspace_of(task)
    return ((program.workspace_pool, workspace),) if workspace else ()


def _add_sizes(several: Iterable[Sizes]) -> Sizes:
    total: dict[PoolId, int] = {}
    for sizes in several:
        for pool, size in sizes:
            total[pool] = total.get(pool, 0) + size
    return tuple(total.items())
