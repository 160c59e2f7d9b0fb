"""Both orders of micro-batches are proved; sums of another order, or of other parts, are not."""

from __future__ import annotations

import pytest
from edits import change, drop, find, insert, move, reject
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.program.buffers import BufferId
from packhorse.program.tasks import Backward
from packhorse.verifier.rules import verify_program

MODEL = make_model(num_layers=3, tied_head=True, shared_layers=(1, 2, 3), skips=((0, 2),))
OPTIONS = {"num_microbatches": 3, "gradients": "disk", "tied_sum": "per_step"}
LAYERED = lower_plan(
    make_plan(MODEL, order="layered", activations=("keep", "recompute"), **OPTIONS),
    MODEL,
    "train_step",
)
DEPTH_FIRST = lower_plan(make_plan(MODEL, **OPTIONS), MODEL, "train_step")
SUM = "wsum/shared.weight/2"


def without(program, words, field, name):
    task = program.tasks[find(program, words)]
    names = tuple(other for other in getattr(task, field) if other != name)
    assert len(names) + 1 == len(getattr(task, field))
    return change(program, words, **{field: names})


def test_both_orders_are_proved() -> None:
    for program in (LAYERED, DEPTH_FIRST):
        verify_program(program, MODEL)
    runs = [(t.block, t.microbatch) for t in LAYERED.tasks if isinstance(t, Backward)]
    assert runs == [(block, mb) for block in (4, 3, 2, 1, 0) for mb in (0, 1, 2)]


def test_a_layer_runs_backward_first_in_first_out() -> None:
    program = move(LAYERED, "B block=1 mb=2", before="B block=1 mb=1")
    program = move(program, "R block=1 mb=2", before="B block=1 mb=2")
    reject(program, MODEL, "order", "block 1 backward for micro-batch 1", "0, 1, 2")
    reject(program, None, "order", "block 1 backward for micro-batch 1", "0, 1, 2")


def test_a_layer_waits_for_the_later_users_of_its_values() -> None:
    program = move(LAYERED, "B block=1 mb=0", before="B block=2 mb=0")
    program = move(program, "R block=1 mb=0", before="B block=1 mb=0")
    reject(program, MODEL, "order", "B block=2 mb=0", "last user")


def test_an_update_waits_for_the_last_micro_batch_of_its_layer() -> None:
    model = make_model()
    plan = make_plan(model, clips=False, num_microbatches=3, order="layered")
    program = lower_plan(plan, model, "train_step")
    (chunk,) = program.layout.chunks_of("layers.2.proj.weight")
    update, norm = f"UPD chunk={chunk.id}", f"SEG chunk={chunk.id}"
    assert find(program, update) < find(program, "B block=1 mb=0")
    early = move(program, update, before="B block=2 mb=2")
    reject(early, model, "coverage", f"updates chunk {chunk.id} before its last gradient")
    early = move(program, norm, before="B block=2 mb=2")
    reject(early, model, "order", f"sums the gradient of chunk {chunk.id} before")


@pytest.mark.parametrize("program", [LAYERED, DEPTH_FIRST], ids=["layered", "depth first"])
@pytest.mark.parametrize(
    ("words", "field", "name"),
    [
        ("B block=2 mb=0", "writes", SUM),
        ("B block=2 mb=1", "reads", SUM),
        ("B block=2 mb=1", "writes", SUM),
        ("B block=2 mb=2", "reads", SUM),
        ("B block=2 mb=2", "writes", "grad"),
        ("B block=2 mb=2", "reads", "grad"),
        ("B block=3 mb=1", "reads", "grad"),
        ("B block=3 mb=1", "writes", "grad"),
    ],
)
def test_every_user_of_a_tied_parameter_sums_on_its_own(program, words, field, name) -> None:
    (chunk,) = program.layout.chunks_of("shared.weight")
    name = f"grad/{chunk.id}" if name == "grad" else name
    broken = without(program, words, field, name)
    verb = field.removesuffix("s")
    reject(broken, MODEL, "reads", f"does not {verb} {name}, which it needs", words)


@pytest.mark.parametrize("words", ["B block=2 mb=0", "B block=2 mb=1", "B block=1 mb=1"])
def test_sums_are_added_to_the_chunk_only_in_the_last_micro_batch(words: str) -> None:
    (chunk,) = DEPTH_FIRST.layout.chunks_of("shared.weight")
    task = DEPTH_FIRST.tasks[find(DEPTH_FIRST, words)]
    grad = BufferId(f"grad/{chunk.id}")
    program = change(DEPTH_FIRST, words, writes=(*task.writes, grad))
    reject(program, MODEL, "reads", f"writes {grad}, which it does not need", words)


def test_the_last_user_has_room_for_a_gradient_of_its_own() -> None:
    size = MODEL.parameters["embed.weight"].num_elements * 4
    for program in (LAYERED, DEPTH_FIRST):
        least = MODEL.body_of(MODEL.blocks[4].id).backward_workspace_bytes
        assert program.tasks[find(program, "B block=4 mb=0")].workspace_bytes == least
        assert program.tasks[find(program, "B block=4 mb=1")].workspace_bytes == least + size
        small = change(program, "B block=4 mb=1", workspace_bytes=least)
        reject(small, MODEL, "reads", f"its body needs {least + size}")


def test_a_layer_that_leaves_out_a_micro_batch_is_rejected() -> None:
    reject(drop(LAYERED, "B block=0 mb=1"), MODEL, "coverage", "B block=0 mb=1 is missing")
    again = LAYERED.tasks[find(LAYERED, "B block=0 mb=1")]
    program = insert(LAYERED, again, before="B block=0 mb=2")
    reject(program, MODEL, "coverage", "does again")
