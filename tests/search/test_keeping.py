"""When chunks stay in valleys: where it is quicker; what the plan says of it is what is saved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.plan.files import format_plan, parse_plan
from packhorse.plan.spec import Choice
from packhorse.program.tasks import Copy
from packhorse.search.prediction import predict_plan
from packhorse.verifier.rules import verify_program
from tests.search.toy_search import make_candidates, make_machine, need, search

WIDE = {"num_layers": 8, "hidden": 128, "vocabulary": 512, "length": 256}
SHARES = {"depth-first, keep": 0.55, "depth-first, recompute": 0.35, "layered": 0.35}
ORDERS = {
    "depth-first, keep": {"order": "depth_first", "recompute": "none"},
    "depth-first, recompute": {"order": "depth_first", "recompute": "all"},
    "layered": {"order": "layered"},
}


def plan_in(share, pins, total=3):
    """A plan whose budget lies between the least and all that it could use."""
    candidates = make_candidates((1,), **WIDE)
    all_in = search(candidates, total=total, pins={**pins, "chunk_bytes": "64KiB"})
    machine = make_machine(int(share * need(all_in)))
    return (
        candidates[0],
        machine,
        search(candidates, machine, total=total, pins={**pins, "chunk_bytes": "64KiB"}),
    )


def read_bytes(plan, model):
    program = lower_plan(plan, model, "train_step")
    return sum(
        program.buffers[task.buffer].size_bytes
        for task in program.tasks
        if isinstance(task, Copy) and task.target == "device"
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_mapped_heap_has_valleys_that_the_placing_of_moves_leaves(order):
    candidate, machine, plan = plan_in(SHARES[order], {**ORDERS[order], "heap": "map"})
    none = replace(plan, cache=Choice(value="none", because=""))
    slow = predict_plan(none, candidate.model, candidate.profile, machine)
    if order == "layered":
        # Each chunk is brought once for all micro-batches already: little is left to save.
        assert plan.prediction.disk_read_bytes >= 0.9 * slow.disk_read_bytes
        return
    assert plan.cache.value == "valleys"
    assert plan.prediction.disk_read_bytes < slow.disk_read_bytes
    assert plan.prediction.step_ns <= slow.step_ns
    assert plan.prediction.peak_bytes["device"] == slow.peak_bytes["device"]
    verify_program(lower_plan(plan, candidate.model, "train_step"), candidate.model)
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize("total", [3, 7])
def test_the_promised_reads_are_those_of_the_whole_step(total):
    candidate, _, plan = plan_in(0.55, {**ORDERS["depth-first, keep"], "heap": "map"}, total)
    assert plan.cache.value == "valleys"
    assert plan.prediction.disk_read_bytes == read_bytes(plan, candidate.model)


def test_a_pin_is_kept():
    for wanted in ("none", "valleys"):
        pins = {**ORDERS["depth-first, keep"], "heap": "map", "cache": wanted}
        _, _, plan = plan_in(0.6, pins)
        assert plan.cache == Choice(value=wanted, because="pinned")


def test_where_all_is_resident_nothing_is_kept():
    plan = search(make_candidates((1,), **WIDE), total=2)
    assert plan.cache.value == "none"
    assert "no valley" in plan.cache.because
