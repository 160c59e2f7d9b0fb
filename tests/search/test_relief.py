"""What would help a plan, what clipping costs, and how long an evaluation takes."""

from __future__ import annotations

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.search.prediction import predict_evaluation_ns
from packhorse.search.relief import cost_of_clipping, find_relief
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_run
from tests.search.toy_search import SGD, make_candidates, make_machine, need, search, smallest_plan


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


def test_layers_are_a_relief_that_ties_may_be_asked_for():
    candidates = make_candidates(length=64, tied_head=True)
    model, profile = candidates[0].model, candidates[0].profile
    plan = search(candidates, total=4, pins={"parameters": "disk", "cache": "none"})
    assert plan.order.value == "depth_first"
    (layers,) = [r for r in find_relief(plan, model, profile, make_machine()) if "layers" in r.text]
    assert "tied_sum: per_step" in layers.text
    assert layers.changes_numbers
    assert layers.saved_ns > 0
    alone = search(candidates, total=1, pins={"parameters": "disk"})
    assert not any("layers" in r.text for r in find_relief(alone, model, profile, make_machine()))
    untied = make_candidates(length=64)
    pins = {"parameters": "disk", "order": "depth_first", "cache": "none"}
    pinned = search(untied, total=4, pins=pins)
    found = find_relief(pinned, untied[0].model, untied[0].profile, make_machine())
    (layers,) = [relief for relief in found if "layers" in relief.text]
    assert "order: layered" in layers.text
    assert not layers.changes_numbers


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_an_evaluation_is_predicted_to_the_nanosecond(count):
    candidates = make_candidates(length=64)
    model, profile = candidates[0].model, candidates[0].profile
    plan = search(candidates, pins={"parameters": "disk"})
    program = lower_plan(plan, model, "evaluate", eval_microbatches=count)
    costs = TaskCosts(
        machine=make_machine(), profile=profile, model=model, program=program, heap="keep"
    )
    timeline = simulate_run(program, costs=costs)
    predicted = predict_evaluation_ns(plan, model, profile, make_machine(), count)
    assert predicted == timeline.step_ns
