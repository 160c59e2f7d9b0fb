"""When each task of a schedule runs, and how much each rank saves: an own small list simulator.

In: a schedule that passed its rules, and costs. Out: a `Timing`. Each rank takes its tasks in
order; a task begins when the one before it has ended and what it needs has arrived. Transfers run
beside computing and beside each other, and take `send_ns` from one rank to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from packhorse.schedule.costs import Cost, Costs
from packhorse.schedule.needs import list_needs
from packhorse.schedule.spec import Backward, Forward, InputGrad, Schedule, Task, WeightGrad


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """What one rank does in a step: when each task of its order starts and ends."""

    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    peak_bytes: int

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
        """When the last task of all ranks ends: the step, with the flush."""
        return max((rank.ends_ns[-1] for rank in self.ranks if rank.ends_ns), default=0)

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
            return cost.weight_grad_ns


def time_schedule(schedule: Schedule, costs: Costs) -> Timing:
    """Give each task its time.

    Raises:
        ValueError: the schedule never ends; `check_schedule` says why.
    """
    stages = costs.cut(schedule.num_stages)
    rank_of = {task: rank for rank, order in enumerate(schedule.orders) for task in order}
    ends_ns: dict[Task, int] = {}
    starts: list[list[int]] = [[] for _ in schedule.orders]
    waiting: dict[Task, list[int]] = {}
    pending = list(range(schedule.num_ranks))
    while pending:
        rank = pending.pop()
        order = schedule.orders[rank]
        started = starts[rank]
        free_ns = ends_ns[order[len(started) - 1]] if started else 0
        while len(started) < len(order):
            task = order[len(started)]
            ready_ns = free_ns
            missing: Task | None = None
            for need in list_needs(task, schedule.num_stages, rank_of):
                end_ns = ends_ns.get(need)
                if end_ns is None:
                    missing = need
                    break
                arrival_ns = end_ns if rank_of[need] == rank else end_ns + costs.send_ns
                ready_ns = max(ready_ns, arrival_ns)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            started.append(ready_ns)
            free_ns = ends_ns[task] = ready_ns + duration_of(task, stages[task.stage])
            pending += waiting.pop(task, ())
    if len(ends_ns) < schedule.num_tasks:
        raise ValueError(f"{schedule.num_tasks - len(ends_ns)} tasks wait for ever")
    return Timing(
        ranks=tuple(
            RankTiming(
                starts_ns=tuple(started),
                ends_ns=tuple(ends_ns[task] for task in order),
                peak_bytes=find_peak(order, stages),
            )
            for order, started in zip(schedule.orders, starts, strict=True)
        )
    )


def find_peak(order: Sequence[Task], stages: Sequence[Cost]) -> int:
    """Give the most bytes that a rank saves at once; its order alone decides, not the times."""
    saved_bytes = peak_bytes = 0
    for task in order:
        match task:
            case Forward():
                saved_bytes += stages[task.stage].saved_bytes
                peak_bytes = max(peak_bytes, saved_bytes)
            case Backward() | WeightGrad():
                saved_bytes -= stages[task.stage].saved_bytes
            case InputGrad():
                pass
    return peak_bytes


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
