"""What it costs to sum gradients over replicas that are simulated as one.

In: the costs of one replica's program, how many replicas there are, the link between two of them.
Out: `ReplicaCosts`: the first norm or update behind a rank's last backward takes longer by the
all-reduce of all of its gradients; `show_reductions` tells the two apart on a timeline.

The replicas of a rank sum a gradient by a fixed binary tree. Each of n of them sums an n-th: it
gets that from all others (an all-to-all), adds, and hands the sum to all others. So each sends and
receives 2 (n - 1) / n of the bytes, as in a ring, and adds (n - 1) / n of them. Gradients that are
finished earlier could go earlier, beside the last backwards: the time is rather too long. What
arrives has no place in the program: the memory is too little by what is on its way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Final

from packhorse.machine.spec import Machine
from packhorse.program.buffers import BufferId
from packhorse.program.program import Program
from packhorse.program.tasks import BlockTask, SegmentNorm, Task, Update
from packhorse.simulator.costs import ADD_PASSES, TaskCosts
from packhorse.timeline.names import ALL_REDUCE, words_for
from packhorse.timeline.spec import Span, Timeline

_GRADIENT: Final = "grad/"


class ReplicaCosts:
    """The cost model of one replica's program among others.

    Args:
        costs: of the program by itself.
        bytes_per_s: of the link between two replicas of a rank, in each direction.
        latency_ns: the same link's.
    """

    def __init__(
        self, costs: TaskCosts, *, num_replicas: int, bytes_per_s: float, latency_ns: int
    ) -> None:
        self._costs = costs
        self._num_replicas = num_replicas
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns

    @property
    def machine(self) -> Machine:
        """The machine of every rank."""
        return self._costs.machine

    @property
    def program(self) -> Program:
        """The program of the first replica."""
        return self._costs.program

    def duration_ns(self, task: Task) -> int:
        """Give the duration of a task of the program, with the all-reduce before it.

        Raises:
            MismatchError, InputError: as `TaskCosts`.
        """
        return self._costs.duration_ns(task) + self.reduction_ns(task)

    def reduction_ns(self, task: Task) -> int:
        """How long the all-reduce before a task of the program takes; 0 where there is none."""
        return self._reduced_ns if task is self._first_behind else 0

    @cached_property
    def _first_behind(self) -> Task | None:
        # Behind the last backward, or the last of all where that trains nothing.
        found: Task | None = None
        for task in reversed(self.program.tasks):
            if isinstance(task, BlockTask) and found is not None:
                break
            if isinstance(task, SegmentNorm | Update):
                found = task
        return found

    @cached_property
    def _reduced_ns(self) -> int:
        if self._num_replicas == 1:
            return 0
        names = sorted(name for name in self.program.buffers if name.startswith(_GRADIENT))
        return sum(map(self._reduce_ns, names))

    def _reduce_ns(self, gradient: BufferId) -> int:
        share = (self._num_replicas - 1) / self._num_replicas
        moved_bytes = share * self.program.buffers[gradient].size_bytes
        moving_ns = self._latency_ns + moved_bytes * 1e9 / self._bytes_per_s
        adding_ns = ADD_PASSES * moved_bytes * 1e9 / self.machine.memory_bytes_per_s
        return ceil(2 * moving_ns + adding_ns)


def show_reductions(timeline: Timeline, costs: ReplicaCosts) -> Timeline:
    """Give the all-reduce before a task a span of its own, on a lane of its own."""
    spans: list[Span] = []
    for span in timeline.spans:
        taken_ns = costs.reduction_ns(costs.program.tasks[span.index])
        if not taken_ns:
            spans.append(span)
            continue
        middle_ns = span.start_ns + taken_ns
        reduction = replace(
            span,
            name=f"{words_for(ALL_REDUCE)}, all gradients",
            kind=ALL_REDUCE,
            lane=ALL_REDUCE,
            end_ns=middle_ns,
        )
        spans += [reduction, replace(span, start_ns=middle_ns)]
    return replace(timeline, spans=tuple(spans))
