"""Copies are asked for before their use, as far as memory lets them, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_cases import cases
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.passes.prefetch import hoist_copies
from packhorse.compiler.peak import peak_of
from packhorse.plan.spec import Choice
from packhorse.program.buffers import PoolId
from packhorse.program.lanes import assign_lanes
from packhorse.program.tasks import Backward, Copy, Export, Forward, Recompute, Update
from packhorse.verifier.rules import verify_program

COMPUTE = (Forward, Recompute, Backward, Update, Export)


def tighten(program, spare_bytes):
    """The same program in pools that are full at the peak but for some bytes."""
    peaks = peak_of(program)
    pools = tuple(
        replace(pool, capacity_bytes=max(peaks[pool.id] + spare_bytes, 1)) for pool in program.pools
    )
    return replace(program, pools=pools)


def hoist(program, depth):
    tasks = hoist_copies(
        program.tasks,
        program.buffers,
        program.pools,
        workspace_pool=program.workspace_pool,
        depth=depth,
    )
    return replace(program, tasks=tasks)


@pytest.mark.parametrize("kind", ["train_step", "evaluate", "save"])
@given(
    case=cases(),
    depth=st.integers(1, 9),
    spare_bytes=st.sampled_from([0, 1, 4096, 20_000, 1 << 22, 1 << 40]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_the_room_every_program_is_proved_and_only_copies_have_moved(
    kind, case, depth, spare_bytes
):
    model, plan = case
    program = tighten(lower_plan(plan, model, kind), spare_bytes)
    hoisted = hoist(program, depth)
    verify_program(hoisted, model)
    assert Counter(hoisted.tasks) == Counter(program.tasks)
    assert without_loads(hoisted) == without_loads(program)
    lanes = assign_lanes(program.tasks)
    after = dict(zip(map(id, hoisted.tasks), assign_lanes(hoisted.tasks), strict=True))
    assert [after[id(task)] for task in program.tasks] == list(lanes)
    for lane in set(lanes):
        if lane != "compute":
            assert loads_of(hoisted, lane) == loads_of(program, lane)


def without_loads(program):
    return [t for t in program.tasks if not (isinstance(t, Copy) and t.target == "device")]


def loads_of(program, lane):
    lanes = assign_lanes(program.tasks)
    pairs = zip(program.tasks, lanes, strict=True)
    return [t for t, its in pairs if its == lane and isinstance(t, Copy) and t.target == "device"]


@given(case=cases(), depth=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_copy_passes_at_most_so_many_compute_tasks(case, depth):
    model, plan = case
    program = lower_plan(plan, model, "train_step")
    before, after = computed_before(program), computed_before(hoist(program, depth))
    assert all(0 <= before[load] - after[load] <= depth for load in before)


def computed_before(program):
    found, count = {}, 0
    for task in program.tasks:
        count += isinstance(task, COMPUTE)
        if isinstance(task, Copy) and task.target == "device":
            found[id(task)] = count
    return found


def test_a_load_goes_before_the_task_that_comes_before_its_use():
    model = make_model(num_layers=4)
    plan = make_plan(model, parameters="disk")
    plan = replace(plan, prefetch=Choice(value=1, because="a test"))
    names = [
        f"{type(task).__name__} {getattr(task, 'buffer', getattr(task, 'block', ''))}"
        for task in lower_plan(plan, model, "evaluate").tasks
        if isinstance(task, Copy | Forward)
    ]
    (chunk,) = lower_plan(plan, model, "evaluate").layout.chunks_of("layers.2.norm.weight")
    load = names.index(f"Copy param/{chunk.id}")
    assert load < names.index("Forward 1") or load < names.index("Forward 2") - 1


def test_without_room_nothing_moves():
    model = make_model(num_layers=4)
    program = lower_plan(make_plan(model, parameters="disk", optimizer="disk"), model, "train_step")
    full = replace(
        program,
        pools=tuple(
            replace(pool, capacity_bytes=0) if pool.id == PoolId("device") else pool
            for pool in program.pools
        ),
    )
    assert hoist(full, 8).tasks == full.tasks
    assert hoist(program, 0).tasks == program.tasks
    assert hoist(program, 8).tasks != program.tasks


@given(case=cases())
@settings(max_examples=20, deadline=None)
def test_a_plan_without_prefetch_is_lowered_as_it_was_ordered(case):
    model, plan = case
    assert plan.prefetch.value == 0
    whole = lower_plan(plan, model, "train_step")
    ahead = replace(plan, prefetch=Choice(value=3, because="a test"))
    assert lower_plan(ahead, model, "train_step") == hoist(whole, 3)
    load = lower_plan(ahead, model, "load")
    assert load == lower_plan(plan, model, "load")
