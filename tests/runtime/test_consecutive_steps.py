"""Steps run into each other: the same bits, real overlap, late failures that name their step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from subjects import find_subject
from torch import Tensor

from bench.planned import PLACES, Ways, make_plan, open_engine, read_states, record_curve
from bench.reference import Curve, find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.errors import InputError, StorageError
from packhorse.program.buffers import BufferId
from packhorse.program.program import Program
from packhorse.program.tasks import Copy
from packhorse.runtime.disk import DiskTier
from packhorse.runtime.engine import Engine
from packhorse.runtime.step_result import StepResult

MS = 1_000_000
NUM_STEPS = 4
STEPS = make_steps(ZOO["weave"], num_steps=NUM_STEPS, num_microbatches=2)
# Updates between backwards, and updates that wait for the norm.
CLIPS = (None, 1.0)
ON_DISK = replace(PLACES["all on disk"], activations=("recompute",))
MIXED = Ways(
    parameters=("disk", "device"),
    gradients=("device", "disk"),
    optimizer=("disk", "disk", "device"),
    chunk_bytes=4096,
    prefetch=4,
    cache="valleys",
)


class Feed(Mapping[str, Tensor]):
    """A micro-batch that says when it is placed in the device."""

    def __init__(self, inner: Mapping[str, Tensor], placed: threading.Event) -> None:
        self.inner = inner
        self.placed = placed

    def __getitem__(self, name: str) -> Tensor:
        return self.inner[name]

    def __iter__(self) -> Iterator[str]:
        self.placed.set()
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class HeldWrites:
    """Holds the last write of every step but the last one until the next step has begun."""

    def __init__(self, num_writes: int, patch: pytest.MonkeyPatch) -> None:
        self.began = [threading.Event() for _ in range(NUM_STEPS)]
        self.num_held = 0
        self.fails_in = 0
        write = DiskTier.write
        left = [num_writes] * NUM_STEPS
        step = 1

        def hold(disk: DiskTier, buffer: BufferId, address: int) -> None:
            nonlocal step
            left[step - 1] -= 1
            if not left[step - 1] and step < NUM_STEPS:
                assert self.began[step].wait(30), f"step {step + 1} waits for step {step}"
                self.num_held += 1
                if step == self.fails_in:
                    raise StorageError("the drive is gone", where=str(disk.path))
            if not left[step - 1]:
                step += 1
            write(disk, buffer, address)

        patch.setattr(DiskTier, "write", hold)

    def train(self, engine: Engine) -> list[StepResult]:
        results: list[StepResult] = []
        for step, feeds in enumerate(STEPS, 1):
            watched = [Feed(feed, self.began[step - 1]) for feed in feeds]
            results.append(engine.train_step(watched, step=step, learning_rate=1e-3 / step))
        return results


def count_writes(ways: Ways, clip: float | None) -> int:
    subject = find_subject("weave")
    plan = make_plan(
        subject.traced.model, subject.optimizer, ways, num_microbatches=2, clips=clip is not None
    )
    tasks = lower_plan(plan, subject.traced.model, "train_step").tasks
    return sum(isinstance(task, Copy) and task.target == "disk" for task in tasks)


def open_weave(ways: Ways, clip: float | None, scratch: Path, **options) -> Engine:
    return open_engine(
        find_subject("weave"),
        ways,
        num_microbatches=2,
        max_grad_norm=clip,
        scratch=scratch,
        **options,
    )


def train_in_turn(ways: Ways, clip: float | None, scratch: Path) -> Curve:
    """Train by a plan, and wait for the end of every step."""
    with open_weave(ways, clip, scratch) as engine:
        results: list[StepResult] = []
        for step, feeds in enumerate(STEPS, 1):
            results.append(engine.train_step(feeds, step=step, learning_rate=1e-3 / step))
            engine.settle()
        return record_curve(results, read_states(engine, find_subject("weave").weights))


@pytest.mark.parametrize("clip", CLIPS, ids=["unclipped", "clipped"])
@pytest.mark.parametrize("ways", [ON_DISK, MIXED], ids=["disk", "mixed"])
def test_a_step_begins_while_the_last_write_of_the_one_before_goes_on(
    ways: Ways, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held write ends only once a task of the next step has run: waiting between them hangs."""
    expected = train_in_turn(ways, clip, tmp_path / "in-turn")
    with open_weave(ways, clip, tmp_path / "held") as engine:
        with monkeypatch.context() as patch:
            held = HeldWrites(count_writes(ways, clip), patch)
            results = held.train(engine)
            engine.settle()
        found = record_curve(results, read_states(engine, find_subject("weave").weights))
    assert held.num_held == NUM_STEPS - 1
    assert find_differences(expected, found) == ()
    assert all(result.timeline.since_ns > 0 for result in results[1:])


