"""Single passes on small, readable cases."""

from __future__ import annotations

import pytest
from models import make_model, make_plan

from packhorse.compiler.layout import lay_out_chunks
from packhorse.compiler.lower import lower_plan
from packhorse.compiler.passes.updates import add_updates, place_updates
from packhorse.program.buffers import NORM, ChunkId, state_id
from packhorse.program.tasks import (
    Backward,
    Copy,
    Free,
    SegmentNorm,
    Task,
    Update,
    lane_of,
)


def backwards(program, block):
    return [t for t in program.tasks if isinstance(t, Backward) and t.block == block]


def test_a_tied_parameter_is_summed_from_its_last_user_to_its_first():
    model = make_model(num_layers=3, shared_layers=(1, 2, 3))
    program = lower_plan(make_plan(model, num_microbatches=2), model, "train_step")
    (chunk,) = program.layout.chunks_of("shared.weight")
    grad = f"grad/{chunk.id}"

    last, middle, first = (backwards(program, block)[0] for block in (3, 2, 1))
    assert all(grad in task.writes for task in (last, middle, first))
    assert [grad in task.reads for task in (last, middle, first)] == [False, True, True]
    assert "wgrad/shared.weight@0" not in program.buffers

    running = "wgrad/shared.weight@1"
    last, middle, first = (backwards(program, block)[1] for block in (3, 2, 1))
    assert [running in task.writes for task in (last, middle, first)] == [True, True, False]
    assert [running in task.reads for task in (last, middle, first)] == [False, True, True]
    assert [grad in task.writes for task in (last, middle, first)] == [False, False, True]
    assert [grad in task.reads for task in (last, middle, first)] == [False, False, True]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_without_clipping_a_tied_chunk_is_updated_after_the_last_backward_that_touches_it(
    num_microbatches, recompute
):
    model = make_model(num_layers=3, tied_head=True, shared_layers=(1, 3))
    activations = "recompute" if recompute else "keep"
    plan = make_plan(model, num_microbatches=num_microbatches, clips=False, activations=activations)
    program = lower_plan(plan, model, "train_step")
    for name, first_user in (("embed.weight", 0), ("shared.weight", 1)):
        (chunk,) = program.layout.chunks_of(name)
        touching = [
            index
            for index, task in enumerate(program.tasks)
            if isinstance(task, Backward)
            and {f"grad/{chunk.id}", f"param/{chunk.id}"} & {*task.reads, *task.writes}
        ]
        last = program.tasks[touching[-1]]
        assert (last.block, last.microbatch) == (first_user, num_microbatches - 1)
        (norm,), (update,) = (
            [i for i, t in enumerate(program.tasks) if isinstance(t, kind) and t.chunk == chunk.id]
            for kind in (SegmentNorm, Update)
        )
        assert touching[-1] < norm < update


def test_a_value_used_twice_gets_its_gradient_as_an_extra_root():
    model = make_model(num_layers=3, skips=((0, 3),))
    program = lower_plan(make_plan(model), model, "train_step")
    (later,), (earlier,), (producer,) = (backwards(program, block) for block in (3, 1, 0))
    assert "dvalue/h0@0" in later.writes
    assert "dvalue/h0@0" not in later.reads
    assert "dvalue/h0@0" in earlier.writes
    assert "dvalue/h0@0" in earlier.reads
    assert "dvalue/h0@0" in producer.reads


def test_nothing_runs_backward_below_the_lowest_trained_block():
    model = make_model(num_layers=3, frozen=("embed", "layers.1"))
    program = lower_plan(make_plan(model), model, "train_step")
    assert [t.block for t in program.tasks if isinstance(t, Backward)] == [4, 3, 2]
    assert "dvalue/h1@0" not in program.buffers
    assert "saved/1@0" not in program.buffers


