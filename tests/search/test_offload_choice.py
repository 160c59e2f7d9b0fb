"""Blocks move what they save where a lane is idle and a second forward is dear, and only there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from packhorse.errors import RecipeError
from packhorse.machine.spec import Link, Tier
from packhorse.plan.pins import read_pins
from packhorse.search.evaluation import Evaluator
from packhorse.search.knapsack import choose_moves
from packhorse.search.sketch import make_sketch
from packhorse.search.space import Problem, make_setting
from tests.search.toy_search import (
    ADAMW,
    ARITHMETIC,
    HUGE,
    make_candidates,
    make_machine,
    need,
    search,
)

STAY = dict.fromkeys(("parameters", "gradients", "optimizer", "boundaries"), "device")
PINS = {"heap": "map", "chunk_bytes": 8192, **STAY}


def machine_with(bytes_per_s: float, device_bytes: int = HUGE, *tiers: str):
    names = tiers or ("disk",)
    machine = make_machine(device_bytes)
    links = tuple(
        Link(source=source, target=target, bytes_per_s=bytes_per_s, latency_ns=1000)
        for name in names
        for source, target in (("device", name), (name, "device"))
    )
    others = tuple(
        Tier(name=name, total_bytes=HUGE, budget_bytes=HUGE, path="s" if name == "disk" else None)
        for name in names
    )
    return replace(machine, links=links, tiers=(machine.tiers[0], *others))


def activations_of(plan) -> list[str]:
    return [block.activations.value for block in plan.blocks]


def candidates():
    return make_candidates((1,), length=512, num_layers=6, hidden=64)


@pytest.mark.parametrize("total", [1, 4])
def test_an_idle_lane_takes_what_would_be_made_again(total) -> None:
    roomy = search(candidates(), machine_with(1e10), total=total, pins=PINS)
    assert activations_of(roomy) == ["keep"] * 8
    assert roomy.offload.value == "device"
    budget = need(roomy) * 2 // 3
    quick = search(candidates(), machine_with(1e10, budget), total=total, pins=PINS)
    assert "offload" in activations_of(quick)
    assert need(quick) <= budget
    assert quick.offload.value == "disk"
    assert quick.prediction.disk_written_bytes > 0
    assert "activations" in quick.prediction.peak_bytes["disk"]
    reasons = [b.activations.because for b in quick.blocks if b.activations.value == "offload"]
    assert all("moving it to disk frees" in reason for reason in reasons)
    again = [b.name for b in quick.blocks if b.activations.value == "offload"]
    made_again = search(
        candidates(),
        machine_with(1e10, budget),
        total=total,
        pins={**PINS, "recompute": again},
    )
    assert quick.prediction.step_ns < made_again.prediction.step_ns


def test_a_slow_lane_takes_nothing() -> None:
    budget = need(search(candidates(), machine_with(1e7), total=1, pins=PINS)) * 2 // 3
    plan = search(candidates(), machine_with(1e7, budget), total=1, pins=PINS)
    assert set(activations_of(plan)) == {"keep", "recompute"}
    assert plan.prediction.disk_written_bytes == 0


def test_a_busy_lane_takes_nothing() -> None:
    """The lane that is quick enough when idle, with all states of chunks on their way over it."""
    wide = make_candidates((1,), length=256, num_layers=6, hidden=256)
    idle = {**PINS, "chunk_bytes": 1 << 18}
    busy = {**idle, "parameters": "disk", "gradients": "disk", "optimizer": "disk"}
    rate, found = 4.4e8, []
    for pins in (idle, busy):
        most = need(search(wide, machine_with(rate), total=1, pins=pins))
        least = need(search(wide, machine_with(rate), total=1, pins={**pins, "recompute": "all"}))
        machine = machine_with(rate, (most + least) // 2)
        found.append(set(activations_of(search(wide, machine, total=1, pins=pins))))
    assert found == [{"keep", "offload"}, {"keep", "recompute"}]


def test_the_host_comes_before_the_disk_unless_it_is_pinned() -> None:
    machine = machine_with(1e10, HUGE, "host", "disk")
    pins = {**PINS, "activations": {"layers.*": "offload"}}
    plan = search(candidates(), machine, total=1, pins=pins)
    assert plan.offload.value == "host"
    assert activations_of(plan)[1:7] == ["offload"] * 6
    assert plan.blocks[1].activations.because == "pinned"
    assert "activations" in plan.prediction.peak_bytes["host"]
    assert "activations" not in plan.prediction.peak_bytes.get("disk", {})
    plan = search(candidates(), machine, total=1, pins={**pins, "offload": "disk"})
    assert (plan.offload.value, plan.offload.because) == ("disk", "pinned")
    assert plan.prediction.disk_read_bytes > 0


@pytest.mark.parametrize("pins", [{"offload": "host"}, {"activations": "offload"}])
def test_a_tier_that_is_not_there_is_refused(pins) -> None:
    machine = make_machine()
    alone = replace(machine, tiers=machine.tiers[:1], links=())
    with pytest.raises(RecipeError, match="saved values are pinned"):
        search(candidates(), alone, pins=pins)


@pytest.mark.parametrize("order", ["depth_first", "layered"])
@pytest.mark.parametrize("total", [1, 4])
def test_the_sketch_knows_what_leaves(order, total) -> None:
    problem = Problem(
        machine=make_machine(),
        optimizer=ADAMW,
        arithmetic=ARITHMETIC,
        pins=read_pins({}),
        global_batch_rows=total,
    )
    evaluator = Evaluator(problem)
    (one,) = candidates()
    setting = make_setting(problem, one, heap="map", chunk_bytes=8192, order=order, offload="disk")
    sketch = make_sketch(evaluator, setting)
    random_ = random.Random(total)
    saves = [m for m in setting.moves if m.kind in ("recompute", "offload")]
    assert len(saves) == 12
    for _ in range(5):
        chosen = {m.index: random_.choice(["keep", "recompute", "offload"]) for m in saves}
        taken = [move.kind == chosen.get(move.index) for move in setting.moves]
        exact = evaluator.evaluate(setting, taken)
        assert exact.device_bytes <= sketch.need_bytes(taken) <= exact.device_bytes * 1.05
        away = sum(sketch.away_bytes["disk"][c] for c, is_taken in enumerate(taken) if is_taken)
        assert exact.need_bytes.get("disk", 0) == away
    least = choose_moves(sketch, device_bytes=0, away_bytes={"disk": HUGE}, goal="memory")
    assert least is not None
    both = [m.subject for m, is_taken in zip(setting.moves, least, strict=True) if is_taken]
    assert len(set(both)) == len(both)
