"""Slots for finished steps: who has them, what they take, and what is written behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import make_model, make_plan

from packhorse.compiler.durability import (
    list_kinds,
    slot_bytes,
    states_with_slots,
    states_written_behind,
)
from packhorse.compiler.layout import lay_out_chunks
from packhorse.compiler.lower import lower_plan
from packhorse.errors import DoesNotFitError, RuleError
from packhorse.plan.spec import Choice
from packhorse.program.tasks import Copy, Export, Free, Import
from packhorse.verifier.rules import verify_program

MODEL = make_model(num_layers=2, frozen=("embed",))


def plan_with(home: str, *, durable: object = 3, model=MODEL):
    plan = make_plan(model, parameters=[home], optimizer=[home], chunk_bytes=8192)
    return replace(plan, durable=Choice(value=durable, because="by hand"))


def test_states_on_the_disk_get_a_second_slot_and_frozen_ones_none():
    plan = plan_with("disk")
    layout = lay_out_chunks(plan, MODEL)
    states = states_with_slots(plan, layout)
    trained = [chunk for chunk in layout.chunks if chunk.trainable]
    assert len(trained) < len(layout.chunks)
    assert len(states) == 3 * len(trained)
    assert slot_bytes(plan, layout) == sum(12 * chunk.num_elements for chunk in trained)
    assert states_written_behind(plan, layout) == ()
    assert list_kinds(plan) == ("train_step", "evaluate", "load", "save")


def test_states_in_memory_are_written_behind_to_two_slots():
    plan = plan_with("device")
    layout = lay_out_chunks(plan, MODEL)
    trained = [chunk for chunk in layout.chunks if chunk.trainable]
    assert slot_bytes(plan, layout) == sum(24 * chunk.num_elements for chunk in trained)
    assert list_kinds(plan)[-2:] == ("persist", "restore")
    persist = lower_plan(plan, MODEL, "persist")
    assert {task.buffer for task in persist.tasks if isinstance(task, Export)} == set(
        states_written_behind(plan, layout)
    )
    restore = lower_plan(plan, MODEL, "restore")
    imported = {task.buffer for task in restore.tasks if isinstance(task, Import)}
    assert imported > set(states_written_behind(plan, layout))  # the frozen ones come back too


def test_what_is_off_takes_nothing():
    plan = plan_with("device", durable="off")
    assert slot_bytes(plan, lay_out_chunks(plan, MODEL)) == 0
    assert list_kinds(plan) == ("train_step", "evaluate", "load", "save")


def test_slots_are_taken_off_the_budget_of_the_disk():
    plan = plan_with("disk")
    layout = lay_out_chunks(plan, MODEL)
    need = slot_bytes(plan, layout)
    off = lower_plan(replace(plan, durable=Choice(value="off", because="")), MODEL, "train_step")
    on = lower_plan(plan, MODEL, "train_step")
    before = next(pool.capacity_bytes for pool in off.pools if pool.tier == "disk")
    after = next(pool.capacity_bytes for pool in on.pools if pool.tier == "disk")
    assert before - after == need
    short = replace(plan, budget_bytes={**plan.budget_bytes, "disk": need - 1})
    with pytest.raises(DoesNotFitError, match="for slots of finished steps alone"):
        lower_plan(short, MODEL, "train_step")
    held = replace(plan, budget_bytes={**plan.budget_bytes, "disk": need})
    with pytest.raises(RuleError, match="capacity"):
        verify_program(lower_plan(held, MODEL, "train_step"), MODEL)


@pytest.mark.parametrize("kind", ["persist", "restore"])
@pytest.mark.parametrize("home", ["device", "host"])
def test_a_state_that_is_missing_or_one_too_many_is_rejected(kind, home):
    program = lower_plan(plan_with(home), MODEL, kind)
    verify_program(program, MODEL)
    hands = Export if kind == "persist" else Import
    first = next(task.buffer for task in program.tasks if isinstance(task, hands))
    without = tuple(
        task
        for task in program.tasks
        if not (isinstance(task, hands | Copy | Free) and task.buffer == first)
    )
    with pytest.raises(RuleError, match="coverage"):
        verify_program(replace(program, tasks=without), MODEL)
    twice = (*program.tasks, *(t for t in program.tasks if getattr(t, "buffer", "") == first))
    with pytest.raises(RuleError, match="coverage"):
        verify_program(replace(program, tasks=twice), MODEL)


def test_what_lies_on_the_disk_is_neither_written_behind_nor_filled():
    program = lower_plan(plan_with("disk"), MODEL, "save")
    with pytest.raises(RuleError, match="a persist program leaves alone"):
        verify_program(replace(program, kind="persist"), MODEL)
    program = lower_plan(plan_with("disk"), MODEL, "load")
    with pytest.raises(RuleError, match="a restore program leaves alone"):
        verify_program(replace(program, kind="restore"), MODEL)