def test_without_clipping_an_update_waits_for_the_last_reader_of_its_parameters():
    model = make_model(num_layers=1)
    plan = make_plan(model, clips=False)
    layout = lay_out_chunks(plan, model)
    grads = [state_id("grad", chunk.id) for chunk in layout.chunks]
    tasks: list[Task] = [
        Backward(block=1, microbatch=0, reads=(), writes=tuple(grads), workspace_bytes=0),
        Backward(
            block=0,
            microbatch=0,
            reads=(state_id("param", ChunkId(1)),),
            writes=(),
            workspace_bytes=0,
        ),
    ]
    made = add_updates(tasks, layout, plan.optimizer, place_updates(plan))
    names = [
        (type(task).__name__, getattr(task, "chunk", None))
        for task in made
        if isinstance(task, Backward | SegmentNorm | Update)
    ]
    others = [chunk.id for chunk in layout.chunks if chunk.id != 1]
    assert names.index(("Update", 1)) == len(names) - 1
    assert names.index(("SegmentNorm", 1)) < len(names) - 2
    assert [names.index(("Update", c)) - names.index(("SegmentNorm", c)) for c in others] == [
        1
    ] * len(others)


def test_gradients_on_disk_leave_between_micro_batches_and_return_once_for_the_update():
    model = make_model(num_layers=2)
    plan = make_plan(model, gradients="disk", num_microbatches=2)
    program = lower_plan(plan, model, "train_step")
    (chunk,) = program.layout.chunks_of("head.weight")
    moves = [
        (task.source, task.target) if isinstance(task, Copy) else task.tier
        for task in program.tasks
        if isinstance(task, Copy | Free) and task.buffer == f"grad/{chunk.id}"
    ]
    away, back = ("device", "disk"), ("disk", "device")
    assert moves == [away, "device", back, away, "device", back, "device", "disk"]


def test_a_chunk_stays_between_neighbours():
    model = make_model(num_layers=3)
    program = lower_plan(make_plan(model, parameters="disk"), model, "evaluate")
    (chunk,) = program.layout.chunks_of("layers.2.norm.weight")
    assert program.layout.chunks_of("layers.1.norm.weight") == (chunk,)
    loads = [t for t in program.tasks if isinstance(t, Copy) and t.buffer == f"param/{chunk.id}"]
    assert len(loads) == 1


def test_updates_in_the_host_begin_with_the_gradients_that_came_first():
    """And the others with the last, as without a host; the norm goes to the host once, at once."""
    model = make_model(num_layers=6)
    plan = make_plan(model, gradients="host", optimizer="host", update="host", stride=3)
    program = lower_plan(plan, model, "train_step")
    norms = [task.chunk for task in program.tasks if isinstance(task, SegmentNorm)]
    updates = [task for task in program.tasks if isinstance(task, Update)]
    hosted = [task.chunk for task in updates if task.where == "host"]
    visiting = [task.chunk for task in updates if task.where == "device"]
    assert hosted == [chunk for chunk in norms if chunk in hosted]
    assert visiting == [chunk for chunk in reversed(norms) if chunk in visiting]
    turns = [plan.update_tiers[chunk] for chunk in reversed(norms)]
    assert [task.where for task in updates] == turns
    copies = [t for t in program.tasks if isinstance(t, Copy) and t.buffer == "norm"]
    assert copies == [Copy(buffer=NORM, source="device", target="host")]
    assert lane_of(copies[0]) == "compute"


def test_a_gradient_for_the_host_leaves_the_device_when_its_norm_is_summed():
    model = make_model(num_layers=3)
    program = lower_plan(make_plan(model, optimizer="host", update="host"), model, "train_step")
    for chunk in program.layout.chunks:
        grad = state_id("grad", chunk.id)
        summed = next(
            at
            for at, task in enumerate(program.tasks)
            if isinstance(task, SegmentNorm) and task.chunk == chunk.id
        )
        left = program.tasks.index(Copy(buffer=grad, source="device", target="host"))
        freed = program.tasks.index(Free(buffer=grad, tier="device"))
        assert summed < left < freed
        assert not any(isinstance(task, Backward) for task in program.tasks[summed:freed])
