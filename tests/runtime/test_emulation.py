"""Lanes at the pace of another machine: how long tasks last, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from models import make_model, make_plan
from subjects import find_subject

from bench.planned import Ways, open_engine, read_states, record_curve
from bench.reference import find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.program.buffers import BufferId
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Recv, Send, Update
from packhorse.runtime.emulation import PacedLanes
from packhorse.runtime.lanes import InlineLanes

MS = 1_000_000
MODEL = make_model()
PROGRAM = lower_plan(make_plan(MODEL), MODEL, "train_step")


class Clock:
    """A clock that only work and sleeps move; sleeps end `late_ns` late."""

    def __init__(self, late_ns: int = 0) -> None:
        self.at_ns = 0
        self.late_ns = late_ns
        self.num_sleeps = 0

    def now_ns(self) -> int:
        return self.at_ns

    def sleep(self, seconds: float) -> None:
        self.num_sleeps += 1
        self.at_ns += round(seconds * 1e9) + self.late_ns

    def work(self, duration_ns: int) -> None:
        self.at_ns += duration_ns


def unheard(begin_ns: int, end_ns: int) -> None:
    """Nobody asks when it was done."""
    del begin_ns, end_ns


def run(clock: Clock, durations: list[int], works: list[int]) -> PacedLanes:
    lanes = PacedLanes(InlineLanes(), lambda _: durations, now_ns=clock.now_ns, sleep=clock.sleep)
    lanes.begin(PROGRAM)
    for index, work in enumerate(works):
        lanes.submit(index, "compute", partial(clock.work, work), unheard, ())
    lanes.wait_all()
    return lanes


def test_a_task_that_is_done_early_waits_for_the_end_of_its_time() -> None:
    clock = Clock()
    lanes = run(clock, [5 * MS, 3 * MS], [1 * MS, 0])
    assert clock.at_ns == 8 * MS
    assert lanes.overrun_ns == 0


def test_many_short_tasks_take_their_time_together() -> None:
    clock = Clock(late_ns=60_000)
    run(clock, [20_000] * 1000, [1_000] * 1000)
    assert clock.at_ns == pytest.approx(20 * MS, abs=300_000)
    assert clock.num_sleeps < 150


def test_late_sleeps_are_made_up_for() -> None:
    clock = Clock(late_ns=500_000)
    run(clock, [4 * MS] * 50, [MS] * 50)
    assert clock.at_ns == pytest.approx(200 * MS, abs=MS)


def test_a_task_that_takes_too_long_is_told_and_not_made_up_for() -> None:
    clock = Clock()
    lanes = run(clock, [2 * MS, 2 * MS], [5 * MS, 0])
    assert clock.at_ns == 7 * MS
    assert lanes.overrun_ns == 3 * MS


def test_a_stall_lets_later_tasks_run_free_only_for_a_moment() -> None:
    clock = Clock(late_ns=50 * MS)
    run(clock, [10 * MS] * 2, [0, 0])
    assert clock.at_ns >= 2 * 60 * MS - 2 * MS


def test_the_pace_is_asked_once_for_each_kind_of_program() -> None:
    asked: list[str] = []

    def pace(program: Program) -> list[int]:
        asked.append(program.kind)
        return [0] * len(program.tasks)

    lanes = PacedLanes(InlineLanes(), pace)
    for _ in range(3):
        lanes.begin(PROGRAM)
    assert asked == ["train_step"]


def test_an_engine_at_another_pace_has_the_same_bits_and_lasting_tasks(tmp_path: Path) -> None:
    ways = Ways(
        parameters=("host",), gradients=("host",), optimizer=("host",), update=("host",), stride=2
    )
    entry = ZOO["weave"]
    subject = find_subject("weave")
    steps = make_steps(entry, num_steps=2, num_microbatches=1)

    def pace(program: Program) -> list[int]:
        moved = (Copy, Update)
        return [3 * MS if isinstance(task, moved) else 0 for task in program.tasks]

    with open_engine(
        subject, ways, num_microbatches=1, max_grad_norm=1.0, scratch=tmp_path, pace=pace
    ) as engine:
        results = [
            engine.train_step(feeds, step=step, learning_rate=subject.optimizer.lr)
            for step, feeds in enumerate(steps, 1)
        ]
        curve = record_curve(results, read_states(engine, subject.weights))
    plain = train_plainly(build_model(entry), subject.optimizer, steps, max_grad_norm=1.0)
    assert find_differences(plain, curve) == ()
    spans = [s for s in results[-1].timeline.spans if s.kind in ("copy_in", "copy_out", "update")]
    assert {span.lane for span in spans} == {"copy_in", "copy_out", "update", "compute"}
    # A lane makes up for at most 2 ms that it slept too long.
    assert all(span.duration_ns >= 1 * MS for span in spans)


def test_a_message_takes_its_time_behind_the_wait_for_its_peer() -> None:
    clock = Clock()
    tasks = (
        Recv(buffer=BufferId("x"), peer=1),
        Send(buffer=BufferId("y"), peer=1),
    )
    lanes = PacedLanes(
        InlineLanes(), lambda _: [5 * MS, 3 * MS], now_ns=clock.now_ns, sleep=clock.sleep
    )
    lanes.begin(replace(PROGRAM, tasks=tasks))
    # The peer comes after 20 ms; only then bytes begin to move.
    lanes.submit(0, "receive 1", partial(clock.work, 20 * MS), unheard, ())
    assert clock.at_ns == 25 * MS
    lanes.submit(1, "send 1", partial(clock.work, 0), unheard, ())
    assert clock.at_ns == 28 * MS
    assert lanes.overrun_ns == 0
