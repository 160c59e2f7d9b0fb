"""Tasks as whole numbers: there and back, and the same needs."""

from __future__ import annotations

from hypothesis import given, settings

from packhorse.schedule.needs import list_needs
from packhorse.schedule.numbering import decode_task, encode_task, number_tasks
from packhorse.schedule.spec import Schedule
from tests.schedule.schedule_cases import named_schedules, write_schedule


def check_needs(schedule: Schedule) -> None:
    numbered = number_tasks(schedule)
    rank_of = {task: rank for rank, order in enumerate(schedule.orders) for task in order}
    for rank, (order, codes) in enumerate(zip(schedule.orders, numbered.orders, strict=True)):
        for task, code in zip(order, codes, strict=True):
            assert numbered.decode(code) == task
            assert numbered.rank_of[code] == rank
            needs = tuple(map(numbered.decode, numbered.needs_of(code)))
            assert needs == list_needs(task, schedule.num_stages, rank_of)


@settings(max_examples=30)
@given(case=named_schedules())
def test_numbers_have_the_needs_of_their_tasks(case: tuple[str, Schedule]) -> None:
    check_needs(case[1])


def test_needs_of_what_is_not_all_there() -> None:
    # Where neither form of the next stage's backward is there, the whole one is needed.
    check_needs(write_schedule("0F0 0B0 0F1 0I1", "1F0"))
    check_needs(write_schedule("0F0 0B0 0F1 0I1 0W1", "1F0 1I0 1F1 1B1"))


def test_codes_sort_by_kind_stage_and_microbatch() -> None:
    schedule = write_schedule("0F0 1F0 0F1 1F1 1B0 0I0 1B1 0I1 0W0 0W1")
    codes = [encode_task(task, 2, 2) for task in schedule.orders[0]]
    names = [decode_task(code, 2, 2) for code in sorted(codes)]
    assert [(type(each).__name__[0], each.stage, each.microbatch) for each in names] == [
        ("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1),
        ("I", 0, 0), ("I", 0, 1), ("W", 0, 0), ("W", 0, 1),
    ]  # fmt: skip
