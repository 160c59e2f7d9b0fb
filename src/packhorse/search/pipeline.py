"""Which schedule, cut where, is the fastest way to train a model on its ranks?

In: a model, ranks that may be unlike, the links between them, the number of microbatches. Out: a
`Pipeline` with a reason for every choice and a line for every schedule that was not taken.

    for every named family, where it may with several numbers of stages:
        its schedule says how many microbatches of each stage are held at once
        cut the model for that schedule; no cut fits: say so
        time the schedule with the stages' own costs
    for the shortest few placements: search an order of tasks within what memory leaves
    take the shortest; but of those that are 2 % from it, the one whose ranks need the least memory

Estimates are no nearer to what a step takes than that. A step is also no shorter than its slowest
rank or link is busy. No limit is in seconds, so the same input gives the same pipeline everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from packhorse.errors import DoesNotFitError, InputError
from packhorse.machine.cluster import Links
from packhorse.model.spec import Model
from packhorse.plan.ranks import Rejected
from packhorse.plan.spec import Choice, OptimizerPlan
from packhorse.schedule.costs import Costs, even_costs
from packhorse.schedule.families import FAMILIES, AnyStages, FixedStages
from packhorse.schedule.finding import NAMES, SEARCHED, make_schedule, names_function
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.searched import improve_schedule
from packhorse.schedule.spec import Schedule
from packhorse.schedule.timing import time_schedule
from packhorse.search.ranks import RankSpec
from packhorse.search.space import UNLIMITED_BYTES
from packhorse.search.stage_costs import cost_stages
from packhorse.search.stages import (
    Cutter,
    RankShare,
    StageCuts,
    cut_stages,
    make_cutter,
    place_cuts,
)
from packhorse.units import format_bytes, format_ns, format_part, format_percent

_TURNS: Final = (2, 3, 4)
_NUM_SEARCHED: Final = 2
_MOVED_TASKS: Final = 400_000
_LEAST_GAIN: Final = 0.001
_CLOSE: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A schedule of a model on its ranks, where the model is cut, and why.

    `bounds` has the first block of every stage and the end, `recomputes` a choice for every rank.
    """

    schedule_name: Choice[str]
    bounds: Choice[tuple[int, ...]]
    recomputes: tuple[Choice[bool], ...]
    schedule: Schedule
    cuts: StageCuts
    costs: Costs
    step_ns: int
    bubble: Fraction
    rejected: tuple[Rejected, ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of every block."""
        return self.cuts.owners


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    name: str
    schedule: Schedule
    cuts: StageCuts
    costs: Costs
    step_ns: int
    bubble: Fraction

    @property
    def need_bytes(self) -> int:
        return sum(share.need_bytes for share in self.cuts.shares)


def find_pipeline(
    model: Model,
    ranks: Sequence[RankSpec],
    links: Links,
    *,
    num_microbatches: int,
    optimizer: OptimizerPlan,
    names: Sequence[str] = NAMES,
) -> Pipeline:
    """Find the fastest schedule that fits, and where it cuts the model.

    Args:
        model: at the shape of one microbatch.
        names: which schedules may be taken: named ones, or functions in a person's own files.

    Raises:
        InputError: there are more ranks than blocks, a name is unknown, a link is missing, or a
            profile is not of this model.
        DoesNotFitError: no schedule keeps every rank within its budget.
    """
    _check_request(model, ranks, names)
    cutter = make_cutter(model, ranks, links, optimizer=optimizer)
    named = tuple(name for name in names if name != SEARCHED)
    found: list[_Timed] = []
    rejected: list[Rejected] = []
    roomy = _Roomy(cutter)
    for name, wanted in _list_sizes(named or tuple(FAMILIES), cutter):
        schedule = _make(name, wanted, len(ranks), num_microbatches)
        num_stages = schedule.num_stages
        try:
            found.append(_time(cutter, name, schedule, roomy.cut(schedule)))
        except DoesNotFitError as error:
            because = f"does not fit: {(error.where or error.what).splitlines()[0]}"
            rejected.append(Rejected(name=name, num_stages=num_stages, because=because))
        except InputError as error:
            if num_stages <= len(model.blocks):
                raise
            rejected.append(Rejected(name=name, num_stages=num_stages, because=error.what))
    if not found:
        raise _refuse(model, rejected)
    found.sort(key=_order)
    if SEARCHED in names:
        searched = [_search(cutter, each) for each in _pick_placements(found)]
        found = sorted((*(found if named else ()), *searched), key=_order)
    best = _pick(found)
    others = [each for each in found if each is not best]
    check_schedule(best.schedule)
    # The nearest first, and last what cannot be.
    rejected = [
        *(
            Rejected(
                name=each.name, num_stages=each.schedule.num_stages, because=_compare(each, best)
            )
            for each in others
        ),
        *rejected,
    ]
    return Pipeline(
        schedule_name=Choice(value=best.name, because=_word_schedule(best, others, len(rejected))),
        bounds=Choice(value=best.cuts.bounds, because=_word_cuts(best.cuts)),
        recomputes=tuple(
            Choice(value=share.recomputes, because=_word_recompute(share, spec.budget_bytes))
            for share, spec in zip(best.cuts.shares, ranks, strict=True)
        ),
        schedule=best.schedule,
        cuts=best.cuts,
        costs=best.costs,
        step_ns=best.step_ns,
        bubble=best.bubble,
        rejected=tuple(rejected),
    )


def _check_request(model: Model, ranks: Sequence[RankSpec], names: Sequence[str]) -> None:
    if len(ranks) > len(model.blocks):
        raise InputError(
            f"{model.name} has {len(model.blocks)} blocks, too few for {len(ranks)} ranks",
            where="the number of ranks",
            fix=f"take at most {len(model.blocks)} ranks",
        )
    for name in names:
        if name not in NAMES and not names_function(name):
            raise InputError(
                f"there is no schedule {name!r} to choose from",
                where="the names of schedules",
                fix=f"take some of {', '.join(NAMES)}, or file.py:function",
            )


def _list_sizes(names: Sequence[str], cutter: Cutter) -> Iterator[tuple[str, int | None]]:
    """List each family with the numbers of stages to try; functions decide on theirs."""
    num_ranks, num_blocks = len(cutter.ranks), len(cutter.model.blocks)
    for name in names:
        family = FAMILIES.get(name)
        match family:
            case None:
                yield name, None
            case FixedStages():
                yield name, family.stages_per_rank * num_ranks
            case AnyStages() if name == "layered":
                yield name, num_blocks
            case AnyStages():
                few = [turns * num_ranks for turns in _TURNS if turns * num_ranks < num_blocks]
                for num_stages in few or [num_blocks]:
                    yield name, num_stages


class _Roomy:
    """Remembers where each placement is cut best if memory is no matter.

    Schedules of a placement differ in what they hold, and in nothing else that cuts depend on.
    """

    def __init__(self, cutter: Cutter) -> None:
        self.cutter = cutter
        ranks = tuple(replace(rank, budget_bytes=UNLIMITED_BYTES) for rank in cutter.ranks)
        self._unlimited = replace(cutter, ranks=ranks)
        self._bounds: dict[tuple[int, ...], tuple[int, ...]] = {}

    def cut(self, schedule: Schedule) -> StageCuts:
        """Cut for a schedule: as if there were room, if there is."""
        rank_of = tuple(schedule.placement[stage][0] for stage in range(schedule.num_stages))
        if rank_of not in self._bounds:
            self._bounds[rank_of] = cut_stages(self._unlimited, schedule).bounds
        try:
            cuts = place_cuts(self.cutter, schedule, self._bounds[rank_of])
        except DoesNotFitError:
            return cut_stages(self.cutter, schedule)
        if any(share.recomputes or share.moved_bytes for share in cuts.shares):
            return cut_stages(self.cutter, schedule)
        return cuts


def _make(name: str, num_stages: int | None, num_ranks: int, num_microbatches: int) -> Schedule:
    # A named schedule is known before its costs are: they follow from the cuts, and those from it.
    even = even_costs(num_ranks)
    schedule = make_schedule(name, num_ranks, num_microbatches, even, num_stages=num_stages)
    if names_function(name):
        check_schedule(schedule)
        _check_sizes(name, schedule, num_ranks, num_microbatches)
    return schedule


def _check_sizes(name: str, schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    found = schedule.num_ranks, schedule.num_microbatches
    if found != (num_ranks, num_microbatches):
        raise InputError(
            f"the schedule is of {found[0]} ranks and {found[1]} microbatches, not of {num_ranks}"
            f" and {num_microbatches}",
            where=name,
            fix="make it for the ranks and microbatches that the function is called with",
        )


def _time(cutter: Cutter, name: str, schedule: Schedule, cuts: StageCuts) -> _Timed:
    costs = cost_stages(cutter, schedule, cuts)
    timing = time_schedule(schedule, costs)
    step_ns = max(timing.makespan_ns, cuts.bottleneck_ns * schedule.num_microbatches)
    busy_ns = sum(rank.busy_ns for rank in timing.ranks)
    return _Timed(
        name=name,
        schedule=schedule,
        cuts=cuts,
        costs=costs,
        step_ns=step_ns,
        bubble=1 - Fraction(busy_ns, max(step_ns, 1) * schedule.num_ranks),
    )


def _pick_placements(found: Sequence[_Timed]) -> list[_Timed]:
    """Give the shortest of each placement, a few of them."""
    firsts: dict[tuple[int, ...], _Timed] = {}
    for each in found:
        firsts.setdefault(each.cuts.rank_of, each)
    return list(firsts.values())[:_NUM_SEARCHED]


def _search(cutter: Cutter, start: _Timed) -> _Timed:
    schedule = improve_schedule(start.schedule, start.costs, num_moved_tasks=_MOVED_TASKS)
    try:
        cuts = place_cuts(cutter, schedule, start.cuts.bounds)
    except DoesNotFitError:
        # What a rank that recomputes holds between two halves is in no cost of a stage.
        return replace(start, name=SEARCHED)
    found = _time(cutter, SEARCHED, schedule, cuts)
    return min(found, replace(start, name=SEARCHED), key=_order)


def _order(timed: _Timed) -> tuple[int, int]:
    return timed.step_ns, timed.need_bytes


def _pick(found: Sequence[_Timed]) -> _Timed:
    """Give what ranks hold the least for of all that are about as short as the first."""
    limit_ns = found[0].step_ns * (1 + _CLOSE)
    near = [each for each in found if each.step_ns <= limit_ns]
    return min(near, key=lambda each: (each.need_bytes, each.step_ns))


def _refuse(model: Model, rejected: Sequence[Rejected]) -> DoesNotFitError:
    return DoesNotFitError(
        f"no schedule of {model.name} fits its ranks",
        where="\n".join(
            f"{each.name}, {each.num_stages} stages: {each.because}" for each in rejected
        ),
        fix="grant ranks more, let states lie on another tier, use more ranks, or take smaller"
        " micro-batches",
    )


def _compare(each: _Timed, best: _Timed) -> str:
    step = f"{format_ns(each.step_ns)} a step"
    longer = (each.step_ns - best.step_ns) / max(best.step_ns, 1)
    if longer >= _LEAST_GAIN:
        return f"{step}, {format_percent(longer)} longer"
    more_bytes = each.need_bytes - best.need_bytes
    if longer <= -_LEAST_GAIN:
        return f"{step}, {format_percent(-longer)} shorter, but {_word_more(more_bytes)}"
    if more_bytes > 0:
        return f"{step}, no shorter, and {_word_more(more_bytes)}"
    return f"{step}, no shorter"


def _word_more(more_bytes: int) -> str:
    return f"ranks hold {format_bytes(more_bytes)} more"


def _word_schedule(best: _Timed, others: Sequence[_Timed], num_rejected: int) -> str:
    step = f"{format_ns(best.step_ns)} a step, {format_percent(float(best.bubble))} idle"
    if not others:
        return f"{step}: the only one that fits" if num_rejected else f"{step}: the only one"
    second = next((each for each in others if each.name != best.name), others[0])
    shortest = others[0]
    if shortest.step_ns < best.step_ns:
        return (
            f"{step}: of {len(others) + 1} that fit, the one that holds the least of those within"
            f" {format_percent(_CLOSE)} of the shortest; {shortest.name} takes"
            f" {format_ns(shortest.step_ns)}, and"
            f" {_word_more(shortest.need_bytes - best.need_bytes)}"
        )
    return (
        f"{step}: the shortest of {len(others) + 1} that fit;"
        f" {second.name} takes {format_ns(second.step_ns)}"
    )


def _word_cuts(cuts: StageCuts) -> str:
    owners = cuts.owners
    counts = ", ".join(str(owners.count(rank)) for rank in range(len(cuts.shares)))
    times = [share.step_ns for share in cuts.shares]
    crossing = f"{format_bytes(cuts.crossing_bytes)} cross the cuts"
    if len(times) == 1:
        return "one rank has all blocks"
    if min(times) == max(times) == cuts.bottleneck_ns:
        return (
            f"blocks by rank {counts}: each takes {format_ns(times[0])} of each microbatch;"
            f" {crossing}"
        )
    if cuts.bottleneck_ns > max(times):
        return (
            f"blocks by rank {counts}: a link is busy the longest,"
            f" {format_ns(cuts.bottleneck_ns)} of each microbatch; {crossing}"
        )
    slowest, fastest = times.index(max(times)), times.index(min(times))
    return (
        f"blocks by rank {counts}: of each microbatch rank {slowest} takes the longest,"
        f" {format_ns(times[slowest])}, rank {fastest} the least, {format_ns(times[fastest])};"
        f" {crossing}"
    )


def _word_recompute(share: RankShare, budget_bytes: int) -> str:
    part = format_part(share.need_bytes, budget_bytes)
    moved = f"; {format_bytes(share.moved_bytes)} of states lie elsewhere between uses"
    away = moved if share.moved_bytes else ""
    if not share.recomputes:
        return f"saved values fit: {part} are needed{away}"
    if share.kept_need_bytes > budget_bytes:
        return (
            f"keeping would need {format_bytes(share.kept_need_bytes)}; with a second forward"
            f" {part} are needed{away}"
        )
    return f"a second forward takes less time than moving more states: {part} are needed{away}"
