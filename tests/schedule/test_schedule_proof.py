"""Broken schedules, each rejected by the name of its rule, with the place and what is missing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from packhorse.errors import RuleError
from packhorse.schedule.costs import even_costs
from packhorse.schedule.messages import Receive, Send, check_messages, project_messages
from packhorse.schedule.proof import RULES, check_schedule
from packhorse.schedule.spec import Backward, Forward, Schedule
from packhorse.schedule.timing import time_schedule
from tests.schedule.schedule_cases import make_even, write_schedule


def reject(schedule: Schedule) -> RuleError:
    with pytest.raises(RuleError) as found:
        check_schedule(schedule)
    assert found.value.rule in RULES
    assert found.value.where
    assert found.value.fix
    return found.value


def test_a_missing_task_is_named_with_its_rank() -> None:
    error = reject(write_schedule("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"))
    assert error.what == "rule coverage: no rank computes 0B1"
    assert error.where == "rank 0, task 1: 0F0 >0F1 0B0"
    assert error.fix == "add it to rank 0"
    error = reject(write_schedule("0F0 0B0", "1F0 1B0 1F1 1B1"))
    assert error.what == "rule coverage: no rank computes 0F1, 0B1"
    assert error.where == "stage 0, microbatch 1 of 2, rank 0"


def test_a_half_of_a_backward_is_not_enough() -> None:
    assert "no rank computes 0W0" in reject(write_schedule("0F0 0I0")).what
    assert "no rank computes 0I0" in reject(write_schedule("0F0 0W0")).what
    both = reject(write_schedule("0F0 0B0 0W0"))
    assert both.what == "rule coverage: 0B0 and its half 0W0 are both computed"


def test_a_repeated_task_is_named_with_both_places() -> None:
    error = reject(write_schedule("0F0 0B0", "1F0 1F0 1B0"))
    assert error.what == "rule coverage: 1F0 is computed twice"
    assert error.where == "rank 1, task 0: >1F0 1F0 1B0\nrank 1, task 1: 1F0 >1F0 1B0"


def test_a_task_on_another_rank_than_its_stage() -> None:
    schedule = write_schedule("0F0 0B0", "1F0 1B0")
    error = reject(replace(schedule, placement={0: (0,), 1: (0,)}))
    assert error.what == "rule placement: rank 1 computes 1F0, but stage 1 is placed on rank 0"
    error = reject(replace(schedule, placement={0: (0,), 1: (2,)}))
    assert "stage 1 is placed on rank 2, but there are orders for ranks 0 to 1" in error.what
    assert "is of stage 1, but" in reject(replace(schedule, placement={0: (0,)})).what
    assert "stage 1 is missing" in reject(replace(schedule, placement={0: (0,), 2: (1,)})).what
    assert (
        "stage 1 is placed on no rank" in reject(replace(schedule, placement={0: (0,), 1: ()})).what
    )
    with pytest.raises(RuleError, match="has no stages"):
        check_schedule(Schedule(placement={}, orders=()))
    with pytest.raises(RuleError, match="has no ranks"):
        check_schedule(Schedule(placement={0: (0,)}, orders=()))


def test_replicas_keep_each_microbatch_on_one_rank() -> None:
    check_schedule(write_schedule("0F0 0B0 0F1 0B1", "0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    error = reject(write_schedule("0F0 0B0 0F2 0B2", "0F1 0B1"))
    assert error.what == (
        "rule order: rank 0 has microbatches 0 to 2 of stage 0, but 0F1 between them is on rank 1:"
        " gradients would be summed in another order"
    )
    error = reject(write_schedule("0F0 0B1", "0F1 0B0"))
    assert error.what == (
        "rule placement: rank 1 computes 0B0, but what it needs was saved on rank 0, by 0F0"
    )


def test_backwards_out_of_order() -> None:
    error = reject(write_schedule("0F0 0F1 0B1 0B0"))
    assert error.what == (
        "rule order: rank 0 computes 0B0 after 0B1: the gradients of stage 0 would be summed in"
        " another order"
    )
    assert error.where == "rank 0, task 3: 0F0 0F1 0B1 >0B0"
    assert reject(write_schedule("0F0 0F1 0I0 0I1 0W1 0W0")).rule == "order"
    assert reject(write_schedule("0F0 0F1 0I0 0B1 0W0")).rule == "order"


def test_a_task_before_what_it_needs_on_the_same_rank() -> None:
    error = reject(write_schedule("0F0 0W0 0I0"))
    assert error.what == (
        "rule deadlock: 1 rank waits for itself: rank 0 cannot begin 0W0 before 0I0"
    )
    assert "rank 0 waits at task 1, 0W0, for 0I0, which comes later on the same rank" in str(error)


def test_a_circle_is_printed_rank_by_rank() -> None:
    schedule = write_schedule(
        "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F1 3F0 3B0 3B1"
    )
    error = reject(schedule)
    assert error.rule == "deadlock"
    assert error.where is not None
    lines = error.where.splitlines()
    assert lines == [
        "rank 0 waits at task 1, 0B0, for 1B0, which rank 1 has as task 2, behind 1F1",
        "rank 1 waits at task 1, 1F1, for 0F1, which rank 0 has as task 2, behind 0B0",
        "rank 0, task 1: 0F0 >0B0 0F1 0B1",
    ]
    assert error.fix == "put 1B0 earlier on rank 1, or 0B0 later on rank 0"


def test_a_long_circle_is_cut() -> None:
    rows = [f"{rank}F0 {rank}B0" for rank in range(1, 30)]
    error = reject(write_schedule("0F0 0B0 30F0 30B0", *rows))
    assert error.what.startswith("rule deadlock: 30 ranks wait for each other in a circle")
    assert error.where is not None
    lines = error.where.splitlines()
    assert lines[6] == "... 18 more ranks ..."
    assert lines[12].startswith("rank 29 waits at task 1, 29B0, for 30B0, which rank 0 has")
    assert len(lines) == 14


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_no_mutant_that_never_ends_is_accepted(name: str) -> None:
    """Swap, drop, repeat or move single tasks: what passes the rules runs to its end."""
    schedule = make_even(name, 4, 8)
    random.seed(1)
    rejected: list[str] = []
    for _ in range(150):
        rank = random.randrange(4)
        order = list(schedule.orders[rank])
        at, to = random.randrange(len(order)), random.randrange(len(order))
        change = random.choice(("drop", "repeat", "move", "swap"))
        if change == "drop":
            del order[at]
        elif change == "repeat":
            order.insert(to, order[at])
        elif change == "move":
            order.insert(to, order.pop(at))
        else:
            order[at], order[to] = order[to], order[at]
        orders = (*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :])
        mutant = replace(schedule, orders=orders)
        try:
            check_schedule(mutant)
        except RuleError as error:
            rejected.append(str(error))
            if error.rule == "deadlock":
                with pytest.raises(ValueError, match="wait for ever"):
                    time_schedule(mutant, even_costs(4))
            continue
        assert change in ("move", "swap")
        time_schedule(mutant, even_costs(4))
        check_messages(project_messages(mutant))
    assert len(rejected) > 90
    assert all("rank" in each for each in rejected)


def test_a_schedule_that_never_ends_is_no_timing() -> None:
    with pytest.raises(ValueError, match="2 tasks wait for ever"):
        time_schedule(write_schedule("0B0 0F0"), even_costs(1))


def test_messages_in_another_order_get_stuck() -> None:
    lists = project_messages(write_schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    check_messages(lists)
    first = [list(actions) for actions in lists]
    sends = [at for at, action in enumerate(first[0]) if isinstance(action, Send)]
    first[0][sends[0]], first[0][sends[1]] = first[0][sends[1]], first[0][sends[0]]
    with pytest.raises(RuleError) as found:
        check_messages(first)
    assert found.value.rule == "deadlock"
    assert found.value.where == (
        "rank 0 waits at action 1: send 0F1 to 1\nrank 1 waits at action 0: receive 0F0 from 0"
    )


def test_a_receive_behind_a_send_that_waits_gets_stuck() -> None:
    """Each task's receives right before it and its sends right behind it are not enough."""
    forward, other = Forward(stage=0, microbatch=0), Forward(stage=0, microbatch=1)
    gradient = Backward(stage=1, microbatch=0)
    first = [
        forward,
        Send(task=forward, target=1),
        other,
        Send(task=other, target=1),
        Receive(task=gradient, source=1),
    ]
    second = [
        Receive(task=forward, source=0),
        Forward(stage=1, microbatch=0),
        gradient,
        Send(task=gradient, target=0),
        Receive(task=other, source=0),
    ]
    with pytest.raises(RuleError, match="2 ranks wait for messages for ever"):
        check_messages([first, second])
    second[3], second[4] = second[4], second[3]
    check_messages([first, second])
