"""The order of compute tasks, and what each reads and writes.

In: model, layout, and per block keep or recompute. Out: Feed, Forward, Recompute, Backward and
the Emit of each loss; everything is in the device tier, nothing is moved or freed yet.

    for each micro-batch:
        Feed; Forward of every block in order; Emit the loss
        for each block with a backward, last first: Recompute if so chosen, Backward

A value or parameter with several users gets its gradient from the last user first; earlier users
add to it as an extra root. The first Backward that touches a gradient chunk creates it. A tied
parameter is summed in its chunk in micro-batch 0; in later ones the chunk holds earlier
micro-batches, so the sum is apart until the first user adds it to the chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from packhorse.model.spec import Block, BlockId, Model, Parameter, ValueId
from packhorse.program.buffers import (
    BufferId,
    ChunkId,
    Layout,
    saved_id,
    state_id,
    tied_grad_id,
    value_grad_id,
    value_id,
)
from packhorse.program.tasks import Backward, Emit, Feed, Forward, Recompute, Task

ChunksOf = Mapping[str, tuple[ChunkId, ...]]


def order_train_step(
    model: Model,
    layout: Layout,
    *,
    recomputed: Collection[BlockId],
    num_microbatches: int,
) -> tuple[Task, ...]:
    """Order a training step, depth first over micro-batches.

    A block of `recomputed` whose Backward follows its Forward directly keeps its saved values
    instead: the memory is the same, the work less. A body that saves nothing is not run again.
    """
    kept = [b.id for b in model.blocks if b.has_backward and _saves(model, b.id)]
    backward = [block for block in reversed(model.blocks) if block.has_backward]
    directly = backward[0].id if backward and backward[0].id == model.blocks[-1].id else None
    again = {block for block in kept if block in recomputed and block != directly}
    chunks_of = _chunks_of(layout)
    with_grad = values_with_grad(model)
    created: set[BufferId] = set()
    tasks: list[Task] = []
    for microbatch in range(num_microbatches):
        keeping = {block for block in kept if block not in again}
        tasks += _order_forward(model, chunks_of, microbatch, keeping=keeping)
        for block in backward:
            if block.id in again:
                tasks.append(_recompute(model, block, chunks_of, microbatch))
            task = _backward(model, block, chunks_of, microbatch, with_grad, created)
            created.update(task.writes)
            tasks.append(task)
    return tuple(tasks)


def order_evaluation(model: Model, layout: Layout, *, num_microbatches: int) -> tuple[Task, ...]:
    """Order the forward of every micro-batch; nothing is kept but what later blocks use."""
    chunks_of = _chunks_of(layout)
    return tuple(
        task
        for microbatch in range(num_microbatches)
        for task in _order_forward(model, chunks_of, microbatch, keeping=())
    )


def values_with_grad(model: Model) -> frozenset[ValueId]:
    """The values that a gradient flows back through: some later user leads it from the loss.

    The loss has none: its gradient is 1.
    """
    found: set[ValueId] = set()
    for block in reversed(model.blocks):
        rooted = any(value == model.loss or value in found for value in block.outputs)
        if block.has_backward and rooted:
            found.update(value for value in block.inputs if model.values[value].needs_grad)
    return frozenset(found)


def _order_forward(
    model: Model, chunks_of: ChunksOf, microbatch: int, *, keeping: Collection[BlockId]
) -> list[Task]:
    fed = (v.id for v in model.values.values() if v.producer is None and v.consumers)
    tasks: list[Task] = [
        Feed(microbatch=microbatch, writes=tuple(value_id(value, microbatch) for value in fed))
    ]
    for block in model.blocks:
        body = model.bodies[block.body]
        keeps = block.id in keeping
        outputs = [value_id(value, microbatch) for value in block.outputs]
        tasks.append(
            Forward(
                block=block.id,
                microbatch=microbatch,
                reads=_forward_reads(block, chunks_of, microbatch),
                writes=_unique(outputs + ([saved_id(block.id, microbatch)] if keeps else [])),
                workspace_bytes=(
                    body.forward_workspace_bytes if keeps else body.discard_workspace_bytes
                ),
            )
        )
        if model.loss in block.outputs:
            tasks.append(Emit(buffer=value_id(model.loss, microbatch)))
    return tasks


def _forward_reads(block: Block, chunks_of: ChunksOf, microbatch: int) -> tuple[BufferId, ...]:
    parameters = [
        state_id("param", chunk) for name in block.parameters for chunk in chunks_of[name]
    ]
    return _unique(parameters + [value_id(value, microbatch) for value in block.inputs])


def _recompute(model: Model, block: Block, chunks_of: ChunksOf, microbatch: int) -> Recompute:
    # The outputs are made and dropped, so they count as workspace.
    dropped = sum(model.values[value].size_bytes for value in block.outputs)
    return Recompute(
        block=block.id,
        microbatch=microbatch,
        reads=_forward_reads(block, chunks_of, microbatch),
        writes=(saved_id(block.id, microbatch),),
        workspace_bytes=model.bodies[block.body].forward_workspace_bytes + dropped,
    )


def _backward(
    model: Model,
    block: Block,
    chunks_of: ChunksOf,
    microbatch: int,
    with_grad: Collection[ValueId],
    created: Collection[BufferId],
) -> Backward:
    body = model.bodies[block.body]
    reads: list[BufferId] = []
    writes = [value_grad_id(value, microbatch) for value in block.inputs if value in with_grad]
    if body.saved_bytes:
        reads.append(saved_id(block.id, microbatch))
    for index in body.backward_parameters:
        reads += [state_id("param", chunk) for chunk in chunks_of[block.parameters[index]]]
    again = [block.inputs[index] for index in body.backward_inputs]
    again += [block.outputs[index] for index in body.backward_outputs]
    reads += [value_id(value, microbatch) for value in again]
    reads += [value_grad_id(value, microbatch) for value in block.outputs if value in with_grad]
    for name in block.parameters:
        parameter = model.parameters[name]
        if parameter.trainable:
            accumulated, started = _parameter_grads(model, parameter, block, chunks_of, microbatch)
            reads += accumulated
            writes += started
    # What an earlier task created is added to, so it is read as well.
    reads += [buffer for buffer in writes if buffer in created]
    return Backward(
        block=block.id,
        microbatch=microbatch,
        reads=_unique(reads),
        writes=_unique(writes),
        workspace_bytes=body.backward_workspace_bytes,
    )


def _parameter_grads(
    model: Model, parameter: Parameter, block: Block, chunks_of: ChunksOf, microbatch: int
) -> tuple[list[BufferId], list[BufferId]]:
    # What is read beyond what is written, and what is written.
    users = [user for user in parameter.blocks if model.blocks[user].has_backward]
    chunks = [state_id("grad", chunk) for chunk in chunks_of[parameter.name]]
    if len(users) == 1 or microbatch == 0:
        return [], chunks
    running = tied_grad_id(parameter.name, microbatch)
    return ([running], chunks) if block.id == users[0] else ([], [running])


def _saves(model: Model, block: BlockId) -> bool:
    return model.body_of(block).saved_bytes > 0


def _chunks_of(layout: Layout) -> ChunksOf:
    return {name: tuple(chunk.id for chunk in layout.chunks_of(name)) for name in layout.slots}


def _unique(buffers: list[BufferId]) -> tuple[BufferId, ...]:
    return tuple(dict.fromkeys(buffers))
