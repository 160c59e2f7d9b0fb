"""Depths that are timed together are timed as each one is alone."""

from __future__ import annotations

import pytest

from packhorse.plan.pins import read_pins
from packhorse.search.evaluation import Evaluator, costs_of, need_of, short_plan
from packhorse.search.settings import list_settings
from packhorse.search.space import Problem
from packhorse.search.timing import limit_program, time_limited, time_program
from tests.search.toy_search import ADAMW, ARITHMETIC, make_candidates, make_machine

DEPTHS = (0, 1, 2, 4, 8, 16)


@pytest.mark.parametrize("heap", ["keep", "map"])
@pytest.mark.parametrize("total", [1, 2, 5])
@pytest.mark.parametrize("spare_bytes", [0, 30_000, 1 << 30])
def test_depths_timed_together_are_those_timed_alone(heap, total, spare_bytes):
    machine = make_machine()
    problem = Problem(
        machine=machine,
        optimizer=ADAMW,
        arithmetic=ARITHMETIC,
        pins=read_pins({"chunk_bytes": 8192, "heap": heap}),
        global_batch_rows=total,
    )
    (setting, *_) = list_settings(problem, make_candidates(length=64, num_layers=3))
    taken = [move.kind != "gradients" for move in setting.moves]
    plan = short_plan(problem, setting, taken)
    program = Evaluator(problem).lowerer_of(setting.model).lower(plan, "train_step")
    budgets = {tier: need + spare_bytes for tier, need in need_of(plan, program).items()}
    costs = costs_of(problem, setting, program)
    together = time_limited(
        program,
        plan,
        budgets,
        costs=costs,
        machine=machine,
        num_microbatches=total,
        depths=DEPTHS,
    )
    alone = tuple(
        time_program(
            limit_program(program, plan, budgets, depth),
            costs=costs,
            machine=machine,
            num_microbatches=total,
        )[0]
        for depth in DEPTHS
    )
    assert together == alone
