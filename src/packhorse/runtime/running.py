"""A program made ready to run, and one on its way.

In: a program and its proof; then, task by task, when each ran and what the pools held. Out: what
the run emitted, as soon as it exists, and a measured timeline once all of its tasks are complete.

Programs run into each other: while the last tasks of one are still on their way, the next one is
issued. A step is counted from the end of the one before it to its own, so the times of steps add
up; its curves show all that the pools hold while it runs, whoever put it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from packhorse.program.audit import check_same_tasks
from packhorse.program.buffers import BufferId, ChunkId, PoolId
from packhorse.program.lanes import assign_lanes
from packhorse.program.program import Program, Proof
from packhorse.program.tasks import Copy, Emit, Lane
from packhorse.runtime.dependencies import Dependencies, find_dependencies
from packhorse.runtime.noise import NoiseKey
from packhorse.storage.extents import align_up
from packhorse.timeline.names import kind_of, name_of
from packhorse.timeline.spec import Span, Timeline, curve_from

ChunkWork = Callable[[BufferId], None]
UpdateWork = Callable[[ChunkId, Mapping[str, Tensor], Tensor | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step brings from outside; tasks ask for it when they run.

    `name` is what errors call the run, such as `step 3`.
    `feeds` gives each micro-batch's inputs by value name; `noise` its key, None without dropout;
    `update` applies the optimizer to a chunk's states (with the norm, when clipping);
    `fill` and `drain` serve Import and Export. `inspect` sees what is emitted before the next task
    of its lane runs, so that it can end the run while the states are still good; for the norm it
    also gets the parameters whose gradient is not finite.
    """

    name: str
    feeds: Callable[[int], Mapping[str, Tensor]]
    noise: Callable[[int], NoiseKey | None]
    update: UpdateWork
    fill: ChunkWork
    drain: ChunkWork
    inspect: Callable[[BufferId, Tensor, tuple[str, ...]], None]


def _no_feeds(microbatch: int) -> Mapping[str, Tensor]:
    raise AssertionError(f"micro-batch {microbatch} is fed outside a step")


def _no_update(chunk: ChunkId, _tensors: Mapping[str, Tensor], _norm: Tensor | None) -> None:
    raise AssertionError(f"chunk {chunk} is updated outside a training step")


def _no_transfer(buffer: BufferId) -> None:
    raise AssertionError(f"{buffer} is filled or handed out outside a load or save")


def _accept(buffer: BufferId, value: Tensor, spoilt: tuple[str, ...]) -> None:
    """Take whatever is emitted."""
    del buffer, value, spoilt


NO_WORK: Final = StepWork(
    name="",
    feeds=_no_feeds,
    noise=lambda _: None,
    update=_no_update,
    fill=_no_transfer,
    drain=_no_transfer,
    inspect=_accept,
)
"""Brings nothing; a run replaces what its program asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A program made ready to run many times.

    `disk_read_bytes` and `disk_written_bytes` are what its copies move, in whole pages.
    """

    program: Program
    proof: Proof
    dependencies: Dependencies
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    disk_read_bytes: int
    disk_written_bytes: int


def prepare_program(program: Program, proof: Proof) -> Prepared:
    """Find dependencies and names once.

    Raises:
        AuditError: the proof is of another program.
    """
    check_same_tasks(proof, program)
    copies = [task for task in program.tasks if isinstance(task, Copy)]
    sizes = {task.buffer: align_up(program.buffers[task.buffer].size_bytes) for task in copies}
    return Prepared(
        program=program,
        proof=proof,
        dependencies=find_dependencies(program.tasks),
        lanes=assign_lanes(program.tasks),
        names=tuple(name_of(task) for task in program.tasks),
        disk_read_bytes=sum(sizes[task.buffer] for task in copies if task.source == "disk"),
        disk_written_bytes=sum(sizes[task.buffer] for task in copies if task.target == "disk"),
    )


class Running:
    """A program on its way; only the executor's thread uses it.

    Lanes fill `emitted`, each value before its Emit is complete.
    """

    def __init__(self, prepared: Prepared, work: StepWork, *, first: int) -> None:
        self.prepared = prepared
        self.work = work
        self.first = first
        self.emitted: dict[BufferId, Tensor] = {}
        tasks = prepared.program.tasks
        self._num_left = len(tasks)
        self._num_values = sum(isinstance(task, Emit) for task in tasks)
        self._spans: list[tuple[int, int, int]] = []
        self._curves: dict[PoolId, list[tuple[int, int]]] = {
            pool.id: [] for pool in prepared.program.pools
        }
        self._since_ns: int | None = None

    @property
    def has_values(self) -> bool:
        """Whether all that it emits is there."""
        return not self._num_values

    @property
    def is_complete(self) -> bool:
        """Whether all of its tasks are."""
        return not self._num_left

    @property
    def is_over(self) -> bool:
        """Whether it and every program before it are complete."""
        return self._since_ns is not None

    @property
    def peak_bytes(self) -> Mapping[PoolId, int]:
        """Largest use of each pool so far, since its first task was issued."""
        return {
            pool: max((used for _, used in points), default=0)
            for pool, points in self._curves.items()
        }

    def book(self, index: int, start_ns: int, end_ns: int) -> None:
        """Note when a task ran."""
        self._num_left -= 1
        self._num_values -= isinstance(self.prepared.program.tasks[index], Emit)
        self._spans.append((index, start_ns, end_ns))

    def note(self, at_ns: int, used_bytes: Mapping[PoolId, int]) -> None:
        """Note what the pools hold."""
        for pool, points in self._curves.items():
            if not points or points[-1][1] != used_bytes[pool]:
                points.append((at_ns, used_bytes[pool]))

    def end(self, since_ns: int) -> int:
        """End a program that is complete, after all before it; gives the moment of the last end.

        What came from outside is let go: whoever keeps a step's result keeps no batch with it.

        Args:
            since_ns: the last end of those before it.
        """
        self.work = NO_WORK
        self._since_ns = since_ns
        return max((end_ns for _, _, end_ns in self._spans), default=since_ns)

    def timeline(self, rank: int = 0) -> Timeline:
        """What it did when; it is over."""
        assert self._since_ns is not None
        zero_ns = min((start_ns for _, start_ns, _ in self._spans), default=0)
        names, lanes = self.prepared.names, self.prepared.lanes
        return Timeline(
            source="measured",
            rank=rank,
            spans=tuple(
                Span(
                    index=index,
                    name=names[index],
                    kind=kind_of(self.prepared.program.tasks[index]),
                    lane=lanes[index],
                    start_ns=start_ns - zero_ns,
                    end_ns=end_ns - zero_ns,
                )
                for index, start_ns, end_ns in sorted(self._spans)
            ),
            memory={pool: curve_from(points, zero_ns) for pool, points in self._curves.items()},
            since_ns=max(self._since_ns - zero_ns, 0),
        )
