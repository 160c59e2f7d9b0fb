"""How far copies run ahead: by the simulated step, pinned, or not at all where nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.plan.spec import Choice
from packhorse.search.prediction import predict_plan
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_run
from packhorse.units import format_ns
from tests.search.toy_search import make_candidates, make_machine, need, search, smallest_plan


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_the_chosen_depth_is_never_slower_than_none(share):
    candidates = make_candidates(length=64, num_layers=3)
    pins = {"chunk_bytes": 8192, "cache": "none", "order": "depth_first"}
    least = search(candidates, how=smallest_plan, pins=pins).budget_bytes["device"]
    most = need(search(candidates, pins=pins))
    machine = make_machine(least + int((most - least) * share))
    plan = search(candidates, machine, pins=pins)
    model, profile = candidates[0].model, candidates[0].profile
    program = lower_plan(plan, model, "train_step")
    costs = TaskCosts(
        machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
    )
    assert simulate_run(program, costs=costs).step_ns == plan.prediction.step_ns
    for depth in (0, 1, 4, 16):
        pinned = search(candidates, machine, pins={**pins, "prefetch": depth})
        assert (pinned.prefetch.value, pinned.prefetch.because) == (depth, "pinned")
    roomy = search(candidates, pins={"chunk_bytes": 8192})
    assert roomy.prefetch.value == 0
    assert roomy.prefetch.because == "nothing is brought into the device"


def test_no_depth_of_the_chosen_state_is_quicker():
    candidates = make_candidates(length=64, num_layers=3)
    pins = {"chunk_bytes": 8192, "optimizer": "disk", "cache": "none", "order": "depth_first"}
    least = search(candidates, how=smallest_plan, pins=pins).budget_bytes["device"]
    machine = make_machine(least + 20_000)
    plan = search(candidates, machine, pins=pins)
    model, profile = candidates[0].model, candidates[0].profile
    for depth in (0, 1, 2, 4, 8, 16):
        other = replace(plan, prefetch=Choice(value=depth, because="a test"))
        other_ns = predict_plan(other, model, profile, machine).step_ns
        assert other_ns >= plan.prediction.step_ns
        if depth == 0:
            gain = format_ns(other_ns - plan.prediction.step_ns)
    assert plan.prefetch.value > 0
    assert plan.prefetch.because.endswith(f"a step, {gain} less than with each at its use")
