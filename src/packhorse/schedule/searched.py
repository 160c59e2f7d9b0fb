"""A searched schedule: never longer than the best named one that keeps the caps.

In: ranks, microbatches, costs with caps of memory. Out: a schedule.

    candidates   every named schedule that keeps the caps, and list scheduling on a V of stages and
                 on loops of one, two and four stages a rank, with several policies and several
                 shares of the room
    improved     the shortest few, by moves of single tasks
    answer       the shortest of all; of equals, the one that was found first, named ones first

Equal inputs give equal schedules: how long it searches is counted in tasks timed, not in seconds.
Every candidate is timed with the given costs, and halves of a backward are taken to cost no more
than the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from packhorse.errors import DoesNotFitError
from packhorse.schedule.board import Board, make_board
from packhorse.schedule.costs import Costs
from packhorse.schedule.families import FAMILIES, make_named
from packhorse.schedule.greedy import Policy, list_orders
from packhorse.schedule.moves import (
    Orders,
    bound_makespan,
    improve_orders,
    join_backwards,
    split_backwards,
)
from packhorse.schedule.placements import place_looped, place_vee
from packhorse.schedule.spec import Schedule
from packhorse.schedule.timing import find_excess, time_schedule

_LISTED_TASKS: Final = 150_000
_MOVED_TASKS: Final = 3_000_000
_NUM_IMPROVED: Final = 4
_POLICIES: Final = tuple(
    Policy(first=first, patience=patience, deep_first=deep)
    for deep, first, patience in product(
        (True, False), ("gradients", "forwards", "oldest"), (1.0, 0.5, 0.0)
    )
)
_ROOMS: Final = (1.0, 0.75, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    makespan_ns: int
    board: Board
    orders: Orders


def make_searched(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Search a schedule for these costs and caps.

    Raises:
        DoesNotFitError: a rank may not even save one microbatch of its share.
    """
    cap_bytes = list_caps(num_ranks, num_microbatches, costs)
    found = [
        *_list_named(num_ranks, num_microbatches, costs),
        *_list_listed(num_ranks, num_microbatches, costs, cap_bytes),
    ]
    if not found:
        raise _word_refusal(num_ranks, costs, cap_bytes)
    found.sort(key=lambda each: each.makespan_ns)
    best = found[0]
    for each in _pick_distinct(found):
        improved = _improve(each, cap_bytes, _MOVED_TASKS)
        if improved.makespan_ns < best.makespan_ns:
            best = improved
    return best.board.schedule_of(best.orders)


