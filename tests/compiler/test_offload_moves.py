"""What a block saves leaves after its Forward and comes back before its Backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.errors import RefusedError, RuleError
from packhorse.plan.spec import NO_OFFLOAD
from packhorse.program.program import Program
from packhorse.program.tasks import Backward, Copy, Forward, Free
from packhorse.verifier.rules import verify_program

MODEL = make_model(num_layers=3)


def lower(**options) -> Program:
    plan = make_plan(MODEL, **options)
    return lower_plan(plan, MODEL, "train_step")


def index_of(program, task) -> int:
    return program.tasks.index(task)


def find_block(program, kind, block, microbatch=0) -> int:
    return next(
        index
        for index, task in enumerate(program.tasks)
        if isinstance(task, kind) and (task.block, task.microbatch) == (block, microbatch)
    )


@pytest.mark.parametrize("order", ["depth_first", "layered"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_each_goes_once_and_comes_back_once(tier, order) -> None:
    program = lower(activations="offload", offload=tier, order=order, num_microbatches=2)
    verify_program(program, MODEL)
    for block in (1, 2, 3):
        for microbatch in (0, 1):
            name = f"saved/{block}@{microbatch}"
            out = index_of(program, Copy(buffer=name, source="device", target=tier))
            back = index_of(program, Copy(buffer=name, source=tier, target="device"))
            frees = [
                index
                for index, task in enumerate(program.tasks)
                if task == Free(buffer=name, tier="device")
            ]
            dropped = index_of(program, Free(buffer=name, tier=tier))
            forward = find_block(program, Forward, block, microbatch)
            backward = find_block(program, Backward, block, microbatch)
            assert forward < out < frees[0] < back < backward < frees[1]
            assert backward < dropped


def test_what_is_used_at_once_stays_and_has_no_other_place() -> None:
    program = lower(activations="offload")
    assert tuple(program.buffers["saved/4@0"].pools) == ("device",)
    assert not any(isinstance(t, Copy) and t.buffer == "saved/4@0" for t in program.tasks)


def test_only_blocks_that_offload_have_a_place_elsewhere() -> None:
    program = lower(activations=("keep", "offload", "recompute", "keep", "keep"))
    away = {name for name, buffer in program.buffers.items() if "disk" in buffer.pools}
    assert away == {"saved/1@0"}


def test_the_device_needs_less() -> None:
    long = make_model(num_layers=3, length=4096)
    peaks = {
        choice: verify_program(
            lower_plan(make_plan(long, activations=choice), long, "train_step"), long
        ).peak_bytes
        for choice in ("keep", "offload")
    }
    saved = long.body_of(1).saved_bytes
    assert saved > 0
    assert peaks["offload"]["disk"] == 3 * saved
    assert peaks["offload"]["device"] <= peaks["keep"]["device"] - 2 * saved


def test_copies_are_asked_for_before_their_use() -> None:
    plan = make_plan(MODEL, activations="offload")
    at_use = lower_plan(plan, MODEL, "train_step")
    ahead = replace(plan, prefetch=replace(plan.prefetch, value=2))
    early = lower_plan(ahead, MODEL, "train_step")
    verify_program(early, MODEL)
    copy = Copy(buffer="saved/2@0", source="disk", target="device")
    before = find_block(at_use, Backward, 3)
    assert index_of(at_use, copy) > before
    assert index_of(early, copy) < find_block(early, Backward, 3)


@pytest.mark.parametrize(
    ("source", "again", "rule"),
    [("device", 0, "fresh"), ("disk", 0, "present"), ("disk", 2, "present")],
    ids=["not copied out", "not brought back", "brought twice"],
)
def test_programs_that_lose_it_are_rejected(source, again, rule) -> None:
    program = lower(activations="offload")
    target = "disk" if source == "device" else "device"
    copy = Copy(buffer="saved/2@0", source=source, target=target)
    at = index_of(program, copy)
    changed = (*program.tasks[:at], *[copy] * again, *program.tasks[at + 1 :])
    with pytest.raises(RuleError) as caught:
        verify_program(replace(program, tasks=changed), MODEL)
    assert rule in str(caught.value)
    assert "saved/2@0" in str(caught.value)


def test_a_tier_that_is_not_there_is_refused() -> None:
    plan = make_plan(MODEL, activations="offload")
    with pytest.raises(RefusedError, match="the tier for that is device"):
        lower_plan(replace(plan, offload=NO_OFFLOAD), MODEL, "train_step")
    small = replace(plan, budget_bytes={"device": 1 << 40, "host": 1 << 40})
    with pytest.raises(RefusedError, match="to tier disk") as caught:
        lower_plan(small, MODEL, "train_step")
    assert "set offload: host" in str(caught.value)
