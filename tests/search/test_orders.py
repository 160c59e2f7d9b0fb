"""Which order micro-batches go in, and what a plan in layers promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_search import ARITHMETIC, HUGE, SGD, make_candidates, make_machine, need, search

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.peak import peak_of
from packhorse.errors import DoesNotFitError, RecipeError
from packhorse.program.tasks import Copy
from packhorse.search.prediction import predict_plan
from packhorse.search.search import find_plan
from packhorse.search.space import UNLIMITED_BYTES
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_run

# Without the cache, which spares reads in either order.
ON_DISK = {"parameters": "disk", "optimizer": "disk", "cache": "none"}


def search_per_step(candidates, **options):
    def how(found, machine, **more):
        per_step = replace(ARITHMETIC, tied_sum="per_step")
        return find_plan(found, machine, **{**more, "arithmetic": per_step})

    return search(candidates, how=how, **options)


def test_layers_are_chosen_where_they_bring_less() -> None:
    candidates = make_candidates(length=64)
    plan = search(candidates, total=8, pins=ON_DISK)
    assert plan.order.value == "layered"
    assert "once for all 8 micro-batches" in plan.order.because
    first = search(candidates, total=8, pins={**ON_DISK, "order": "depth_first"})
    assert (first.order.value, first.order.because) == ("depth_first", "pinned")
    assert plan.prediction.step_ns < first.prediction.step_ns
    assert 2 * plan.prediction.disk_read_bytes < first.prediction.disk_read_bytes
    assert plan.numerics.microbatch_rows.value == first.numerics.microbatch_rows.value == 1


def test_one_after_another_where_nothing_lies_away_or_there_is_only_one() -> None:
    resident = search(make_candidates(length=64), total=8)
    assert resident.order.value == "depth_first"
    assert "nothing lies away" in resident.order.because
    alone = search(make_candidates(length=64), total=1, pins=ON_DISK)
    assert alone.order.value == "depth_first"
    assert "one micro-batch" in alone.order.because


def test_ties_go_in_layers_only_where_their_sums_allow_it() -> None:
    candidates = make_candidates(length=64, tied_head=True)
    plan = search(candidates, total=4, pins=ON_DISK)
    assert (plan.order.value, plan.numerics.tied_sum) == ("depth_first", "per_microbatch")
    assert "embed.weight is tied" in plan.order.because
    per_step = search_per_step(candidates, total=4, pins={**ON_DISK, "tied_sum": "per_step"})
    assert (per_step.order.value, per_step.numerics.tied_sum) == ("layered", "per_step")
    with pytest.raises(RecipeError, match="order is pinned to layered"):
        search(candidates, total=4, pins={"order": "layered"})
    assert search(candidates, total=1, pins={"order": "layered"}).order.value == "layered"


def test_layers_that_do_not_fit_are_not_chosen() -> None:
    """They hold the values of all micro-batches at once."""
    candidates = make_candidates(length=64, num_layers=4)
    pins = {"heap": "map", "chunk_bytes": 8192, "recompute": "all", "boundaries": "device"}
    roomy = search(candidates, total=16, pins={**pins, **ON_DISK, "gradients": "disk"})
    assert roomy.order.value == "layered"
    tight = make_machine(need(roomy) - 1)
    plan = search(candidates, tight, total=16, pins={**pins, **ON_DISK, "gradients": "disk"})
    assert plan.order.value == "depth_first"
    assert need(plan) < need(roomy)


def test_values_leave_where_nothing_else_can() -> None:
    candidates = make_candidates(length=512, num_layers=6)
    stay = dict.fromkeys(("parameters", "gradients", "optimizer"), "device")
    pins = {"heap": "map", "recompute": "all", **stay}
    roomy = search(candidates, total=2, pins=pins)
    assert (roomy.boundaries.value, roomy.order.value) == ("device", "depth_first")
    assert roomy.boundaries.because == "everything fits: none has to leave"
    machine = make_machine(need(roomy) - 1)
    plan = search(candidates, machine, total=2, pins=pins)
    assert plan.boundaries.value == "disk"
    assert "make room" in plan.boundaries.because
    assert plan.prediction.disk_read_bytes > 0
    with pytest.raises(DoesNotFitError):
        search(candidates, machine, total=2, pins={**pins, "boundaries": "device"})


def test_values_cannot_wait_where_there_is_no_room() -> None:
    with pytest.raises(RecipeError, match="boundaries are pinned to the tier host"):
        search(make_candidates(), pins={"boundaries": "host"})


@pytest.mark.parametrize("total", [2, 5])
@pytest.mark.parametrize("optimizer", [None, SGD])
def test_a_step_in_layers_is_predicted_whole(total, optimizer) -> None:
    candidates = make_candidates(length=64, num_layers=3)
    model, profile = candidates[0].model, candidates[0].profile
    options = {} if optimizer is None else {"optimizer": optimizer}
    pins = {"parameters": "disk", "order": "layered", "recompute": ["layers.2"]}
    plan = search(candidates, total=total, pins=pins, **options)
    unlimited = replace(plan, budget_bytes=dict.fromkeys(("device", "disk"), UNLIMITED_BYTES))
    program = lower_plan(unlimited, model, "train_step")
    costs = TaskCosts(
        machine=make_machine(),
        profile=profile,
        model=model,
        program=program,
        heap=plan.heap.value,
    )
    prediction = predict_plan(plan, model, profile, make_machine())
    assert prediction == plan.prediction
    assert prediction.step_ns == simulate_run(program, costs=costs).step_ns
    read = sum(
        program.buffers[task.buffer].size_bytes
        for task in program.tasks
        if isinstance(task, Copy) and task.source == "disk"
    )
    assert prediction.disk_read_bytes == read
    if plan.heap.value == "map":
        assert sum(prediction.peak_bytes["device"].values()) >= peak_of(program)["device"]


def test_gradients_that_nothing_keeps_cannot_be_pinned_away() -> None:
    candidates = make_candidates(length=64)
    pins = {"gradients": "disk", "order": "layered"}
    with pytest.raises(RecipeError, match="used up where it arises"):
        search(candidates, make_machine(HUGE), total=4, optimizer=SGD, pins=pins)
    kept = search(candidates, total=4, optimizer=SGD, pins={"gradients": "disk"})
    assert kept.order.value == "depth_first"
