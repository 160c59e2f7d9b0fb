"""What stages ask of ranks and links: for one place of all cuts, or for every place of one stage.

In: a model's tables, ranks, links and a schedule, whose orders say how many microbatches of each
stage are held at once. Out: `Loads`. Given a `Slot`, a load is a table over all stretches of blocks
that the slot's stage could be while all other stages stay; without, a table without axes.

    a rank   computes its stages' forwards and backwards once for each microbatch, with a second
             forward where that is the only way to fit, or the faster one; states that do not fit
             are read and written once a step beside it
    a link   carries each message: latency, and bytes at its rate, beside computing

A rank needs its base, all states of its stages, what its fullest moment holds, and the workspace of
one block. Where states may lie away, only those of its block with the most parameters have to be
in memory, without the optimizer's: whoever plans the rank moves the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
import numpy.typing as npt

from packhorse.machine.cluster import Links, find_link
from packhorse.schedule.holding import list_moments, stages_of
from packhorse.schedule.spec import Schedule
from packhorse.search.block_times import BlockTime
from packhorse.search.ranks import RankSpec
from packhorse.search.stretches import Ints, Stretches, add_up

Floats = npt.NDArray[np.float64]
_LACKING_NS: Final = 1e15
_LACKING_NS_PER_BYTE: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A stage whose place is open: any stretch between two blocks."""

    stage: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What one rank does for a microbatch, and needs for the step.

    `step_ns` is `compute_ns`, or longer where moving `moved_bytes` of states takes longer.
    `room_bytes` is what microbatches on their way may hold at most. `missing_bytes` do not fit and
    may not lie elsewhere. `kept_need_bytes` is the need if no block recomputed.
    """

    step_ns: Ints
    compute_ns: Ints
    recomputes: Ints
    states_bytes: Ints
    held_bytes: Ints
    need_bytes: Ints
    room_bytes: Ints
    moved_bytes: Ints
    missing_bytes: Ints
    kept_need_bytes: Ints

    @property
    def worth(self) -> Floats:
        """How bad it is: its time, or longer than any time where memory is missing."""
        lacking = _LACKING_NS + self.missing_bytes * _LACKING_NS_PER_BYTE
        return np.where(self.missing_bytes > 0, lacking, self.step_ns)


class Loads:
    """The loads of all ranks and links under a schedule; `times` are of each rank's blocks."""

    def __init__(
        self,
        stretches: Stretches,
        times: Sequence[Sequence[BlockTime]],
        ranks: Sequence[RankSpec],
        links: Links,
        schedule: Schedule,
    ) -> None:
        self.stretches = stretches
        self.ranks = tuple(ranks)
        self.num_microbatches = schedule.num_microbatches
        self.rank_of = tuple(schedule.placement[at][0] for at in range(schedule.num_stages))
        self.stages = tuple(stages_of(schedule, rank) for rank in range(schedule.num_ranks))
        self.moments = list_moments(schedule)
        self.kept_ns = tuple(add_up([each.kept_ns for each in own]) for own in times)
        self.remade_ns = tuple(add_up(self._list_remade(own)) for own in times)
        self.messages = tuple(
            Messages(stretches, links, self.rank_of[at], self.rank_of[at + 1])
            for at in range(schedule.num_stages - 1)
        )

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    @property
    def holds_last_once(self) -> bool:
        """Whether the last stage's backward always follows its forward."""
        rank = self.rank_of[-1]
        place = self.stages[rank].index(self.num_stages - 1)
        return all(moment.saved[place] <= 1 for moment in self.moments[rank])

    def _list_remade(self, times: Sequence[BlockTime]) -> list[int]:
        # Nothing is gained by dropping what is wanted next.
        last_ns = times[-1].kept_ns if self.holds_last_once else times[-1].remade_ns
        return [*(each.remade_ns for each in times[:-1]), last_ns]

    def of_rank(self, rank: int, bounds: Sequence[int], slot: Slot | None = None) -> RankLoad:
        """Give the load of a rank; `bounds` has the first block of each stage and the end."""
        view = _View(self.stages[rank], bounds, slot)
        stretches, spec = self.stretches, self.ranks[rank]
        states_bytes = view.add(stretches.states_bytes)
        for tied in stretches.tied:
            states_bytes = states_bytes + tied.states_bytes * view.top(tied.is_used)
        least_bytes = states_bytes
        if spec.away_bytes_per_s is not None:
            least_bytes = np.minimum(view.top(stretches.least_bytes), states_bytes)
        kept = self._load(rank, view, states_bytes, least_bytes, recomputes=False)
        if not (kept.moved_bytes.any() or kept.missing_bytes.any()):
            return kept
        return _take_better(
            kept, self._load(rank, view, states_bytes, least_bytes, recomputes=True)
        )

    def _load(
        self, rank: int, view: _View, states_bytes: Ints, least_bytes: Ints, *, recomputes: bool
    ) -> RankLoad:
        spec = self.ranks[rank]
        held_bytes, workspace_bytes = self._hold(rank, view, recomputes=recomputes)
        own_ns = (self.remade_ns if recomputes else self.kept_ns)[rank]
        compute_ns = view.add(own_ns) + self._message_ns(view)
        rest_bytes = spec.profile.base_bytes + workspace_bytes + held_bytes
        all_bytes = rest_bytes + states_bytes
        need_bytes = np.maximum(rest_bytes + least_bytes, np.minimum(all_bytes, spec.budget_bytes))
        moved_bytes = all_bytes - need_bytes
        return RankLoad(
            step_ns=np.maximum(compute_ns, self._moving_ns(rank, moved_bytes)),
            compute_ns=compute_ns,
            recomputes=np.full_like(compute_ns, int(recomputes)),
            states_bytes=states_bytes,
            held_bytes=held_bytes,
            need_bytes=need_bytes,
            room_bytes=spec.budget_bytes - (rest_bytes + least_bytes) + held_bytes,
            moved_bytes=moved_bytes,
            missing_bytes=np.maximum(need_bytes - spec.budget_bytes, 0),
            kept_need_bytes=need_bytes,
        )

    def _moving_ns(self, rank: int, moved_bytes: Ints) -> Ints:
        """Give what a microbatch's share of moving states takes, both ways once a step."""
        rate = self.ranks[rank].away_bytes_per_s
        if rate is None:
            return np.zeros_like(moved_bytes)
        return np.ceil(moved_bytes * (2e9 / rate / self.num_microbatches)).astype(np.int64)

    def _hold(self, rank: int, view: _View, *, recomputes: bool) -> tuple[Ints, Ints]:
        """Give what the fullest moment holds, and the workspace."""
        stretches = self.stretches
        if not recomputes:
            own = view.list(stretches.kept_bytes)
            held = [_weigh(moment.saved, own) for moment in self.moments[rank]]
            return reduce(np.maximum, held), view.top(stretches.kept_workspace_bytes)
        own, opened = view.list(stretches.remade_bytes), view.list(stretches.opened_bytes)
        held = [
            _weigh(moment.saved, own) + _weigh(moment.opened, opened)
            for moment in self.moments[rank]
        ]
        return reduce(np.maximum, held), view.top(stretches.remade_workspace_bytes)

    def _message_ns(self, view: _View) -> Ints:
        """Give what messages take of the time of the rank's cores."""
        total_ns = np.zeros((), dtype=np.int64)
        for stage in view.stages:
            if stage > 0:
                total_ns = total_ns + view.row(self.messages[stage - 1].core_ns, stage)
            if stage + 1 < self.num_stages:
                total_ns = total_ns + view.column(self.messages[stage].core_ns, stage)
        return total_ns

    def of_links(self, bounds: Sequence[int]) -> dict[tuple[int, int], int]:
        """Give the time that each link, from one rank to another, is busy for a microbatch."""
        busy_ns: dict[tuple[int, int], int] = {}
        for at, message in enumerate(self.messages):
            if message.crosses:
                there, back = message.path, message.way_back
                cut = bounds[at + 1]
                busy_ns[there] = busy_ns.get(there, 0) + int(message.forward_ns[cut])
                busy_ns[back] = busy_ns.get(back, 0) + int(message.gradient_ns[cut])
        return busy_ns


