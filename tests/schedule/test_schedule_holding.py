"""The fullest moments of a rank: whatever microbatches weigh, its peak is at one of them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.schedule.costs import Cost, Costs
from packhorse.schedule.holding import list_moments, stages_of
from packhorse.schedule.spec import Backward, Forward, InputGrad, Schedule, WeightGrad
from packhorse.schedule.timing import time_schedule
from tests.schedule.schedule_cases import make_even, named_schedules, write_schedule


@settings(max_examples=40)
@given(case=named_schedules(), data=st.data())
def test_the_peak_is_at_one_of_them(case: tuple[str, Schedule], data: st.DataObject) -> None:
    _, schedule = case
    weights = data.draw(
        st.lists(st.integers(0, 99), min_size=schedule.num_stages, max_size=schedule.num_stages)
    )
    stages = [
        Cost(forward_ns=0, input_grad_ns=0, weight_grad_ns=0, saved_bytes=each) for each in weights
    ]
    peak_bytes = time_schedule(schedule, Costs(parts=tuple(stages))).peak_bytes
    for rank, moments in enumerate(list_moments(schedule)):
        own = [weights[stage] for stage in stages_of(schedule, rank)]
        most = max(
            sum(count * weight for count, weight in zip(moment.saved, own, strict=True))
            for moment in moments
        )
        assert most == peak_bytes[rank]
        for one, other in combinations(moments, 2):
            pairs = zip((*one.saved, *one.opened), (*other.saved, *other.opened), strict=True)
            assert any(a < b for a, b in pairs)


@settings(max_examples=20)
@given(case=named_schedules())
def test_both_counts_together_are_those_of_a_replay(case: tuple[str, Schedule]) -> None:
    _, schedule = case
    for rank, moments in enumerate(list_moments(schedule)):
        held = most = 0
        for task in schedule.orders[rank]:
            held += {Forward: 3, InputGrad: 5, Backward: -3, WeightGrad: -8}[type(task)]
            most = max(most, held)
        assert most == max(3 * sum(each.saved) + 5 * sum(each.opened) for each in moments)


def test_an_opened_microbatch_is_one_between_its_halves() -> None:
    (moments,) = list_moments(write_schedule("0F0 0F1 0I0 0I1 0W0 0W1"))
    assert [(each.saved, each.opened) for each in moments] == [((2,), (2,))]
    (moments,) = list_moments(write_schedule("0F0 0F1 0I0 0W0 0I1 0W1"))
    assert [(each.saved, each.opened) for each in moments] == [((2,), (1,))]
    (moments,) = list_moments(write_schedule("0F0 0F1 0B0 0B1"))
    assert [(each.saved, each.opened) for each in moments] == [((2,), (0,))]


def test_1f1b_saves_one_more_on_each_rank_before() -> None:
    for rank, moments in enumerate(list_moments(make_even("1f1b", 4, 9))):
        assert [each.saved for each in moments] == [(4 - rank,)]
    moments = list_moments(make_even("zb-v", 2, 9))
    assert all(len(each.saved) == 2 for own in moments for each in own)
