"""List scheduling, local search, and the searched schedule against the named ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import DoesNotFitError
from packhorse.schedule.board import make_board
from packhorse.schedule.costs import Costs, even_costs
from packhorse.schedule.families import FAMILIES, make_named
from packhorse.schedule.greedy import Policy, list_orders
from packhorse.schedule.moves import (
    bound_makespan,
    improve_orders,
    join_backwards,
    split_backwards,
)
from packhorse.schedule.placements import place_looped, place_vee
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.searched import list_caps, make_searched
from packhorse.schedule.spec import Schedule
from packhorse.schedule.timing import find_excess, time_schedule
from tests.schedule.schedule_cases import named_schedules, uneven_costs

POLICIES = st.builds(
    Policy,
    split=st.booleans(),
    first=st.sampled_from(("gradients", "forwards", "oldest")),
    deep_first=st.booleans(),
    patience=st.sampled_from((0.0, 0.5, 1.0)),
)


def ranks_of(schedule: Schedule) -> list[int]:
    return [schedule.placement[stage][0] for stage in range(schedule.num_stages)]


@settings(max_examples=60)
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 12),
    shape=st.sampled_from(("line", "loop", "vee")),
    room=st.floats(0, 2),
    policy=POLICIES,
    costs=uneven_costs(),
)
def test_listed_orders_are_right_and_keep_every_cap(
    p: int, m: int, shape: str, room: float, policy: Policy, costs: Costs
) -> None:
    places = {"line": place_looped(p, p), "loop": place_looped(p, 3 * p), "vee": place_vee(p)}
    placement = places[shape]
    board = make_board([placement[stage][0] for stage in range(len(placement))], p, m, costs)
    least = [
        sum(board.stages[stage].saved_bytes for stage in board.stages_of(rank)) for rank in range(p)
    ]
    caps = [round(each * (1 + room * m)) for each in least]
    orders = list_orders(board, caps, policy)
    schedule = board.schedule_of(orders)
    check_schedule(schedule)
    timing = time_schedule(schedule, costs)
    assert not find_excess(timing.peak_bytes, caps)
    assert board.time(orders) == timing.makespan_ns >= bound_makespan(board)


@settings(max_examples=40)
@given(case=named_schedules(), costs=uneven_costs())
def test_a_board_times_and_names_tasks_as_schedules_do(
    case: tuple[str, Schedule], costs: Costs
) -> None:
    _, schedule = case
    board = make_board(ranks_of(schedule), schedule.num_ranks, schedule.num_microbatches, costs)
    orders = [list(map(board.encode, order)) for order in schedule.orders]
    assert board.schedule_of(orders) == schedule
    timing = time_schedule(schedule, costs)
    assert board.time(orders) == timing.makespan_ns
    halves = split_backwards(board, orders)
    split_ns = board.time(halves)
    assert split_ns is not None
    assert split_ns <= timing.makespan_ns
    assert board.time(join_backwards(board, halves)) == split_ns
    check_schedule(board.schedule_of(halves))


def test_a_board_says_when_tasks_never_end() -> None:
    board = make_board([0], 1, 1, even_costs(1))
    assert board.time([[1, 0]]) is None


@settings(max_examples=30)
@given(case=named_schedules(), costs=uneven_costs())
def test_moves_keep_rules_and_caps_and_never_lengthen(
    case: tuple[str, Schedule], costs: Costs
) -> None:
    _, schedule = case
    before = time_schedule(schedule, costs)
    board = make_board(ranks_of(schedule), schedule.num_ranks, schedule.num_microbatches, costs)
    orders = split_backwards(board, [list(map(board.encode, o)) for o in schedule.orders])
    improved = improve_orders(board, orders, before.peak_bytes, num_trials=200)
    moved = board.schedule_of(improved)
    check_schedule(moved)
    after = time_schedule(moved, costs)
    assert after.makespan_ns <= before.makespan_ns
    assert not find_excess(after.peak_bytes, before.peak_bytes)


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
@pytest.mark.parametrize("cap", [None, 2, 3])
def test_never_longer_than_the_best_named(num_microbatches: int, cap: int | None) -> None:
    caps = None if cap is None else (cap * 120,) * 3
    costs = even_costs(3, input_grad_ns=1_300_000, saved_bytes=120, send_ns=150_000)
    costs = replace(costs, cap_bytes=caps)
    schedule = make_searched(3, num_microbatches, costs)
    check_schedule(schedule)
    timing = time_schedule(schedule, costs)
    assert not find_excess(timing.peak_bytes, caps)
    for name in FAMILIES:
        named = time_schedule(make_named(name, 3, num_microbatches, costs), costs)
        if not find_excess(named.peak_bytes, caps):
            assert timing.makespan_ns <= named.makespan_ns, name
    assert make_searched(3, num_microbatches, costs) == schedule


def test_it_fits_where_no_named_one_does() -> None:
    costs = replace(even_costs(4, saved_bytes=100), cap_bytes=(100, 150, 150, 100))
    peaks = {
        name: time_schedule(make_named(name, 4, 6, costs), costs).peak_bytes for name in FAMILIES
    }
    assert all(find_excess(peak, costs.cap_bytes) for peak in peaks.values())
    schedule = make_searched(4, 6, costs)
    check_schedule(schedule)
    assert not find_excess(time_schedule(schedule, costs).peak_bytes, costs.cap_bytes)


def test_what_cannot_fit_is_refused() -> None:
    costs = replace(even_costs(2, saved_bytes=100), cap_bytes=(100, 99))
    with pytest.raises(DoesNotFitError) as found:
        make_searched(2, 4, costs)
    assert found.value.where == "rank 1 saves 1 for one microbatch and may save 0.99"
    board = make_board([0, 1], 2, 4, costs)
    with pytest.raises(ValueError, match="rank 1 needs 100 bytes"):
        list_orders(board, (100, 99), Policy())
    assert list_caps(2, 4, replace(costs, cap_bytes=None)) == (800, 800)