class Messages:
    """What passes between two stages for a microbatch, for every place of the cut between them.

    The times of cores are those of either end.
    """

    def __init__(self, stretches: Stretches, links: Links, source: int, target: int) -> None:
        self.path = source, target
        self.way_back = target, source
        self.crosses = source != target
        empty = np.zeros(stretches.num_blocks + 1, dtype=np.int64)
        self.forward_ns = self.gradient_ns = self.size_bytes = empty
        self.forward_core_ns = self.gradient_core_ns = empty
        if self.crosses:
            forward_bytes, gradient_bytes = stretches.forward_bytes, stretches.gradient_bytes
            there, back = find_link(links, source, target), find_link(links, target, source)
            self.forward_ns = _map(there.transfer_ns, forward_bytes)
            self.gradient_ns = _map(back.transfer_ns, gradient_bytes)
            self.forward_core_ns = _map(there.core_ns, forward_bytes)
            self.gradient_core_ns = _map(back.core_ns, gradient_bytes)
            self.size_bytes = forward_bytes + gradient_bytes

    @property
    def core_ns(self) -> Ints:
        """Both ways."""
        return self.forward_core_ns + self.gradient_core_ns


class _View:
    """A rank's stages in a table over all stretches: one of them open, or none."""

    def __init__(self, stages: Sequence[int], bounds: Sequence[int], slot: Slot | None) -> None:
        self.stages = stages
        self._bounds = bounds
        self._slot = slot

    def list(self, table: Ints) -> list[Ints]:
        """List what each stage has of it."""
        return [self._at(table, stage) for stage in self.stages]

    def add(self, table: Ints) -> Ints:
        return reduce(np.add, self.list(table))

    def top(self, table: Ints) -> Ints:
        return reduce(np.maximum, self.list(table))

    def row(self, column: Ints, stage: int) -> Ints:
        """What a cut has in front of a stage."""
        slot = self._slot
        if slot is None or stage != slot.stage:
            return column[self._bounds[stage]]
        return column[slot.first : slot.stop + 1, None]

    def column(self, column: Ints, stage: int) -> Ints:
        """What a cut has behind a stage."""
        slot = self._slot
        if slot is None or stage != slot.stage:
            return column[self._bounds[stage + 1]]
        return column[None, slot.first : slot.stop + 1]

    def _at(self, table: Ints, stage: int) -> Ints:
        slot = self._slot
        if slot is None or stage != slot.stage:
            return table[self._bounds[stage], self._bounds[stage + 1]]
        return table[slot.first : slot.stop + 1, slot.first : slot.stop + 1]


def _map(give: Callable[[int], int], column: Ints) -> Ints:
    return np.asarray([give(int(each)) for each in column], dtype=np.int64)


def _weigh(counts: Sequence[int], own: Sequence[Ints]) -> Ints:
    return reduce(np.add, (count * each for count, each in zip(counts, own, strict=True)))


def _take_better(kept: RankLoad, remade: RankLoad) -> RankLoad:
    better = remade.worth < kept.worth

    def pick(one: Ints, other: Ints) -> Ints:
        return np.where(better, other, one)

    return RankLoad(
        step_ns=pick(kept.step_ns, remade.step_ns),
        compute_ns=pick(kept.compute_ns, remade.compute_ns),
        recomputes=pick(kept.recomputes, remade.recomputes),
        states_bytes=pick(kept.states_bytes, remade.states_bytes),
        held_bytes=pick(kept.held_bytes, remade.held_bytes),
        need_bytes=pick(kept.need_bytes, remade.need_bytes),
        room_bytes=pick(kept.room_bytes, remade.room_bytes),
        moved_bytes=pick(kept.moved_bytes, remade.moved_bytes),
        missing_bytes=pick(kept.missing_bytes, remade.missing_bytes),
        kept_need_bytes=kept.need_bytes,
    )
