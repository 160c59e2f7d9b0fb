"""When each task of a schedule runs, and how much each rank saves: an own small list simulator.

In: a schedule that passed its rules, and costs. Out: a `Timing`. Each rank takes its tasks in
order; a task begins when the one before it has ended and what it needs has arrived. Transfers run
beside computing and beside each other, and take from one rank to another what the costs say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from packhorse.schedule.costs import Cost, Costs, Crossing
from packhorse.schedule.numbering import Numbered, number_tasks
from packhorse.schedule.spec import (
    LETTERS,
    Backward,
    Forward,
    InputGrad,
    Schedule,
    Task,
    WeightGrad,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """When a stage's gradients are summed over all replicas, beside computing."""

    stage: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """What one rank does in a step: when each task of its order starts and ends.

    `reductions` are in order; a rank that has no replicas has none.
    """

    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    peak_bytes: int
    reductions: tuple[Reduction, ...] = ()

    @property
    def end_ns(self) -> int:
        """When all that it does has ended."""
        return max((*self.ends_ns[-1:], *(each.end_ns for each in self.reductions)), default=0)

    @property
    def busy_ns(self) -> int:
        """How long it computes."""
        return sum(self.ends_ns) - sum(self.starts_ns)

    @property
    def span_ns(self) -> int:
        """From the start of its first task to the end of its last."""
        return self.ends_ns[-1] - self.starts_ns[0] if self.ends_ns else 0

    @property
    def idle_in_span(self) -> Fraction:
        """Share of its own span in which it computes nothing."""
        return _share(self.span_ns - self.busy_ns, self.span_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What every rank does in a step."""

    ranks: tuple[RankTiming, ...]

    @property
    def makespan_ns(self) -> int:
        """When the last task or reduction of all ranks ends: the step, with the flush."""
        return max((rank.end_ns for rank in self.ranks), default=0)

    def bubble_of(self, rank: int) -> Fraction:
        """Share of the step in which a rank computes nothing."""
        return _share(self.makespan_ns - self.ranks[rank].busy_ns, self.makespan_ns)

    @property
    def bubble(self) -> Fraction:
        """Share of the step in which ranks compute nothing, over all ranks."""
        whole_ns = self.makespan_ns * len(self.ranks)
        return _share(whole_ns - sum(rank.busy_ns for rank in self.ranks), whole_ns)

    @property
    def idle_in_span(self) -> Fraction:
        """Share of the ranks' own spans in which they compute nothing, over all ranks."""
        whole_ns = sum(rank.span_ns for rank in self.ranks)
        return _share(whole_ns - sum(rank.busy_ns for rank in self.ranks), whole_ns)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank saves at once."""
        return tuple(rank.peak_bytes for rank in self.ranks)


def duration_of(task: Task, cost: Cost) -> int:
    """How long a task takes in a stage of a given cost, in ns."""
    match task:
        case Forward():
            return cost.forward_ns
        case Backward():
            return cost.backward_ns
        case InputGrad():
            return cost.input_grad_ns
        case WeightGrad():
            return cost.weight_half_ns


def time_schedule(schedule: Schedule, costs: Costs) -> Timing:
    """Give each task its time.

    Raises:
        ValueError: the schedule never ends; `check_schedule` says why.
    """
    return time_numbered(number_tasks(schedule), costs)


def time_numbered(numbered: Numbered, costs: Costs) -> Timing:
    """Give each task of a numbered schedule its time, as `time_schedule` does."""
    stages = costs.cut(numbered.num_stages)
    count, rank_of, needs_of = numbered.num_microbatches, numbered.rank_of, numbered.needs_of
    # By kind and stage: what a task takes, and what it waits for is on its way to another rank.
    durations_ns = [
        duration_of(kind(stage=stage, microbatch=0), cost)
        for kind in LETTERS
        for stage, cost in enumerate(stages)
    ]
    lags_ns = _list_lags(costs.cross(numbered.num_stages))
    saved_bytes = [cost.saved_bytes for cost in stages]
    freed_bytes = [-cost.saved_bytes for cost in stages]
    grown_bytes = (*saved_bytes, *freed_bytes, *([0] * len(stages)), *freed_bytes)
    ends_ns: dict[int, int] = {}
    starts: list[list[int]] = [[] for _ in numbered.orders]
    waiting: dict[int, list[int]] = {}
    pending = list(range(len(numbered.orders)))
    while pending:
        rank = pending.pop()
        order = numbered.orders[rank]
        started = starts[rank]
        free_ns = ends_ns[order[len(started) - 1]] if started else 0
        while len(started) < len(order):
            code = order[len(started)]
            row = code // count
            missing: int | None = None
            for need in needs_of(code):
                end_ns = ends_ns.get(need)
                if end_ns is None:
                    missing = need
                    break
                if rank_of[need] != rank:
                    end_ns += lags_ns[row]
                free_ns = max(free_ns, end_ns)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            started.append(free_ns)
            free_ns += durations_ns[row]
            ends_ns[code] = free_ns
            if code in waiting:
                pending += waiting.pop(code)
    num_tasks = sum(map(len, numbered.orders))
    if len(ends_ns) < num_tasks:
        raise ValueError(f"{num_tasks - len(ends_ns)} tasks wait for ever")
    return Timing(
        ranks=tuple(
            RankTiming(
                starts_ns=tuple(started),
                ends_ns=tuple([ends_ns[code] for code in codes]),
                peak_bytes=max(
                    accumulate((grown_bytes[code // count] for code in codes), initial=0)
                ),
            )
            for codes, started in zip(numbered.orders, starts, strict=True)
        )
    )


def _list_lags(crossings: Sequence[Crossing]) -> tuple[int, ...]:
    forward_ns = (0, *(each.forward_ns for each in crossings))
    gradient_ns = (*(each.gradient_ns for each in crossings), 0)
    return (*forward_ns, *gradient_ns, *gradient_ns, *([0] * len(forward_ns)))


def find_excess(
    peak_bytes: Sequence[int], cap_bytes: Sequence[int] | None
) -> Mapping[int, tuple[int, int]]:
    """Give peak and cap of each rank that saves more than it may."""
    if cap_bytes is None:
        return {}
    pairs = enumerate(zip(peak_bytes, cap_bytes, strict=True))
    return {rank: (peak, cap) for rank, (peak, cap) in pairs if peak > cap}


def _share(part_ns: int, whole_ns: int) -> Fraction:
    return Fraction(part_ns, whole_ns) if whole_ns else Fraction(0)
