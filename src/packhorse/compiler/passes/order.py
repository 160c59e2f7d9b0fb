"""The order of compute tasks, and what each reads and writes.

In: model, layout, per block keep or recompute, the order of micro-batches. Out: Feed, Forward,
Recompute, Backward and the Emit of each loss; everything is in the device tier, nothing is moved or
freed yet.

    depth first    for each micro-batch:
                       Feed; Forward of every block in order; Emit the loss
                       for each block with a backward, last first: Recompute if so chosen, Backward
    layered        for each block: for each micro-batch: (Feed;) Forward; (Emit the loss)
                       the last block's Backward follows its Forward at once
                   for each block with a backward, last first:
                       for each micro-batch, first in, first out: Recompute if so chosen, Backward

Either way a block's Backward goes over the micro-batches in order, so both orders have the same
sums. A value or parameter with several users gets its gradient from the last user first; earlier
users add to it as an extra root. The first Backward that touches a gradient chunk creates it.

A tied parameter whose sum is per micro-batch is summed in its chunk in micro-batch 0; in later ones
the chunk holds earlier micro-batches, so the sum is apart until the first user adds it to the
chunk. Where its sum is per step, the last user adds up its micro-batches in the chunk, every other
user apart, until its Backward of the last micro-batch adds what it has to the chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from packhorse.compiler.layout import find_chunks
from packhorse.model.spec import ITEM_BYTES, Block, BlockId, Model, Parameter, ValueId
from packhorse.plan.spec import Order, TiedSum
from packhorse.program.buffers import (
    BufferId,
    ChunkId,
    Layout,
    saved_id,
    state_id,
    tied_grad_id,
    tied_sum_id,
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
    order: Order = "depth_first",
    tied_sum: TiedSum = "per_microbatch",
) -> tuple[Task, ...]:
    """Order a training step.

    A block of `recomputed` whose Backward follows its Forward directly keeps its saved values
    instead: the memory is the same, the work less. A body that saves nothing is not run again.
    """
    kept = [b.id for b in model.blocks if b.has_backward and _saves(model, b.id)]
    backward = [block for block in reversed(model.blocks) if block.has_backward]
    directly = backward[0].id if backward and backward[0].id == model.blocks[-1].id else None
    again = {block for block in kept if block in recomputed and block != directly}
    step = _Step(
        model=model,
        chunks_of=_chunks_of(layout),
        with_grad=values_with_grad(model),
        keeping=frozenset(block for block in kept if block not in again),
        again=frozenset(again),
        # With one micro-batch both sums are the same, and this one needs no room of its own.
        sums_per_step=tied_sum == "per_step" and num_microbatches > 1,
        num_microbatches=num_microbatches,
    )
    everything = range(num_microbatches)
    created: set[BufferId] = set()
    tasks: list[Task] = []
    if order == "depth_first":
        for microbatch in everything:
            tasks += step.forward(model.blocks, [microbatch])
            for block in backward:
                tasks += step.backward(block, microbatch, created)
        return tuple(tasks)
    for block in model.blocks:
        for microbatch in everything:
            tasks += step.forward([block], [microbatch])
            if block.id == directly:
                tasks += step.backward(block, microbatch, created)
    for block in backward:
        if block.id != directly:
            for microbatch in everything:
                tasks += step.backward(block, microbatch, created)
    return tuple(tasks)


def order_evaluation(
    model: Model, layout: Layout, *, num_microbatches: int, num_together: int = 1
) -> tuple[Task, ...]:
    """Order the forward of every micro-batch; nothing is kept but what later blocks use.

    So many micro-batches as `num_together` go through a block before the next block.
    """
    step = _Step(
        model=model,
        chunks_of=_chunks_of(layout),
        with_grad=frozenset(),
        keeping=frozenset(),
        again=frozenset(),
        sums_per_step=False,
        num_microbatches=num_microbatches,
    )
    tasks: list[Task] = []
    for first in range(0, num_microbatches, num_together):
        together = range(first, min(first + num_together, num_microbatches))
        tasks += step.forward(model.blocks, together)
    return tuple(tasks)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    # What all tasks of a program have in common: `keeping` are the blocks whose Forward saves,
    # `again` those that recompute.
    model: Model
    chunks_of: ChunksOf
    with_grad: frozenset[ValueId]
    keeping: frozenset[BlockId]
    again: frozenset[BlockId]
    sums_per_step: bool
    num_microbatches: int

    def forward(self, blocks: Sequence[Block], microbatches: Sequence[int]) -> list[Task]:
        """Run blocks, each over all micro-batches, which are fed when the first block runs."""
        tasks: list[Task] = []
        for block in blocks:
            for microbatch in microbatches:
                if block.id == self.model.blocks[0].id:
                    tasks.append(self._feed(microbatch))
                tasks.append(self._forward(block, microbatch))
                if self.model.loss in block.outputs:
                    tasks.append(Emit(buffer=value_id(self.model.loss, microbatch)))
        return tasks

    def backward(self, block: Block, microbatch: int, created: set[BufferId]) -> list[Task]:
        """Run a block's backward; `created` are buffers that exist, and gets what it creates."""
        tasks: list[Task] = []
        if block.id in self.again:
            tasks.append(self._recompute(block, microbatch))
        task = self._backward(block, microbatch, created)
        created.update(task.writes)
        return [*tasks, task]

    def _feed(self, microbatch: int) -> Feed:
        values = self.model.values.values()
        fed = (v.id for v in values if v.producer is None and v.consumers)
        return Feed(
            microbatch=microbatch, writes=tuple(value_id(value, microbatch) for value in fed)
        )

    def _forward(self, block: Block, microbatch: int) -> Forward:
        body = self.model.bodies[block.body]
        keeps = block.id in self.keeping
        outputs = [value_id(value, microbatch) for value in block.outputs]
        return Forward(
            block=block.id,
            microbatch=microbatch,
            reads=self._forward_reads(block, microbatch),
            writes=_unique(outputs + ([saved_id(block.id, microbatch)] if keeps else [])),
            workspace_bytes=(
                body.forward_workspace_bytes if keeps else body.discard_workspace_bytes
            ),
        )

    def _forward_reads(self, block: Block, microbatch: int) -> tuple[BufferId, ...]:
        parameters = [
            state_id("param", chunk) for name in block.parameters for chunk in self.chunks_of[name]
        ]
        return _unique(parameters + [value_id(value, microbatch) for value in block.inputs])

    def _recompute(self, block: Block, microbatch: int) -> Recompute:
        # The outputs are made and dropped, so they count as workspace.
        dropped = sum(self.model.values[value].size_bytes for value in block.outputs)
        return Recompute(
            block=block.id,
            microbatch=microbatch,
            reads=self._forward_reads(block, microbatch),
            writes=(saved_id(block.id, microbatch),),
            workspace_bytes=self.model.bodies[block.body].forward_workspace_bytes + dropped,
        )

    def _backward(self, block: Block, microbatch: int, created: Collection[BufferId]) -> Backward:
        body = self.model.bodies[block.body]
        reads: list[BufferId] = []
        flowing = [value for value in block.inputs if value in self.with_grad]
        writes = [value_grad_id(value, microbatch) for value in flowing]
        if body.saved_bytes:
            reads.append(saved_id(block.id, microbatch))
        for index in body.backward_parameters:
            reads += [state_id("param", chunk) for chunk in self.chunks_of[block.parameters[index]]]
        again = [block.inputs[index] for index in body.backward_inputs]
        again += [block.outputs[index] for index in body.backward_outputs]
        reads += [value_id(value, microbatch) for value in again]
        arriving = [value for value in block.outputs if value in self.with_grad]
        reads += [value_grad_id(value, microbatch) for value in arriving]
        held_bytes = 0
        for name in block.parameters:
            parameter = self.model.parameters[name]
            if parameter.trainable:
                accumulated, started = self._parameter_grads(parameter, block, microbatch)
                reads += accumulated
                writes += started
                held_bytes += self._held_bytes(parameter, block, microbatch)
        # What an earlier task created is added to, so it is read as well.
        reads += [buffer for buffer in writes if buffer in created]
        return Backward(
            block=block.id,
            microbatch=microbatch,
            reads=_unique(reads),
            writes=_unique(writes),
            workspace_bytes=body.backward_workspace_bytes + held_bytes,
        )

    def _parameter_grads(
        self, parameter: Parameter, block: Block, microbatch: int
    ) -> tuple[list[BufferId], list[BufferId]]:
        # What is read beyond what is written, and what is written.
        users = self._users(parameter)
        chunks = [state_id("grad", chunk) for chunk in self.chunks_of[parameter.name]]
        if len(users) == 1:
            return [], chunks
        if self.sums_per_step:
            if block.id == users[-1]:
                return [], chunks
            apart = [tied_sum_id(parameter.name, block.id)]
            return [], apart + (chunks if microbatch == self.num_microbatches - 1 else [])
        if microbatch == 0:
            return [], chunks
        running = tied_grad_id(parameter.name, microbatch)
        return ([running], chunks) if block.id == users[0] else ([], [running])

    def _held_bytes(self, parameter: Parameter, block: Block, microbatch: int) -> int:
        # The last user's gradient is a running sum from micro-batch 1 on; where its sum is per
        # step it exists only until it is added to the chunk: as workspace.
        users = self._users(parameter)
        if not self.sums_per_step or microbatch == 0 or len(users) == 1 or block.id != users[-1]:
            return 0
        return parameter.num_elements * ITEM_BYTES[parameter.dtype]

    def _users(self, parameter: Parameter) -> list[BlockId]:
        return [user for user in parameter.blocks if self.model.blocks[user].has_backward]


def _saves(model: Model, block: BlockId) -> bool:
    return model.body_of(block).saved_bytes > 0


def _chunks_of(layout: Layout) -> ChunksOf:
    return {name: tuple([each.id for each in held]) for name, held in find_chunks(layout).items()}


def _unique(buffers: list[BufferId]) -> tuple[BufferId, ...]:
    return tuple(dict.fromkeys(buffers))
