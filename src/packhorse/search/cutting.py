"""How cuts are searched: exactly for runs of stages on different ranks, by turns for all others.

In: `Loads`. Out: the bounds of the best cuts found, and what any cuts are worth. A run of stages in
which no rank comes twice is cut exactly, by dynamic programming over stage and block, while
everything else stays:

    best[s][j] = min over i < j of max(best[s-1][i], rank of s with blocks i to j, link at i)

With one stage a rank the run is the whole model. Else, from a few starts:

    until nothing gets better:
        cut every longest run anew; also with one cut moved before
    for these goals in turn:
        powers  the sum of high powers of all loads, which goes on where the bottleneck is elsewhere
        worst   the bottleneck
        bytes   what passes over the cuts, then evenness, with no load above the bottleneck

Where there are few cuts in all, every one is looked at. How long it searches is counted in cells of
tables, not in seconds: equal inputs give equal cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import comb
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from packhorse.search.stage_loads import Floats, Loads, Slot

_POWER: Final = 12
_SHIFTS: Final = (-1, 1, -2, 2, -4, 4)
_MOST_ROUNDS: Final = 30
_EVENNESS: Final = 1024
_FEW_CUTS: Final = 500
# How much is tried, in cells of tables; making one costs as much as so many cells.
_MOST_WORK: Final = 6_000_000
_TABLE_WORK: Final = 2_000

Goal = Literal["powers", "worst", "bytes"]


class CutSearch:
    """Cuts runs of stages anew until nothing gets better."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.num_stages = loads.num_stages
        self.num_blocks = loads.stretches.num_blocks
        self.runs = tuple(self._list_runs())
        self.is_chain = len(self.runs) == 1
        self._left = _MOST_WORK
        self._worths: dict[tuple[int, ...], float] = {}
        self._tables: dict[tuple[object, ...], Floats] = {}
        self._recuts: dict[tuple[object, ...], list[int]] = {}
        self._evenness = 0.5 ** (len(loads.ranks).bit_length() + 1) / _EVENNESS

    def run(self) -> list[int]:
        if not self.is_chain and comb(self.num_blocks - 1, self.num_stages - 1) <= _FEW_CUTS:
            inner = combinations(range(1, self.num_blocks), self.num_stages - 1)
            return min(([0, *cuts, self.num_blocks] for cuts in inner), key=self._rate)
        best: list[int] | None = None
        for start in self._list_starts():
            found = self._descend(start)
            if best is None or self._rate(found) < self._rate(best):
                best = found
        assert best is not None
        return best

    def find_worst(self, bounds: Sequence[int]) -> float:
        """Give the bottleneck in ns, or more than any time where a rank lacks memory."""
        return max(self._list_loads(bounds))

    def count_bytes(self, bounds: Sequence[int]) -> int:
        """Count what passes over all cuts for one microbatch."""
        messages = self.loads.messages
        return sum(
            int(each.size_bytes[cut]) for each, cut in zip(messages, bounds[1:-1], strict=True)
        )

    def _list_loads(self, bounds: Sequence[int]) -> list[float]:
        busy = [self._worth_of(rank, bounds) for rank in range(len(self.loads.ranks))]
        return [*busy, *map(float, self.loads.of_links(bounds).values())]

    def _worth_of(self, rank: int, bounds: Sequence[int]) -> float:
        stages = self.loads.stages[rank]
        key = (rank, *(bounds[at] for stage in stages for at in (stage, stage + 1)))
        if key not in self._worths:
            self._worths[key] = float(self.loads.of_rank(rank, bounds).worth)
        return self._worths[key]

    def _rate(self, bounds: Sequence[int]) -> tuple[float, int, float, tuple[int, ...]]:
        loads = self._list_loads(bounds)
        worst = max(loads)
        even = sum((load / worst) ** 2 for load in loads) if worst else 0.0
        return worst, self.count_bytes(bounds), round(even, 6), tuple(bounds)

    def _list_runs(self) -> Iterator[tuple[int, int]]:
        """List the longest runs of stages in which no rank comes twice."""
        rank_of, last_stop = self.loads.rank_of, 0
        for first in range(self.num_stages):
            stop = first + 1
            while stop < self.num_stages and rank_of[stop] not in rank_of[first:stop]:
                stop += 1
            if stop > last_stop:
                yield first, stop
                last_stop = stop

    def _list_starts(self) -> Iterator[list[int]]:
        """List a few cuts to begin with; for a chain any will do."""
        stages, blocks = self.num_stages, self.num_blocks
        yield [stage * blocks // stages for stage in range(stages + 1)]
        if not self.is_chain:
            yield self._spread("time")
            yield self._spread("memory")

    def _spread(self, what: Literal["time", "memory"]) -> list[int]:
        """Cut as if each stage had an equal part of its rank to itself."""
        loads, tables = self.loads, list[Floats]()
        for stage, rank in enumerate(loads.rank_of):
            count = len(loads.stages[rank])
            if what == "time":
                tables.append(np.asarray(loads.kept_ns[rank] * count, dtype=np.float64))
            else:
                held = max(
                    moment.saved[loads.stages[rank].index(stage)] for moment in loads.moments[rank]
                )
                need = loads.stretches.states_bytes + held * loads.stretches.kept_bytes
                weight = count / max(loads.ranks[rank].budget_bytes, 1)
                tables.append(np.asarray(need * weight, dtype=np.float64))
        fronts = [np.zeros(self.num_blocks + 1)] * self.num_stages
        cuts = _cut_run(tables, fronts, "worst")
        assert cuts is not None
        return [0, *cuts, self.num_blocks]

    def _descend(self, bounds: list[int]) -> list[int]:
        if not self.is_chain:
            bounds = self._improve(bounds, "powers")
        bounds = self._improve(bounds, "worst")
        return self._improve(bounds, "bytes")

    def _improve(self, bounds: list[int], goal: Goal) -> list[int]:
        scale_ns = max(self.find_worst(bounds), 1.0)
        value = self._value(bounds, goal, scale_ns)
        for _ in range(1 if self.is_chain else _MOST_ROUNDS):
            before = value
            for trial in self._list_trials(bounds):
                for first, stop in self.runs:
                    trial = self._recut(trial, first, stop, goal, scale_ns)
                new = self._value(trial, goal, scale_ns)
                if new < value:
                    bounds, value = trial, new
            if not value < before:
                break
        return bounds

    def _list_trials(self, bounds: list[int]) -> Iterator[list[int]]:
        """List the cuts as they are, and where ranks have several stages with one cut moved."""
        yield bounds
        cuts = () if self.is_chain else range(1, self.num_stages)
        for shift, cut in product(_SHIFTS, cuts):
            moved = _shift_cut(bounds, cut, shift)
            if moved is not None and self._left > 0:
                yield moved

    def _value(self, bounds: Sequence[int], goal: Goal, scale_ns: float) -> tuple[float, ...]:
        match goal:
            case "powers":
                return (sum((load / scale_ns) ** _POWER for load in self._list_loads(bounds)),)
            case "worst":
                return (self.find_worst(bounds),)
            case "bytes":
                return self._rate(bounds)[:3]

    def _recut(
        self, bounds: list[int], first: int, stop: int, goal: Goal, scale_ns: float
    ) -> list[int]:
        """Cut the stages from `first` to before `stop` anew, all others as they are."""
        low, high = bounds[first], bounds[stop]
        key = (goal, scale_ns, *bounds[: first + 1], -1, *bounds[stop:])
        if key in self._recuts:
            return self._recuts[key]
        tables: list[Floats] = []
        for stage in range(first, stop):
            worth = self._table_of(Slot(stage=stage, first=low, stop=high), bounds)
            tables.append(self._weigh(worth, goal, scale_ns, self._evenness))
        fronts = [np.zeros(high - low + 1)]
        busy_ns = self.loads.of_links(bounds)
        for cut in range(first + 1, stop):
            link_ns = self._link_ns(bounds, cut, busy_ns)[low : high + 1]
            size_bytes = self.loads.messages[cut - 1].size_bytes[low : high + 1]
            fronts.append(
                self._weigh(link_ns, goal, scale_ns, 0.0) + size_bytes * (goal == "bytes")
            )
        found = _cut_run(tables, fronts, goal)
        inner = bounds[first + 1 : stop] if found is None else [low + cut for cut in found]
        self._recuts[key] = [*bounds[: first + 1], *inner, *bounds[stop:]]
        return self._recuts[key]

    def _table_of(self, slot: Slot, bounds: Sequence[int]) -> Floats:
        rank = self.loads.rank_of[slot.stage]
        others = [stage for stage in self.loads.stages[rank] if stage != slot.stage]
        key = (slot, *(bounds[at] for stage in others for at in (stage, stage + 1)))
        if key not in self._tables:
            self._left -= _TABLE_WORK + (slot.stop - slot.first) ** 2
            self._tables[key] = self.loads.of_rank(rank, bounds, slot).worth
        return self._tables[key]

    def _weigh(self, load_ns: Floats, goal: Goal, scale_ns: float, evenness: float) -> Floats:
        match goal:
            case "powers":
                return (load_ns / scale_ns) ** _POWER
            case "worst":
                return load_ns
            case "bytes":
                # In steps, so that sums are exact; all of them together weigh less than a byte.
                even = np.round((load_ns / scale_ns) ** 2 * _EVENNESS) * evenness
                return np.where(load_ns <= scale_ns, even, np.inf)

    def _link_ns(
        self, bounds: Sequence[int], cut: int, busy_ns: Mapping[tuple[int, int], int]
    ) -> Floats:
        """Give what the links over a cut are busy, for every place of it."""
        message = self.loads.messages[cut - 1]
        if not message.crosses:
            return np.zeros(self.num_blocks + 1)
        there = busy_ns[message.path] - message.forward_ns[bounds[cut]] + message.forward_ns
        back = busy_ns[message.way_back] - message.gradient_ns[bounds[cut]] + message.gradient_ns
        return np.maximum(there, back).astype(np.float64)


def _cut_run(tables: Sequence[Floats], fronts: Sequence[Floats], goal: Goal) -> list[int] | None:
    """Cut blocks into stages, the best by dynamic programming; None where nothing is allowed.

    Args:
        tables: of each stage, for every first block and the block behind the last.
        fronts: of each stage, for every place of the cut in front of it; the first has none.

    Returns:
        The cuts between the stages.
    """
    size = len(fronts[0])
    forward = np.triu(np.ones((size, size), dtype=np.bool_), k=1)
    best = np.where(np.arange(size) == 0, 0.0, np.inf)
    choices: list[npt.NDArray[np.intp]] = []
    for table, front in zip(tables, fronts, strict=True):
        if goal == "worst":
            ways = np.maximum(np.maximum(best, front)[:, None], table)
        else:
            ways = (best + front)[:, None] + table
        ways = np.where(forward, ways, np.inf)
        choices.append(ways.argmin(axis=0))
        best = ways.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    cuts = [size - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return cuts[-2:0:-1]


def _shift_cut(bounds: Sequence[int], cut: int, shift: int) -> list[int] | None:
    """Move a cut, and push those that are in its way; None where there is no room."""
    moved = list(bounds)
    moved[cut] += shift
    for at in range(cut + 1, len(moved)):
        moved[at] = max(moved[at], moved[at - 1] + 1)
    for at in range(cut - 1, -1, -1):
        moved[at] = min(moved[at], moved[at + 1] - 1)
    return moved if (moved[0], moved[-1]) == (bounds[0], bounds[-1]) else None
