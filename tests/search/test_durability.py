"""How often finished steps are kept: what it costs decides, and the choice says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from toy_search import HUGE, make_candidates, make_machine, search

from packhorse.compiler.durability import slot_bytes, states_with_slots, states_written_behind
from packhorse.compiler.layout import lay_out_chunks
from packhorse.errors import DoesNotFitError, RecipeError
from packhorse.plan.files import format_plan, parse_plan
from packhorse.plan.pins import read_pins
from packhorse.search.durability import MOST_SHARE
from packhorse.simulator.costs import TASK_NS

ON_DISK = {"parameters": "disk", "optimizer": "disk", "gradients": "disk"}
IN_MEMORY = {"parameters": "device", "optimizer": "device", "gradients": "device"}


def layout_of(plan, candidates):
    return lay_out_chunks(plan, candidates[0].model)


def test_every_step_is_kept_where_all_of_it_lies_on_the_disk():
    candidates = make_candidates()
    plan = search(candidates, pins=ON_DISK)
    assert plan.durable.value == 1
    assert "second slot" in plan.durable.because
    assert plan.prediction.kept_bytes_per_step == 0
    slots = plan.prediction.peak_bytes["disk"]["slots"]
    assert slots == slot_bytes(plan, layout_of(plan, candidates)) > 0
    off = search(candidates, pins={**ON_DISK, "durable": "off"})
    assert plan.prediction.scratch_bytes - off.prediction.scratch_bytes == slots
    assert plan.prediction.step_ns == off.prediction.step_ns


def test_what_lies_in_memory_is_written_behind_at_the_smallest_interval_within_the_share():
    candidates = make_candidates()
    plan = search(candidates, pins=IN_MEMORY)
    every = plan.durable.value
    assert every > 1
    layout = layout_of(plan, candidates)
    states = states_with_slots(plan, layout)
    behind = states_written_behind(plan, layout)
    assert set(behind) == set(states)
    link = make_machine().link("device", "disk")
    size = sum(states[name].size_bytes for name in behind)
    write_ns = size / link.bytes_per_s * 1e9 + len(behind) * (link.latency_ns + TASK_NS)
    step_ns = plan.prediction.step_ns
    assert write_ns <= MOST_SHARE * every * step_ns
    # One step less would be too dear.
    assert write_ns > MOST_SHARE * (every - 1) * step_ns
    assert plan.prediction.kept_bytes_per_step == size // every


def test_a_longer_step_is_kept_more_often():
    short = search(make_candidates(length=8), pins=IN_MEMORY)
    long = search(make_candidates(length=512), pins=IN_MEMORY)
    assert long.durable.value < short.durable.value


@pytest.mark.parametrize("pins", [ON_DISK, IN_MEMORY])
def test_a_disk_that_has_no_room_for_slots_keeps_none(pins):
    candidates = make_candidates()
    plan = search(candidates, pins={**pins, "durable": 3})
    assert plan.durable.value == 3
    assert plan.durable.because.startswith("pinned: ")
    assert "durable" in plan.pins
    exact = plan.prediction.scratch_bytes
    fits = search(candidates, make_machine(disk_bytes=exact), pins={**pins, "durable": 3})
    assert fits.durable.value == 3
    short = make_machine(disk_bytes=exact - 1)
    found = search(candidates, short, pins=pins)
    assert found.durable.value == "off"
    assert "of disk" in found.durable.because
    assert "slots" not in found.prediction.peak_bytes.get("disk", {})
    with pytest.raises(DoesNotFitError, match="durable is pinned to 3"):
        search(candidates, short, pins={**pins, "durable": 3})


def test_without_a_disk_nothing_is_kept():
    machine = make_machine()
    alone = replace(machine, tiers=machine.tiers[:1], links=())
    plan = search(make_candidates(), alone)
    assert plan.durable.value == "off"
    assert plan.durable.because.startswith("the budget has no disk")
    with pytest.raises(RecipeError, match="durable is pinned to 2, but the budget has no disk"):
        search(make_candidates(), alone, pins={"durable": 2})


@pytest.mark.parametrize(("given", "read"), [(False, "off"), ("off", "off"), (7, 7), (None, None)])
def test_the_pin_is_off_or_a_number_of_steps(given, read):
    content = {} if given is None else {"durable": given}
    assert read_pins(content).durable == read


@pytest.mark.parametrize("wrong", [True, 0, -1, "often", 1.5])
def test_other_pins_are_refused_by_name(wrong):
    with pytest.raises(RecipeError, match="durable is pinned to"):
        read_pins({"durable": wrong})


@pytest.mark.parametrize("value", [1, 20, "off"])
def test_the_choice_is_in_the_plan_file(value):
    plan = search(make_candidates(), make_machine(HUGE), pins={**ON_DISK, "durable": value})
    assert parse_plan(format_plan(plan)) == plan
    content = json.loads(format_plan(plan))
    for by_hand in ("off", False):
        assert parse_plan(json.dumps({**content, "durable": by_hand})).durable.value == "off"
    del content["durable"]
    assert parse_plan(json.dumps(content)).durable.value == "off"
