"""Stages of their own length, with messages that take as long as each cut makes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.schedule.board import make_board
from packhorse.schedule.costs import Cost, Costs, Crossing, even_costs
from packhorse.schedule.needs import list_needs
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.searched import improve_schedule
from packhorse.schedule.spec import Forward, Schedule
from packhorse.schedule.timing import duration_of, find_excess, time_schedule
from tests.schedule.schedule_cases import make_even, named_schedules


def draw_costs(data: st.DataObject, num_stages: int) -> Costs:
    times = st.integers(1, 1000)
    part = st.builds(
        Cost, forward_ns=times, input_grad_ns=times, weight_grad_ns=times, saved_bytes=times
    )
    lag = st.integers(0, 900)
    cut = st.builds(Crossing, forward_ns=lag, gradient_ns=lag)
    return Costs(
        parts=tuple(data.draw(st.lists(part, min_size=num_stages, max_size=num_stages))),
        crossings=tuple(data.draw(st.lists(cut, min_size=num_stages - 1, max_size=num_stages - 1))),
    )


@settings(max_examples=40)
@given(case=named_schedules(), data=st.data())
def test_every_cut_has_its_own_times(case: tuple[str, Schedule], data: st.DataObject) -> None:
    _, schedule = case
    costs = draw_costs(data, schedule.num_stages)
    timing = time_schedule(schedule, costs)
    spans = {
        task: (rank, start_ns, end_ns)
        for rank, order in enumerate(schedule.orders)
        for task, start_ns, end_ns in zip(
            order, timing.ranks[rank].starts_ns, timing.ranks[rank].ends_ns, strict=True
        )
    }
    for rank, order in enumerate(schedule.orders):
        free_ns = 0
        for task in order:
            ready_ns = free_ns
            for need in list_needs(task, schedule.num_stages, spans):
                lag_ns = 0
                if spans[need][0] != rank and isinstance(task, Forward):
                    lag_ns = costs.crossings[task.stage - 1].forward_ns
                elif spans[need][0] != rank:
                    lag_ns = costs.crossings[task.stage].gradient_ns
                ready_ns = max(ready_ns, spans[need][2] + lag_ns)
            free_ns = ready_ns + duration_of(task, costs.parts[task.stage])
            assert spans[task] == (rank, ready_ns, free_ns)


@settings(max_examples=40)
@given(case=named_schedules(), data=st.data())
def test_a_board_gives_the_same_times(case: tuple[str, Schedule], data: st.DataObject) -> None:
    _, schedule = case
    costs = draw_costs(data, schedule.num_stages)
    ranks = [schedule.placement[stage][0] for stage in range(schedule.num_stages)]
    board = make_board(ranks, schedule.num_ranks, schedule.num_microbatches, costs)
    orders = [list(map(board.encode, order)) for order in schedule.orders]
    assert board.time(orders) == time_schedule(schedule, costs).makespan_ns


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_equal_cuts_are_the_one_time_of_all(name: str) -> None:
    schedule = make_even(name, 3, 5)
    stages = schedule.num_stages
    one = even_costs(stages, send_ns=300_000)
    same = Crossing(forward_ns=300_000, gradient_ns=300_000)
    many = replace(one, send_ns=0, crossings=(same,) * (stages - 1))
    assert time_schedule(schedule, one) == time_schedule(schedule, many)


def test_crossings_are_those_of_one_number_of_stages() -> None:
    costs = replace(even_costs(4), crossings=(Crossing(forward_ns=1, gradient_ns=2),) * 3)
    assert len(costs.cross(4)) == 3
    with pytest.raises(ValueError, match="crossings of 4 stages, not 8"):
        costs.cross(8)


@settings(max_examples=8)
@given(
    name=st.sampled_from(["1f1b", "zb-v", "interleaved"]),
    num_ranks=st.integers(1, 3),
    data=st.data(),
)
def test_an_improved_schedule_is_no_longer_and_keeps_the_caps(
    name: str, num_ranks: int, data: st.DataObject
) -> None:
    schedule = make_even(name, num_ranks, 4)
    costs = draw_costs(data, schedule.num_stages)
    before = time_schedule(schedule, costs)
    costs = replace(costs, cap_bytes=before.peak_bytes)
    found = improve_schedule(schedule, costs, num_moved_tasks=8000)
    check_schedule(found)
    assert found.placement == schedule.placement
    after = time_schedule(found, costs)
    assert after.makespan_ns <= before.makespan_ns
    assert not find_excess(after.peak_bytes, costs.cap_bytes)
