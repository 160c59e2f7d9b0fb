"""Rule `order`: sums are added, and states are read, in the order that the numbers rely on.

The Backward of a block runs over the micro-batches in order, so gradients are added in micro-batch
order. Within a micro-batch, later users of a value or parameter run their Backward before earlier
ones, so that the running gradient is summed from the last user to the first. Of a Backward that
runs in halves, InputGrad comes first; it stands for the gradients of values, WeightGrad for those
of parameters. A chunk's segment norms come after its last gradient, the global norm after all
segment norms, updates that clip after the global norm. No task that runs a body reads a parameter
that this step has already updated.
"""

from __future__ import annotations

from typing import Final

from packhorse.model.spec import BlockId, Model
from packhorse.program.buffers import NORM, BufferId, state_id
from packhorse.program.tasks import BlockTask, Update
from packhorse.verifier.failures import make_error, name_task
from packhorse.verifier.outline import Outline

RULE: Final = "order"


def check_order(outline: Outline) -> None:
    """Check the order of backward tasks, then norms, then parameters."""
    _check_halves(outline)
    _check_microbatches(outline)
    if outline.model is not None:
        _check_users(outline, outline.model)
    _check_norms(outline)
    _check_parameters(outline)


def _check_halves(outline: Outline) -> None:
    for key, (index,) in outline.weight_grads.items():
        first = outline.input_grads.get(key, (index,))[0]
        if first > index:
            what = (
                f"comes before {name_task(outline.program, first)}, the first half of its backward"
            )
            raise make_error(outline.program, RULE, index, what)


def _check_microbatches(outline: Outline) -> None:
    latest: dict[int, tuple[int, int]] = {}
    for (block, microbatch), (index,) in outline.summed.items():
        before = latest.get(block)
        if before is not None and microbatch < before[0]:
            what = (
                f"runs block {block} backward for micro-batch {microbatch} after"
                f" {name_task(outline.program, before[1])}: a block's backward goes over"
                " the micro-batches in order 0, 1, 2, ..."
            )
            raise make_error(outline.program, RULE, index, what)
        latest[block] = (microbatch, index)


def _check_users(outline: Outline, model: Model) -> None:
    # Gradients of values come from what begins a backward, those of parameters from what ends it.
    for table, find_users in (
        (outline.begun, _later_value_users),
        (outline.summed, _later_parameter_users),
    ):
        later = [find_users(model, block.id) for block in model.blocks]
        for (block, microbatch), (index,) in table.items():
            for user in later[block]:
                user_index = table[user, microbatch][0]
                if user_index > index:
                    what = (
                        f"runs before {name_task(outline.program, user_index)}, a later user of"
                        f" what block {block} makes or uses: gradients are summed from the last"
                        " user to the first"
                    )
                    raise make_error(outline.program, RULE, index, what)


def _later_value_users(model: Model, block_id: BlockId) -> tuple[BlockId, ...]:
    block = model.blocks[block_id]
    users = {
        user
        for value in (*block.inputs, *block.outputs)
        if model.values[value].needs_grad
        for user in model.later_users(value, block_id)
    }
    return tuple(sorted(user for user in users if model.blocks[user].has_backward))


def _later_parameter_users(model: Model, block_id: BlockId) -> tuple[BlockId, ...]:
    users = {
        user
        for name in model.blocks[block_id].parameters
        if model.parameters[name].trainable
        for user in model.later_parameter_users(name, block_id)
    }
    return tuple(sorted(user for user in users if model.blocks[user].has_backward))


def _check_norms(outline: Outline) -> None:
    program = outline.program
    for chunk, (index,) in outline.segment_norms.items():
        last = outline.gradients[chunk][-1]
        if last > index:
            what = (
                f"sums the gradient of chunk {chunk} before {name_task(program, last)} adds to it"
            )
            raise make_error(program, RULE, index, what)
        if outline.grad_norms and outline.grad_norms[0] < index:
            what = f"comes after {name_task(program, outline.grad_norms[0])}, which needs it"
            raise make_error(program, RULE, index, what)
    known = (*outline.grad_norms, *outline.receives.get(NORM, ()), len(program.tasks))
    for (index,) in outline.updates.values():
        task = program.tasks[index]
        if isinstance(task, Update) and NORM in task.reads and known[0] > index:
            what = f"reads {NORM} before {name_task(program, known[0])} makes it"
            raise make_error(program, RULE, index, what)


def _check_parameters(outline: Outline) -> None:
    program = outline.program
    if not outline.updates:
        return
    updated: dict[BufferId, int] = {}
    for index, task in enumerate(program.tasks):
        if isinstance(task, Update):
            updated[state_id("param", task.chunk)] = index
        elif isinstance(task, BlockTask) and updated and not updated.keys().isdisjoint(task.reads):
            buffer = next(buffer for buffer in task.reads if buffer in updated)
            what = (
                f"reads {buffer} after {name_task(program, updated[buffer])} changed it:"
                " a step computes with the parameters it began with"
            )
            raise make_error(program, RULE, index, what)