@pytest.mark.parametrize("clip", CLIPS, ids=["unclipped", "clipped"])
def test_steps_in_a_row_have_the_bits_of_the_plain_loop(clip: float | None, tmp_path: Path) -> None:
    subject = find_subject("weave")
    plain = train_plainly(build_model(ZOO["weave"]), subject.optimizer, STEPS, max_grad_norm=clip)
    for name, ways in (("disk", ON_DISK), ("mixed", MIXED)):
        with open_weave(ways, clip, tmp_path / name) as engine:
            results = [
                engine.train_step(feeds, step=step, learning_rate=subject.optimizer.lr)
                for step, feeds in enumerate(STEPS, 1)
            ]
            curve = record_curve(results, read_states(engine, subject.weights))
        assert find_differences(plain, curve) == ()


def test_slow_writes_of_a_step_go_on_in_the_next_and_the_times_add_up(tmp_path: Path) -> None:
    def pace(program: Program) -> list[int]:
        return [
            4 * MS if isinstance(task, Copy) and task.target == "disk" else 0
            for task in program.tasks
        ]

    completed: list[int] = []
    with open_weave(ON_DISK, 1.0, tmp_path, pace=pace) as engine:
        results: list[StepResult] = []
        for step, feeds in enumerate(STEPS, 1):
            results.append(
                engine.train_step(
                    feeds,
                    step=step,
                    learning_rate=1e-3,
                    completed=lambda _, step=step: completed.append(step),
                )
            )
            # The step before is complete, and told to whoever asked.
            assert completed[: step - 1] == list(range(1, step))
        engine.settle()
    assert completed == list(range(1, NUM_STEPS + 1))
    timelines = [result.timeline for result in results]
    assert timelines[0].since_ns == 0
    for before, timeline in pairwise(timelines):
        assert timeline.since_ns > 0
        assert 0 < timeline.step_ns < timeline.makespan_ns
        # What is left of the step before when this one starts is part of that one.
        assert timeline.since_ns < before.makespan_ns
        assert {span.index for span in timeline.spans} == {span.index for span in before.spans}
        assert all(points[0].at_ns == 0 for points in timeline.memory.values())


@pytest.mark.parametrize("failing", [1, 2])
def test_a_late_write_that_fails_is_told_with_its_step(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_weave(ON_DISK, 1.0, tmp_path) as engine:
        held = HeldWrites(count_writes(ON_DISK, 1.0), monkeypatch)
        held.fails_in = failing
        with pytest.raises(StorageError, match="the drive is gone") as caught:
            held.train(engine)
        # It failed while the step after it was under way.
        assert held.began[failing].is_set()
        where = caught.value.where or ""
        assert f"of step {failing}: " in where
        assert "disk" in where.splitlines()[-1]
        assert str(tmp_path) in where
        with pytest.raises(InputError, match="this run has ended: the drive is gone"):
            engine.train_step(STEPS[3], step=4, learning_rate=1e-3)


def test_an_end_waits_for_the_last_write_and_tells_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def fail(disk: DiskTier, buffer: BufferId, address: int) -> None:
        assert began.wait(30)
        raise StorageError("the drive is gone", where=f"{disk.path} {buffer} {address:x}")

    def run(feeds: Sequence[Mapping[str, Tensor]]) -> None:
        with open_weave(PLACES["optimizer on disk"], 1.0, tmp_path) as engine:
            monkeypatch.setattr(DiskTier, "write", fail)
            # Its values are there, for no write comes before the norm.
            assert engine.train_step(feeds, step=1, learning_rate=1e-3).grad_norm is not None
            began.set()

    with pytest.raises(StorageError, match="the drive is gone") as caught:
        run(STEPS[0])
    assert "of step 1: " in (caught.value.where or "")


def test_a_timeline_is_waited_for_and_is_gone_with_its_engine(tmp_path: Path) -> None:
    with open_weave(ON_DISK, 1.0, tmp_path) as engine:
        first = engine.train_step(STEPS[0], step=1, learning_rate=1e-3)
        assert first.timeline.makespan_ns == first.timeline.step_ns
        assert first.disk_read_bytes > 0
    # A block that ends well has waited.
    assert first.timeline.spans


@pytest.mark.parametrize("ways", [ON_DISK, PLACES["resident"]], ids=["disk", "resident"])
def test_who_keeps_a_result_keeps_no_batch_with_it(ways: Ways, tmp_path: Path) -> None:
    feeds = [Feed(feed, threading.Event()) for feed in STEPS[0]]
    batch = weakref.ref(feeds[0])
    with open_weave(ways, 1.0, tmp_path) as engine:
        result = engine.train_step(feeds, step=1, learning_rate=1e-3)
        engine.settle()
        del feeds
        gc.collect()
        assert batch() is None
        assert result.timeline.spans