def improve_schedule(schedule: Schedule, costs: Costs, *, num_moved_tasks: int) -> Schedule:
    """Search a schedule on the placement of another that keeps the caps; it is never longer.

    Args:
        num_moved_tasks: how long to search, in tasks timed.
    """
    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    cap_bytes = list_caps(num_ranks, num_microbatches, costs)
    board = make_board(
        [schedule.placement[stage][0] for stage in range(schedule.num_stages)],
        num_ranks,
        num_microbatches,
        costs,
    )
    orders = [list(map(board.encode, order)) for order in schedule.orders]
    makespan_ns = board.time(orders)
    assert makespan_ns is not None
    found = [_Candidate(makespan_ns=makespan_ns, board=board, orders=orders)]
    tasks = 0
    for room, policy in product(_ROOMS, _POLICIES):
        listed = _list_on(board, cap_bytes, room, policy)
        if listed is not None:
            found.append(listed)
            tasks += 3 * board.num_stages * num_microbatches
        if tasks > min(_LISTED_TASKS, num_moved_tasks):
            break
    found.sort(key=lambda each: each.makespan_ns)
    improved = [
        _improve(each, cap_bytes, num_moved_tasks // _NUM_IMPROVED)
        for each in _pick_distinct(found)
    ]
    best = min((found[0], *improved), key=lambda each: each.makespan_ns)
    return best.board.schedule_of(best.orders)


def list_caps(num_ranks: int, num_microbatches: int, costs: Costs) -> tuple[int, ...]:
    """Give what each rank may save; without caps, all that there is."""
    if costs.cap_bytes is not None:
        return costs.cap_bytes
    return (num_microbatches * sum(part.saved_bytes for part in costs.parts),) * num_ranks


def _list_named(num_ranks: int, num_microbatches: int, costs: Costs) -> Iterator[_Candidate]:
    for name in FAMILIES:
        schedule = make_named(name, num_ranks, num_microbatches, costs)
        timing = time_schedule(schedule, costs)
        if not find_excess(timing.peak_bytes, costs.cap_bytes):
            ranks = [schedule.placement[stage][0] for stage in range(schedule.num_stages)]
            board = make_board(ranks, num_ranks, num_microbatches, costs)
            orders = [list(map(board.encode, order)) for order in schedule.orders]
            yield _Candidate(makespan_ns=timing.makespan_ns, board=board, orders=orders)


def _list_listed(
    num_ranks: int, num_microbatches: int, costs: Costs, cap_bytes: Sequence[int]
) -> Iterator[_Candidate]:
    placements = (
        place_vee(num_ranks),
        place_looped(num_ranks, num_ranks),
        place_looped(num_ranks, 2 * num_ranks),
        place_looped(num_ranks, 4 * num_ranks),
    )
    tasks = 0
    for room, policy, placement in product(_ROOMS, _POLICIES, placements):
        if tasks > _LISTED_TASKS:
            return
        ranks = [placement[stage][0] for stage in range(len(placement))]
        board = make_board(ranks, num_ranks, num_microbatches, costs)
        found = _list_on(board, cap_bytes, room, policy)
        if found is not None:
            tasks += 3 * board.num_stages * num_microbatches
            yield found


def _list_on(
    board: Board, cap_bytes: Sequence[int], room: float, policy: Policy
) -> _Candidate | None:
    """List on one placement within a share of the room; None where one microbatch is too much."""
    limits = [
        max(round(room * cap), _least_bytes(board, rank))
        if room < 1 and cap >= _least_bytes(board, rank)
        else cap
        for rank, cap in enumerate(cap_bytes)
    ]
    try:
        orders = list_orders(board, limits, policy)
    except ValueError:
        return None
    makespan_ns = board.time(orders)
    assert makespan_ns is not None
    return _Candidate(makespan_ns=makespan_ns, board=board, orders=orders)


def _least_bytes(board: Board, rank: int) -> int:
    return sum(board.stages[stage].saved_bytes for stage in board.stages_of(rank))


def _pick_distinct(found: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Give the shortest few, each a little different from the others."""
    seen = set[tuple[int, tuple[int, ...]]]()
    for each in found:
        key = each.makespan_ns, each.board.ranks
        if key not in seen:
            seen.add(key)
            yield each
        if len(seen) == _NUM_IMPROVED:
            return


def _improve(candidate: _Candidate, cap_bytes: Sequence[int], num_moved_tasks: int) -> _Candidate:
    board = candidate.board
    if candidate.makespan_ns <= bound_makespan(board):
        return candidate
    orders = split_backwards(board, candidate.orders)
    num_tasks = sum(map(len, orders))
    num_trials = num_moved_tasks // num_tasks
    orders = improve_orders(board, orders, cap_bytes, num_trials=num_trials)
    if num_trials > num_tasks:
        orders = join_backwards(board, orders)
    makespan_ns = board.time(orders)
    assert makespan_ns is not None
    return _Candidate(makespan_ns=makespan_ns, board=board, orders=orders)


def _word_refusal(num_ranks: int, costs: Costs, cap_bytes: Sequence[int]) -> DoesNotFitError:
    share_bytes = costs.share_bytes(num_ranks)
    lines = [
        f"rank {rank} saves {stage.saved_bytes / share_bytes:.3g} for one microbatch and may save"
        f" {cap / share_bytes:.3g}"
        for rank, (stage, cap) in enumerate(zip(costs.cut(num_ranks), cap_bytes, strict=True))
        if cap < stage.saved_bytes
    ]
    return DoesNotFitError(
        "one microbatch of a rank's stages saves more than the rank may",
        where="\n".join(lines[:8]) or "every placement of the stages",
        fix="raise the cap, make microbatches smaller, or use more ranks",
    )
