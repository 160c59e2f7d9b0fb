"""Every named schedule keeps every rule, for any ranks, microbatches, stages and costs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import InputError
from packhorse.schedule.costs import Costs, even_costs
from packhorse.schedule.families import FAMILIES, AnyStages, FixedStages, make_named
from packhorse.schedule.messages import (
    Receive,
    Send,
    check_messages,
    order_tasks,
    project_messages,
)
from packhorse.schedule.needs import list_needs
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.spec import Backward, Forward, InputGrad, Schedule, WeightGrad
from packhorse.schedule.timing import duration_of, time_schedule
from tests.schedule.schedule_cases import (
    NAMES,
    STAGED,
    make_even,
    named_schedules,
    uneven_costs,
)


@settings(max_examples=40)
@given(case=named_schedules())
def test_each_task_exactly_once(case: tuple[str, Schedule]) -> None:
    _, schedule = case
    counts = Counter(task for order in schedule.orders for task in order)
    assert set(counts.values()) == {1}
    for stage in range(schedule.num_stages):
        for at in range(schedule.num_microbatches):
            halves = [counts[kind(stage=stage, microbatch=at)] for kind in (InputGrad, WeightGrad)]
            assert counts[Forward(stage=stage, microbatch=at)] == 1
            assert counts[Backward(stage=stage, microbatch=at)] == 1 - halves[0]
            assert halves[0] == halves[1]
    assert set(schedule.placement) == {task.stage for task in counts}


@settings(max_examples=40)
@given(case=named_schedules(), costs=uneven_costs())
def test_needs_are_kept_and_ranks_do_one_thing_at_a_time(
    case: tuple[str, Schedule], costs: Costs
) -> None:
    _, schedule = case
    timing = time_schedule(schedule, costs)
    stages = costs.cut(schedule.num_stages)
    spans = {
        task: (rank, start_ns, end_ns)
        for rank, order in enumerate(schedule.orders)
        for task, start_ns, end_ns in zip(
            order, timing.ranks[rank].starts_ns, timing.ranks[rank].ends_ns, strict=True
        )
    }
    for task, (rank, start_ns, end_ns) in spans.items():
        assert end_ns - start_ns == duration_of(task, stages[task.stage])
        arrivals = [
            spans[need][2] + (costs.send_ns if spans[need][0] != rank else 0)
            for need in list_needs(task, schedule.num_stages, spans)
        ]
        assert start_ns >= max(arrivals, default=0)
        # Nothing is later than it must be.
        at = schedule.orders[rank].index(task)
        before_ns = timing.ranks[rank].ends_ns[at - 1] if at else 0
        assert start_ns == max(arrivals, default=0) or start_ns == before_ns
    for each in timing.ranks:
        assert all(
            end <= start for end, start in zip(each.ends_ns, each.starts_ns[1:], strict=False)
        )


@settings(max_examples=40)
@given(case=named_schedules())
def test_every_rule_passes(case: tuple[str, Schedule]) -> None:
    check_schedule(case[1])


@settings(max_examples=40)
@given(case=named_schedules())
def test_backwards_are_first_in_first_out(case: tuple[str, Schedule]) -> None:
    _, schedule = case
    for order in schedule.orders:
        for kinds in ((Backward, InputGrad), (Backward, WeightGrad), (Forward,)):
            for stage in range(schedule.num_stages):
                run = [t.microbatch for t in order if isinstance(t, kinds) and t.stage == stage]
                assert run == sorted(run)


@settings(max_examples=40)
@given(case=named_schedules())
def test_messages_are_one_order_seen_by_both_ends(case: tuple[str, Schedule]) -> None:
    _, schedule = case
    ordered = order_tasks(schedule)
    places = {task: at for at, (_, task) in enumerate(ordered)}
    for at, (_, task) in enumerate(ordered):
        assert all(places[need] < at for need in list_needs(task, schedule.num_stages, places))
    lists = project_messages(schedule)
    check_messages(lists)
    channels: dict[tuple[int, int], list[list[object]]] = {}
    for rank, actions in enumerate(lists):
        assert (
            tuple(a for a in actions if not isinstance(a, Send | Receive))
            == (schedule.orders[rank])
        )
        for action in actions:
            if isinstance(action, Send):
                channels.setdefault((rank, action.target), [[], []])[0].append(action.task)
            elif isinstance(action, Receive):
                channels.setdefault((action.source, rank), [[], []])[1].append(action.task)
    assert all(sent == received for sent, received in channels.values())
    # Every boundary between ranks is crossed once by each microbatch, both ways.
    homes = [schedule.placement[stage][0] for stage in range(schedule.num_stages)]
    crossings = sum(one != other for one, other in pairwise(homes))
    assert sum(len(sent) for sent, _ in channels.values()) == (
        2 * crossings * schedule.num_microbatches
    )


@settings(max_examples=40)
@given(case=named_schedules(), costs=uneven_costs())
def test_times_are_those_of_a_walk_in_total_order(case: tuple[str, Schedule], costs: Costs) -> None:
    _, schedule = case
    stages = costs.cut(schedule.num_stages)
    free_ns: dict[int, int] = {}
    ends: dict[object, tuple[int, int]] = {}
    for rank, task in order_tasks(schedule):
        begin_ns = free_ns.get(rank, 0)
        for need in list_needs(task, schedule.num_stages, {t for o in schedule.orders for t in o}):
            end_ns, home = ends[need]
            begin_ns = max(begin_ns, end_ns + (costs.send_ns if home != rank else 0))
        free_ns[rank] = begin_ns + duration_of(task, stages[task.stage])
        ends[task] = free_ns[rank], rank
    assert time_schedule(schedule, costs).makespan_ns == max(free_ns.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8])
def test_fewer_microbatches_than_stages(name: str, num_microbatches: int) -> None:
    schedule = make_even(name, 6, num_microbatches)
    check_schedule(schedule)
    assert schedule.num_microbatches == num_microbatches
    assert schedule.num_stages >= 6


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("num_stages", [4, 5, 7, 10, 16])
def test_more_stages_than_ranks(name: str, num_stages: int) -> None:
    schedule = make_even(name, 4, 6, num_stages=num_stages)
    assert schedule.num_stages == num_stages
    assert all(schedule.placement[stage] == (stage % 4,) for stage in range(num_stages))


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_a_pure_function(name: str) -> None:
    assert make_even(name, 4, 9) == make_even(name, 4, 9)
    assert FAMILIES[name].about


def test_stages_that_do_not_go_with_a_family_are_refused() -> None:
    with pytest.raises(InputError) as found:
        make_named("zb-v", 4, 8, even_costs(4), num_stages=4)
    assert found.value.what == "zb-v on 4 ranks has 8 stages, not 4"
    assert "interleaved, looped-bfs, layered" in str(found.value)
    with pytest.raises(InputError, match="3 stages leave 1 of 4 ranks without work"):
        make_named("interleaved", 4, 8, even_costs(4), num_stages=3)
    assert {name for name, each in FAMILIES.items() if isinstance(each, AnyStages)} == set(STAGED)
    for name, family in FAMILIES.items():
        if isinstance(family, FixedStages):
            wanted = 3 * family.stages_per_rank
            assert make_even(name, 3, 4, num_stages=wanted) == make_even(name, 3, 4)


@given(costs=uneven_costs(), num_stages=st.integers(1, 40))
def test_stages_of_every_cut_sum_to_the_same(costs: Costs, num_stages: int) -> None:
    stages = costs.cut(num_stages)
    assert len(stages) == num_stages
    for field in ("forward_ns", "input_grad_ns", "weight_grad_ns", "saved_bytes"):
        values = [getattr(stage, field) for stage in stages]
        assert sum(values) == sum(getattr(part, field) for part in costs.parts)
        assert min(values) >= 0
    assert costs.cut(len(costs.parts)) == costs.parts
