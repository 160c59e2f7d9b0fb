"""One replica stands for all: written out, all of them keep the rules and take the same time."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from schedule_cases import make_even

from packhorse.errors import RuleError
from packhorse.schedule.costs import UNIT_NS, even_costs
from packhorse.schedule.families import FAMILIES
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.replicas import Replicas, time_replicas
from packhorse.schedule.timing import Reduction, time_schedule


def with_reduction(num_ranks, reduce_ns):
    even = even_costs(num_ranks)
    return replace(even, parts=tuple(replace(p, reduce_ns=reduce_ns) for p in even.parts))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_replicas_are_the_first_one_again(name):
    replicas = Replicas(first=make_even(name, 3, 5), count=3)
    whole = replicas.write_out()
    check_schedule(whole)
    assert (whole.num_ranks, whole.num_microbatches) == (9, 15)
    assert (replicas.num_ranks, replicas.num_microbatches) == (9, 15)
    assert whole.placement == replicas.placement
    one = time_schedule(replicas.first, even_costs(3))
    # The same model on each replica: a part of it for each rank of a replica.
    all_of_them = time_schedule(whole, even_costs(3))
    for rank, times in enumerate(all_of_them.ranks):
        assert times == one.ranks[rank % 3]


def test_a_stage_has_a_rank_in_each_replica():
    replicas = Replicas(first=make_even("zb-v", 2, 4), count=2)
    assert replicas.placement == {0: (0, 2), 1: (1, 3), 2: (1, 3), 3: (0, 2)}


def test_mixed_microbatches_are_refused():
    whole = Replicas(first=make_even("gpipe", 2, 2), count=2).write_out()
    swap = {0: 0, 1: 2, 2: 1, 3: 3}
    mixed = replace(
        whole,
        orders=tuple(
            tuple(replace(task, microbatch=swap[task.microbatch]) for task in order)
            for order in whole.orders
        ),
    )
    with pytest.raises(RuleError, match="summed in another order"):
        check_schedule(mixed)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (4, 8), (3, 2)])
def test_the_step_of_1f1b_ends_with_the_first_rank_s_sum(num_ranks, num_microbatches):
    replicas = Replicas(first=make_even("1f1b", num_ranks, num_microbatches), count=4)
    alone_ns = 3 * (num_microbatches + num_ranks - 1) * UNIT_NS
    timing = time_replicas(replicas, with_reduction(num_ranks, 5 * UNIT_NS))
    assert timing.makespan_ns == alone_ns + 5 * UNIT_NS
    busy_ns = 3 * num_microbatches * UNIT_NS
    assert timing.bubble == 1 - Fraction(busy_ns, timing.makespan_ns)
    assert time_replicas(replace(replicas, count=1), with_reduction(num_ranks, 7)).makespan_ns == (
        alone_ns
    )


def test_sums_go_one_after_another_beside_what_is_computed():
    replicas = Replicas(first=make_even("zb-v", 2, 4), count=2)
    timing = time_replicas(replicas, with_reduction(2, 20 * UNIT_NS))
    for order, times in zip(replicas.first.orders, timing.ranks, strict=True):
        last_ns = {task.stage: end_ns for task, end_ns in zip(order, times.ends_ns, strict=True)}
        first, second = times.reductions
        # A rank's share is two stages: each takes half of the time.
        assert first == Reduction(
            stage=min(last_ns, key=lambda stage: last_ns[stage]),
            start_ns=min(last_ns.values()),
            end_ns=min(last_ns.values()) + 10 * UNIT_NS,
        )
        assert second.start_ns == max(first.end_ns, *last_ns.values())
        assert times.end_ns == second.end_ns
