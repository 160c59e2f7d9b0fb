"""A program on its way.

In: a prepared program; then, job by job, when its tasks ran and what the pools held. Out: what the
run emitted, as soon as it exists, and a measured timeline once all of its tasks are complete.

Programs run into each other: while the last tasks of one are still on their way, the next one is
issued. A step is counted from the end of the one before it to its own, so the times of steps add
up; its curves show all that the pools hold while it runs, whoever put it there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from packhorse.program.buffers import BufferId, ChunkId, PoolId
from packhorse.program.tasks import Emit
from packhorse.runtime.noise import NoiseKey
from packhorse.runtime.prepared import Job, Prepared
from packhorse.timeline.names import kind_of
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


class Running:
    """A program on its way; only the executor's thread uses it.

    Lanes fill `emitted`, each value before its Emit is complete.
    """

    def __init__(self, prepared: Prepared, work: StepWork, *, first: int) -> None:
        self.prepared = prepared
        self.work = work
        self.first = first
        self.emitted: dict[BufferId, Tensor] = {}
        self._num_left = len(prepared.jobs)
        # Numbers of the tasks that emit and are not complete.
        self._values = {
            first + index
            for index, task in enumerate(prepared.program.tasks)
            if isinstance(task, Emit)
        }
        # Bare numbers, one behind the other: index, start, end of each span; moment and bytes of
        # each point of a curve.
        self._spans = array("q")
        self._curves: dict[PoolId, array[int]] = {
            pool.id: array("q") for pool in prepared.program.pools
        }
        self._since_ns: int | None = None

    @property
    def missing_values(self) -> Collection[int]:
        """Numbers of the tasks that have still to emit something."""
        return self._values

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
        return {pool: max(points[1::2], default=0) for pool, points in self._curves.items()}

    def book(self, job: Job, start_ns: int, end_ns: int, free_ends_ns: Sequence[int]) -> None:
        """Note when the tasks of a job ran; its frees end at `free_ends_ns`."""
        self._num_left -= 1
        self._values.discard(self.first + job.index)
        self._spans.extend((job.index, start_ns, end_ns))
        for index, free_end_ns in enumerate(free_ends_ns, job.index + 1):
            self._spans.extend((index, end_ns, free_end_ns))
            end_ns = free_end_ns

    def note(self, at_ns: int, used_bytes: Mapping[PoolId, int]) -> None:
        """Note what the pools hold; what is told late counts as of the last note."""
        for pool, points in self._curves.items():
            used = used_bytes[pool]
            if not points:
                points.extend((at_ns, used))
            elif points[-1] != used:
                points.extend((max(at_ns, points[-2]), used))

    def end(self, since_ns: int) -> int:
        """End a program that is complete, after all before it; gives the moment of the last end.

        What came from outside is let go: whoever keeps a step's result keeps no batch with it.

        Args:
            since_ns: the last end of those before it.
        """
        self.work = NO_WORK
        self._since_ns = since_ns
        return max(self._spans[2::3], default=since_ns)

    def timeline(self) -> Timeline:
        """What it did when; it is over."""
        assert self._since_ns is not None
        zero_ns = min(self._spans[1::3], default=0)
        names, lanes = self.prepared.names, self.prepared.lanes
        return Timeline(
            source="measured",
            rank=self.prepared.program.rank,
            spans=tuple(
                Span(
                    index=index,
                    name=names[index],
                    kind=kind_of(self.prepared.program.tasks[index]),
                    lane=lanes[index],
                    start_ns=start_ns - zero_ns,
                    end_ns=end_ns - zero_ns,
                )
                for index, start_ns, end_ns in sorted(
                    zip(self._spans[::3], self._spans[1::3], self._spans[2::3], strict=True)
                )
            ),
            memory={
                pool: curve_from(list(zip(points[::2], points[1::2], strict=True)), zero_ns)
                for pool, points in self._curves.items()
            },
            since_ns=max(self._since_ns - zero_ns, 0),
        )
