"""Lanes with threads: order, dependencies, errors, and a drive that never answers."""

from __future__ import annotations

import threading
from functools import partial
from random import Random

import pytest

from packhorse.program.tasks import Lane
from packhorse.runtime.lanes import LanesStuckError, ThreadLanes

LANES: tuple[Lane, ...] = ("compute", "disk_read", "disk_write")


def nothing() -> None:
    """Prepare no thread."""


def unheard(begin_ns: int, end_ns: int) -> None:
    """Nobody asks when it was done."""
    del begin_ns, end_ns


@pytest.fixture
def lanes():
    made = ThreadLanes(prepare=nothing, stuck_after_s=5.0)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(20))
def test_work_follows_its_lane_and_its_dependencies(lanes: ThreadLanes, seed: int) -> None:
    random = Random(seed)
    ran: list[int] = []
    booked: list[int] = []

    def book(index: int, begin_ns: int, end_ns: int) -> None:
        assert begin_ns <= end_ns
        assert threading.current_thread() is threading.main_thread()
        booked.append(index)

    for _ in range(3):  # task numbers start anew after wait_all
        ran.clear()
        booked.clear()
        on: list[Lane] = []
        after: list[list[int]] = []
        for index in range(60):
            lane = random.choice(LANES)
            waits = sorted(random.sample(range(index), min(index, random.randrange(4))))
            on.append(lane)
            after.append(waits)

            lanes.submit(index, lane, partial(ran.append, index), partial(book, index), waits)
            if random.random() < 0.2:
                lanes.wait_any()
        lanes.wait_all()
        assert sorted(ran) == sorted(booked) == list(range(60))
        place = {index: at for at, index in enumerate(ran)}
        for index, waits in enumerate(after):
            assert all(place[wait] < place[index] for wait in waits)
        for lane in LANES:
            mine = [index for index in ran if on[index] == lane]
            assert mine == sorted(mine)


def test_lanes_run_beside_each_other(lanes: ThreadLanes) -> None:
    reading, computing = threading.Event(), threading.Event()

    def read() -> None:
        reading.set()
        assert computing.wait(5), "compute did not start while a read was going on"

    def compute() -> None:
        assert reading.wait(5)
        computing.set()

    lanes.submit(0, "disk_read", read, unheard, ())
    lanes.submit(1, "compute", compute, unheard, ())
    lanes.wait_all()


def test_what_goes_along_belongs_to_its_task(lanes: ThreadLanes) -> None:
    may_end = threading.Event()
    happened: list[str] = []

    def then() -> None:
        assert may_end.wait(5)
        happened.append("then")

    lanes.submit(0, "compute", partial(happened.append, "work"), unheard, (), then)
    lanes.submit(1, "disk_write", partial(happened.append, "behind it"), unheard, (0,))
    lanes.submit(2, "disk_read", may_end.set, unheard, ())
    lanes.wait_all()
    assert happened == ["work", "then", "behind it"]


def test_who_waits_is_woken_for_what_is_wanted(lanes: ThreadLanes) -> None:
    booked: list[int] = []
    asked: list[int] = []
    ended = [threading.Event() for _ in range(6)]

    def work(index: int) -> None:
        # All but the first one run while somebody waits.
        if index == 0:
            assert waits.wait(5)

    def book(index: int, begin_ns: int, end_ns: int) -> None:
        del begin_ns, end_ns
        booked.append(index)
        ended[index].set()

    def wanted(index: int) -> bool:
        asked.append(index)
        return index == 4

    waits = threading.Event()
    for index in range(5):
        lanes.submit(index, "compute", partial(work, index), partial(book, index), ())
    threading.Timer(0.02, waits.set).start()
    assert lanes.wait_any(wanted)
    while not ended[4].is_set():  # a machine that is slow for a moment is looked at in between
        lanes.wait_any(wanted)
    assert booked == list(range(5))
    assert asked == sorted(asked)
    assert not lanes.wait_any(wanted)


def test_what_is_not_wanted_is_told_a_moment_later(lanes: ThreadLanes) -> None:
    booked: list[int] = []
    go_on = threading.Event()

    def book(begin_ns: int, end_ns: int) -> None:
        del begin_ns, end_ns
        booked.append(0)

    def last() -> None:
        assert go_on.wait(5), "nobody heard of the task before"

    lanes.submit(0, "compute", nothing, book, ())
    lanes.submit(1, "compute", last, unheard, ())
    while not booked:
        assert lanes.wait_any(lambda index: index == 1)
    go_on.set()
    lanes.wait_all()


def test_the_first_error_ends_everything(lanes: ThreadLanes) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("the drive is gone")

    def submit_and_wait(index: int) -> None:
        lanes.submit(index, "compute", partial(ran.append, index), unheard, (0,))
        lanes.wait_all()

    lanes.submit(0, "disk_read", fail, unheard, ())
    with pytest.raises(ValueError, match="the drive is gone"):
        submit_and_wait(1)
    with pytest.raises(ValueError, match="the drive is gone"):
        submit_and_wait(2)
    assert not ran


def test_a_lane_that_does_not_answer_is_named() -> None:
    lanes = ThreadLanes(prepare=nothing, stuck_after_s=0.2)
    answer = threading.Event()

    def wait() -> None:
        answer.wait(20)

    lanes.submit(7, "disk_write", wait, unheard, ())
    lanes.submit(8, "compute", nothing, unheard, (7,))
    with pytest.raises(LanesStuckError) as caught:
        lanes.wait_all()
    assert caught.value.running == {"disk_write": 7}
    answer.set()
    lanes.close()


def test_closing_drops_what_has_not_begun(lanes: ThreadLanes) -> None:
    begun, answer = threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        begun.set()
        answer.wait(5)

    lanes.submit(0, "compute", first, unheard, ())
    lanes.submit(1, "compute", lambda: ran.append(1), unheard, ())
    assert begun.wait(5)
    threading.Timer(0.1, answer.set).start()
    lanes.close()
    assert not ran
    lanes.close()


def test_threads_are_prepared_and_an_error_there_is_told() -> None:
    def refuse() -> None:
        raise RuntimeError("no thread for you")

    lanes = ThreadLanes(prepare=refuse, stuck_after_s=5.0)
    lanes.submit(0, "compute", nothing, unheard, ())
    with pytest.raises(RuntimeError, match="no thread for you"):
        lanes.wait_all()
    lanes.close()
