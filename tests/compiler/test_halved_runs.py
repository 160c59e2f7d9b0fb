"""A step's order is a list of runs: whole backwards or halves, checked and simulated alike."""

from __future__ import annotations

import pytest
from halved_orders import ORDERS, in_turn, two_later
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_cases import models, plans
from models import make_model, make_pipeline, make_plan

from packhorse.compiler.lower import Lowerer, lower_plan
from packhorse.compiler.runs import run_alone, run_pipelined
from packhorse.program.tasks import (
    Backward,
    Forward,
    InputGrad,
    Recompute,
    WeightGrad,
)
from packhorse.program.text import format_program, parse_program
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named
from packhorse.simulator.engine import INLINE, OVERLAPPED, simulate_program
from packhorse.verifier.rules import verify_program


class Steady:
    """Every task takes the same time."""

    def duration_ns(self, _task):
        return 7


@pytest.mark.parametrize("order", ["depth_first", "layered"])
def test_a_list_that_says_the_plans_order_gives_its_program(order: str) -> None:
    model = make_model(num_layers=3, skips=((0, 2),))
    plan = make_plan(model, order=order, num_microbatches=3, activations=("keep", "recompute"))
    again = Lowerer(model, run_alone(model, 3, order)).lower(plan, "train_step")
    assert again == lower_plan(plan, model, "train_step")


def test_a_block_whose_first_half_follows_directly_is_not_recomputed() -> None:
    model = make_model(num_layers=2, frozen=("embed",), halved=True)
    plan = make_plan(model, num_microbatches=3, activations="recompute")
    for order in (in_turn, two_later):
        program = Lowerer(model, order(model, 3)).lower(plan, "train_step")
        again = [task.block for task in program.tasks if isinstance(task, Recompute)]
        assert sorted(again) == [1, 1, 1, 2, 2, 2]


def test_a_schedule_with_halves_is_a_list_of_them() -> None:
    model = make_model(num_layers=2, halved=True)
    schedule = make_named("zb-h1", 2, 3, even_costs(2))
    runs = run_pipelined(model, make_pipeline(schedule, (0, 2, 4)))
    assert {run.direction for run in runs} == {"forward", "input_grad", "weight_grad"}
    for direction in ("forward", "input_grad", "weight_grad"):
        found = [(run.block, run.microbatch) for run in runs if run.direction == direction]
        assert sorted(found) == [(block, each) for block in range(4) for each in range(3)]
    last = [run for run in runs if run.block >= 2 and run.direction == "input_grad"]
    assert [run.block for run in last] == [3, 2] * 3


@settings(max_examples=60)
@given(data=st.data())
def test_every_order_of_halves_is_proved_written_and_simulated(data) -> None:
    model = data.draw(models(halved=True))
    plan = data.draw(plans(model))
    names = [n for n in ORDERS if n != "in layers" or plan.numerics.tied_sum == "per_step"]
    order = data.draw(st.sampled_from(names))
    runs = ORDERS[order](model, plan.numerics.num_microbatches)
    program = Lowerer(model, runs).lower(plan, "train_step")
    proof = verify_program(program, model)
    verify_program(program)
    assert parse_program(format_program(program)) == program
    inline = simulate_program(program, costs=Steady(), workers=INLINE)
    assert dict(inline.peak_bytes) == dict(proof.peak_bytes)
    ahead = simulate_program(program, costs=Steady(), workers=OVERLAPPED)
    assert ahead.makespan_ns <= inline.makespan_ns


def test_halves_do_what_whole_backwards_do_in_sum() -> None:
    model = make_model(num_layers=3, tied_head=True, shared_layers=(1, 2), halved=True)
    plan = make_plan(model, num_microbatches=3, activations="recompute")
    whole = lower_plan(plan, model, "train_step")
    halves = Lowerer(model, two_later(model, 3)).lower(plan, "train_step")

    def touched(program, kinds, microbatch):
        return {
            (task.block, name)
            for task in program.tasks
            if isinstance(task, kinds) and task.microbatch == microbatch
            for name in (*task.reads, *task.writes)
            if not name.startswith("stash/")
        }

    for microbatch in range(3):
        both = touched(halves, (InputGrad, WeightGrad), microbatch)
        assert both == touched(whole, Backward, microbatch)
        assert touched(halves, (Forward, Recompute), microbatch) == touched(
            whole, (Forward, Recompute), microbatch
        )


def test_a_late_weight_half_keeps_its_stash_and_little_else() -> None:
    model = make_model(num_layers=3, halved=True)
    plan = make_plan(model, num_microbatches=3)
    program = Lowerer(model, ORDERS["at the end"](model, 3)).lower(plan, "train_step")
    late = {name for task in program.tasks if isinstance(task, WeightGrad) for name in task.reads}
    assert {"stash/2@0", "stash/2@1", "stash/2@2"} <= late
    assert not any(name.startswith("saved/") for name in late)
