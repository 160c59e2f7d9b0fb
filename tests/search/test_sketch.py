"""The linear model against the lowered program, over random states."""

from __future__ import annotations

import random

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.plan.pins import read_pins
from packhorse.search.evaluation import Evaluator, costs_of, short_plan
from packhorse.search.knapsack import choose_moves
from packhorse.search.settings import list_settings
from packhorse.search.sketch import make_sketch
from packhorse.search.space import Problem
from packhorse.search.timing import weights_of
from tests.search.toy_search import ADAMW, ARITHMETIC, SGD, make_candidates, make_machine


def settings_of(optimizer, total, **options):
    candidates = make_candidates((1, 2), length=64, num_layers=4, **options)
    problem = Problem(
        machine=make_machine(),
        optimizer=optimizer,
        arithmetic=ARITHMETIC,
        pins=read_pins({"chunk_bytes": 8192}),
        global_batch_rows=total,
    )
    return Evaluator(problem), list_settings(problem, candidates)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
@pytest.mark.parametrize("total", [2, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied_head": True, "shared_layers": (1, 3)},
        {"skips": ((0, 3), (1, 4)), "frozen": ["embed", "layers.1"]},
    ],
)
def test_memory_is_exact_and_time_close(optimizer, total, options):
    evaluator, settings = settings_of(optimizer, total, **options)
    random_ = random.Random(total)
    for setting in settings:
        sketch = make_sketch(evaluator, setting)
        for density in (0.0, 0.2, 0.5, 0.8, 1.0):
            taken = [random_.random() < density for _ in setting.moves]
            exact = evaluator.evaluate(setting, taken)
            assert sketch.need_bytes(taken) >= exact.device_bytes
            assert sketch.need_bytes(taken) <= exact.device_bytes * 1.05
            program = lower_plan(
                short_plan(evaluator.problem, setting, taken), setting.model, "train_step"
            )
            costs = costs_of(evaluator.problem, setting, program)
            weights = weights_of(program.tasks, setting.num_microbatches)
            work_ns = sum(
                costs.duration_ns(task) * weight
                for task, weight in zip(program.tasks, weights, strict=True)
            )
            # Moves that act on each other (parameters away and recompute) are not in the sum.
            assert sketch.work_ns(taken) == pytest.approx(work_ns, rel=0.1)
            assert sketch.least_ns(taken) <= sketch.time_ns(taken) <= sketch.work_ns(taken)
        nothing = [False] * len(setting.moves)
        assert sketch.time_ns(nothing) == sketch.least_ns(nothing) == sketch.step_ns


def test_choosing_keeps_to_the_budget_and_wants_the_least():
    evaluator, settings = settings_of(ADAMW, 2)
    sketch = make_sketch(evaluator, settings[0])
    nothing = sketch.need_bytes([False] * len(settings[0].moves))
    away = {"disk": 1 << 40}
    assert not any(choose_moves(sketch, device_bytes=nothing, away_bytes=away) or [True])
    least = choose_moves(sketch, device_bytes=0, away_bytes=away, goal="memory", rel_gap=0.0)
    assert least is not None
    floor = sketch.need_bytes(least)
    times = []
    for budget in range(floor, nothing, (nothing - floor) // 7):
        taken = choose_moves(sketch, device_bytes=budget, away_bytes=away)
        assert taken is not None
        assert sketch.need_bytes(taken) <= budget
        times.append(sketch.time_ns(taken))
    assert times == sorted(times, reverse=True)
    assert choose_moves(sketch, device_bytes=floor - 1, away_bytes=away) is None
    assert choose_moves(sketch, device_bytes=floor, away_bytes={"disk": 0}) is None
