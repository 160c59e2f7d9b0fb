"""What would help a plan, and what a whole run takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.search.prediction import predict_evaluation_ns
from packhorse.search.relief import cost_of_clipping, find_relief
from packhorse.search.run import RunCounts, estimate_run, size_checkpoint
from packhorse.search.search import smallest_plan
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_program
from tests.search.toy_search import ADAMW, SGD, make_candidates, make_machine, need, search

COUNTS = RunCounts(
    num_steps=100,
    tokens_per_step=128,
    save_steps=30,
    checkpoints_kept=2,
    save_only_model=False,
    stored_dtype="bfloat16",
)


def tight_plan(candidates, **options):
    least = search(candidates, how=smallest_plan, **options).budget_bytes["device"]
    machine = make_machine(least)
    return search(candidates, machine, **options), machine


def test_relief_is_true():
    candidates = make_candidates(length=64, num_layers=3)
    model, profile = candidates[0].model, candidates[0].profile
    plan, machine = tight_plan(candidates, pins={"chunk_bytes": 8192})
    reliefs = find_relief(plan, model, profile, machine)
    assert reliefs
    saved = [relief.saved_ns for relief in reliefs]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] > 0
    for relief in reliefs:
        assert relief.share == relief.saved_ns / plan.prediction.step_ns
        assert relief.change in relief.text
    # The memory that a relief asks for lets the search be at least that much faster.
    best = next(r for r in reliefs if not r.changes_numbers and r.device_bytes > 0)
    granted = make_machine(need(plan) + best.device_bytes)
    faster = search(candidates, granted, pins={"chunk_bytes": 8192})
    assert faster.prediction.step_ns <= plan.prediction.step_ns - best.saved_ns


def test_nothing_relieves_a_plan_without_limits_but_clipping():
    candidates = make_candidates(length=64)
    plan = search(candidates, optimizer=SGD)
    model, profile = candidates[0].model, candidates[0].profile
    assert find_relief(plan, model, profile, make_machine()) == ()
    assert cost_of_clipping(plan, model, profile, make_machine()) is None


def test_the_cost_of_clipping_is_the_same_plan_without():
    candidates = make_candidates(length=64)
    model, profile = candidates[0].model, candidates[0].profile
    plan = search(candidates, total=1, pins={"optimizer": "disk", "gradients": "disk"})
    cost = cost_of_clipping(plan, model, profile, make_machine())
    assert cost is not None
    assert cost.changes_numbers
    # The gradients need not wait on the disk for the norm.
    assert cost.saved_ns > 0
    assert cost.device_bytes == 0 or abs(cost.device_bytes) < need(plan)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_an_evaluation_is_predicted_to_the_nanosecond(count):
    candidates = make_candidates(length=64)
    model, profile = candidates[0].model, candidates[0].profile
    plan = search(candidates, pins={"parameters": "disk"})
    program = lower_plan(plan, model, "evaluate", eval_microbatches=count)
    costs = TaskCosts(
        machine=make_machine(), profile=profile, model=model, program=program, heap="keep"
    )
    timeline = simulate_program(program, costs=costs)
    predicted = predict_evaluation_ns(plan, model, profile, make_machine(), count)
    assert predicted == timeline.makespan_ns


def test_a_run_in_numbers():
    candidates = make_candidates(length=64, frozen=["embed"])
    model, profile = candidates[0].model, candidates[0].profile
    plan = search(candidates, pins={"optimizer": "disk"})
    run = estimate_run(plan, model, profile, make_machine(), COUNTS)
    weights = 2 * model.num_parameters
    checkpoint = weights + 8 * model.num_trainable
    assert run.checkpoint_bytes == checkpoint
    assert run.num_checkpoints == 3
    assert run.scratch_bytes == plan.prediction.scratch_bytes >= 8 * model.num_trainable
    # Two kept, a third being written, and the model at the end.
    assert run.disk_bytes == run.scratch_bytes + 3 * checkpoint + weights
    assert run.written_bytes["output"] == 3 * checkpoint + weights
    assert run.written_per_step_bytes == plan.prediction.disk_written_bytes
    assert run.written_bytes["scratch"] == run.scratch_bytes + 100 * run.written_per_step_bytes
    assert run.run_ns == 100 * plan.prediction.step_ns + 3 * run.checkpoint_ns
    assert run.tokens_per_s == pytest.approx(128 / (plan.prediction.step_ns / 1e9))


def test_evaluation_is_part_of_a_run():
    candidates = make_candidates(length=64)
    model, profile = candidates[0].model, candidates[0].profile
    plan = search(candidates)
    counts = replace(COUNTS, eval_rows=5, eval_steps=40, save_steps=None)
    run = estimate_run(plan, model, profile, make_machine(), counts)
    once = predict_evaluation_ns(plan, model, profile, make_machine(), 5)
    # Before the first step, after 40 and 80, and at the end.
    assert run.eval_ns == 4 * once
    assert run.num_checkpoints == 0
    assert run.run_ns == 100 * plan.prediction.step_ns + run.eval_ns
    ends = estimate_run(plan, model, profile, make_machine(), replace(counts, eval_steps=None))
    assert ends.eval_ns == 2 * once


def test_the_size_of_a_checkpoint():
    model = make_candidates()[0].model
    count = model.num_parameters
    sizes = [
        size_checkpoint(model, optimizer, save_only_model=only, stored_dtype="float32")
        for optimizer, only in [
            (ADAMW, False),
            (ADAMW, True),
            (replace(ADAMW, master=True), False),
            (SGD, False),
        ]
    ]
    assert sizes == [12 * count, 4 * count, 16 * count, 4 * count]
