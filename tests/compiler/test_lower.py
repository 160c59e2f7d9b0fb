"""Every lowered program keeps the contract: random models and plans, replayed independently."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_cases import cases
from models import make_model, make_plan
from step_replay import StepReplay

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.peak import peak_of
from packhorse.errors import DoesNotFitError, InputError, RefusedError
from packhorse.model.spec import ITEM_BYTES
from packhorse.program.buffers import NORM_WORKSPACE_BYTES
from packhorse.program.tasks import (
    Backward,
    Emit,
    Export,
    Forward,
    GradNorm,
    Import,
    Recompute,
    SegmentNorm,
    Update,
)


def replay_steps(program, model, steps=2):
    replay = StepReplay(program, model)
    if program.kind != "load":
        replay.fill()
    for _ in range(steps):
        replay.run()
        replay.check_at_home()
    return replay


@settings(max_examples=120, deadline=None)
@given(cases())
def test_a_training_step_can_be_repeated_and_its_peak_is_known(case):
    model, plan = case
    program = lower_plan(plan, model, "train_step")
    replay = replay_steps(program, model)
    assert dict(peak_of(program)) == {pool.id: replay.peaks[pool.id] for pool in program.pools}


def plain_sum(users, num_microbatches, tied_sum="per_microbatch"):
    """How a plain loop sums a gradient: over the users, last first, then over micro-batches.

    Per step it is the other way round: each user over micro-batches, then over the users.
    """
    runs = range(num_microbatches)
    last_first = sorted(users, reverse=True)
    if tied_sum == "per_step":
        return add_up([add_up([f"{user}@{at}" for at in runs]) for user in last_first])
    return add_up([add_up([f"{user}@{at}" for user in last_first]) for at in runs])


def add_up(parts):
    total = parts[0]
    for part in parts[1:]:
        total = f"({total} + {part})"
    return total


def test_the_plain_sum_is_spelled_out():
    assert plain_sum((0, 2, 4), 2) == "(((4@0 + 2@0) + 0@0) + ((4@1 + 2@1) + 0@1))"
    assert plain_sum((3,), 3) == "((3@0 + 3@1) + 3@2)"
    assert plain_sum((3,), 3, "per_step") == plain_sum((3,), 3)
    wanted = "(((4@0 + 4@1) + (2@0 + 2@1)) + (0@0 + 0@1))"
    assert plain_sum((0, 2, 4), 2, "per_step") == wanted


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_gradient_is_summed_in_the_order_of_a_plain_loop(case):
    model, plan = case
    program = lower_plan(plan, model, "train_step")
    replay = StepReplay(program, model)
    replay.fill()
    checked = 0
    for task in program.tasks:
        if isinstance(task, SegmentNorm | Update):
            chunk = program.layout.chunks[task.chunk]
            assert replay.grads_of(chunk) == {
                slot.parameter: plain_sum(
                    model.parameters[slot.parameter].blocks,
                    program.num_microbatches,
                    plan.numerics.tied_sum,
                )
                for slot in program.layout.slots_of(chunk)
            }
            checked += 1
        replay.step(task)
    assert checked == 2 * sum(chunk.trainable for chunk in program.layout.chunks)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_running_gradients_are_apart_from_the_second_micro_batch_on(case):
    model, plan = case
    program = lower_plan(plan, model, "train_step")
    running = {name for name in program.buffers if name.startswith("wgrad/")}
    tied = [p for p in model.parameters.values() if p.trainable and len(p.blocks) > 1]
    sums = {name for name in program.buffers if name.startswith("wsum/")}
    if plan.numerics.tied_sum == "per_step":
        assert not running
        users = [(p.name, block) for p in tied for block in p.blocks[:-1]]
        assert sums == {f"wsum/{name}/{block}" for name, block in users}
        return
    assert not sums
    assert running == {
        f"wgrad/{p.name}@{index}" for p in tied for index in range(1, program.num_microbatches)
    }
    assert all(
        program.buffers[f"wgrad/{p.name}@{index}"].size_bytes
        == p.num_elements * ITEM_BYTES[p.dtype]
        for p in tied
        for index in range(1, program.num_microbatches)
    )


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_block_and_chunk_has_its_turn_exactly_once(case):
    model, plan = case
    program = lower_plan(plan, model, "train_step")
    runs = range(program.num_microbatches)
    forward = [(t.microbatch, t.block) for t in program.tasks if isinstance(t, Forward)]
    backward = [(t.microbatch, t.block) for t in program.tasks if isinstance(t, Backward)]
    blocks = [block.id for block in model.blocks]
    if plan.order.value == "layered":
        assert forward == [(index, block) for block in blocks for index in runs]
    else:
        assert forward == [(index, block) for index in runs for block in blocks]
    last_first = [block for block in reversed(blocks) if model.blocks[block].has_backward]
    if plan.order.value == "layered":
        assert backward == [(index, block) for block in last_first for index in runs]
    else:
        assert backward == [(index, block) for index in runs for block in last_first]
    again = [(t.microbatch, t.block) for t in program.tasks if isinstance(t, Recompute)]
    assert again == [
        (index, block)
        for index, block in backward
        if plan.blocks[block].activations.value == "recompute"
        and model.body_of(block).saved_bytes
        and block != blocks[-1]
    ]
    trained = [chunk.id for chunk in program.layout.chunks if chunk.trainable]
    for kind in (Update, SegmentNorm):
        assert sorted(t.chunk for t in program.tasks if isinstance(t, kind)) == trained
    (norm,) = (task for task in program.tasks if isinstance(task, GradNorm))
    assert norm.reads == tuple(f"norm/{chunk}" for chunk in trained)
    emitted = [task.buffer for task in program.tasks if isinstance(task, Emit)]
    assert emitted == [*(f"value/loss@{index}" for index in runs), "norm"]


@settings(max_examples=80, deadline=None)
@given(cases())
def test_parameters_change_only_after_their_last_use(case):
    model, plan = case
    program = lower_plan(plan, model, "train_step")
    updated = set()
    normed = False
    for task in program.tasks:
        match task:
            case Update():
                assert normed or not plan.optimizer.clips
                assert ("norm" in task.reads) == plan.optimizer.clips
                updated.add(f"param/{task.chunk}")
                updated.add(f"grad/{task.chunk}")
            case Forward() | Recompute() | Backward() | SegmentNorm():
                assert updated.isdisjoint((*task.reads, *task.writes))
            case GradNorm():
                normed = True
            case _:
                pass


@settings(max_examples=80, deadline=None)
@given(cases())
def test_tasks_read_what_their_body_needs(case):
    model, plan = case
    program = lower_plan(plan, model, "train_step")
    for task in program.tasks:
        if not isinstance(task, Forward | Recompute | Backward):
            continue
        block, at = model.blocks[task.block], f"@{task.microbatch}"
        body = model.bodies[block.body]
        params = {name for name in task.reads if name.startswith("param/")}
        values = {name for name in task.reads if name.startswith("value/")}
        saved = {f"saved/{block.id}{at}"} if body.saved_bytes else set()
        if isinstance(task, Backward):
            names = [block.parameters[index] for index in body.backward_parameters]
            used = [block.inputs[index] for index in body.backward_inputs]
            used += [block.outputs[index] for index in body.backward_outputs]
            assert saved == {name for name in task.reads if name.startswith("saved/")}
        else:
            names, used = block.parameters, block.inputs
        assert values == {f"value/{value}{at}" for value in used}
        assert params == {
            f"param/{chunk.id}" for name in names for chunk in program.layout.chunks_of(name)
        }


@settings(max_examples=60, deadline=None)
@given(cases(), st.one_of(st.none(), st.integers(1, 3)))
def test_an_evaluation_leaves_the_state_as_it_was(case, count):
    model, plan = case
    program = lower_plan(plan, model, "evaluate", eval_microbatches=count)
    assert program.num_microbatches == (count or plan.numerics.num_microbatches)
    replay = replay_steps(program, model)
    assert dict(peak_of(program)) == {pool.id: replay.peaks[pool.id] for pool in program.pools}
    assert not any(name.split("/")[0] in {"saved", "dvalue", "grad"} for name in program.buffers)
    assert all(
        replay.newest[name] == 0 for name, b in program.buffers.items() if b.home is not None
    )


def test_more_evaluation_batches_need_no_more_memory():
    model = make_model(num_layers=3)
    plan = make_plan(model, parameters="disk")
    peaks = [
        peak_of(lower_plan(plan, model, "evaluate", eval_microbatches=count)) for count in (4, 64)
    ]
    assert peaks[0] == peaks[1]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_load_and_save_pass_every_state_once_and_one_at_a_time(case):
    model, plan = case
    load, save = (lower_plan(plan, model, kind) for kind in ("load", "save"))
    homed = [name for name, buffer in load.buffers.items() if buffer.home is not None]
    assert [t.buffer for t in load.tasks if isinstance(t, Import)] == homed
    assert [t.buffer for t in save.tasks if isinstance(t, Export)] == homed
    away = [b.size_bytes for b in load.buffers.values() if b.home != "device"]
    resident = sum(b.size_bytes for b in load.buffers.values() if b.home == "device")
    pool = "chunks" if plan.heap.value == "keep" else "device"
    for program, steps in ((load, 1), (save, 2)):
        replay_steps(program, model, steps)
        assert peak_of(program)[pool] <= resident + max(away, default=0)


@pytest.mark.parametrize("clips", [True, False])
def test_disk_traffic_is_near_its_lower_bound(clips):
    model = make_model(num_layers=6)
    plan = make_plan(
        model,
        parameters="disk",
        gradients="disk",
        optimizer="disk",
        activations="recompute",
        clips=clips,
    )
    program = lower_plan(plan, model, "train_step")
    replay = StepReplay(program, model)
    replay.fill()
    replay.run()
    num_chunks = len(program.layout.chunks)
    for state in ("exp_avg", "exp_avg_sq"):
        assert replay.copies[state, "disk", "device"] == num_chunks
        assert replay.copies[state, "device", "disk"] == num_chunks
    assert replay.copies["param", "device", "disk"] == num_chunks
    assert replay.copies["param", "disk", "device"] <= (3 if clips else 2) * num_chunks
    assert replay.copies["grad", "device", "disk"] <= (num_chunks - 1 if clips else 0)
    assert replay.copies["grad", "disk", "device"] == replay.copies["grad", "device", "disk"]


def test_the_last_block_keeps_what_it_would_recompute_at_once():
    model = make_model(num_layers=2)
    program = lower_plan(make_plan(model, activations="recompute"), model, "train_step")
    assert [t.block for t in program.tasks if isinstance(t, Recompute)] == [2, 1]
    last = [t for t in program.tasks if isinstance(t, Forward)][-1]
    assert "saved/3@0" in last.writes


def test_a_kept_heap_sets_its_slack_aside():
    model = make_model(num_layers=3)
    plan = make_plan(
        model,
        heap="keep",
        heap_slack=0.5,
        base_bytes=1000,
        budget_bytes={"device": 1_000_000, "disk": 0},
    )
    programs = [lower_plan(plan, model, kind) for kind in ("train_step", "evaluate", "load")]
    capacities = [{pool.id: pool.capacity_bytes for pool in p.pools} for p in programs]
    heap = peak_of(programs[0])["heap"]
    assert capacities[0] == {
        "chunks": 1_000_000 - 1000 - (heap + heap // 2 + heap % 2),
        "heap": heap,
        "disk": 0,
    }
    assert capacities[0] == capacities[1] == capacities[2]
    assert all(p.workspace_pool == "heap" for p in programs)


def test_a_mapped_heap_shares_one_pool():
    model = make_model()
    plan = make_plan(model, budget_bytes={"device": 500_000}, base_bytes=100_000)
    program = lower_plan(plan, model, "train_step")
    assert [(p.id, p.tier, p.capacity_bytes) for p in program.pools] == [
        ("device", "device", 400_000)
    ]
    assert program.workspace_pool == "device"


def test_a_budget_that_the_process_itself_uses_up_is_refused():
    model = make_model()
    plan = make_plan(model, budget_bytes={"device": 2 << 20}, base_bytes=3 << 20)
    with pytest.raises(DoesNotFitError, match=r"needs more than 3\.00 MiB and has 2\.00 MiB"):
        lower_plan(plan, model, "train_step")


def test_nothing_to_train_is_refused_but_can_be_evaluated():
    model = make_model(frozen=("",))
    plan = make_plan(model, heap="keep")
    with pytest.raises(RefusedError, match="every parameter is frozen"):
        lower_plan(plan, model, "train_step")
    assert lower_plan(plan, model, "evaluate").tasks


@pytest.mark.parametrize(("kind", "count"), [("train_step", 2), ("evaluate", 0)])
def test_a_wrong_number_of_evaluation_batches_is_refused(kind, count):
    model = make_model()
    with pytest.raises(InputError, match=f"eval_microbatches is {count}"):
        lower_plan(make_plan(model), model, kind, eval_microbatches=count)


def test_equal_plans_give_equal_programs():
    model = make_model(num_layers=3, tied_head=True, skips=((0, 3),))
    plan = make_plan(model, parameters=("disk", "device"), num_microbatches=2)
    assert lower_plan(plan, model, "train_step") == lower_plan(plan, model, "train_step")


def test_the_norm_has_the_workspace_that_it_needs():
    norm = pytest.importorskip("packhorse.optim.norm")
    assert norm.SCRATCH_BYTES == NORM_WORKSPACE_BYTES


@pytest.mark.parametrize("clips", [True, False])
def test_only_an_update_that_clips_changes_the_gradient(clips):
    model = make_model()
    program = lower_plan(make_plan(model, clips=clips), model, "train_step")
    updates = [task for task in program.tasks if isinstance(task, Update)]
    assert {f"grad/{task.chunk}" in task.writes for task in updates} == {clips}
